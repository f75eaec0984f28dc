"""Which roots this process has open, who uses them, and what becomes of them in a fork.

LMDB wants one environment a process, so a folder has one Root, with a RootUse for each of its users. A use ends when
it is closed, or when nothing refers to it any more: so whoever is interrupted leaves no store open.

Before a fork every Root's guard is taken, so that no transaction is split, and no file that is to be locked is between
its opening and its registration. The child closes its copies of the catalog and of the files that were opened to be
locked, and opens the catalog again when it needs it.
This is done for closed and replaced roots too, as long as anybody has them: the child must not unmap what their spares
had mapped, because something else may lie there.
"""

from __future__ import annotations

import threading
import weakref

from memstore.engine.files import close_all
from memstore.engine.root.root import Root
from memstore.engine.root.settings import Settings
from memstore.late_imports import Hooks, around_forks

roots: dict[tuple[int, int], Root] = {}
lock = threading.RLock()  # before any root's guard. A forked child gets a new one: say `registry.lock`
_replaced: list[Root] = []  # some of their uses may go on
_known: weakref.WeakSet[Root] = weakref.WeakSet()  # closed and replaced ones too: a put may still end there
_forking: list[Root] = []


class RootUse:
    """One user of an opened root, which stays open as long as it has any."""

    __slots__ = ("__weakref__", "root")

    def __init__(self, root: Root) -> None:
        self.root = root


def use_root(root: Root) -> RootUse:
    """One more use. When nothing refers to it, the next opening or closing closes the root, if it was the last one.

    Not at once: a finalizer may run anywhere, and must take no lock. What notes it here, and forgets it, is C: no
    signal's handler comes in between.
    """
    use = RootUse(root)
    with lock:
        root.uses.add(weakref.ref(use, root.uses.discard))
        _close_unused()
    return use


def register(identity: tuple[int, int], root: Root) -> RootUse:
    """A new root, with its first use. Call it under the lock."""
    use = RootUse(root)
    root.uses.add(weakref.ref(use, root.uses.discard))
    _known.add(root)
    roots[identity] = root
    return use


def registered(identity: tuple[int, int], settings: Settings | None) -> RootUse | None:
    """One more use of the root that this process has on the folder already."""
    with lock:
        _close_unused()
        root = roots.get(identity)
        if root is None:
            return None
        is_other = settings is None or settings.store != root.settings.store  # emptied or replaced while it was open
        if is_other or not root.is_in_place():  # or moved: it does all by its old path
            root.is_replaced, root.look_again = True, 0.0
            _replaced.append(root)
            del roots[identity]
            _end(root)
            return None
        return use_root(root)


def reopen_root(root: Root, deadline: float) -> None:
    """In a forked child, before it first reads the store. Within the mutex: see `Catalog`."""
    if root.lock is None:
        root.catalog.reopen()
    else:
        root.lock.run(root.catalog.reopen, deadline)


def close_root(use: RootUse) -> None:
    """Ends a use, and closes the root if it was the last one. May be called again."""
    with lock:
        use.root.uses.discard(weakref.ref(use))
        _close_unused()


def close_unused() -> None:
    """Closes the roots whose last use was dropped."""
    with lock:
        _close_unused()


def _close_unused() -> None:
    for identity, root in list(roots.items()):
        if not root.uses:
            _end(root)
            del roots[identity]
            _forget(root)
    for root in [root for root in _replaced if not root.uses]:
        _replaced.remove(root)
        _forget(root)


def _forget(root: Root) -> None:
    if root.lock is not None:
        root.lock.recover = None  # it refers to the root


def _end(root: Root) -> None:
    elsewhere, root.elsewhere = root.elsewhere, None
    if elsewhere is not None:
        elsewhere.close()
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
