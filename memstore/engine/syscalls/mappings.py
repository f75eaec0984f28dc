"""Mappings of files, address space that is reserved for them, and memory at an address."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
from collections.abc import Iterable
from typing import Any, NoReturn

from memstore.engine import syscalls
from memstore.engine.syscalls.libc import (
    Int,
    Long,
    Pointer,
    Size,
    bind,
    drain,
    holding_gil,
    last_error,
    releasing_gil,
)

# To lay out memory that processes share: a class of fields, and their types. An instance is made by `from_address`.
Structure, Uint32, Uint64, Float64 = ctypes.Structure, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double

PAGE = 4096  # of our files, whatever the machine's
HUGE_PAGE = 2 << 20

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 1, 2, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
NOT_MAPPED = (1 << 8 * ctypes.sizeof(ctypes.c_void_p)) - 1  # MAP_FAILED; munmap refuses it
_HINTED = 1 << 40  # bytes of address space that mappings are strewn over, of 2^47
_MS_SYNC = 4
_MADV_WILLNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 3, 10, 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25

_mmap = bind(releasing_gil, "mmap", Pointer, Pointer, Size, Int, Int, Int, Long)
unmap = bind(releasing_gil, "munmap", Int, Pointer, Size)
_madvise = bind(releasing_gil, "madvise", Int, Pointer, Size, Int)
_msync = bind(releasing_gil, "msync", Int, Pointer, Size, Int)
_mincore = bind(releasing_gil, "mincore", Int, Pointer, Size, Pointer)
_malloc_trim = bind(releasing_gil, "malloc_trim", Int, Size)


class Cleanup(map):  # pyright: ignore[reportMissingTypeArgument] - there it can't have one
    """A `map` that takes one step when nothing refers to it any more.

    Made of functions in C, it runs in C alone: no signal handler comes before it or within. A method is a frame of
    Python, which a handler may leave before its first line, and then nothing is ever undone.
    """

    __slots__ = ()
    __del__ = map.__next__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def __reduce__(self) -> NoReturn:
        """Refuses: the copy of a `map` would close the same file, or unmap the same memory, once more."""
        raise TypeError(
            "mapped memory and its files can't be pickled or copied: copy the bytes, or send the path and map the file "
            "there"
        )


def map_into(place: list[int], fd: int, size: int, flags: int = 0, *, shared: bool = False) -> None:
    """Maps the file copy-on-write: whoever writes gets pages of their own. Sets `place[0]`, NOT_MAPPED before.

    With `shared`, everybody sees what is written.

    Both in one C call, as in `open_into`. The mapping keeps a lock of `fd` after that is closed. The kernel maps huge
    pages only where address and offset in the file agree modulo 2 MiB. To ask for a free address of that kind takes
    2 us; MAP_FIXED over a larger reservation 5, and 2 more to unmap what is left of that.
    """
    flags |= _MAP_SHARED if shared else _MAP_PRIVATE
    if size < HUGE_PAGE:
        _map_into(place, 0, fd, size, flags)
    else:
        _map_into(place, _hint(size), fd, size, flags | _MAP_FIXED_NOREPLACE)
        if place[0] == NOT_MAPPED:  # as a rule, since something lies there
            _map_into(place, _free_address(size), fd, size, flags)
    if place[0] == NOT_MAPPED:
        raise last_error()


def map_room_into(place: list[int], size: int) -> None:
    """Maps zeros as `map_into` maps a file, for `map_over`."""
    syscalls.map_into(place, -1, size, _MAP_ANONYMOUS)


def _map_into(place: list[int], hint: int, fd: int, size: int, flags: int) -> None:
    flags |= _MAP_NORESERVE
    mapped = map(_mmap, (hint,), (size,), (_PROT_READ | _PROT_WRITE,), (flags,), (fd,), (0,))
    drain(map(place.__setitem__, (0,), mapped))


def map_over(address: int, fd: int, size: int) -> None:
    """Maps the file copy-on-write over addresses that a mapping of the caller's has."""
    flags = _MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(address, size, _PROT_READ | _PROT_WRITE, flags, fd, 0) != address:
        raise last_error()


_hints = [0, 0]  # the last one, and the lowest


def _hint(size: int) -> int:
    """Returns an address that may well be free: below the one before. Little lies below what the kernel chooses."""
    hint = (_hints[0] - size) // HUGE_PAGE * HUGE_PAGE
    if hint < _hints[1]:
        return _free_address(size)
    _hints[0] = hint
    return hint


def _free_address(size: int) -> int:
    hole = mmap.mmap(-1, size + HUGE_PAGE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, _PROT_READ | _PROT_WRITE)
    address = buffer_address(hole)
    address += -address % HUGE_PAGE
    _hints[:] = address, max(address - _HINTED, address // 2)
    return address  # the hole is given back: unless another thread is faster, the next mapping gets it


class Reservation(mmap.mmap):
    """Address space that is given back, with all that was mapped into it, when nothing refers to it any more.

    The deallocation is C, so no signal handler can come between.
    """


def reserve(size: int) -> tuple[Reservation, int, int]:
    """Reserves room for a mapping of `size` bytes.

    Returns it, its address, and the offset where the mapping is to start.
    """
    room = size + HUGE_PAGE if size >= HUGE_PAGE else size
    reservation = Reservation(-1, room, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, _PROT_READ | _PROT_WRITE)
    address = buffer_address(reservation)
    return reservation, address, -address % HUGE_PAGE if size >= HUGE_PAGE else 0


def map_shared(address: int, fd: int, size: int, *, writable: bool = True) -> None:
    """Maps the file over reserved addresses. The mapping keeps a lock of `fd` after that is closed."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    if _mmap(address, size, protection, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise last_error()


def map_nothing(address: int, size: int) -> None:
    """Puts memory of this process, which takes none until it is written to, in the place of a mapping."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(address, size, _PROT_READ | _PROT_WRITE, flags, -1, 0) != address:
        raise last_error()


def buffer_address(buffer: bytearray | mmap.mmap | memoryview) -> int:
    """Returns where the bytes lie, as long as nobody resizes it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0


def memory_at(address: int, size: int) -> memoryview:
    """Returns mapped bytes, which can be used as long as they are mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def words(address: int, count: int) -> Any:
    """Returns `count` unsigned 32-bit words at `address`, to load and store by index."""
    return (ctypes.c_uint32 * count).from_address(address)


def long_words(address: int, count: int) -> Any:
    """Returns `count` unsigned 64-bit words at `address`."""
    return (ctypes.c_uint64 * count).from_address(address)


def sync_mapped(address: int, size: int) -> None:
    """Brings what was stored into whole pages of a shared mapping to the disk, as `sync_data` does a whole file."""
    if _msync(address, size, _MS_SYNC):
        raise last_error()


def keep_from_children(address: int, size: int) -> None:
    """Keeps the mapping, and so the lock that it keeps, from forked children."""
    if _madvise(address, size, _MADV_DONTFORK):
        raise last_error()


def collapse(address: int, size: int) -> bool:
    """Turns whole, touched 2 MiB extents into huge pages (Linux 6.1). False where the kernel refuses for good."""
    return not _madvise(address, size, _MADV_COLLAPSE) or ctypes.get_errno() == errno.EAGAIN


def prefer_huge_pages(address: int, size: int) -> None:
    """Asks for huge pages in room that is written for the first time: 64 MiB in 20 ms instead of 80. Advice."""
    _madvise(address, size, _MADV_HUGEPAGE)


def populate(address: int, size: int) -> bool:
    """Allocates and maps the pages at once (Linux 5.14): 230 of them in 25 us instead of 100. False where refused."""
    return not _madvise(address, size, _MADV_POPULATE_WRITE)


def populate_for_reading(address: int, size: int) -> bool:
    """Maps pages that are in memory already (Linux 5.14): no faults later. False where refused."""
    return not _madvise(address, size, _MADV_POPULATE_READ)


def trim_heap() -> None:
    """Gives pages of memory that was freed back, also such as lie between blocks in use."""
    _malloc_trim(0)


def will_need(addresses: Iterable[int], sizes: Iterable[int]) -> None:
    """Starts to read ranges of whole pages from disk. Advice: what is refused is left out."""
    drain(map(_madvise, addresses, sizes, itertools.repeat(_MADV_WILLNEED)))


copy = bind(releasing_gil, "memmove", Pointer, Pointer, Pointer, Size)  # to an address, from an address, bytes
copy_briefly = bind(holding_gil, "memmove", Pointer, Pointer, Pointer, Size)  # a quarter of the time for a few bytes


def is_resident(address: int) -> bool:
    """Returns whether the page is in memory. The kernel says yes of all files that aren't the caller's own."""
    page = ctypes.c_ubyte()
    if _mincore(address, PAGE, ctypes.addressof(page)):
        return True
    return bool(page.value & 1)
