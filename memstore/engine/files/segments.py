"""Segments: the files that hold the bytes of puts, how a get maps them, and how a put fills them.

Every segment is a valid safetensors file. Its header is described in `format/headers.py`. Its data is written only
under the exclusive lock of the file, and whoever holds a shared lock may rely on it; the state in the header may change
under the store's mutex meanwhile.

- A get calls `map_segment`: it opens the file, locks it shared, compares the header with the record, and maps it.
- A put has a `ClaimedFile`: nobody else writes, sweeps or claims it until it is published. A `SegmentWriter` makes room
  (`allocate`), gives memory to be filled, and writes the header (`seal`). The commit makes the header say *live*
  (`go_live`), and gives up the lock.
- The slots of a header are words of fixed width that change while the file lives (`write_slots`, `write_state`,
  `erase_put_id`, `vacate`). They are rewritten under the mutex, or with the file's exclusive lock.
- `KeptMappings` are writable mappings of segments that this process has filled, kept for the next time that it fills
  the same files. A new mapping costs its page faults: 0.6 us for each small page, so that an overwrite through one is
  six times slower than a memcpy where the kernel refuses huge pages. A kept mapping holds no lock: others may claim the
  file and fill it, or unlink it. Whoever unlinks it gives its memory back by punching a hole, since a mapping would
  keep the memory: see `sweep.close_unlinked`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from memstore.engine import syscalls
from memstore.engine.files.mapping import (
    COLLAPSE_STEP,
    LockFile,
    Mapping,
    OwnedFile,
    address_in,
    allocate_pages,
    map_file,
    move_to_huge,
    prices,
)
from memstore.engine.format.headers import (
    HEAD_SIZE,
    PUT_ID_AT,
    SLOTS_OFFSET,
    STATE_AT,
    STATE_WORDS,
    Header,
    HeaderSlots,
    belongs,
)
from memstore.engine.format.records import RETIRED, SegmentExtent
from memstore.engine.syscalls import HUGE_PAGE, PAGE, Cleanup, Reservation
from memstore.errors import CorruptionError

# --- mapping a segment -----------------------------------------------------------------------------------------------


def segment_path(folder: str, segment: int) -> str:
    return f"{folder}/{segment:016x}.safetensors"


def map_segment(
    path: str,
    extent: SegmentExtent,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    keep_open: bool = False,
    shared: bool = False,
) -> Mapping | None:
    """Locks, checks and maps the segment that a record names; with `shared`, to be written in place.

    Returns None if the segment was replaced since the record was read: somebody has locked the file, it is gone, or it
    has another put id; with `live`, also if its header says that it is not live. Raises CorruptionError if the file
    isn't as long as record and header say: who reads beyond its end would meet SIGBUS. With `keep_open`, the file stays
    open as long as it is mapped; see `filesystem.mappings_keep_locks`.
    """
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))  # a file that stays open stays locked, and is never swept
    try:
        # 2. Open, lock, compare: the numbers are those of a get, see `protocols/get.py`
        syscalls.open_into(fds, path, os.O_RDWR if shared else os.O_RDONLY, 0, dir_fd)
        if not _is_locked_and_fits(path, fds[0], extent, store, live=live):
            return None
        # 3. Map. The mapping keeps the lock when the file is closed; a kill leaves nothing
        return map_file(fds[0], extent.size, closing if keep_open else None, shared=shared)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _open_error(path, error) from None
    finally:
        del closing  # else the traceback of an error would keep the file open


def _is_locked_and_fits(path: str, fd: int, extent: SegmentExtent, store: str, *, live: bool) -> bool:
    if not syscalls.lock_shared(fd):
        return False
    head = syscalls.read_at(fd, HEAD_SIZE, 0)  # only now: before the lock it may be a writer's
    if not belongs(head, extent.put_id, store, live=live):
        if len(head) < HEAD_SIZE:  # no writer leaves so little: it sizes the file before the put has a record
            raise CorruptionError(path=path, detail=other_size(len(head), extent.size))
        return False
    start = 8 + int.from_bytes(head[:8], "little")
    size = os.lseek(fd, 0, os.SEEK_END)  # as `syscalls.size_of`: every get of a segment comes here
    if size != extent.size:
        raise CorruptionError(path=path, detail=other_size(size, extent.size))
    if start != extent.start:
        detail = f"its header has {start:,} bytes instead of {extent.start:,}: run memstore.repair"
        raise CorruptionError(path=path, detail=detail)
    return True


def other_size(size: int, expected: int) -> str:
    """Says in an error that somebody has truncated a segment, or extended it."""
    what = "it was truncated" if size < expected else "something was written behind its end"
    return f"the file has {size:,} bytes instead of {expected:,}: {what}: put the key again, or restore the file"


def map_segments(
    files: Sequence[tuple[str, SegmentExtent]],
    size: int,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    own: int = 0,
    keep_open: bool = False,
    otherwise: str | None = None,
) -> Mapping | None:
    """Maps several segments as `map_segment` does, in one range of `size` addresses, each from its base on.

    What is left of the range is zeros, and takes no memory until it is written.

    Args:
        own: with `live`: the put whose header has to say so; 0: all have to.
        otherwise: a folder where files may lie that aren't at their paths.
    """
    kept: list[int] = []  # files that stay open as long as the range is mapped
    mapping = map_file(None, size, Cleanup(syscalls.drain, (map(os.close, kept),)) if keep_open else None)
    for path, extent in files:
        place, owner = address_in(mapping, extent.base, extent.size), kept if keep_open else None
        alive = live and own in (0, extent.put_id)
        if map_segment_over(place, extent.size, path, extent, store=store, dir_fd=dir_fd, live=alive, kept=owner):
            continue
        if otherwise is None:
            return None
        path = segment_path(otherwise, extent.segment)
        if not map_segment_over(place, extent.size, path, extent, store=store, live=alive, kept=owner):
            return None
    end = max((-(-(extent.base + extent.size) // PAGE) * PAGE for _, extent in files), default=0)
    if size - end >= HUGE_PAGE and prices.prefers_huge():
        syscalls.prefer_huge_pages(mapping.address + end, size - end)
    return mapping


def map_segment_over(
    address: int,
    nbytes: int,
    path: str,
    extent: SegmentExtent,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    kept: list[int] | None = None,
) -> bool:
    """Maps the first `nbytes` of a segment as `map_segment` does, over addresses of a mapping. False: it was replaced.

    The file stays open in `kept`; None: it needn't.
    """
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))
    try:
        syscalls.open_into(fds, path, os.O_RDONLY, 0, dir_fd)
        if not _is_locked_and_fits(path, fds[0], extent, store, live=live):
            return False
        syscalls.map_over(address, fds[0], nbytes)
        if kept is not None:
            kept.extend(map(os.dup, fds))
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _open_error(path, error) from None
    finally:
        del closing


def _open_error(path: str, error: OSError) -> Exception:
    """Returns the meaning of an error of open or read: where a segment should be, a link, folder or FIFO may lie."""
    what = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ESPIPE: "a FIFO", errno.ENXIO: "a socket"}
    if error.errno not in what:
        return error
    detail = f"it is {what[error.errno]}, and no file of memstore's"
    return CorruptionError(path=path, detail=detail)


def remove_file(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder there isn't ours: it is left alone
        syscalls.unlink(path, dir_fd)


# --- the slots of the header -----------------------------------------------------------------------------------------


def write_slots(fd: int, slots: HeaderSlots) -> None:
    syscalls.write_at(fd, slots.encode(), SLOTS_OFFSET)


def write_state(fd: int, state: int) -> None:
    syscalls.write_at(fd, STATE_WORDS[state], STATE_AT)


def erase_put_id(fd: int) -> None:
    """Erases the put id: readers that come with an older record see that the file holds no put's contents."""
    syscalls.write_at(fd, b"0" * 16, PUT_ID_AT)


def vacate(fd: int) -> None:
    """Erases the put id and marks what the file held as retired, by one write."""
    syscalls.write_at(fd, b"%016x state=%s" % (0, STATE_WORDS[RETIRED]), PUT_ID_AT)


# --- claimed files ---------------------------------------------------------------------------------------------------


Guard = AbstractContextManager[Any]  # the lock that a fork takes first: see `root.guard`


class ClaimedFile:
    """The file, and the lock that keeps others from it: an exclusive one of the open file, or a parked one.

    This is what a commit and a clean-up need of a segment: they write its header in place, and give up the lock.

    Attributes:
        lock_file: what holds the exclusive lock. It is closed while the file is parked.
    """

    __slots__ = ("_dir_fd", "_page", "lock_file", "path")

    def __init__(self, path: str, lock_file: LockFile, dir_fd: int | None = None) -> None:
        self.path, self.lock_file, self._dir_fd = path, lock_file, dir_fd
        self._page: Reservation | None = None  # keeps the lock of a parked file

    def park(self, guard: Guard) -> None:
        """Closes the file, and keeps a shared lock by a mapping of one page.

        A process may have 65,530 mappings, and 1,024 open files. Call it under the store's mutex, once the segment is
        sealed. An exclusive lock could not be given up by `go_live`: a subprocess that is just being started has the
        file open too, until its exec, and so has the lock. A shared lock is in no reader's way.
        """
        syscalls.lock_shared(self.lock_file.fd)
        self._page, address, start = syscalls.reserve(syscalls.PAGE)
        map_for_writing(address + start, self.lock_file.fd, syscalls.PAGE, guard)
        self.lock_file.close()

    def open(self) -> OwnedFile:
        """Returns the file, opened anew if it is parked. Call it under the store's mutex."""
        return OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd) if self.lock_file.fd < 0 else self.lock_file

    def go_live(self, slots: HeaderSlots, *, durable: bool) -> None:
        """Writes what a live segment's header says, and gives up the lock.

        Call it under the store's mutex, right before the catalog's commit; again, if that has to be repeated.
        """
        file = self.lock_file if self.lock_file.fd >= 0 else self.open()
        fd = file.fd
        syscalls.write_at(fd, slots.encode(), SLOTS_OFFSET)
        if durable:
            syscalls.sync_data(fd)
        if file is self.lock_file:
            syscalls.unlock(fd)
        else:
            self._page = None

    def unlock(self) -> None:
        """Gives up the lock of a file that is not parked: a row of the catalog keeps it from here on."""
        syscalls.unlock(self.lock_file.fd)

    def vacate(self) -> None:
        """Makes the header say that the file holds nothing and may be used again. Under the store's mutex."""
        file = self.open()
        vacate(file.fd)

    def close(self) -> None:
        self._page = None
        self.lock_file.close()


class ClaimedOnOverlay(ClaimedFile):
    """A `ClaimedFile` where a mapping keeps no lock: it stays open."""

    __slots__ = ()

    def park(self, guard: Guard) -> None:
        """Does nothing."""


class PreparedFile:
    """The file of a prepared segment: no lock keeps it, but a row of the catalog."""

    __slots__ = ("_dir_fd", "path")

    def __init__(self, path: str, dir_fd: int | None = None) -> None:
        self.path, self._dir_fd = path, dir_fd

    def go_live(self, slots: HeaderSlots, *, durable: bool) -> None:
        """Writes what a live segment's header says. Under the store's mutex, right before the catalog's commit.

        Raises CorruptionError if the file is not there any more.
        """
        try:
            file = OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                raise
            detail = "it was put as a part of a sharded value, and somebody has removed it"
            raise CorruptionError(path=self.path, detail=detail) from None
        with file:
            write_slots(file.fd, slots)
            if durable:
                syscalls.sync_data(file.fd)


def map_for_writing(address: int, fd: int, size: int, guard: Guard) -> None:
    """Maps a file into a reservation. A fork comes before or after both calls: no child inherits the mapping."""
    with guard:
        syscalls.map_shared(address, fd, size)
        syscalls.keep_from_children(address, size)


# --- filling a segment -----------------------------------------------------------------------------------------------


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


MAPPED_AGAIN = 128 << 10  # bytes of a file from which a mapping of it takes less than a second copy (measured: 010)


class SegmentWriter:
    """A segment that this process fills: its claimed file, and its bytes in memory.

    A small segment is assembled in memory and written at once (a pwrite of 64 KiB takes 21 us, faulting its pages in
    takes 55); from one huge page on, the file itself is mapped. So is a smaller one in memory that this process fills
    again and again, from `MAPPED_AGAIN` on: its pages are faulted in once, and each put copies once instead of twice.
    Closing gives back the memory and the lock.

    Attributes:
        size: of the file, fixed for its life: header, data, and slack.
        is_whole: all of the file is allocated.
        is_new: it had no value before.
    """

    def __init__(
        self,
        file: ClaimedFile,
        segment: int,
        put_id: int,
        size: int,
        *,
        is_new: bool,
        is_frequent: bool = False,
        spare: KeptMapping | None = None,
    ) -> None:
        """Takes a claimed file. `is_frequent`: this process has filled it a moment ago, and may do so again."""
        self.file, self.segment, self.put_id, self.size = file, segment, put_id, size
        self.is_whole = not is_new
        self.is_new = is_new
        self._is_frequent = is_frequent and size >= MAPPED_AGAIN
        self._header: Header | None = None
        self._start = self._end = 0  # of the data
        self._scratch = bytearray()
        self._mapping, self._address, self._huge = spare[:3] if spare else (None, 0, 0)

    @property
    def is_reusable(self) -> bool:
        """Whether another put may fill the file, if this one isn't published."""
        return self.is_whole

    @property
    def is_mapped(self) -> bool:
        """Whether what is filled is in the file at once, and not assembled in memory."""
        return self._mapping is not None

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, on_tmpfs: bool) -> None:
        """Makes room for the header and `nbytes` of data.

        Raises OSError (ENOSPC) for a mapped file: every block is reserved before it is touched. A smaller one is put
        together in memory, and `seal` writes it: there a full disk shows.
        """
        self._header, self._start, self._end = header, header.nbytes, header.nbytes + nbytes
        is_small, fd = self.size < syscalls.HUGE_PAGE, self.file.lock_file.fd
        if is_small and self._mapping is None:
            if not (self._is_frequent and on_tmpfs):
                self._scratch = bytearray(self._end if self.is_whole else self.size)
                return
            syscalls.allocate(fd, self.size)  # it may have holes: a copy of the folder, or what `seal` left of it
        if not self.is_whole:
            # To find out by filling the disk takes the room that others need. What they take meanwhile, the allocation
            # finds. A tmpfs without a limit tells of no blocks.
            found = os.fstatvfs(fd)
            if found.f_blocks and self.size > found.f_bavail * found.f_frsize:
                raise OSError(errno.ENOSPC, f"{self.size:,} bytes, and {found.f_bavail * found.f_frsize:,} are free")
            syscalls.truncate(fd, self.size)
            if not on_tmpfs:
                syscalls.allocate(fd, self.size)
        if self._mapping is None:
            try:
                mapping, address, start = syscalls.reserve(self.size)
                map_for_writing(address + start, fd, self.size, guard)
            except OSError as error:
                if not is_small or error.errno != errno.ENOMEM:
                    raise
                self._scratch = bytearray(self._end)  # this process may map no more, and needs no mapping for this
                return
            self._mapping, self._address = mapping, address + start
            if is_small:
                syscalls.populate(self._address, self.size)
            elif on_tmpfs and not self.is_whole:
                allocate_pages(fd, self._address, self.size)
            elif on_tmpfs:
                self._huge = move_to_huge(self._address, self.size)
        elif on_tmpfs and not is_small and self.size - self._huge >= syscalls.HUGE_PAGE:
            # Small pages, because huge ones cost more when the file was new. Readers take twice as long for them.
            most = max(self.size // _MOVED_A_PUT, COLLAPSE_STEP)
            self._huge += move_to_huge(self._address + self._huge, min(most, self.size - self._huge))
        self.is_whole = True

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The data section, to be filled. It must not be touched after `close`."""
        address = self._address or syscalls.buffer_address(self._scratch)
        shape, data = (self._end - self._start,), (address + self._start, False)
        return {"version": 3, "typestr": "|u1", "shape": shape, "data": data}

    def seal(self, checksums: bytes | None, *, durable: bool) -> SealedSegment:
        """Writes the header, and all that was assembled in memory; with `durable`, syncs. The data is in its place."""
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

    def spare(self) -> KeptMapping | None:
        """Returns the mapping of a published file, if it has one, for the next time it is filled.

        No lock is left on it.
        """
        return KeptMapping(self._mapping, self._address, self._huge, self.size) if self._mapping is not None else None

    def close(self) -> None:
        self._address, self._mapping = 0, None
        self.file.close()


# --- kept mappings ---------------------------------------------------------------------------------------------------


_MOVED_A_PUT = 8  # a put moves one part of so many to huge pages, or one step: else the first would take all the time
_MOST_KEPT = 3  # mappings: of one file that is live, one retired, and one being filled
_MOST_KEPT_BYTES = 4 << 30  # of all of them: with small pages, these take 8 MiB of page tables


class KeptMapping(NamedTuple):
    """A mapping of a whole file."""

    mapping: Reservation
    address: int  # where the file starts
    huge: int  # bytes, from the first on, whose pages were looked at, and are huge now where the kernel lets them
    size: int


class KeptMappings:
    """The kept mappings of one root in this process, by segment: a file keeps its segment's number for life."""

    __slots__ = ("_filled", "_kept")

    def __init__(self) -> None:
        self._kept: OrderedDict[int, KeptMapping] = OrderedDict()
        self._filled: deque[int] = deque(maxlen=2 * _MOST_KEPT)  # the files that were used again last

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, segment: int, size: int) -> bool:
        kept = self._kept.get(segment)
        return kept is not None and kept.size == size

    def take(self, segment: int, size: int) -> KeptMapping | None:
        kept = self._kept.pop(segment, None)
        return kept if kept is not None and kept.size == size else None

    def note_filled(self, segment: int) -> bool:
        """Notes that a file is used again. Returns whether it is used so often that a mapping pays.

        That is where two or three files take turns: of puts to one key, or two. Where it was one of the last three
        files, puts of 200 KiB to 6 keys in a random order took a sixth longer, for mappings that found no second use.
        """
        is_frequent = self._filled.count(segment) > 1
        self._filled.append(segment)
        return is_frequent

    def keep(self, segment: int, mapping: KeptMapping) -> None:
        self._kept[segment] = mapping
        while len(self._kept) > _MOST_KEPT or sum(kept.size for kept in self._kept.values()) > _MOST_KEPT_BYTES:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drops them all. Call it before a fork too: a child gets no such mapping, but the objects that unmap them."""
        self._kept.clear()


# --- segments on storage that hosts share: who fills one, how it is written and read ---------------------------------
# Who fills a file, or is about to remove it, has locked a byte for it (`FileClaims`). The byte lies in the file
# `claims` of the host's state folder, on a local disk, at the segment's number: locks of the shared file system are
# asked for nothing. (NFS may have none, or keep them on each host; some Lustre mounts refuse them.) Only processes of
# one host ever claim a file: each host writes files of its own. A process has the file open once, and its locks belong
# to that: so a kill gives up all of them, and a forked child, which opens it anew, has none. What the process itself
# has claimed, the kernel would give it twice: hence the set.
#
# `ClaimedOnStorage` and `SharedStorageWriter` take the places of `ClaimedFile` and `SegmentWriter`.
#
# Readers, of this host or others, copy bytes and lock nothing (`open_stored`, `read_stored`). A file there is written
# once, by the host whose folder it lies in, and synced before anybody hears of it. It is never used again; when its
# value was replaced it stays for the store's grace time, and is then removed. So a reader opens it, compares what its
# header says with the record, reads, and compares the put id again, which is erased before a removal. A file that is
# missing, too short, full of zeros, or another put's may be gone, or not have come here yet: file systems show the
# files of other hosts when they like. The reader looks up the record again to tell which.


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

    def allocate(self, header: Header, nbytes: int, guard: Guard, *, on_tmpfs: bool) -> None:
        self._header, self._start, self._end = header, header.nbytes, header.nbytes + nbytes
        self._scratch = bytearray(self.size)  # fresh zeros of the kernel's, where it is large


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
