"""Pages of files in memory: dropping a file's own, to measure what a disk takes, and looking whether they are gone."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from memstore.engine import syscalls

SAMPLES = 64


def flush(path: Path) -> None:
    """Has the disk hold the file: only such pages can be dropped."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop(path: Path) -> None:
    """Drops this file's pages from memory, those that somebody has mapped excepted."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def unmap(address: int, nbytes: int) -> None:
    """Takes the pages of a shared mapping out of it, which stays: each comes back from the file when it is touched."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), mmap.MADV_DONTNEED):
        raise OSError(f"madvise refused {nbytes:,} bytes at {address:#x}")


def are_in_memory(path: Path) -> bool:
    """Whether some of the pages are that are looked at."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        start, pages = array.__array_interface__["data"][0], range(0, len(array), mmap.PAGESIZE)
        del array  # or the mapping can't be closed
        return any(syscalls.is_resident(start + page) for page in pages[:: max(len(pages) // SAMPLES, 1)])


def can_drop_pages(folder: Path) -> bool:
    """Whether a file in this folder lies on a disk, from which it comes back; on tmpfs it has no other place."""
    path = folder / "dropped"
    path.write_bytes(os.urandom(16 * mmap.PAGESIZE))
    flush(path)
    drop(path)
    try:
        return not are_in_memory(path)
    finally:
        path.unlink()
