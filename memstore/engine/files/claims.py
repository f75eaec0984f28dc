"""Claims of files on storage that hosts share: who fills one, or is about to remove it, has locked a byte for it.

The byte lies in the file `claims` of the host's state folder, on a local disk, at the segment's number: locks of the
shared file system are asked for nothing. (NFS may have none, or keep them on each host; some Lustre mounts refuse
them.) Only processes of one host ever claim a file: each host writes files of its own.

A process has the file open once, and its locks belong to that: so a kill gives up all of them, and a forked child,
which opens it anew, has none. What the process itself has claimed, the kernel would give it twice: hence the set.
"""

from __future__ import annotations

import os

from memstore.engine import syscalls
from memstore.engine.files.claimed_file import ClaimedFile, Guard
from memstore.engine.files.lockfile import LockFile
from memstore.engine.files.segment_writer import SealedSegment, SegmentWriter
from memstore.engine.files.slots import write_slots
from memstore.engine.format import Header, Slots


class Claims:
    """Of one root, in one process. Call `take` under the store's mutex, and the guard that a fork takes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: LockFile | None = None
        self._held: set[int] = set()

    def take(self, segment: int) -> bool:
        """False: somebody has claimed it, in this process too."""
        file = self._file
        if file is None or file.fd < 0:  # the first time, in this process
            self._held.clear()
            file = self._file = LockFile(self._path, os.O_RDWR)
        if segment in self._held or not syscalls.lock_byte(file.fd, segment):
            return False
        self._held.add(segment)
        return True

    def give_up(self, segment: int) -> None:
        """Nothing happens if it wasn't claimed. A finalizer may call it."""
        file = self._file
        if segment in self._held and file is not None and file.fd >= 0:
            syscalls.unlock_byte(file.fd, segment)
            self._held.discard(segment)


class StorageFile(LockFile):
    """An open file on shared storage that this process may claim. Open it under a lock that a fork takes too."""

    __slots__ = ("_claims", "_segment", "_is_claimed")

    def __init__(
        self, claims: Claims, segment: int, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None
    ) -> None:
        self._claims, self._segment, self._is_claimed = claims, segment, False
        super().__init__(path, flags, mode, dir_fd)

    def lock(self) -> bool:
        self._is_claimed = self._claims.take(self._segment)
        return self._is_claimed

    def unlock(self) -> None:
        """Gives up the claim; the file stays open."""
        if self._is_claimed:
            self._is_claimed = False
            self._claims.give_up(self._segment)

    def park(self) -> None:
        """Closes the file, and keeps the claim."""
        super().close()

    def close(self) -> None:
        super().close()
        self.unlock()

    def leave_to_parent(self) -> None:
        self._is_claimed = False  # it is the parent's
        super().close()


class ClaimedOnStorage(ClaimedFile):
    """A `ClaimedFile` on shared storage."""

    __slots__ = ()

    lock_file: StorageFile

    def park(self, guard: Guard) -> None:
        self.lock_file.park()

    def go_live(self, slots: Slots, *, durable: bool) -> None:
        file = self.open()
        write_slots(file.fd, slots)
        if durable:
            syscalls.sync_data(file.fd)
        if file is not self.lock_file:
            file.close()
        self.lock_file.unlock()

    def unlock(self) -> None:
        self.lock_file.unlock()


class StorageWriter(SegmentWriter):
    """A `SegmentWriter` for a new file on shared storage: all of it is assembled in memory, written, and synced.

    A shared file system tells of a full or failing disk when a file is written or synced, and no mapping can hear that.
    Other hosts see the bytes once they are synced: so that comes before anybody is told of them.
    """

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, huge_pages: bool) -> None:
        self._header, self._start, self._end = header, header.nbytes, header.nbytes + nbytes
        self._scratch = bytearray(self.size)  # fresh zeros of the kernel's, where it is large

    def seal(self, checksums: bytes | None, *, durable: bool) -> SealedSegment:
        sealed = super().seal(checksums, durable=durable)
        if not durable:
            syscalls.sync(self.file.lock_file.fd)
        return sealed
