"""Roots: the opened store folders of this process, who uses them, and what becomes of them in a fork.

`opening.py` makes a `Root`. LMDB wants one environment a process, so a folder has one Root, which all Store objects of
the process on this folder share, with a `RootUse` for each of its users. A use ends when it is closed, or when nothing
refers to it any more: so whoever is interrupted leaves no store open.

Before a fork every Root's guard is taken, so that no transaction is split, and no file that is to be locked is between
its opening and its registration. The child closes its copies of the catalog and of the files that were opened to be
locked, and opens the catalog again when it needs it. This is done for closed and replaced roots too, as long as anybody
has them: the child must not unmap what their `KeptMappings` had mapped, because something else may lie there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

from memstore._threads import Hooks, around_forks
from memstore.engine import syscalls
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.files.mapping import close_all
from memstore.engine.files.segments import ClaimedFile
from memstore.engine.root.folder import AGENT_LOCK, SETTINGS, Settings
from memstore.engine.root.storage import StorageDriver, StorePaths
from memstore.engine.sync.pages import LockPage
from memstore.engine.sync.primitives import Doorbell, boot_clock
from memstore.errors import FencedError, NotAStoreError, PermissionDeniedError, StorageError, UnknownOutcomeError

_REMOVED_EVERY = 0.25  # seconds in which a removal of many files removes another one
_REMOVED_WITHIN = 10.0  # seconds for which a removal is watched
_IN_PLACE_FOR = 1e-4  # seconds that `glance` believes a look: to look takes 2 us, which is a get of a small value
_LOOK_FOR_AGENT = 0.1  # seconds: an agent takes half a second until its host is a member
MEMBER_SIZE = 16  # bytes


class NextFile(NamedTuple):
    """A file that this process has locked for its next put: see `engine/protocols/reuse.py`."""

    segment: int
    put_id: int
    size: int
    file: ClaimedFile


@dataclass(eq=False, slots=True)
class NextPut:
    """State of the reuse of files in this process: see `engine/protocols/reuse.py`.

    Attributes:
        file: what the next put may fill.
        filled_before: bytes of the last segment that was published by itself.
        keeps_none_for: puts for which no file is to be kept.
    """

    file: NextFile | None = None
    filled_before: int = 0
    keeps_none_for: int = 0


@dataclass(eq=False, slots=True)
class SweepLooks:
    """State of the sweeps of this process: see `engine/protocols/sweep.py`.

    Attributes:
        looked_at_held: when it last did, monotonic.
        looked_for_dead: when it last came to the end of the filling rows, monotonic.
        last_filling: the row where it stopped.
    """

    looked_at_held: float = 0.0
    looked_for_dead: float = 0.0
    last_filling: int = 0


class Owners(Protocol):
    """The hosts that own a store's keys: this one alone (`Alone`), or several (`protocols.Elsewhere`)."""

    is_alone: bool

    def membership_for(self, keys: Sequence[bytes], deadline: float | None = None) -> int | None:
        """Returns the counters' `membership` under which this host owns all keys; None if it doesn't.

        A commit compares it with that of its transaction.
        """
        ...

    def replicates(self, keys: Sequence[bytes]) -> bool:
        """Returns whether values of some of these keys are to lie on a second host, by what `membership` is of."""
        ...

    def check_one_owner(self, keys: Sequence[bytes], deadline: float) -> None:
        """Raises CrossHostError if this process knows that the keys have several owners."""
        ...

    def close(self) -> None: ...


class Alone:
    """This host as the owner of all keys, where nobody is known to serve the store."""

    is_alone = True

    def membership_for(self, keys: Sequence[bytes], deadline: float | None = None) -> int:
        return 0

    def replicates(self, keys: Sequence[bytes]) -> bool:
        return False

    def check_one_owner(self, keys: Sequence[bytes], deadline: float) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()
NO_LEASE = (0,)


@dataclass(eq=False)
class Root:
    """The parts of an opened store that the protocols work on.

    Attributes:
        state: the folder of its catalog, lock page, doorbell and settings: `path`, but on storage that hosts share.
        segments: the path of the folder of its segments.
        storage: of its segments: the driver for the kind of storage that they lie on.
    """

    places: StorePaths
    settings: Settings
    lock: LockPage | None  # None where this process may only read
    doorbell: Doorbell
    catalog: Catalog
    on_tmpfs: bool
    storage: StorageDriver
    uses: set[weakref.ref[Any]] = field(default_factory=set[weakref.ref[Any]])  # see `RootUse`
    before_close: Callable[[Root], None] = field(default=lambda root: None)  # gives back what this process keeps
    next_put: NextPut = field(default_factory=NextPut)
    sweeps: SweepLooks = field(default_factory=SweepLooks)
    not_removed: float = 0.0  # until when nobody looks again whether the store is being removed
    look_again: float = 0.0  # when a `glance` is to look what the path names, monotonic
    owners: Owners = ALONE  # of its keys, as far as this process knows
    connect: Callable[[Root | None], Any] | None = None  # makes the `owners` of a served root; of None it imports alone
    host_lease: Any = NO_LEASE  # an array of one number: until when this process may use the store; 0: for ever
    look_for_agent: float = 0.0  # until when nobody calls `expect_others`, monotonic
    guard: threading.RLock = field(init=False)  # the catalog's; every file that is to be locked is opened under it too
    path: str = field(init=False)
    state: str = field(init=False)
    segments: str = field(init=False)
    identity: tuple[int, int] = field(init=False)  # of the folder of segments: no other gets it while it is open

    def __post_init__(self) -> None:
        self.guard = self.catalog.guard
        self.path, self.state, self.segments = self.places
        status = os.fstat(self.storage.fd)
        self.identity = (status.st_dev, status.st_ino)

    def leave_to_parent(self) -> None:
        """Gives up what must not be shared with the parent. A forked child calls it before it does anything."""
        self.catalog.leave_to_parent()
        self.guard = self.catalog.guard
        self.next_put.file, self.next_put.filled_before = None, 0
        self.owners = ALONE  # connections to others are the parent's
        if self.lock is not None:
            self.lock.forget_threads()

    @property
    def segments_fd(self) -> int:
        fd = self.storage.fd
        if fd < 0:
            raise self.storage.closed_error()
        return fd

    def reading(self) -> AbstractContextManager[object]:
        """Returns what is held while a value is mapped: no forked child is to have its open file, and with it the lock.

        Nothing is held where bytes are read: others would wait, and nothing is locked.
        """
        return self.guard if self.storage.maps_at_once else contextlib.nullcontext()

    def sync_unlinked(self) -> None:
        """Syncs the folder, before the rows go: after a crash of the host nobody finds files that no row names."""
        if self.settings.durable:
            syscalls.sync(self.segments_fd)

    # --- what the path names ------------------------------------------------------------------------------------------
    # A store that is removed or moved lives on for who has it open: mapped, unlinked, and seen by nobody else. So each
    # call asks whether it is still the one that others find there. Its folder of segments is asked for, and not the
    # store's: that may have been emptied, and filled with another store.

    def check_in_place(self) -> None:
        """Raises NotAStoreError if the path doesn't name the opened folder any more; StorageError of a shared one."""
        now = monotonic()
        if self.storage.is_replaced:
            raise self.storage.closed_error()
        try:
            status = os.stat(self.segments)
        except OSError as error:
            raise self.storage.unseen_error(error) from None
        if (status.st_dev, status.st_ino) != self.identity:
            raise self.storage.unseen_error(None)
        self.look_again = now + _IN_PLACE_FOR

    def check_missing(self) -> None:
        """Calls `check_in_place`, where a file is missing. A folder is removed one file after another.

        It waits as long as files vanish, and believes for some seconds what it has found: one may ask for many files.
        """
        self.check_in_place()
        until, left = monotonic() + _REMOVED_WITHIN, -1
        while True:
            try:
                os.lstat(f"{self.state}/{SETTINGS}")
                if monotonic() < self.not_removed:
                    return
                found = len(os.listdir(self.segments))
            except OSError as error:
                raise self.storage.unseen_error(error) from None
            if 0 <= left <= found or monotonic() > until:
                self.not_removed = monotonic() + _REMOVED_WITHIN
                return
            left = found
            sleep(_REMOVED_EVERY)
            self.check_in_place()

    def is_in_place(self) -> bool:
        try:
            self.check_in_place()
        except (NotAStoreError, StorageError):
            return False
        return True

    def glance(self) -> None:
        """Calls `check_in_place`, unless that was done just now. For reads; and for writes, which look at the end."""
        if monotonic() > self.look_again:
            self.check_in_place()

    # --- the host lease -----------------------------------------------------------------------------------------------
    # Of a host that its cluster may remove without a person's word, when it is silent. Its index process renews the
    # lease while it hears the others. Callers look at the word themselves, which takes 30 ns: `if root.host_lease[0]`.

    def check_lease(self) -> None:
        """Raises FencedError if the lease is over. To be called before anything is read or changed."""
        late = boot_clock() - self.host_lease[0]
        if late > 0:
            raise FencedError(
                f"{self.path}: host {os.uname().nodename} has not heard from a majority of its cluster for its lease "
                f"and {late / 1e9:.1f} s more, and may have been removed: nothing was done. It goes on when it hears "
                "them, if it is still a member: memstore status says which hosts answer, and whether the agent here "
                "runs. If it was removed, serve the folder again"
            )

    def confirm_lease(self, key: bytes) -> None:
        """Raises UnknownOutcomeError if the lease is over. To be called after a change, before it is acknowledged."""
        if boot_clock() > self.host_lease[0]:
            name = key.decode()
            raise UnknownOutcomeError(
                f"{name!r}: the lease of host {os.uname().nodename} was over before the change was known to stand: it "
                "was made here, and is lost if this host was removed meanwhile. Repeat the call when the host hears "
                "the others again",
                key=name,
            )

    def expect_others(self) -> None:
        """Imports what `connect` needs, in a thread, once an agent serves the root: it takes 0.1 s.

        Else the first put of this process after the host has become a member would wait for that. To be called when
        `look_for_agent` is over.
        """
        self.look_for_agent = monotonic() + _LOOK_FOR_AGENT
        if self.connect is not None and os.path.exists(f"{self.state}/{AGENT_LOCK}"):
            self.look_for_agent = inf
            threading.Thread(target=self.connect, args=(None,), name="import", daemon=True).start()

    def member_id(self) -> bytes:
        """Returns the store's name as a member of a cluster: its id, 16 bytes. Raises NotAStoreError."""
        try:
            member = bytes.fromhex(self.settings.store)
        except ValueError:
            member = b""
        if len(member) != MEMBER_SIZE:
            raise NotAStoreError(
                f"{self.path} can't be served: its id {self.settings.store!r} is not one of 32 hexadecimal digits; "
                "copy its values into a new store"
            )
        return member

    @property
    def mutex(self) -> LockPage:
        if self.lock is None:
            raise PermissionDeniedError(f"{self.path}: this process may only read the store")
        return self.lock


# --- the roots of this process ---------------------------------------------------------------------------------------


_opened: dict[tuple[int, int], Root] = {}
lock = threading.RLock()  # before any root's guard. A forked child gets a new one: say `roots.lock`
_replaced_roots: list[Root] = []  # some of their uses may go on
_known_roots: weakref.WeakSet[Root] = weakref.WeakSet()  # closed and replaced ones too: a put may still end there
_forking: list[Root] = []


class RootUse:
    """A user of an opened root, which stays open as long as it has any."""

    __slots__ = ("__weakref__", "root")

    def __init__(self, root: Root) -> None:
        self.root = root


def use_root(root: Root) -> RootUse:
    """Adds a use. The opening or closing that follows the end of the last use closes the root.

    Not at once: a finalizer may run anywhere, and must take no lock. What notes it here, and forgets it, is C: no
    signal's handler comes in between.
    """
    use = RootUse(root)
    with lock:
        root.uses.add(weakref.ref(use, root.uses.discard))
        _close_unused()
    return use


def register(identity: tuple[int, int], root: Root) -> RootUse:
    """Registers a new root, with its first use. Call it under the lock."""
    use = RootUse(root)
    root.uses.add(weakref.ref(use, root.uses.discard))
    _known_roots.add(root)
    _opened[identity] = root
    return use


def registered(identity: tuple[int, int], settings: Settings | None) -> RootUse | None:
    """Adds a use of the root that this process has on the folder already. Returns None if there is none."""
    with lock:
        _close_unused()
        root = _opened.get(identity)
        if root is None:
            return None
        is_other = settings is None or settings.store != root.settings.store  # emptied or replaced while it was open
        if is_other or not root.is_in_place():  # or moved: it does all by its old path
            root.storage.is_replaced, root.look_again = True, 0.0
            _replaced_roots.append(root)
            del _opened[identity]
            _end_root(root)
            return None
        return use_root(root)


def reopen_root(root: Root, deadline: float) -> None:
    """Opens the catalog anew in a forked child, before it first reads the store. Within the mutex: see `Catalog`."""
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
    for identity, root in list(_opened.items()):
        if not root.uses:
            _end_root(root)
            del _opened[identity]
            _forget_recovery(root)
    for root in [root for root in _replaced_roots if not root.uses]:
        _replaced_roots.remove(root)
        _forget_recovery(root)


def _forget_recovery(root: Root) -> None:
    if root.lock is not None:
        root.lock.recover = None  # it refers to the root


def _end_root(root: Root) -> None:
    owners, root.owners = root.owners, ALONE
    owners.close()
    root.before_close(root)
    with root.guard:
        root.catalog.close()
        root.storage.close()


# --- fork -------------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    lock.acquire()
    _forking[:] = _known_roots
    for root in _forking:
        root.guard.acquire()
        root.storage.mappings.clear()  # a child doesn't get these mappings, and may map something else where they lay


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
