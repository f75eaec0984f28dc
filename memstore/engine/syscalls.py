"""Calls into the kernel and the C library, each as a function of Python: files, locks, mappings, mutexes, processes.

Everything calls `syscalls.name(...)` by this module, so a test that replaces a name here sees every call, and can fail
or kill the process at each. Errors are OSErrors; the callers give them their meaning.

`_bind` makes a Python function of one in C. Then follow futexes, mutexes that are robust and shared by processes, and
the signal that ends a process with its parent; files, folders and their locks; mappings, address space that is reserved
for them, and memory at an address.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import platform
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NoReturn

Pointer, Size, Int, Long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long

releasing_gil = ctypes.CDLL(None, use_errno=True)
holding_gil = ctypes.PyDLL(None, use_errno=True)

drain = deque[Any](maxlen=0).extend  # runs an iterator in C


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


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _timespec(seconds: float) -> Timespec:
    whole = int(seconds)
    return Timespec(whole, int((seconds - whole) * 1e9))


# --- futexes ---------------------------------------------------------------------------------------------------------


_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
MUTEX_OWNER = 0x3FFFFFFF  # mask of the owner's thread id in a mutex's first word
MUTEX_SIZE = 64  # sizeof(pthread_mutex_t) is 40 on x86-64 and 48 on aarch64
HELD, OWNER_DIED, TIMED_OUT = 0, errno.EOWNERDEAD, errno.ETIMEDOUT
_SLICE = 0.2  # seconds
_SPINS = 40  # some 10 us

_syscall = _bind(
    releasing_gil, "syscall", Long, Long, Pointer, Int, ctypes.c_uint32, ctypes.POINTER(Timespec), Pointer, Int
)
_syscall_of_longs = _bind(holding_gil, "syscall", Long, Long, Long, Long, Long)
_mutexattr_init = _bind(holding_gil, "pthread_mutexattr_init", Int, Pointer)
_mutexattr_setpshared = _bind(holding_gil, "pthread_mutexattr_setpshared", Int, Pointer, Int)
_mutexattr_setrobust = _bind(holding_gil, "pthread_mutexattr_setrobust", Int, Pointer, Int)
_mutex_init = _bind(holding_gil, "pthread_mutex_init", Int, Pointer, Pointer)
_mutex_trylock = _bind(holding_gil, "pthread_mutex_trylock", Int, Pointer)
_mutex_clocklock = _bind(releasing_gil, "pthread_mutex_clocklock", Int, Pointer, Int, ctypes.POINTER(Timespec))


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps while the word is `expected`; also returns on a wake, a signal, and after `seconds`."""
    limit = _timespec(seconds)
    if _syscall(
        _SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0
    ) and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise _last_error()


def futex_wake(address: int) -> int:
    """Wakes all that wait on the word; returns how many."""
    return _syscall_of_longs(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF)


# --- robust, process-shared mutexes -----------------------------------------------------------------------------------


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
    if code == HELD:
        return code
    for _ in range(_SPINS):  # holds are short: to sleep and be woken takes longer than most of them
        if code != errno.EBUSY:
            break
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
mutex_unlock = _bind(holding_gil, "pthread_mutex_unlock", Int, Pointer)
mutex_recovered = _bind(holding_gil, "pthread_mutex_consistent", Int, Pointer)  # EINVAL where its owner didn't die
thread_id = threading.get_native_id


# --- processes that end together -------------------------------------------------------------------------------------


_PR_SET_PDEATHSIG = 1

_prctl = _bind(holding_gil, "prctl", Int, Int, Long, Long, Long, Long)


def die_with_parent(parent: int) -> bool:
    """Asks the kernel to kill this process when the thread that started it ends.

    Args:
        parent: the pid of who started it.

    Returns: False if that one has ended already, so that nobody will be told: end then.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise _last_error()
    return os.getppid() == parent


# --- files, folders and their locks (flock) --------------------------------------------------------------------------


BOOT_ID = "/proc/sys/kernel/random/boot_id"  # a file

IOV_MAX = 1024  # parts that one call takes, on Linux

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock

_fallocate = _bind(releasing_gil, "fallocate", Int, Int, Int, Long, Long)
_sync_file_range = _bind(releasing_gil, "sync_file_range", Int, Int, Long, Long, Int)
_statfs = _bind(releasing_gil, "statfs", Int, ctypes.c_char_p, Pointer)


# Calls as they are: tests replace these names too.
close = os.close
make_folder, remove_folder = os.mkdir, os.rmdir  # an empty one
read_at = os.pread  # of a descriptor so many bytes from an offset on
rename = os.rename
status = os.fstat
sync, truncate = os.fsync, os.ftruncate


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


def open_file(path: str, flags: int, mode: int = 0o600) -> int:
    """Opens a file as `open_into` does, where no lock and no mapping depends on it."""
    owner: list[int] = []
    open_into(owner, path, flags, mode)
    return owner[0]


@contextlib.contextmanager
def file_open(path: str, flags: int, mode: int = 0o600) -> Generator[int]:
    """Opens a file as `open_file` does, and closes it at the end of the block."""
    fd = open_file(path, flags, mode)
    try:
        yield fd
    finally:
        close(fd)


def open_file_of(pid: int, number: int) -> int:
    """Opens the file that a process has as its descriptor `number`, anew. The process must be of this user."""
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def close_all(owner: list[int]) -> None:
    """Closes what `open_into` opened, each in one C call with taking it out."""
    while owner:
        drain(map(os.close, map(owner.pop, (0,))))


def write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_parts_at(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Writes bytes as `write_at` does, where they lie in several places."""
    todo, first = list(parts), 0
    while first < len(todo):
        written = os.pwritev(fd, todo[first : first + IOV_MAX], offset)
        offset += written
        first = _skip(todo, first, written)


def read_parts_at(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fills the parts one after the other. Returns how many bytes it read: fewer than fit where the file ends."""
    todo, first, done = list(parts), 0, 0
    while first < len(todo):
        count = os.preadv(fd, todo[first : first + IOV_MAX], offset + done)
        if not count:
            break
        done += count
        first = _skip(todo, first, count)
    return done


def _skip(parts: list[memoryview], first: int, count: int) -> int:
    """Returns the first of the parts that isn't done, after `count` more bytes; it is cut where that is within one."""
    while first < len(parts) and count >= len(parts[first]):
        count -= len(parts[first])
        first += 1
    if count:
        parts[first] = parts[first][count:]
    return first


def size_of(fd: int) -> int:
    """Returns the size, in a third of the time of `status`. It moves the descriptor's position, which nothing uses."""
    return os.lseek(fd, 0, os.SEEK_END)


def allocate(fd: int, size: int, start: int = 0) -> None:
    """Reserves blocks for so many bytes of the file, so that no later write to them can find the disk full."""
    os.posix_fallocate(fd, start, size)


def free_blocks(fd: int, size: int) -> None:
    """Makes the first `size` bytes a hole. The file keeps its length, so that no mapping of it can fault."""
    if size and _fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, size):
        raise _last_error()


def sync_data(fd: int) -> None:
    os.fdatasync(fd)


def start_sync(fd: int, offset: int, nbytes: int) -> None:
    """Makes the disk begin to write a range, so that a later `sync` finds less to do. Advice: no error, no promise."""
    _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def link(source: str, target: str, dir_fd: int | None = None, source_fd: int | None = None) -> None:
    """Links a file. With `dir_fd`, both are names in that folder; with `source_fd` too, the first is one in that."""
    folder = dir_fd if source_fd is None else source_fd
    os.link(source, target, src_dir_fd=folder, dst_dir_fd=dir_fd, follow_symlinks=False)


def copy_range(source: int, target: int, count: int, offset: int) -> int:
    """Copies bytes of a file to the same offset of another one, and returns how many. Where it can, it shares them."""
    try:
        return os.copy_file_range(source, target, min(count, 1 << 28), offset, offset)
    except OSError as error:  # between file systems, or not one of this kind
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    data = os.pread(source, min(count, 1 << 22), offset)
    write_at(target, data, offset)
    return len(data)


def replace(source: str, target: str, dir_fd: int | None = None) -> None:
    """Renames a file over another one. With `dir_fd`, both are names in that folder."""
    os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def unlink(path: str, dir_fd: int | None = None) -> None:
    os.unlink(path if dir_fd is None else path.rpartition("/")[2], dir_fd=dir_fd)


def memory_file(name: str) -> int:
    """Makes a file of shared memory that has no name in any folder; `name` is for people who look at /proc."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def filesystem_type(path: str) -> int:
    """Returns the magic number of the file system that holds `path`: statfs(2) lists them."""
    buffer = (ctypes.c_long * 32)()
    if _statfs(os.fsencode(path), ctypes.addressof(buffer)):
        raise _last_error()
    return int(buffer[0]) & 0xFFFFFFFF


# --- flock ------------------------------------------------------------------------------------------------------------


def lock_shared(fd: int) -> bool:
    """Tries, never waits. The lock belongs to the open file description: a mapping of it keeps it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_exclusive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


# --- locks of ranges --------------------------------------------------------------------------------------------------


def lock_byte(fd: int, at: int) -> bool:
    """Tries to lock one byte for oneself, never waits; it may lie beyond the file's end. `fd` is open for writing.

    The lock belongs to the open file description, as that of `flock`, and neither is in the other's way.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
    except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
        return False
    return True


def share_byte(fd: int, at: int) -> bool:
    """Tries to lock one byte together with others who share it, as `lock_byte`. `fd` is open for reading."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_byte(fd: int, at: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))


# --- mappings --------------------------------------------------------------------------------------------------------


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
_MADV_RANDOM, _MADV_WILLNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 1, 3, 10, 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25

_mmap = _bind(releasing_gil, "mmap", Pointer, Pointer, Size, Int, Int, Int, Long)
unmap = _bind(releasing_gil, "munmap", Int, Pointer, Size)
_madvise = _bind(releasing_gil, "madvise", Int, Pointer, Size, Int)
_msync = _bind(releasing_gil, "msync", Int, Pointer, Size, Int)
_mincore = _bind(releasing_gil, "mincore", Int, Pointer, Size, Pointer)
_malloc_trim = _bind(releasing_gil, "malloc_trim", Int, Size)


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
    flags |= _MAP_NORESERVE | (_MAP_SHARED if shared else _MAP_PRIVATE)
    hint, fixed = (0, 0) if size < HUGE_PAGE else (_hint(size), _MAP_FIXED_NOREPLACE)
    while True:
        mapped = map(_mmap, (hint,), (size,), (_PROT_READ | _PROT_WRITE,), (flags | fixed,), (fd,), (0,))
        drain(map(place.__setitem__, (0,), mapped))
        if place[0] != NOT_MAPPED:
            return
        if not fixed:
            raise _last_error()
        hint, fixed = _free_address(size), 0  # as a rule, something lies at the hint


def map_room_into(place: list[int], size: int) -> None:
    """Maps zeros as `map_into` maps a file, for `map_over`."""
    map_into(place, -1, size, _MAP_ANONYMOUS)


def map_over(address: int, fd: int, size: int) -> None:
    """Maps the file copy-on-write over addresses that a mapping of the caller's has."""
    flags = _MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(address, size, _PROT_READ | _PROT_WRITE, flags, fd, 0) != address:
        raise _last_error()


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
        raise _last_error()


def map_nothing(address: int, size: int) -> None:
    """Puts memory of this process, which takes none until it is written to, in the place of a mapping."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(address, size, _PROT_READ | _PROT_WRITE, flags, -1, 0) != address:
        raise _last_error()


def buffer_address(buffer: bytearray | mmap.mmap | memoryview) -> int:
    """Returns where the bytes lie, as long as nobody resizes it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0


def memory_at(address: int, size: int) -> memoryview:
    """Returns mapped bytes, which can be used as long as they are mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


_compare = _bind(releasing_gil, "memcmp", Int, Pointer, Pointer, Size)


def same_bytes(one: int, other: int, size: int) -> bool:
    """Returns whether so many bytes at two addresses are the same. Other threads run meanwhile."""
    return not _compare(one, other, size)


def words(address: int, count: int) -> Any:
    """Returns `count` unsigned 32-bit words at `address`, to load and store by index."""
    return (ctypes.c_uint32 * count).from_address(address)


def long_words(address: int, count: int) -> Any:
    """Returns `count` unsigned 64-bit words at `address`."""
    return (ctypes.c_uint64 * count).from_address(address)


def sync_mapped(address: int, size: int) -> None:
    """Brings what was stored into whole pages of a shared mapping to the disk, as `sync_data` does a whole file."""
    if _msync(address, size, _MS_SYNC):
        raise _last_error()


def keep_from_children(address: int, size: int) -> None:
    """Keeps the mapping, and so the lock that it keeps, from forked children."""
    if _madvise(address, size, _MADV_DONTFORK):
        raise _last_error()


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


def read_no_more(address: int, size: int) -> None:
    """Lets the kernel read no page of a mapping that nobody touches, or asks for by `will_need`."""
    _madvise(address, size, _MADV_RANDOM)


def will_need(addresses: Iterable[int], sizes: Iterable[int]) -> None:
    """Starts to read ranges of whole pages from disk. Advice: what is refused is left out."""
    drain(map(_madvise, addresses, sizes, itertools.repeat(_MADV_WILLNEED)))


copy = _bind(releasing_gil, "memmove", Pointer, Pointer, Pointer, Size)  # to an address, from an address, bytes
copy_briefly = _bind(holding_gil, "memmove", Pointer, Pointer, Pointer, Size)  # a quarter of the time for a few bytes


def is_resident(address: int) -> bool:
    """Returns whether the page is in memory. The kernel says yes of all files that aren't the caller's own."""
    page = ctypes.c_ubyte()
    if _mincore(address, PAGE, ctypes.addressof(page)):
        return True
    return bool(page.value & 1)
