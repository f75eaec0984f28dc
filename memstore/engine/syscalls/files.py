"""Files, folders and their locks (flock)."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.syscalls.libc import Int, Long, Pointer, bind, drain, last_error, releasing_gil

BOOT_ID = "/proc/sys/kernel/random/boot_id"  # a file

IOV_MAX = 1024  # parts that one call takes, on Linux

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock

_fallocate = bind(releasing_gil, "fallocate", Int, Int, Int, Long, Long)
_sync_file_range = bind(releasing_gil, "sync_file_range", Int, Int, Long, Long, Int)
_statfs = bind(releasing_gil, "statfs", Int, ctypes.c_char_p, Pointer)


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


def open_file(path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """Opens a file as `open_into` does, where no lock and no mapping depends on it."""
    owner: list[int] = []
    syscalls.open_into(owner, path, flags, mode, dir_fd)
    return owner[0]


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
        raise last_error()


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


def link(source: str, target: str, dir_fd: int | None = None) -> None:
    """Links a file. With `dir_fd`, both are names in that folder."""
    os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


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
        raise last_error()
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


def unlock_byte(fd: int, at: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))
