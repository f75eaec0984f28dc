"""A store that is opened by its first call, in a thread; and which lane a call of it takes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from memstore.aio.awaited import Awaits
from memstore.aio.lanes import HERE
from memstore.aio.waits import end_waits
from memstore.engine import Root, absolute_path
from memstore.errors import StoreClosedError
from memstore.keys import encode_key
from memstore.late_imports import Hooks, around_forks
from memstore.listing import Mode
from memstore.store.appearing import when_there
from memstore.store.opening import check_mode
from memstore.store.opening import open as open_blocking
from memstore.store.store import Store
from memstore.wording import an

_INTERNAL = frozenset(
    ("blocking", "check_open", "end", "lane_of", "lane_of_ranks", "leave_to_parent", "made", "opened_root", "ready")
)  # no user calls them
ALL_HOSTS = "all hosts"  # the lane of calls that may ask several


def lane_in(root: Root, key: object, *, fetches: bool = False) -> Hashable:
    """As `Opened.lane_of`, of a root that is open."""
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
    if isinstance(store, Opened):
        return
    instead = f": memstore.{name} takes that" if isinstance(store, Store) else ""
    raise TypeError(f"store is one of memstore.aio.open, and not {an(type(store))}{instead}")


class Opened(Awaits[Store]):
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
                self.opened_root = store.lend_root("any")[0]  # in a forked child, this opens the catalog anew
                self.ready = store
            return store

    def lane_of(self, key: object, *, fetches: bool = False) -> Hashable:
        """The lane of a call for a key: of this host, or of the host that is the key's home.

        A store that isn't open yet has one of its own: to open it may take long, and so may the call itself.

        Args:
            fetches: it may ask other hosts for bytes, also if the home is here.
        """
        root = self.opened_root
        return ("opening", self.root) if root is None else lane_in(root, key, fetches=fetches)

    def lane_of_ranks(self, key: object) -> Hashable:
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


_all: weakref.WeakSet[Opened] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for one in list(_all):
        one.leave_to_parent()


def _do_nothing() -> None:
    pass


around_forks(Hooks(_do_nothing, _do_nothing, _after_fork_in_child))
