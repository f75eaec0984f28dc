"""The one seam between memstore and the kernel: files, locks, mappings, futexes, robust mutexes.

Everything in the engine calls `syscalls.name(...)` through the module, so that a test that replaces a name here sees
every call, and can fail or kill the process at each. Errors are OSErrors; the callers give them their meaning.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

PAGE = 4096  # of our files, whatever the machine's
HUGE_PAGE = 2 << 20
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # a file

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 1, 2, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
NOT_MAPPED = (1 << 8 * ctypes.sizeof(ctypes.c_void_p)) - 1  # MAP_FAILED; munmap refuses it
_WISHES = 1 << 40  # bytes of address space that mappings are strewn over, of 2^47
_MADV_WILLNEED, _MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 3, 10, 22, 23, 25
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
MUTEX_OWNER = 0x3FFFFFFF  # mask of the owner's thread id in a mutex's first word
MUTEX_SIZE = 64  # sizeof(pthread_mutex_t) is 40 on x86-64 and 48 on aarch64

drain = deque[Any](maxlen=0).extend  # runs an iterator in C

_releasing_gil = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None, use_errno=True)


def _bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    try:
        function = getattr(library, name)
    except AttributeError:  # macOS: importable, not usable

        def missing(*_: object) -> Any:
            raise OSError(
                errno.ENOSYS, f"memstore needs Linux with glibc 2.30 or later: {name} is missing on {sys.platform}"
            )

        return missing
    function.restype, function.argtypes = result, arguments
    return function


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_pointer, _size, _int, _long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_mmap = _bind(_releasing_gil, "mmap", _pointer, _pointer, _size, _int, _int, _int, _long)
unmap = _bind(_releasing_gil, "munmap", _int, _pointer, _size)
_madvise = _bind(_releasing_gil, "madvise", _int, _pointer, _size, _int)
_mincore = _bind(_releasing_gil, "mincore", _int, _pointer, _size, _pointer)
_syscall = _bind(
    _releasing_gil, "syscall", _long, _long, _pointer, _int, ctypes.c_uint32, ctypes.POINTER(_Timespec), _pointer, _int
)
_fallocate = _bind(_releasing_gil, "fallocate", _int, _int, _int, _long, _long)
_statfs = _bind(_releasing_gil, "statfs", _int, ctypes.c_char_p, _pointer)
_mutexattr_init = _bind(_holding_gil, "pthread_mutexattr_init", _int, _pointer)
_mutexattr_setpshared = _bind(_holding_gil, "pthread_mutexattr_setpshared", _int, _pointer, _int)
_mutexattr_setrobust = _bind(_holding_gil, "pthread_mutexattr_setrobust", _int, _pointer, _int)
_mutex_init = _bind(_holding_gil, "pthread_mutex_init", _int, _pointer, _pointer)
_mutex_trylock = _bind(_holding_gil, "pthread_mutex_trylock", _int, _pointer)
_mutex_clocklock = _bind(_releasing_gil, "pthread_mutex_clocklock", _int, _pointer, _int, ctypes.POINTER(_Timespec))


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


# --- files ------------------------------------------------------------------------------------------------------------


def open_into(owner: list[int], path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
    """Opens, never through a link at the end of `path` nor waiting at a FIFO; appends the descriptor to `owner`.

    Both in one C call: a signal handler that raises comes before or after it, and no file descriptor is lost. With
    `dir_fd`, the last part of `path` is looked up in that folder, wherever it may be by now.
    """
    name = path if dir_fd is None else path.rpartition("/")[2]
    opener = functools.partial(os.open, mode=mode, dir_fd=dir_fd)
    try:
        owner.extend(map(opener, (name,), (flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,)))
    except OSError as error:
        error.filename = path
        raise


def open_file(path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """As `open_into`, for files that no lock and no mapping depends on."""
    owner: list[int] = []
    open_into(owner, path, flags, mode, dir_fd)
    return owner[0]


def close_all(owner: list[int]) -> None:
    """Closes what `open_into` opened, each in one C call with taking it out."""
    while owner:
        drain(map(os.close, map(owner.pop, (0,))))


def close(fd: int) -> None:
    os.close(fd)


def read_at(fd: int, size: int, offset: int) -> bytes:
    return os.pread(fd, size, offset)


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fills the buffer."""
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise OSError(errno.EIO, f"the file ends at {offset}, {len(buffer)} bytes too soon")
        buffer, offset = buffer[count:], offset + count


def write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def status(fd: int) -> os.stat_result:
    return os.fstat(fd)


def size_of(fd: int) -> int:
    """A third of the time of `status`. It moves the position of the descriptor, which nothing here depends on."""
    return os.lseek(fd, 0, os.SEEK_END)


def truncate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)


def allocate(fd: int, size: int) -> None:
    """Reserves blocks for all of the file, so that no later write to it can find the disk full."""
    os.posix_fallocate(fd, 0, size)


def free_blocks(fd: int, size: int) -> None:
    """Makes the first `size` bytes a hole. The file keeps its length, so that no mapping of it can fault."""
    if size and _fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, size):
        raise _last_error()


def sync(fd: int) -> None:
    os.fsync(fd)


def sync_data(fd: int) -> None:
    os.fdatasync(fd)


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def link(source: str, target: str) -> None:
    os.link(source, target)


def replace(source: str, target: str) -> None:
    os.replace(source, target)


def unlink(path: str, dir_fd: int | None = None) -> None:
    os.unlink(path if dir_fd is None else path.rpartition("/")[2], dir_fd=dir_fd)


def make_folder(path: str, mode: int) -> None:
    os.mkdir(path, mode)


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def filesystem_type(path: str) -> int:
    """The magic number of the file system that holds `path`: statfs(2) lists them."""
    buffer = (ctypes.c_long * 32)()
    if _statfs(os.fsencode(path), ctypes.addressof(buffer)):
        raise _last_error()
    return int(buffer[0]) & 0xFFFFFFFF


# --- flock ------------------------------------------------------------------------------------------------------------


def lock_shared(fd: int) -> bool:
    """Tries, never waits. The lock belongs to the open file description: a mapping of it keeps it."""
    return _flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_exclusive(fd: int) -> bool:
    return _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _flock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


# --- mappings ---------------------------------------------------------------------------------------------------------


class Cleanup(map):  # pyright: ignore[reportMissingTypeArgument] - there it can't have one
    """A `map` that takes one step when nothing refers to it any more.

    Made of functions in C, it runs in C alone: no signal handler comes before it or within. A method is a frame of
    Python, which a handler may leave before its first line, and then nothing is ever undone.
    """

    __slots__ = ()
    __del__ = map.__next__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def map_into(place: list[int], fd: int, size: int, flags: int = 0) -> None:
    """Maps the file copy-on-write: whoever writes gets pages of their own. Sets `place[0]`, NOT_MAPPED before.

    Both in one C call, as in `open_into`. The mapping keeps a lock of `fd` after that is closed. The kernel maps huge
    pages only where address and offset in the file agree modulo 2 MiB. To ask for a free address of that kind takes
    2 us; MAP_FIXED over a larger reservation 5, and 2 more to unmap what is left of that.
    """
    if size < HUGE_PAGE:
        _map_into(place, 0, fd, size, flags)
    else:
        _map_into(place, _wish(size), fd, size, flags | _MAP_FIXED_NOREPLACE)
        if place[0] == NOT_MAPPED:  # as a rule, since something lies there
            _map_into(place, _free_address(size), fd, size, flags)
    if place[0] == NOT_MAPPED:
        raise _last_error()


def map_room_into(place: list[int], size: int) -> None:
    """As `map_into`, but no file: zeros, for `map_over`."""
    map_into(place, -1, size, _MAP_ANONYMOUS)


def _map_into(place: list[int], wish: int, fd: int, size: int, flags: int) -> None:
    flags |= _MAP_PRIVATE | _MAP_NORESERVE
    mapped = map(_mmap, (wish,), (size,), (_PROT_READ | _PROT_WRITE,), (flags,), (fd,), (0,))
    drain(map(place.__setitem__, (0,), mapped))


def map_over(address: int, fd: int, size: int) -> None:
    """Maps the file copy-on-write over addresses that a mapping of the caller's has."""
    flags = _MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(address, size, _PROT_READ | _PROT_WRITE, flags, fd, 0) != address:
        raise _last_error()


_wishes = [0, 0]  # the last one, and the lowest


def _wish(size: int) -> int:
    """An address that may well be free: below the one before. Below what the kernel chooses, little else lies."""
    wish = (_wishes[0] - size) // HUGE_PAGE * HUGE_PAGE
    if wish < _wishes[1]:
        return _free_address(size)
    _wishes[0] = wish
    return wish


def _free_address(size: int) -> int:
    hole = mmap.mmap(-1, size + HUGE_PAGE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, _PROT_READ | _PROT_WRITE)
    address = buffer_address(hole)
    address += -address % HUGE_PAGE
    _wishes[:] = address, max(address - _WISHES, address // 2)
    return address  # the hole is given back: unless another thread is faster, the next mapping gets it


class Reservation(mmap.mmap):
    """Address space that is given back, with all that was mapped into it, when nothing refers to it any more.

    The deallocation is C, so no signal handler can come between.
    """


def reserve(size: int) -> tuple[Reservation, int, int]:
    """Room for a mapping of `size` bytes. Returns it, its address, and the offset where the mapping is to start."""
    room = size + HUGE_PAGE if size >= HUGE_PAGE else size
    reservation = Reservation(-1, room, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, _PROT_READ | _PROT_WRITE)
    address = buffer_address(reservation)
    return reservation, address, -address % HUGE_PAGE if size >= HUGE_PAGE else 0


def map_shared(address: int, fd: int, size: int, *, writable: bool = True) -> None:
    """Maps the file over reserved addresses. The mapping keeps a lock of `fd` after that is closed."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    if _mmap(address, size, protection, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise _last_error()


def buffer_address(buffer: bytearray | mmap.mmap) -> int:
    """Where the bytes lie, as long as nobody resizes it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0


def memory_at(address: int, size: int) -> memoryview:
    """Mapped bytes, as long as they are mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def keep_from_children(address: int, size: int) -> None:
    """A forked child doesn't inherit the mapping, and so neither the lock that it keeps."""
    if _madvise(address, size, _MADV_DONTFORK):
        raise _last_error()


def collapse(address: int, size: int) -> bool:
    """Turns whole, touched 2 MiB extents into huge pages (Linux 6.1). False where the kernel refuses for good."""
    return not _madvise(address, size, _MADV_COLLAPSE) or ctypes.get_errno() == errno.EAGAIN


def populate(address: int, size: int) -> bool:
    """Allocates and maps the pages at once (Linux 5.14): 230 of them in 25 us instead of 100. False where refused."""
    return not _madvise(address, size, _MADV_POPULATE_WRITE)


def populate_for_reading(address: int, size: int) -> bool:
    """Maps pages that are in memory already (Linux 5.14): no faults later. False where refused."""
    return not _madvise(address, size, _MADV_POPULATE_READ)


def will_need(addresses: Iterable[int], sizes: Iterable[int]) -> None:
    """Starts to read ranges of whole pages from disk. Advice: what is refused is left out."""
    drain(map(_madvise, addresses, sizes, itertools.repeat(_MADV_WILLNEED)))


def is_resident(address: int) -> bool:
    """Whether the page is in memory. The kernel says yes of all files that aren't the caller's own."""
    page = ctypes.c_ubyte()
    if _mincore(address, PAGE, ctypes.addressof(page)):
        return True
    return bool(page.value & 1)


# --- words and futexes ------------------------------------------------------------------------------------------------


def words(address: int, count: int) -> Any:
    """`count` unsigned 32-bit words at `address`, to load and store by index."""
    return (ctypes.c_uint32 * count).from_address(address)


def long_words(address: int, count: int) -> Any:
    """As `words`, of 64 bits."""
    return (ctypes.c_uint64 * count).from_address(address)


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps while the word is `expected`; also returns on a wake, a signal, and after `seconds`."""
    limit = _timespec(seconds)
    if _syscall(
        _SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0
    ) and ctypes.get_errno() not in (
        errno.EAGAIN,
        errno.EINTR,
        errno.ETIMEDOUT,
    ):
        raise _last_error()


def futex_wake(address: int) -> int:
    """Wakes all that wait on the word; returns how many."""
    return int(_syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0))


# --- robust, process-shared mutexes -----------------------------------------------------------------------------------

HELD, OWNER_DIED, TIMED_OUT = 0, errno.EOWNERDEAD, errno.ETIMEDOUT
_SLICE = 0.2  # seconds


def mutex_create(address: int) -> None:
    attributes = (ctypes.c_char * 64)()
    where = ctypes.addressof(attributes)
    for code in (
        _mutexattr_init(where),
        _mutexattr_setpshared(where, 1),
        _mutexattr_setrobust(where, 1),
        _mutex_init(address, where),
    ):
        if code:
            raise OSError(code, os.strerror(code))


def mutex_lock(address: int, deadline: float) -> int:
    """Returns HELD, OWNER_DIED (held too: recover, then `mutex_recovered`) or TIMED_OUT. `deadline` is monotonic."""
    code = _mutex_trylock(address)
    while code == errno.EBUSY:
        # In slices, so that a signal's handler runs before the deadline: the C call is not interrupted by it.
        until = min(max(deadline, 0.0), time.monotonic() + _SLICE)
        code = _mutex_clocklock(address, time.CLOCK_MONOTONIC, ctypes.byref(_timespec(until)))
        if code == TIMED_OUT and until < deadline:
            code = errno.EBUSY
    if code not in (HELD, OWNER_DIED, TIMED_OUT):
        raise OSError(code, os.strerror(code))
    return code


# Called from `finally`: as plain C functions no signal handler can run between the call and its effect.
mutex_unlock = _bind(_holding_gil, "pthread_mutex_unlock", _int, _pointer)
mutex_recovered = _bind(_holding_gil, "pthread_mutex_consistent", _int, _pointer)  # EINVAL where its owner didn't die
thread_id = threading.get_native_id
