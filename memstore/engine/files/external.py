"""Files of others that hold the data of an entry: which they are, and how they are mapped.

All files of an entry are mapped into one range of addresses, each from its `base` on. So its leaves' offsets count in
one data section, as those in a segment do, and what reads leaves knows nothing of files. A record stores the files as
msgpack of `[[path, size, mtime_ns, inode, base], ...]`.

They are never written, not even opened for it, and no lock protects them: a file that is not what it was when it was
attached is refused, but a change under a mapping that somebody holds shows there. (The device is not compared: its
number changes when btrfs, overlay or NFS are mounted anew.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator

import msgspec

from memstore.engine import syscalls
from memstore.engine.files.lockfile import OwnedFile
from memstore.engine.files.mapping import Mapping, map_file
from memstore.errors import CorruptionError, PermissionDeniedError, UnsupportedValueError

MOST_FILES = 16_384  # a process may have 65,530 mappings
_MOST_BYTES = 1 << 46  # of address space, which has 2^47
_ALIGNMENT = 1 << 16  # of bases: pages are that large on some machines


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when it was attached, and where its first byte lies among the data."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    base: int


class Sources:
    """Collects the files of an entry that is being attached."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self._end = 0

    def add(self, path: str, found: os.stat_result) -> int:
        """Returns the base of the file. Files that can be mapped by huge pages start on a multiple of one."""
        if len(self.files) == MOST_FILES:
            raise UnsupportedValueError(f"{path} is one of more than {MOST_FILES:,} files, which is the limit")
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UnsupportedValueError(f"{path!r} is no UTF-8: rename it") from None
        step = syscalls.HUGE_PAGE if found.st_size >= syscalls.HUGE_PAGE else _ALIGNMENT
        base = -(-self._end // step) * step
        self._end = base + found.st_size
        if self._end > _MOST_BYTES:
            raise UnsupportedValueError(f"{path}: {self._end:,} bytes in all, and {_MOST_BYTES:,} can be mapped")
        self.files.append(SourceFile(path, found.st_size, found.st_mtime_ns, found.st_ino, base))
        return base

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self.files)


_decode = msgspec.msgpack.Decoder(list[SourceFile]).decode


def read_sources(stored: bytes) -> list[SourceFile]:
    """The files that a record names. Raises CorruptionError."""
    try:
        files = _decode(stored)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"the names of its files can't be read: {error}") from None
    end = 0
    for file in files:
        if file.base < end or file.base % syscalls.PAGE or file.size <= 0 or file.base + file.size > _MOST_BYTES:
            raise CorruptionError(f"{file.path} would lie where no file can", path=file.path)
        end = file.base + file.size
    return files


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


def map_sources(files: list[SourceFile]) -> Mapping | None:
    """Maps the files, one behind the other, with one file descriptor at a time; None if there are none.

    Raises CorruptionError for one that is gone or is not what it was.
    """
    if not files:
        return None
    if len(files) == 1 and not files[0].base:
        with _unchanged(files[0]) as fd:
            return map_file(fd, files[0].size)
    mapping = map_file(None, files[-1].base + files[-1].size)
    for file in files:
        with _unchanged(file) as fd:
            syscalls.map_over(mapping.address + file.base, fd, file.size)
    return mapping


@contextlib.contextmanager
def _unchanged(file: SourceFile) -> Generator[int]:
    try:
        with opened(file.path) as (fd, found):
            for name, was, is_now in (
                ("bytes", file.size, found.st_size),
                ("mtime_ns", file.mtime_ns, found.st_mtime_ns),
                ("inode", file.inode, found.st_ino),
            ):
                if was != is_now:
                    raise _changed(file.path, f"it has changed since it was attached: {name} {is_now}, not {was}")
            yield fd
    except (FileNotFoundError, NotADirectoryError):
        raise _changed(file.path, "it was attached, and is gone") from None
    except UnsupportedValueError:
        raise _changed(file.path, "it was attached as a regular file, and is none any more") from None
    except PermissionError:
        raise PermissionDeniedError(f"{file.path} was attached, and this process may not read it") from None


def _changed(path: str, detail: str) -> CorruptionError:
    return CorruptionError(f"{path}: {detail}: attach it again", path=path, detail=detail)
