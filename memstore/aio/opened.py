"""A store that its first call opens, in a thread; which pool of threads takes its calls; waits for newer versions."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from memstore._arguments import encode_key, older_version
from memstore._threads import Hooks, around_forks
from memstore.aio.calls import HERE, call
from memstore.aio.waits import HERE_BY_NOW, LOOK_AGAIN, RemoteWaits, Waiting, change_of, end_waits, news_of
from memstore.engine import Root, absolute_path, deadline_after, elsewhere_of, home_now, index
from memstore.errors import StoreClosedError, StoreTimeoutError
from memstore.listing import Mode, opened, tell_of_wait
from memstore.store.opening import check_mode, when_there
from memstore.store.opening import open as open_blocking
from memstore.store.store import Store

# --- A store that its first call opens; which pool of threads takes a call of it -------------------------------------


ALL_HOSTS = "all hosts"  # the pool of calls that may ask several


def pool_in(root: Root, key: object, *, fetches: bool = False) -> Hashable:
    """Returns the pool of a call for a key: of this host, or of the host that is the key's home.

    Args:
        fetches: the call may ask other hosts for bytes, also if the home is here.
    """
    if root.home.is_alone:
        return HERE
    if not isinstance(key, str):
        return ALL_HOSTS
    home = elsewhere_of(root).home_of(encode_key(key))
    return HERE if home == root.member_id() and not fetches else home


class LazyStore:
    """A store that its first call opens. An `AsyncStore` has one, and any thread may call it.

    Args:
        path, mode, options: as the arguments of `memstore.open`.

    Attributes:
        root: the folder, as an absolute path.
        mode: as it was asked for.
        timeout: seconds that calls take at most which aren't told otherwise.
        ready: the store, if a call of it need not open anything; else None.
        opened_root: the root of that store.
        is_closed: whether its user has closed it.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        check_mode(mode)
        self.root, self.timeout = absolute_path(path), options["timeout"]
        self.ready: Store | None = None
        self.opened_root: Root | None = None
        self.mode: Mode = mode
        self.is_closed = False
        self.remote_waits: dict[Hashable, RemoteWaits] = {}  # by loop and pool, while there are any
        self._options = options
        self._store: Store | None = None
        self._opening = threading.Lock()
        _all.add(self)

    def blocking(self) -> Store:
        """Opens the store, if that is to be done. Call it in a thread.

        Raises what `memstore.open` raises, and a later call tries again; StoreClosedError.
        """
        wait = self._options.get("wait")
        if self._store is None and self._options.get("cluster") is not None:
            open_blocking(self.root, self.mode, **self._options).close()  # joins, without the lock: it may take long
            return self._open_now()
        if wait is None or self._store is not None or self.mode not in ("r", "r+"):
            return self._open_now()
        return when_there(self.root, wait, self._open_now, self.timeout)  # between two looks it may be closed

    def _open_now(self, within: float | None = None) -> Store:
        with self._opening:
            self.check_open()
            if self._store is None:
                options = dict(self._options)
                if options.pop("cluster", None) is not None or self.mode in ("r", "r+"):
                    options.pop("wait", None)  # this host has joined, and the store is there
                if within is not None and within < self.timeout:  # for the opening alone
                    hasty: dict[str, Any] = {**options, "timeout": within}
                    with open_blocking(self.root, self.mode, **hasty):
                        self._store = open_blocking(self.root, self.mode, **options)
                else:
                    self._store = open_blocking(self.root, self.mode, **options)
            store = self._store
            if self.ready is None:
                self.opened_root = opened(store)  # in a forked child, this opens the catalog anew
                self.ready = store
            return store

    def pool_of(self, key: object, *, fetches: bool = False) -> Hashable:
        """Returns the pool of a call for a key, as `pool_in`.

        A store that isn't open yet has a pool of its own: to open it may take long, and so may the call itself.
        """
        root = self.opened_root
        return ("opening", self.root) if root is None else pool_in(root, key, fetches=fetches)

    def pool_of_ranks(self, key: object) -> Hashable:
        """Returns the pool of a call for this key which may wait for other ranks."""
        return "ranks", self.root, key if isinstance(key, str) else None

    def check_open(self) -> None:
        """Raises StoreClosedError if the user has closed the store."""
        if self.is_closed:
            raise StoreClosedError(f"the store {self.root} was closed: memstore.aio.open it again")

    def end(self) -> None:
        """Closes it. Takes a moment."""
        self.is_closed = True  # before it looks at the waits: a wait that comes later looks at this
        for waits in list(self.remote_waits.values()):
            waits.end()
        with self._opening:
            store, root = self._store, self.opened_root
            self._store = self.ready = self.opened_root = None
        if root is not None:
            end_waits(root, self)
        if store is not None:
            store.close()

    def leave_to_parent(self) -> None:
        """Forgets, in a forked child, what belongs to the parent's threads and tasks.

        The thread that holds the lock isn't there. The next call opens the catalog, which takes time.
        """
        self._opening = threading.Lock()
        self.ready = None
        self.remote_waits = {}

    def arguments(self) -> tuple[str, Mode, dict[str, Any]]:
        """Returns arguments that open the same store in another process. Raises TypeError, StoreClosedError."""
        self.check_open()
        if self._store is not None:  # what it was created with is in its folder
            kept = {name: self._options[name] for name in ("verify", "allow_pickle", "timeout")}
            return self.root, "r" if self.mode == "r" else "r+", kept
        if self.mode == "w":
            raise TypeError(
                f"the store {self.root} of mode 'w' isn't opened yet, and a copy would begin it anew: await it"
            )
        return self.root, self.mode, dict(self._options)

    def state(self) -> str:
        """Says, for its text, whether it is open."""
        if self.is_closed:
            return "closed"
        return f"mode {self.mode!r}{', not opened yet' if self._store is None else ''}"


_all: weakref.WeakSet[LazyStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for one in list(_all):
        one.leave_to_parent()


around_forks(Hooks(after_in_child=_after_fork_in_child))


# --- Waits for newer versions ----------------------------------------------------------------------------------------


log = logging.getLogger("memstore")


async def wait_for(lazy: LazyStore, key: str, newer_than: int, deadline: float, seconds: float) -> int:
    """Waits for a newer version of a key, as `Store.wait`.

    Args:
        deadline: the monotonic time at which the timeout of so many `seconds` ends.
    """
    began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
    name, newer_than = encode_key(key), older_version(newer_than)
    store = lazy.ready
    if store is None:
        store = await call(lazy.pool_of(key), lambda _: lazy.blocking())
    root = opened(store)
    is_sure = root.home.is_alone
    while True:
        membership = 0 if is_sure else await call(HERE, lambda _: home_now(root, name), seconds)
        if membership is None:
            version = await wait_elsewhere(lazy, root, key, newer_than, deadline)
        else:
            version = await news_of(root, Waiting(root, name, newer_than, membership, lazy), deadline)
        if version is None:
            version = await call(lazy.pool_of(key), lambda _: index.version_of(root, name, 0))
            if version <= newer_than:  # else it came with the end of the time
                raise index.not_newer(name, version, newer_than, seconds)
        if version != LOOK_AGAIN:
            break
        is_sure = False
    if began:
        tell_of_wait(lazy.root, began, {key: version})
    return version


async def wait_elsewhere(lazy: LazyStore, root: Root, key: str, newer_than: int, deadline: float) -> int | None:
    """Waits for a newer version of a key whose home is another host.

    Returns the version; LOOK_AGAIN if the home has moved here; None if there was none by the deadline.
    """
    pool = "waits", lazy.pool_of(key, fetches=True)
    name = asyncio.get_running_loop(), pool
    waits = lazy.remote_waits.setdefault(name, RemoteWaits(root, pool))
    try:
        lazy.check_open()  # else `end` sees it
        version = await waits.wait(encode_key(key), newer_than, deadline)
        return LOOK_AGAIN if version == HERE_BY_NOW else version
    except StoreTimeoutError:
        return None
    finally:
        if waits.is_idle:
            lazy.remote_waits.pop(name, None)


async def wait_for_any(lazy: LazyStore, wanted: index.AwaitedKeys, seconds: float) -> dict[str, int]:
    """Waits for newer versions of several keys, as `Store.wait_any`."""
    began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
    deadline = deadline_after(seconds)
    some = (wanted.prefix if wanted.keys is None else wanted.keys[0]).decode()
    store = lazy.ready
    if store is None:
        store = await call(lazy.pool_of(some), lambda _: lazy.blocking(), seconds)
    root = opened(store)
    while True:
        lazy.check_open()
        left = max(deadline - time.monotonic(), 0.0)
        look = await call(
            lazy.pool_of(some), lambda _: index.look_for_any(lambda: root, wanted, deadline, seconds), left
        )
        if look.found:
            break
        await change_of(root, None, look.seen, lazy, look.until)
    versions = {name.decode(): version for name, version in look.found.items()}
    if began:
        tell_of_wait(lazy.root, began, versions)
    return versions
