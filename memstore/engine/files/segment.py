"""A segment: the file that holds the tensor bytes of one put. Every segment is a valid safetensors file.

Its header is in `header.py`. Who holds the file's exclusive lock may write it, and who holds the shared lock may rely
on it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from contextlib import AbstractContextManager
from typing import Any

from memstore.engine import syscalls
from memstore.engine.files.lockfile import LockFile, OwnedFile
from memstore.engine.files.mapping import Mapping, map_file
from memstore.engine.files.slots import vacate, write_slots
from memstore.engine.files.spares import Spare
from memstore.engine.format import HEAD_SIZE, LIVE, Header, SegmentExtent, Slots, belongs
from memstore.engine.syscalls import Cleanup
from memstore.errors import CorruptionError

Guard = AbstractContextManager[Any]  # of the process: held by whoever forks

COLLAPSE_STEP = 8 << 20
COLLAPSE_SLOW = 0.1  # seconds a step: untouched memory of a virtual machine takes 0.04, compaction once took 0.7


def segment_path(folder: str, segment: int) -> str:
    return f"{folder}/{segment:016x}.safetensors"


class Filling:
    """A segment that this process fills: its file, exclusively locked, and its bytes in memory.

    Small ones are assembled in memory and written at once (a pwrite of 64 KiB takes 21 us, faulting its pages in 55);
    from one huge page on, the file itself is mapped. Closing gives back the memory and the lock.

    Attributes:
        size: of the file, fixed for its life: header, data, and slack.
        is_whole: all of the file is allocated; so it may be used again.
    """

    def __init__(
        self,
        path: str,
        segment: int,
        put_id: int,
        size: int,
        file: LockFile,
        *,
        is_new: bool,
        dir_fd: int | None = None,
        spare: Spare | None = None,
    ) -> None:
        self.path, self.segment, self.put_id, self.size = path, segment, put_id, size
        self.is_whole = not is_new
        self._file, self._dir_fd, self._is_new = file, dir_fd, is_new
        self._header: Header | None = None
        self._end = 0  # of the data
        self._scratch = bytearray()
        self._mapping, self._address = (spare.mapping, spare.address) if spare else (None, 0)
        self._is_live = False

    @property
    def file(self) -> LockFile:
        return self._file

    @property
    def fd(self) -> int:
        return self._file.fd

    @property
    def start(self) -> int:
        """Of the data."""
        return self._header.nbytes if self._header else 0

    @property
    def used(self) -> int:
        """Bytes of the header and the data."""
        return self._end

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, huge_pages: bool) -> None:
        """Makes room for the header and `nbytes` of data.

        Raises OSError (ENOSPC) here, and never later: every block of a mapped file is reserved before it is touched.
        No fork may come between a mapping and its being kept from children, so both are done under the guard.
        """
        self._header, self._end = header, header.nbytes + nbytes
        if self.size < syscalls.HUGE_PAGE:
            self._scratch = bytearray(self._end if self.is_whole else self.size)
            return
        if not self.is_whole:
            syscalls.truncate(self.fd, self.size)
            if huge_pages:
                for offset in range(0, self.size, syscalls.HUGE_PAGE):
                    syscalls.write_at(self.fd, b"\0", offset)
            else:
                syscalls.allocate(self.fd, self.size)
        if self._mapping is None:
            self._map(self.size, guard)
            if huge_pages:
                self._collapse()
        self.is_whole = True

    def _collapse(self) -> None:
        """Makes huge pages of whole extents of 2 MiB, which are touched, and allocates the rest in small ones.

        So too where the kernel refuses, or is slow for want of whole pages. (To collapse the last, incomplete extent
        as well and cut it by truncation splits it, and the next file finds no whole page: 4.5 ms instead of 0.3.)
        """
        whole = self.size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
        for offset in range(0, whole, COLLAPSE_STEP):
            start = time.monotonic()
            if not syscalls.collapse(self._address + offset, min(COLLAPSE_STEP, whole - offset)):
                break
            if time.monotonic() - start > COLLAPSE_SLOW:
                break
        if self.size > whole:
            syscalls.populate(self._address + whole, self.size - whole)
        if syscalls.status(self.fd).st_blocks * 512 < self.size:
            syscalls.allocate(self.fd, self.size)

    def _map(self, size: int, guard: Guard) -> None:
        self._mapping, address, start = syscalls.reserve(size)
        self._address = address + start
        with guard:
            syscalls.map_shared(self._address, self.fd, size)
            syscalls.keep_from_children(self._address, size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The data section, to be filled. Not to be touched after `close`."""
        address = self._address or syscalls.buffer_address(self._scratch)
        shape, data = (self._end - self.start,), (address + self.start, False)
        return {"version": 3, "typestr": "|u1", "shape": shape, "data": data}

    def seal(self, checksums: bytes | None, *, durable: bool) -> None:
        """The data is in its place: writes the header, and all that was assembled in memory; with `durable`, syncs."""
        assert self._header is not None
        text = self._header.finish(self.put_id, self._end - self.start, self.size - self._end, checksums)
        if self._scratch:
            self._scratch[: self.start] = text
            text, self._scratch = self._scratch, bytearray()
        syscalls.write_at(self.fd, text, 0)
        self.is_whole = True
        if durable:
            syscalls.sync(self.fd)
        if durable and self._is_new:
            syscalls.sync_folder(os.path.dirname(self.path))

    def park(self, guard: Guard) -> None:
        """Keeps a shared lock by a mapping of one page: a process may have 65,530 of these, and 1,024 files.

        Call it under the mutex, and when the file is sealed. An exclusive lock could not be given up by `go_live`: who
        is started as a subprocess in this moment has the file open too, until its exec, and so has the lock. A shared
        one is in no reader's way.
        """
        syscalls.lock_shared(self.fd)
        self._map(syscalls.PAGE, guard)
        self._file.close()

    def open_file(self) -> OwnedFile:
        """The file, opened anew if it was parked. Under the mutex."""
        return OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd) if self.fd < 0 else self._file

    def unmap(self) -> None:
        """As `park`, where a mapping keeps no lock: the file stays open, and locked."""
        self._address, self._mapping = 0, None

    def go_live(self, version: int, batch: int, count: int, *, durable: bool) -> None:
        """Under the mutex, right before the catalog's commit."""
        file = self.open_file()
        write_slots(file.fd, Slots(self.put_id, LIVE, version, batch, count))
        if durable:
            syscalls.sync_data(file.fd)
        if file is self._file:
            syscalls.unlock(file.fd)
            self._is_live = True
        else:
            self._mapping = None

    def go_back(self) -> None:
        """Under the mutex, after an error: the file holds nothing, and may be used again."""
        file = self.open_file()
        vacate(file.fd)

    def spare(self) -> Spare | None:
        """The mapping of the published file, which no lock is left on."""
        return Spare(self._mapping, self._address, self.size) if self._is_live and self._mapping is not None else None

    def close(self) -> None:
        self._address, self._mapping = 0, None
        self._file.close()


def map_segment(
    path: str,
    extent: SegmentExtent,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    keep_open: bool = False,
) -> Mapping | None:
    """Locks, checks and maps the segment that a record names.

    None if it was replaced since the record was read: another's lock, no file, another put id; with `live`, also if its
    header says so. Raises CorruptionError if the file isn't as long as record and header say: mapping it would be a
    SIGBUS waiting for its reader. With `keep_open`, the file stays open as long as it is mapped; see
    `filesystem.mappings_keep_locks`.
    """
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))  # with a lock on it, a file that stays open bars the sweep
    try:
        syscalls.open_into(fds, path, os.O_RDONLY, 0, dir_fd)
        fd = fds[0]
        if not syscalls.lock_shared(fd):
            return None
        head = syscalls.read_at(fd, HEAD_SIZE, 0)  # after the lock: before it, it may be a writer's
        if not belongs(head, extent.put_id, store, live=live):
            return None
        start = 8 + int.from_bytes(head[:8], "little")
        size = syscalls.size_of(fd)
        if (start, size) != (extent.start, extent.size):
            expected = f"{extent.size:,} and {extent.start:,}"
            detail = f"the file has {size:,} bytes and a header of {start:,}, but by the catalog {expected}"
            raise CorruptionError(path=path, detail=detail)
        return map_file(fd, size, closing if keep_open else None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _no_file(path, error) from None
    finally:
        del closing  # not what an error's traceback holds on to


def _no_file(path: str, error: OSError) -> Exception:
    """What open and read say of links, folders and FIFOs that lie where a segment should."""
    what = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ESPIPE: "a FIFO", errno.ENXIO: "a socket"}
    if error.errno not in what:
        return error
    detail = f"it is {what[error.errno]}, and no file of memstore's"
    return CorruptionError(path=path, detail=detail)


def remove_file(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder there is nothing of ours: left alone
        syscalls.unlink(path, dir_fd)
