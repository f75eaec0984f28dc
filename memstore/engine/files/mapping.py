"""Open files and mappings, which end when nothing refers to them any more: so no error path leaves a lock behind.

- `OwnedFile` closes itself. `LockFile` is opened to be locked: a forked child closes its copy (`close_all`), else the
  lock would outlive its parent.
- `Mapping` is a private view of a file. Arrays made of it keep it alive, and so do slices of them and tensors made of
  slices. With it lives the file's shared lock; where mappings keep no locks (overlay: see
  `filesystem.mappings_keep_locks`), by the open file, which is closed with it. It is unmapped when the last of them
  goes. Nothing is unmapped because the interpreter exits: finalizers of others may still read tensors then.
- External files are files of others that are served under a key. `ExternalFiles` collects them, `map_external` maps
  them. memstore never opens them for writing, and no lock protects them. A file that is not what it was when it was
  attached is refused; but whoever has mapped it before sees what others write into it. (The device is not compared: its
  number changes when btrfs, overlay or NFS are mounted anew.)
- `SharedMemory` has no name; other processes get it as a file descriptor.
- `allocate_pages` allocates a file in memory that is mapped to be filled: at once, and in huge pages while they cost no
  more than small ones (`PagePrices`).

A signal handler that raises, at whatever point, must not lose a mapping, for the lock would be lost with it. So what
unmaps it is ready before it is made, and both are single calls in C: see `syscalls.map_into` and `syscalls.Cleanup`.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from memstore.engine import syscalls
from memstore.engine.format.records import MAPPED_LIMIT, ExternalExtent, base_after, encode_extents, end_of
from memstore.engine.syscalls import Cleanup
from memstore.errors import CorruptionError, PermissionDeniedError, UnsupportedValueError

if TYPE_CHECKING:
    from typing_extensions import Self

# --- open files ------------------------------------------------------------------------------------------------------


class OwnedFile:
    """A file descriptor that is closed when nothing refers to it any more.

    It is never copied: the copy would close it too, when the number may be that of another file already.

    Attributes:
        fd: the descriptor; -1 once it is closed.
    """

    __slots__ = ("__weakref__", "_fds", "fd")

    def __init__(self, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
        self._fds: list[int] = []
        syscalls.open_into(self._fds, path, flags, mode, dir_fd)
        self.fd = self._fds[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.fd = -1  # first: once it is closed, the number may be another file's
        syscalls.close_all(self._fds)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an open file can't be pickled or copied, because its descriptor is this process's own: send the path, and "
            "open that"
        )

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Closes the file; not at the interpreter's end, where modules may have lost their names."""
        if not is_ending() and getattr(self, "_fds", None):  # an interrupt may have left it half-made
            try:
                self.close()
            except KeyboardInterrupt:  # it is never tried again, and a lock would last as long as the process
                self.close()
                raise


class LockFile(OwnedFile):
    """An open file that may be locked. Open it under a lock that a fork takes too."""

    __slots__ = ()

    def __init__(self, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
        super().__init__(path, flags, mode, dir_fd)
        _lock_files.add(self)

    def lock(self) -> bool:
        """Tries to lock it for oneself, never waits."""
        return syscalls.lock_exclusive(self.fd)

    def leave_to_parent(self) -> None:
        """Closes the file in a forked child; the parent keeps its lock."""
        self.close()


_lock_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def close_all() -> None:
    """Closes the files that were opened to be locked, in a forked child."""
    for file in list(_lock_files):
        file.leave_to_parent()


# --- mappings --------------------------------------------------------------------------------------------------------


_live: dict[int, int] = {}  # size by address, of this process's mappings
_watched: dict[int, weakref.ref[Any]] = {}  # other bytes, by address; dead ones too, until they are many
_MOST_WATCHED = 1024  # before those that are dead are looked for
_look_at = [_MOST_WATCHED]


class Mapping(msgspec.Struct, gc=False):
    """The bytes of a file, for numpy: `np.asarray(mapping)`.

    The garbage collector doesn't see it, nor what it refers to. So it never unmaps what another object of the same
    dead cycle brings back to life: the mapping goes with the last reference, and not before.
    """

    address: int
    size: int
    _cleanup: Cleanup
    _file: Cleanup | None  # after it: the lock goes when the bytes are gone

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def view(self) -> memoryview:
        """Returns the bytes without numpy. It does not keep the mapping alive."""
        return syscalls.memory_at(self.address, self.size)


def map_file(fd: int | None, size: int, file: Cleanup | None = None, *, shared: bool = False) -> Mapping:
    """Maps `size` bytes of a file copy-on-write; without one, zeros: room for `syscalls.map_over`.

    `file` closes what is to stay open as long as it is mapped. With `shared`, the file is what is written to.
    """
    place = [syscalls.NOT_MAPPED]
    sizes = map(_live.pop, place, itertools.repeat(size))  # taken out first: once unmapped, another may lie there
    cleanup = Cleanup(syscalls.unmap, place, sizes)
    if fd is None:
        syscalls.map_room_into(place, size)
    else:
        syscalls.map_into(place, fd, size, shared=shared)
    address = place[0]
    _live[address] = size
    return Mapping(address, size, cleanup, file)


def address_in(mapping: Mapping, base: int, size: int) -> int:
    """Returns the address of a file that goes into a range from `base` on.

    Raises CorruptionError where the range has no room for it: what is mapped or read there would go over other memory
    of the process. Everything that fills a part of a range asks here.
    """
    if not 0 <= base <= base + size <= mapping.size:
        raise CorruptionError(f"{size:,} bytes at {base:,} have no room in {mapping.size:,} addresses")
    return mapping.address + base


def watch(address: int, memory: Any) -> None:
    """Counts other bytes of a value, those of an inline one, among the mappings, as long as `memory` lives.

    It is an array. (A WeakValueDictionary takes a microsecond a value.)
    """
    _watched[address] = weakref.ref(memory)
    if len(_watched) > _look_at[0]:
        for place, found in list(_watched.items()):
            if found() is None and _watched.get(place) is found:
                del _watched[place]
        _look_at[0] = 2 * len(_watched) + _MOST_WATCHED


def lies_in_mapping(address: int) -> bool:
    """Returns whether `address` is in a live mapping of this process."""
    if any(start <= address < start + size for start, size in list(_live.items())):
        return True
    others = ((start, found()) for start, found in list(_watched.items()))
    return any(memory is not None and start <= address < start + memory.nbytes for start, memory in others)


# --- where an address lies in a file ---------------------------------------------------------------------------------


def file_offsets(addresses: Sequence[int], path: str, inode: int) -> list[int] | None:
    """Offsets in the file with this path or inode; None if any of the addresses is not in a mapping of it.

    Both are looked for: overlay tells the inode of a lower file, and a path with a line break is told in another form.
    """
    name = os.fsencode(path) + b"\n"
    starts: list[int] = []
    ranges: list[tuple[int, int]] = []  # end; offset in the file
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if int(fields[4]) == inode or fields[5:] == [name]:
                start, end = (int(word, 16) for word in fields[0].split(b"-"))
                starts.append(start)
                ranges.append((end, int(fields[2], 16)))
    found: list[int] = []
    for address in addresses:
        i = bisect.bisect_right(starts, address) - 1
        if i < 0 or address >= ranges[i][0]:
            return None
        found.append(address - starts[i] + ranges[i][1])
    return found


# --- external files --------------------------------------------------------------------------------------------------


MOST_FILES = 16_384  # a process may have 65,530 mappings


class ExternalFiles:
    """Collects the files of an entry that is being attached."""

    def __init__(self) -> None:
        self.files: list[ExternalExtent] = []
        self._end = 0

    def add(self, path: str, found: os.stat_result) -> int:
        """Returns the base of the file."""
        if len(self.files) == MOST_FILES:
            raise UnsupportedValueError(f"{path} is one of more than {MOST_FILES:,} files, which is the limit")
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UnsupportedValueError(f"{path!r} is no UTF-8: rename it") from None
        base = base_after(self._end, found.st_size)
        self._end = base + found.st_size
        if self._end > MAPPED_LIMIT:
            raise UnsupportedValueError(f"{path}: {self._end:,} bytes in all, and {MAPPED_LIMIT:,} can be mapped")
        self.files.append(ExternalExtent(path, found.st_size, found.st_mtime_ns, found.st_ino, base))
        return base

    def encode(self) -> bytes:
        return encode_extents(self.files)


@contextlib.contextmanager
def opened(path: str) -> Generator[tuple[int, os.stat_result]]:
    """Opens a regular file for reading; never through a link at the end of its path."""
    try:
        file = OwnedFile(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsupportedValueError(f"{path} is a link or a socket, and no regular file") from None
        raise
    with file:
        found = syscalls.status(file.fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsupportedValueError(f"{path} is no regular file")
        yield file.fd, found


def map_external(extents: Sequence[ExternalExtent], size: int = 0) -> Mapping | None:
    """Maps the files, one behind the other, with one file descriptor at a time; None if there are none.

    Behind them is room up to `size`, of zeros. Raises CorruptionError for one that is gone or is not what it was.
    """
    if not extents:
        return None
    end = end_of(extents)
    if len(extents) == 1 and not extents[0].base and size <= end:
        with _unchanged(extents[0]) as fd:
            return map_file(fd, extents[0].size)
    mapping = map_file(None, max(end, size))
    for extent in extents:
        with _unchanged(extent) as fd:
            syscalls.map_over(address_in(mapping, extent.base, extent.size), fd, extent.size)
    return mapping


@contextlib.contextmanager
def _unchanged(extent: ExternalExtent) -> Generator[int]:
    try:
        with opened(extent.path) as (fd, found):
            for name, was, is_now in (
                ("bytes", extent.size, found.st_size),
                ("mtime_ns", extent.mtime_ns, found.st_mtime_ns),
                ("inode", extent.inode, found.st_ino),
            ):
                if was != is_now:
                    raise _changed_error(
                        extent.path, f"it has changed since it was attached: {name} {is_now}, not {was}"
                    )
            yield fd
    except (FileNotFoundError, NotADirectoryError):
        raise _changed_error(extent.path, "it was attached, and is gone") from None
    except UnsupportedValueError:
        raise _changed_error(extent.path, "it was attached as a regular file, and is none any more") from None
    except PermissionError:
        raise PermissionDeniedError(f"{extent.path} was attached, and this process may not read it") from None


def _changed_error(path: str, detail: str) -> CorruptionError:
    return CorruptionError(f"{path}: {detail}: attach it again", path=path, detail=detail)


# --- shared memory ---------------------------------------------------------------------------------------------------


class SharedMemory:
    """Memory that several processes have: a file in memory that has no name.

    It is given back when nothing refers to it any more in any of them.

    Args:
        size: of new memory, in bytes, at least 1.
        fd: instead, of memory that another process made; it is closed with this object.

    Raises:
        OSError: no file descriptors, or no addresses, are left.

    Attributes:
        size: in bytes.
        address: of the first byte; from 2 MiB on a multiple of that.
    """

    def __init__(self, size: int = 0, *, fd: int | None = None) -> None:
        self._fds: list[int] = []
        self._fds.append(syscalls.memory_file("memstore") if fd is None else fd)
        if fd is None:
            syscalls.truncate(self.fd, size)
        self.size = syscalls.status(self.fd).st_size
        self._mapping, start, skipped = syscalls.reserve(self.size)
        self.address = start + skipped
        syscalls.map_shared(self.address, self.fd, self.size)

    @property
    def fd(self) -> int:
        return self._fds[0]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """All of it, as bytes. An array of numpy that is made of this keeps it."""
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    @property
    def bytes(self) -> memoryview:
        """All of it, while this object is there."""
        return syscalls.memory_at(self.address, self.size)

    def populate(self, start: int, stop: int) -> None:
        """Allocates a run of it, if it can, so that the first touch takes no longer than others. In many threads."""
        syscalls.populate(self.address + start, stop - start)

    def allocate(self) -> None:
        """Allocates what isn't yet. Raises OSError if the machine has not so much memory."""
        allocate_rest(self.fd, self.address, self.size)

    def allocate_huge(self, start: int, stop: int) -> int:
        """Allocates a run of new memory in huge pages, while these cost no more than small ones. Returns where it ends.

        The run starts on a multiple of 2 MiB. In many threads.

        Raises OSError if the machine, or the file system of a file, has not so much memory.
        """
        end = allocate_huge(self.fd, self.address, start, stop)
        if end > start:
            syscalls.allocate(self.fd, end - start, start)  # extents that the kernel has left out for the moment
        return end

    def make_huge(self, start: int, size: int) -> int:
        """Moves a run to huge pages, for all processes, whatever they do meanwhile.

        Returns where it ended: before the end where the kernel refuses, or where it has just cost too much.
        """
        return start + move_to_huge(self.address + start, min(size, self.size - start))

    def keep_from_children(self) -> None:
        """Keeps the memory from children that are forked from now on: they don't have it at all."""
        syscalls.keep_from_children(self.address, self.size)

    def leave(self) -> None:
        """Gives it back, as far as this process has it. What still refers to it finds zeros of this process's own.

        A forked child leaves what its parent goes on with.
        """
        syscalls.map_nothing(self.address, self.size)
        syscalls.close_all(self._fds)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "SharedMemory can't be pickled or copied: send its file descriptor through a socket, or a copy of its bytes"
        )

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending() and hasattr(self, "_fds"):  # as of an OwnedFile
            syscalls.close_all(self._fds)


# --- pages -----------------------------------------------------------------------------------------------------------
# A file in memory that is mapped to be filled is allocated at once, in huge pages while they cost no more than small
# ones (measured: decision 005). As a rule they cost a tenth: 0.13 ms for 2 MiB. But where the kernel has to move other
# pages to make room for one, or has given whole blocks back to the host of a virtual machine, one costs 3 to 22 ms, for
# minutes. So both are measured all the time, in this process.


COLLAPSE_STEP = 4 << 20  # a slow one can't be cut short
_GUESS = 0.003 / (8 << 20)  # seconds a byte: small pages, before any were measured
_FAULTS = 3  # times what small pages cost to allocate: what they cost in the end, as each is a fault (measured: 2.8)
_MOVED = 2  # what a huge page may cost that is made of small ones which are in use, of what it may cost new
_NOTHING = 1e-5 / (1 << 20)  # seconds a byte: less than any page costs. These were huge already
_WAITED = 4  # most of the time that a thread waits is the turn of others, on a busy machine or for Python's lock
_REFUSED = 1.0  # seconds that a refusal counts as
_STALE = 1.0  # seconds
_PATIENCE = 10  # times what a slow step has lost: so what is lost is a tenth of the time at most
_FORGIVEN = 64 << 20  # bytes of huge pages that were cheap, after which slow ones before them count no more
_LONGEST = 60.0  # seconds without huge pages, after they were slow

Result = TypeVar("Result")


class PagePrices:
    """The prices of huge pages and small ones of late, and so which the next ones are to be. For any threads.

    After huge pages that cost more than small ones, all do without for ten times what was lost, and for twice as long
    each time that a new try is slow, up to a minute, until 64 MiB in a row were cheap: the first ones of a file often
    are, and the next ones not. Where small pages come to cost as much (all free memory is as cold), huge ones are tried
    at once. Two threads that note a price at the same time may lose one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._huge, self._small = 0.0, _GUESS  # seconds a byte
        self._measured_at = -_STALE
        self._failures = self._cheap = 0  # slow steps, and bytes since the last one
        self._again_at = 0.0

    def prefers_huge(self) -> bool:
        """Returns whether huge pages cost no more than small ones, or it is time to look."""
        return self._huge <= self._small * _FAULTS or self._clock() >= self._again_at

    def is_stale(self) -> bool:
        """Returns whether the price of small pages is an old one, or a guess."""
        return self._clock() - self._measured_at > _STALE

    def note_huge(self, size: int, seconds: float) -> None:
        self._huge = seconds / size
        if self._huge <= self._small * _FAULTS:
            self._cheap += size
            if self._cheap >= _FORGIVEN:
                self._failures = 0
            return
        lost = seconds - size * self._small * _FAULTS
        self._again_at = self._clock() + min(lost * _PATIENCE * 2**self._failures, _LONGEST)
        self._failures, self._cheap = min(self._failures + 1, 20), 0

    def note_refused(self) -> None:
        """Notes that the kernel makes none: it can't, or has no room. That may last."""
        self.note_huge(syscalls.HUGE_PAGE, _REFUSED)

    def note_small(self, size: int, seconds: float) -> None:
        """Notes a price. The first takes the place of a guess or of an old one; of later ones, each counts half."""
        price = seconds / size
        self._small = price if self.is_stale() else (self._small + price) / 2
        self._measured_at = self._clock()


prices = PagePrices()  # of this process


def allocate_pages(fd: int, address: int, size: int) -> None:
    """Allocates all of a new file of zeros that is mapped at `address`, a multiple of 2 MiB.

    (To collapse the last, incomplete extent as well and cut it by truncation splits it, and the next file finds no
    whole page: 4.5 ms instead of 0.3.)

    Raises OSError (ENOSPC) if there is not so much memory.
    """
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    start = 0
    while (start := allocate_huge(fd, address, start, whole)) < whole:
        _allocate_small(fd, start)
        start += syscalls.HUGE_PAGE
    allocate_rest(fd, address, size)


def allocate_huge(fd: int, address: int, start: int, stop: int) -> int:
    """Allocates whole extents of 2 MiB of a new file from `start` on, while huge pages cost no more than small ones.

    A few may be small: some to measure that, and those that the kernel leaves out for the moment, which may not be
    allocated at all. Returns where it has ended.

    Raises OSError (ENOSPC) if there is not so much memory.
    """
    step = syscalls.HUGE_PAGE  # the first one tells what they cost now
    while stop - start >= syscalls.HUGE_PAGE:
        if prices.prefers_huge():
            size = min(step, (stop - start) // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE)
            for offset in range(start, start + size, syscalls.HUGE_PAGE):  # a page of each, else it would find nothing
                syscalls.write_at(fd, b"\0", offset)
            if not _collapse(address + start, size):
                return start
            start, step = start + size, min(2 * step, COLLAPSE_STEP)
        elif prices.is_stale():
            _allocate_small(fd, start)
            start += syscalls.HUGE_PAGE
        else:
            break
    return start


def move_to_huge(address: int, size: int) -> int:
    """Makes huge pages of a file that is allocated, whoever uses it, while that costs little. Returns where it ended.

    What has huge pages already is passed over in microseconds.
    """
    start, step = 0, syscalls.HUGE_PAGE
    while size - start >= syscalls.HUGE_PAGE and prices.prefers_huge():
        part = min(step, (size - start) // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE)
        if not _collapse(address + start, part, _MOVED):
            break
        start, step = start + part, min(2 * step, COLLAPSE_STEP)
    return start


def allocate_rest(fd: int, address: int, size: int) -> None:
    """Allocates what isn't yet, in small pages; what lies behind the last whole extent is mapped, too."""
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    if size > whole:
        syscalls.populate(address + whole, size - whole)
    if syscalls.status(fd).st_blocks * 512 < size:
        syscalls.allocate(fd, size)


def _collapse(address: int, size: int, allowed: int = 1) -> bool:
    seconds, made = _timed(lambda: syscalls.collapse(address, size))
    if not made:
        prices.note_refused()
    elif seconds > size * _NOTHING:
        prices.note_huge(size, seconds / allowed)
    return made


def _allocate_small(fd: int, start: int) -> None:
    seconds, _ = _timed(lambda: syscalls.allocate(fd, syscalls.HUGE_PAGE, start))
    prices.note_small(syscalls.HUGE_PAGE, seconds)


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds that a call costs: of the processor, or a part of those that pass while the thread waits."""
    started, used = time.monotonic(), time.thread_time()
    result = call()
    used = time.thread_time() - used
    return max(used, (time.monotonic() - started) / _WAITED), result
