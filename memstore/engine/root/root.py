"""Root: one opened store folder in this process. All Store objects of a process on one folder share one Root.

`opening.py` makes them, and `registry.py` knows their users.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

from memstore.engine import syscalls
from memstore.engine.catalog import Catalog
from memstore.engine.files import Claims, LockFile, OwnedFile, Spares
from memstore.engine.root.folder import SETTINGS
from memstore.engine.root.settings import Settings, Shared
from memstore.engine.root.shared import CLAIMS, Places, storage_error
from memstore.engine.sync import Doorbell, LockPage
from memstore.errors import NotAStoreError, PermissionDeniedError, StorageError, StoreClosedError

_REMOVED_EVERY = 0.25  # seconds in which a removal of many files removes another one
_REMOVED_WITHIN = 10.0  # seconds for which a removal is watched
_IN_PLACE_FOR = 1e-4  # seconds that `glance` believes a look: to look takes 2 us, which is a get of a small value
MEMBER_SIZE = 16  # bytes
_NEVER = 1 << 62  # puts
_ADVICE = "open the store again, where it is now"


class KeptFile(NamedTuple):
    """A file that this process has locked for its next put: see `protocols/ahead.py`."""

    segment: int
    put_id: int
    size: int
    file: LockFile


@dataclass(eq=False)
class Root:
    """The parts of an opened store that the protocols work on.

    Attributes:
        state: the folder of its catalog, lock page, doorbell and settings: `path`, but on storage that hosts share.
        segments: the path of the folder of its segments.
        shared, claims: on storage that hosts share what it has fixed, and who fills what; else None.
    """

    places: Places
    settings: Settings
    lock: LockPage | None  # None where this process may only read
    doorbell: Doorbell
    catalog: Catalog
    on_tmpfs: bool
    locks_need_files: bool  # a mapping keeps none there: see `filesystem.mappings_keep_locks`
    segments_folder: OwnedFile  # whatever its path names by now
    uses: set[weakref.ref[Any]] = field(default_factory=set[weakref.ref[Any]])  # see `registry.py`
    spares: Spares = field(default_factory=Spares)
    ahead: KeptFile | None = None  # what the next put may fill
    before_close: Callable[[Root], None] = field(default=lambda root: None)  # gives back what this process keeps
    filled_before: int = 0  # bytes of the last segment that was published by itself
    unbooked: int = 0  # puts for which nothing is to be kept ahead
    looked_at_held: float = 0.0  # when this process last did, monotonic
    looked_for_dead: float = 0.0  # when this process last came to the end of the filling rows, monotonic
    last_filling: int = 0  # the row where it stopped
    not_removed: float = 0.0  # until when nobody looks again whether the store is being removed
    look_again: float = 0.0  # when a `glance` is to look what the path names, monotonic
    is_replaced: bool = False  # this process has opened what its path names by now; it keeps this one for its holders
    membership: int = 0  # the counters' number under which this process has read who the members are; 0: it hasn't
    homes_here: dict[bytes, int] = field(default_factory=dict[bytes, int])  # groups -> `membership`: see `publish.py`
    elsewhere: Any = None  # what this process asks of other hosts, if it did: see `protocols/elsewhere.py`
    guard: threading.RLock = field(init=False)  # the catalog's; every file that is to be locked is opened under it too
    path: str = field(init=False)
    state: str = field(init=False)
    segments: str = field(init=False)
    shared: Shared | None = field(init=False)
    claims: Claims | None = field(init=False)
    identity: tuple[int, int] = field(init=False)  # of `segments_folder`: no other gets it while that is open

    def __post_init__(self) -> None:
        self.guard = self.catalog.guard
        self.path, self.state, self.segments = self.places
        self.shared = self.settings.shared
        self.claims = None if self.shared is None else Claims(f"{self.state}/{CLAIMS}")
        if self.shared is not None:
            self.unbooked = _NEVER  # no file there is used again
        self.identity = _identity(os.fstat(self.segments_folder.fd))

    def leave_to_parent(self) -> None:
        """In a forked child, before it does anything: what must not be shared with the parent is given up."""
        self.catalog.leave_to_parent()
        self.guard = self.catalog.guard
        self.ahead, self.filled_before = None, 0
        self.membership, self.elsewhere = 0, None  # its connections are the parent's
        if self.lock is not None:
            self.lock.forget_threads()

    @property
    def segments_fd(self) -> int:
        fd = self.segments_folder.fd
        if self.is_replaced:
            raise self._replaced()
        if fd < 0:  # by another thread
            raise StoreClosedError(f"the store {self.path} was closed: memstore.open it again")
        return fd

    def sync_unlinked(self) -> None:
        """Call it before the rows go: nobody finds a file that a crash of the host brings back, if no row names it."""
        if self.settings.durable:
            syscalls.sync(self.segments_fd)

    # --- what the path names ------------------------------------------------------------------------------------------
    # A store that is removed or moved lives on for who has it open: mapped, unlinked, and seen by nobody else. So each
    # call asks whether it is still the one that others find there. Its folder of segments is asked for, and not the
    # store's: that may have been emptied, and filled with another store.

    def check_in_place(self) -> None:
        """Raises NotAStoreError if the path doesn't name the opened folder any more; StorageError of a shared one."""
        now = monotonic()
        if self.is_replaced:
            raise self._replaced()
        try:
            found = _identity(os.stat(self.segments))
        except OSError as error:
            raise self._unseen(error) from None
        if found != self.identity and self.shared is not None:
            what = "the storage was mounted anew, or the store was replaced, while it was open"
            raise StorageError(f"{self.segments}: {what}: {_ADVICE}", path=self.segments)
        if found != self.identity:
            raise NotAStoreError(f"{self.path} is another store than was opened: it was replaced meanwhile; {_ADVICE}")
        self.look_again = now + _IN_PLACE_FOR

    def check_missing(self) -> None:
        """As `check_in_place`, where a file is missing: who removes a folder removes its files one after another.

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
                raise self._unseen(error) from None
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
        """As `check_in_place`, unless that was done just now. For reads; and for writes, which look at the end."""
        if monotonic() > self.look_again:
            self.check_in_place()

    def _replaced(self) -> NotAStoreError:
        return NotAStoreError(f"{self.path} was moved or replaced while it was open, and opened anew since: {_ADVICE}")

    def _unseen(self, error: OSError) -> Exception:
        if self.shared is not None:
            return storage_error(self.segments, error)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            what = error.filename if os.path.lexists(self.path) else self.path
            return NotAStoreError(f"{what} was removed or moved while the store was open: {_ADVICE}")
        if error.errno in (errno.EACCES, errno.EPERM):
            return PermissionDeniedError(
                f"{self.path}: this process may not look any more whether its store is still there "
                f"({error.strerror}): give it back the x bits of the folders above"
            )
        return error

    def member_id(self) -> bytes:
        """What the store is called as a member of a cluster: its id, 16 bytes. Raises NotAStoreError."""
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


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
