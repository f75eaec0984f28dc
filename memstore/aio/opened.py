"""The base of AsyncStore: a store that its first call opens, in a thread, and its waits for newer versions."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

from memstore._arguments import encode_key, older_version
from memstore._threads import Hooks, around_forks
from memstore._wording import an
from memstore.aio.calls import HERE, Awaits, call, called_as
from memstore.aio.waits import HERE_BY_NOW, LOOK_AGAIN, RemoteWaits, Waiting, change_of, end_waits, news_of
from memstore.engine import Root, absolute_path, deadline_after, home_now, index, is_served
from memstore.errors import StoreClosedError, StoreTimeoutError
from memstore.listing import Mode, opened, tell_of_wait, wanted_of
from memstore.store.opening import check_mode, when_there
from memstore.store.opening import open as open_blocking
from memstore.store.store import Store

# --- A store that its first call opens; which pool of threads takes a call of it -------------------------------------


_INTERNAL = frozenset(
    ("blocking", "check_open", "end", "pool_of", "pool_of_ranks", "leave_to_parent", "made", "opened_root", "ready")
)  # no user calls them
ALL_HOSTS = "all hosts"  # the pool of calls that may ask several


def pool_in(root: Root, key: object, *, fetches: bool = False) -> Hashable:
    """As `OpenedByCalls.pool_of`, of a root that is open."""
    if not root.membership:
        return HERE
    if not isinstance(key, str) or root.elsewhere is None:
        return ALL_HOSTS
    home: bytes = root.elsewhere.home_of(encode_key(key))
    return HERE if home == root.member_id() and not fetches else home


def check_opened(store: object, name: str) -> None:
    """Raises TypeError for a store of `memstore.open`, and for what is none.

    Args:
        name: what was called: memstore has something of the same name for such a store.
    """
    if isinstance(store, OpenedByCalls):
        return
    instead = f": memstore.{name} takes that" if isinstance(store, Store) else ""
    raise TypeError(f"store is one of memstore.aio.open, and not {an(type(store))}{instead}")


class OpenedByCalls(Awaits[Store]):
    """What `AsyncStore` inherits.

    Args:
        path, mode, options: as the arguments of `memstore.open`.

    Attributes:
        root: the folder, as an absolute path.
        ready: the store, if a call of it need not open anything; else None.
        opened_root: of that store.
        is_closed: by its user.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        check_mode(mode)
        self.root, self.timeout = absolute_path(path), options["timeout"]
        self.ready: Store | None = None
        self.opened_root: Root | None = None
        self._mode: Mode = mode
        self._options = options
        self._store: Store | None = None
        self.is_closed = False
        self._opening = threading.Lock()
        _all.add(self)

    def blocking(self) -> Store:
        """Raises what `memstore.open` raises, and a later call tries again; StoreClosedError."""
        wait = self._options.get("wait")
        if self._store is None and self._options.get("cluster") is not None:
            open_blocking(self.root, self._mode, **self._options).close()  # joins, without the lock: it may take long
            return self._open_now()
        if wait is None or self._store is not None or self._mode not in ("r", "r+"):
            return self._open_now()
        return when_there(self.root, wait, self._open_now, self.timeout)  # between two looks it may be closed

    def _open_now(self, within: float | None = None) -> Store:
        with self._opening:
            self.check_open()
            if self._store is None:
                options = dict(self._options)
                if options.pop("cluster", None) is not None or self._mode in ("r", "r+"):
                    options.pop("wait", None)  # this host has joined, and the store is there
                if within is not None and within < self.timeout:  # for the opening alone
                    hasty: dict[str, Any] = {**options, "timeout": within}
                    with open_blocking(self.root, self._mode, **hasty):
                        self._store = open_blocking(self.root, self._mode, **options)
                else:
                    self._store = open_blocking(self.root, self._mode, **options)
            store = self._store
            if self.ready is None:
                self.opened_root = opened(store)  # in a forked child, this opens the catalog anew
                self.ready = store
            return store

    def pool_of(self, key: object, *, fetches: bool = False) -> Hashable:
        """The pool of a call for a key: of this host, or of the host that is the key's home.

        A store that isn't open yet has one of its own: to open it may take long, and so may the call itself.

        Args:
            fetches: it may ask other hosts for bytes, also if the home is here.
        """
        root = self.opened_root
        return ("opening", self.root) if root is None else pool_in(root, key, fetches=fetches)

    def pool_of_ranks(self, key: object) -> Hashable:
        """That of a call which may wait for other ranks, with this key."""
        return "ranks", self.root, key if isinstance(key, str) else None

    def check_open(self) -> None:
        if self.is_closed:
            raise StoreClosedError(f"the store {self.root} was closed: memstore.aio.open it again")

    def end(self) -> None:
        """Closes it. Takes a moment."""
        self.is_closed = True
        with self._opening:
            store, root = self._store, self.opened_root
            self._store = self.ready = self.opened_root = None
        if root is not None:
            end_waits(root, self)
        if store is not None:
            store.close()

    def leave_to_parent(self) -> None:
        """In a forked child: who holds the lock is not there; and the next call opens the catalog, which takes time."""
        self._opening = threading.Lock()
        self.ready = None

    def __reduce__(self) -> tuple[Any, ...]:
        """By its root, as a Store. What was made when this one was opened is there for others."""
        self.check_open()
        if self._store is None and self._mode == "w":
            raise TypeError(
                f"the store {self.root} of mode 'w' isn't opened yet, and a copy would begin it anew: await it"
            )
        if self._store is None:
            return type(self), (self.root, self._mode, dict(self._options))
        kept = {name: self._options[name] for name in ("verify", "allow_pickle", "timeout")}
        return type(self), (self.root, "r" if self._mode == "r" else "r+", kept)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"mode {self._mode!r}"
        state += ", not opened yet" if self._store is None and not self.is_closed else ""
        return f"<memstore.aio.{type(self).__name__} {self.root} ({state})>"


_all: weakref.WeakSet[OpenedByCalls] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for one in list(_all):
        one.leave_to_parent()


def _do_nothing() -> None:
    pass


around_forks(Hooks(_do_nothing, _do_nothing, _after_fork_in_child))


# --- Waits for newer versions ----------------------------------------------------------------------------------------


log = logging.getLogger("memstore")


class AwaitsVersions(OpenedByCalls):
    """What `AsyncStore` inherits."""

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        super().__init__(path, mode, options)
        self._elsewhere: dict[Hashable, RemoteWaits] = {}  # by loop and pool, while there are any

    @called_as(Store.wait)
    async def wait(self, key: str, *, newer_than: int = 0, timeout: float | None = None) -> int:
        began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
        seconds = self.timeout if timeout is None else timeout
        version = await self._wait_until(key, newer_than, deadline_after(seconds), seconds)
        if began:
            tell_of_wait(self.root, began, {key: version})
        return version

    @called_as(Store.wait_any)
    async def wait_any(
        self,
        keys: Iterable[str] | None = None,
        *,
        prefix: str | None = None,
        newer_than: Mapping[str, int] | int = 0,
        timeout: float | None = None,
    ) -> dict[str, int]:
        began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
        wanted = wanted_of(keys, prefix, newer_than)
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        some = (wanted.prefix if wanted.keys is None else wanted.keys[0]).decode()
        store = self.ready
        if store is None:
            store = await call(self.pool_of(some), lambda _: self.blocking(), seconds)
        root = opened(store)
        while True:
            self.check_open()
            seen, now = root.doorbell.state(), time.monotonic()  # before the catalog
            left = max(deadline - now, 0.0)
            found, hears = await call(self.pool_of(some), partial(look_at, root, wanted, left), left)
            if found:
                versions = {name.decode(): version for name, version in found.items()}
                if began:
                    tell_of_wait(self.root, began, versions)
                return versions
            if time.monotonic() >= deadline:
                raise index.none_newer(wanted, seconds)
            until = deadline if hears else min(deadline, now + index.ASK_EVERY)
            await change_of(root, None, seen, self, until)

    async def _wait_until(self, key: str, newer_than: int, deadline: float, seconds: float) -> int:
        """As `wait`, whose timeout of so many seconds ends at this monotonic time."""
        name, newer_than = encode_key(key), older_version(newer_than)
        store = self.ready
        if store is None:
            store = await call(self.pool_of(key), lambda _: self.blocking())
        root = opened(store)
        is_sure = not root.membership
        while True:
            membership = 0 if is_sure else await call(HERE, lambda _: home_here(root, name), seconds)
            if membership is None:
                version = await self._wait_elsewhere(root, key, newer_than, deadline)
            else:
                version = await news_of(root, Waiting(root, name, newer_than, membership, self), deadline)
            if version is None:
                found = await call(self.pool_of(key), lambda _: index.version_of(root, name, 0))
                if found > newer_than:  # it came with the end of the time
                    return found
                raise index.not_newer(name, found, newer_than, seconds)
            if version != LOOK_AGAIN:
                return version
            is_sure = False

    async def _wait_elsewhere(self, root: Root, key: str, newer_than: int, deadline: float) -> int | None:
        pool = "waits", self.pool_of(key, fetches=True)
        name = asyncio.get_running_loop(), pool
        waits = self._elsewhere.setdefault(name, RemoteWaits(root, pool))
        try:
            self.check_open()  # else `end` sees it
            version = await waits.wait(encode_key(key), newer_than, deadline)
            return LOOK_AGAIN if version == HERE_BY_NOW else version
        except StoreTimeoutError:
            return None
        finally:
            if waits.is_idle:
                self._elsewhere.pop(name, None)

    def end(self) -> None:
        self.is_closed = True  # before it looks at the waits: who comes later looks at this
        for waits in list(self._elsewhere.values()):
            waits.end()
        super().end()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._elsewhere = {}  # tasks of the parent's, which go on there


def look_at(root: Root, wanted: index.AwaitedKeys, seconds: float, _: float) -> tuple[dict[bytes, int], bool]:
    """The keys that have newer versions by now. Also whether the doorbell tells of all that may come."""
    return index.newer_versions(lambda: root, wanted, seconds), index.hears_of_all(root, wanted)


def home_here(root: Root, name: bytes) -> int | None:
    """The number under which the key's home is here: 0 if nobody serves the root. None: it is elsewhere."""
    if not is_served(root):
        return 0
    return home_now(root, name) or None
