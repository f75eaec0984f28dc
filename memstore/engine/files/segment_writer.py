"""Fills the segment of one put: a claimed file, and its bytes in memory until it is sealed for a commit."""

from __future__ import annotations

import errno
import os
from typing import Any, Protocol

import msgspec

from memstore.engine import syscalls
from memstore.engine.files.claimed_file import (
    ClaimedFile,
    Guard,
    PreparedFile,
    map_for_writing,
)
from memstore.engine.files.huge_pages import allocate_pages, move_to_huge
from memstore.engine.files.spares import Spare
from memstore.engine.format import Header


class WritableMemory(Protocol):
    """Memory that a caller fills, as numpy takes it. It must not be touched once the segment is sealed."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SealedSegment(msgspec.Struct, frozen=True):
    """A segment that is written and not yet published: what a commit has to know of it."""

    segment: int
    put_id: int
    size: int  # of the file
    start: int  # of the data section in the file
    used: int  # bytes of the header and the data section
    file: ClaimedFile | PreparedFile


class SegmentWriter:
    """A segment that this process fills: its claimed file, and its bytes in memory.

    A small segment is assembled in memory and written at once (a pwrite of 64 KiB takes 21 us, faulting its pages in
    takes 55); from one huge page on, the file itself is mapped. Closing gives back the memory and the lock.

    Attributes:
        size: of the file, fixed for its life: header, data, and slack.
        is_whole: all of the file is allocated; so it may be used again.
        is_new: it had no value before.
    """

    def __init__(
        self, file: ClaimedFile, segment: int, put_id: int, size: int, *, is_new: bool, spare: Spare | None = None
    ) -> None:
        self.file, self.segment, self.put_id, self.size = file, segment, put_id, size
        self.is_whole = not is_new
        self.is_new = is_new
        self._header: Header | None = None
        self._start = self._end = 0  # of the data
        self._scratch = bytearray()
        self._mapping, self._address = (spare.mapping, spare.address) if spare else (None, 0)

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, huge_pages: bool) -> None:
        """Makes room for the header and `nbytes` of data.

        Raises OSError (ENOSPC) here, and never later: every block of a mapped file is reserved before it is touched.
        """
        self._header, self._start, self._end = header, header.nbytes, header.nbytes + nbytes
        if self.size < syscalls.HUGE_PAGE:
            self._scratch = bytearray(self._end if self.is_whole else self.size)
            return
        fd = self.file.lock_file.fd
        if not self.is_whole:
            _check_room(fd, self.size)
            syscalls.truncate(fd, self.size)
            if not huge_pages:
                syscalls.allocate(fd, self.size)
        if self._mapping is None:
            self._mapping, address, start = syscalls.reserve(self.size)
            self._address = address + start
            map_for_writing(self._address, fd, self.size, guard)
            if huge_pages and not self.is_whole:
                allocate_pages(fd, self._address, self.size)
            elif huge_pages:
                move_to_huge(self._address, self.size)
        self.is_whole = True

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The data section, to be filled. It must not be touched after `close`."""
        address = self._address or syscalls.buffer_address(self._scratch)
        shape, data = (self._end - self._start,), (address + self._start, False)
        return {"version": 3, "typestr": "|u1", "shape": shape, "data": data}

    def seal(self, checksums: bytes | None, *, durable: bool) -> SealedSegment:
        """The data is in its place: writes the header, and all that was assembled in memory; with `durable`, syncs."""
        assert self._header is not None
        text = self._header.finish(self.put_id, self._end - self._start, self.size - self._end, checksums)
        if self._scratch:
            self._scratch[: self._start] = text
            text, self._scratch = self._scratch, bytearray()
        file = self.file
        fd = file.lock_file.fd
        syscalls.write_at(fd, text, 0)
        self.is_whole = True
        if durable:
            syscalls.sync(fd)
        if durable and self.is_new:
            syscalls.sync_folder(os.path.dirname(file.path))
        return SealedSegment(self.segment, self.put_id, self.size, self._start, self._end, file)

    def unmap(self) -> None:
        """Gives back the memory of a sealed segment. Its file stays claimed."""
        self._address, self._mapping = 0, None

    def spare(self) -> Spare | None:
        """The mapping of a published file, if it has one: no lock is left on it. For the next time it is filled."""
        return Spare(self._mapping, self._address, self.size) if self._mapping is not None else None

    def close(self) -> None:
        self._address, self._mapping = 0, None
        self.file.close()


def _check_room(fd: int, size: int) -> None:
    """Refuses at once what is far too large: to find out by filling the disk takes the room that others need.

    What others take meanwhile, the allocation finds. A tmpfs without a limit tells of no blocks.
    """
    found = os.fstatvfs(fd)
    if found.f_blocks and size > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, f"{size:,} bytes, and {found.f_bavail * found.f_frsize:,} are free")
