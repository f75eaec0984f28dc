"""Segments on storage that hosts share: who fills one, how it is written, and how it is read.

Who fills a file, or is about to remove it, has locked a byte for it (`FileClaims`). The byte lies in the file `claims`
of the host's state folder, on a local disk, at the segment's number: locks of the shared file system are asked for
nothing. (NFS may have none, or keep them on each host; some Lustre mounts refuse them.) Only processes of one host ever
claim a file: each host writes files of its own. A process has the file open once, and its locks belong to that: so a
kill gives up all of them, and a forked child, which opens it anew, has none. What the process itself has claimed, the
kernel would give it twice: hence the set.

`ClaimedOnStorage` and `SharedStorageWriter` take the places of `ClaimedFile` and `SegmentWriter`.

Readers, of this host or others, copy bytes and lock nothing (`open_stored`, `read_stored`). A file there is written
once, by the host whose folder it lies in, and synced before anybody hears of it. It is never used again; when its value
was replaced it stays for the store's grace time, and is then removed. So a reader opens it, compares what its header
says with the record, reads, and compares the put id again, which is erased before a removal. A file that is missing,
too short, full of zeros, or another put's may be gone, or not have come here yet: file systems show the files of other
hosts when they like. The reader looks up the record again to tell which.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.files.mapping import LockFile, OwnedFile
from memstore.engine.files.segments import ClaimedFile, Guard, SealedSegment, SegmentWriter, write_slots
from memstore.engine.format import HEAD_SIZE, Header, HeaderSlots, SegmentExtent, belongs
from memstore.errors import CorruptionError

# --- claims and writes -----------------------------------------------------------------------------------------------


class FileClaims:
    """The claims of one root, in one process. Call `take` under the store's mutex, and the guard that a fork takes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: LockFile | None = None
        self._held: set[int] = set()

    def take(self, segment: int) -> bool:
        """Claims a segment. Returns False if somebody has claimed it, in this process too."""
        file = self._file
        if file is None or file.fd < 0:  # the first time, in this process
            self._held.clear()
            file = self._file = LockFile(self._path, os.O_RDWR)
        if segment in self._held or not syscalls.lock_byte(file.fd, segment):
            return False
        self._held.add(segment)
        return True

    def give_up(self, segment: int) -> None:
        """Gives up a claim. Nothing happens if there was none. A finalizer may call it."""
        file = self._file
        if segment in self._held and file is not None and file.fd >= 0:
            syscalls.unlock_byte(file.fd, segment)
            self._held.discard(segment)


class StorageFile(LockFile):
    """An open file on shared storage that this process may claim. Open it under a lock that a fork takes too."""

    __slots__ = ("_claims", "_segment", "_is_claimed")

    def __init__(
        self, claims: FileClaims, segment: int, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None
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

    def go_live(self, slots: HeaderSlots, *, durable: bool) -> None:
        file = self.open()
        write_slots(file.fd, slots)
        if durable:
            syscalls.sync_data(file.fd)
        if file is not self.lock_file:
            file.close()
        self.lock_file.unlock()

    def unlock(self) -> None:
        self.lock_file.unlock()


class SharedStorageWriter(SegmentWriter):
    """A `SegmentWriter` for a new file on shared storage: all of it is assembled in memory, written, and synced.

    A shared file system tells of a full or failing disk when a file is written or synced, and no mapping can hear that.
    Other hosts see the bytes once they are synced: so that comes before anybody is told of them.
    """

    @property
    def is_reusable(self) -> bool:
        return False

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, huge_pages: bool) -> None:
        self._header, self._start, self._end = header, header.nbytes, header.nbytes + nbytes
        self._scratch = bytearray(self.size)  # fresh zeros of the kernel's, where it is large

    def seal(self, checksums: bytes | None, *, durable: bool) -> SealedSegment:
        sealed = super().seal(checksums, durable=durable)
        if not durable:
            syscalls.sync(self.file.lock_file.fd)
        return sealed


# --- reads -----------------------------------------------------------------------------------------------------------


_NOT_THERE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_READ_AT_ONCE = 64 << 20  # bytes a call


def open_stored(path: str, extent: SegmentExtent, store: str, *, live: bool = False) -> OwnedFile | None:
    """Opens a segment that a record names, if it is that and whole; with `live`, and its header says live.

    Args:
        store: the id of the host that has written it.

    Raises OSError; CorruptionError: there is a link, or a folder.
    """
    try:
        file = OwnedFile(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise CorruptionError(path=path, detail="it is no file of memstore's") from None
        raise
    return file if fits(file, extent, store, live=live) else None


def fits(file: OwnedFile, extent: SegmentExtent, store: str, *, live: bool = False) -> bool:
    """Returns whether the file is the segment, and whole, as far as header and size tell."""
    try:
        head = syscalls.read_at(file.fd, HEAD_SIZE, 0)
        if len(head) < HEAD_SIZE or not belongs(head, extent.put_id, store, live=live):
            return False
        return (8 + int.from_bytes(head[:8], "little"), syscalls.size_of(file.fd)) == (extent.start, extent.size)
    except OSError as error:
        if error.errno in _NOT_THERE:  # removed by another host, while it was open here
            return False
        raise


def read_stored(file: OwnedFile, pieces: Sequence[tuple[int, int, int]]) -> bool:
    """Reads pieces of the file: (offset, size, address). False: it has ended, or is gone. Raises OSError."""
    try:
        for offset, size, address in pieces:
            for at in range(0, size, _READ_AT_ONCE):
                part = syscalls.memory_at(address + at, min(_READ_AT_ONCE, size - at))
                if syscalls.read_parts_at(file.fd, [part], offset + at) < len(part):
                    return False
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    return True
