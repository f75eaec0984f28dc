"""Which roots this process has open, who uses them, and what becomes of them in a fork.

LMDB wants one environment a process, so a folder has one Root, with a count of its users.

Before a fork every Root's guard is taken, so that no transaction is split, and no file that is to be locked is between
its opening and its registration. The child closes its copies of the catalog and of the files that were opened to be
locked, and opens the catalog again when it needs it.
This is done for closed and replaced roots too, as long as anybody has them: the child must not unmap what their spares
had mapped, because something else may lie there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from memstore.engine.files import close_all
from memstore.engine.root.root import Root
from memstore.engine.root.settings import Settings
from memstore.late_imports import Hooks, around_forks

roots: dict[tuple[int, int], Root] = {}
lock = threading.RLock()  # before any root's guard. A forked child gets a new one: say `registry.lock`
_abandoned: deque[Root] = deque()
_known: weakref.WeakSet[Root] = weakref.WeakSet()  # closed and replaced ones too: a put may still end there
_forking: list[Root] = []


def register(identity: tuple[int, int], root: Root) -> None:
    """Call it under the lock."""
    _known.add(root)
    roots[identity] = root


def registered(identity: tuple[int, int], settings: Settings | None) -> Root | None:
    """The root that this process has on the folder already, with one more user."""
    with lock:
        _close_abandoned()
        root = roots.get(identity)
        if root is None:
            return None
        is_other = settings is None or settings.store != root.settings.store  # emptied or replaced while it was open
        if is_other or not root.is_in_place():  # or moved: it does all by its old path
            del roots[identity]
            _end(root)
            return None
        root.users += 1
        return root


def reopen_root(root: Root, deadline: float) -> None:
    """In a forked child, before it first reads the store. Within the mutex: see `Catalog`."""
    if root.lock is None:
        root.catalog.reopen()
    else:
        root.lock.run(root.catalog.reopen, deadline)


def retain_root(root: Root) -> None:
    """One more user of an opened root, to be answered by one more `close_root`."""
    with lock:
        root.users += 1
        _close_abandoned()


def close_root(root: Root) -> None:
    abandon_root(root)
    with lock:
        _close_abandoned()


def abandon_root(root: Root) -> None:
    """As `close_root`, but done by the next opening or closing: a finalizer may run anywhere, and must take no lock."""
    _abandoned.append(root)


def close_abandoned() -> None:
    """Closes what finalizers gave up."""
    with lock:
        _close_abandoned()


def _close_abandoned() -> None:
    while _abandoned:
        root = _abandoned.popleft()
        root.users -= 1
        if root.users == 0:
            for identity in [identity for identity, other in roots.items() if other is root]:
                del roots[identity]
            _end(root)
            if root.lock is not None:
                root.lock.recover = None  # it refers to the root


def _end(root: Root) -> None:
    root.before_close(root)
    with root.guard:
        root.catalog.close()
        root.segments_folder.close()
        root.spares.clear()


# --- fork -------------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    lock.acquire()
    _forking[:] = _known
    for root in _forking:
        root.guard.acquire()
        root.spares.clear()  # a child doesn't get these mappings, and may map something else where they lay


def _after_fork_in_parent() -> None:
    for root in _forking:
        root.guard.release()
    _forking.clear()
    lock.release()


def _after_fork_in_child() -> None:
    global lock
    lock = threading.RLock()
    close_all()
    for root in _forking:
        root.leave_to_parent()
    _forking.clear()


around_forks(Hooks(_before_fork, _after_fork_in_parent, _after_fork_in_child))
