"""External files: files of others that are served under a key. How they are collected, opened and mapped.

memstore never opens them for writing, and no lock protects them. A file that is not what it was when it was attached is
refused; but whoever has mapped it before sees what others write into it. (The device is not compared: its number
changes when btrfs, overlay or NFS are mounted anew.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Sequence

from memstore.engine import syscalls
from memstore.engine.files.lockfile import OwnedFile
from memstore.engine.files.mapping import Mapping, map_file
from memstore.engine.format import MAPPED_LIMIT, ExternalExtent, base_after, encode_extents, end_of
from memstore.errors import CorruptionError, PermissionDeniedError, UnsupportedValueError

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
    """A regular file, for reading; never through a link at the end of its path."""
    try:
        file = OwnedFile(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsupportedValueError(f"{path} is a link or a socket, and no regular file") from None
        raise
    try:
        found = syscalls.status(file.fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsupportedValueError(f"{path} is no regular file")
        yield file.fd, found
    finally:
        file.close()


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
            syscalls.map_over(mapping.address + extent.base, fd, extent.size)
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
                    raise _changed(extent.path, f"it has changed since it was attached: {name} {is_now}, not {was}")
            yield fd
    except (FileNotFoundError, NotADirectoryError):
        raise _changed(extent.path, "it was attached, and is gone") from None
    except UnsupportedValueError:
        raise _changed(extent.path, "it was attached as a regular file, and is none any more") from None
    except PermissionError:
        raise PermissionDeniedError(f"{extent.path} was attached, and this process may not read it") from None


def _changed(path: str, detail: str) -> CorruptionError:
    return CorruptionError(f"{path}: {detail}: attach it again", path=path, detail=detail)
