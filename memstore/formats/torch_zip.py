"""The zip that `torch.save` writes: its directory, read and checked, and what else may come in its place.

    NAME/data.pkl, NAME/byteorder, NAME/data/0, NAME/data/1, ...        a pickle, and a storage in each of the others

What torch wrote before 1.6 is no zip, but pickles one behind the other, and the storages' bytes.
"""

from __future__ import annotations

import errno
import os
import re
import zipfile
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

from memstore.engine import HEADER_LIMIT, syscalls
from memstore.errors import MemstoreError, UnsupportedValueError, lacks_told
from memstore.formats.documents import damaged

_STORAGE = re.compile(r"[^/]+/data/[^/]+")
_LOCAL_HEADER = 30  # bytes, then the name and an extra field
_DIRECTORY_HEADER = 46  # bytes, then the name, an extra field and a comment
_LEGACY = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", b"119547037146038801333356L")  # the number that it starts with, pickled
_PICKLES = tuple(b"\x80%c" % protocol for protocol in range(2, 6))  # older protocols have no mark


class Members(NamedTuple):
    """What a zip has that torch.save wrote of one tensor.

    Attributes:
        pickle: what describes it.
        storages: where the bytes of each storage start and stop in the zip, by its name.
        seen: what was looked at, and where in the zip. Whatever has these bytes there has the same members.
    """

    pickle: bytes
    storages: dict[str, tuple[int, int]]
    seen: tuple[tuple[int, bytes], ...]


class Archive(NamedTuple):
    """What the directory of such a zip says.

    Attributes:
        storages: where each storage's bytes start and stop in the file, in order.
        is_intact: whether the pickle fits its checksum. (torch need not write one.)
    """

    storages: list[tuple[int, int]]
    is_intact: bool

    def has(self, start: int, stop: int) -> bool:
        """Whether these bytes are those of a storage."""
        i = bisect_right(self.storages, start, key=itemgetter(0)) - 1
        return i >= 0 and stop <= self.storages[i][1]


def is_legacy(head: bytes) -> bool:
    """Whether a file that starts with `head` (64 bytes) was written as torch did before 1.6."""
    return any(mark in head for mark in _LEGACY)


def is_pickle(head: bytes) -> bool:
    """Whether a file that starts so is a pickle, as what torch wrote before 1.6 is; never a safetensors file."""
    if is_legacy(head):
        return True
    return head.startswith(_PICKLES) and int.from_bytes(head[:8], "little") > HEADER_LIMIT


def read_archive(path: str, fd: int, size: int) -> Archive:
    """Raises CorruptionError, and UnsupportedValueError for what torch.save did not write."""
    head = syscalls.read_at(fd, 64, 0)
    if is_pickle(head):
        raise UnsupportedValueError(
            f"{path} is a pickle, and none of torch.save. Pickles can run code: if you trust whoever wrote it, load it "
            "with pickle.load, and put the value"
        )
    file = _Bounded(fd, size)
    try:
        with lacks_told(path), zipfile.ZipFile(cast("Any", file)) as archive:
            return _read(path, file, archive)
    except MemstoreError:
        raise
    except Exception as error:  # of zipfile, to whatever bytes
        damaged(path, f"it has {size:,} bytes, and is truncated, or no file of torch.save: {error}")


def read_members(path: str, fd: int, start: int, size: int) -> Members:
    """Of a zip that is `size` bytes of a larger file, from `start` on. Raises as `read_archive`."""
    file = _Bounded(fd, size, start)
    try:
        with lacks_told(path), zipfile.ZipFile(cast("Any", file)) as archive:
            _read(path, file, archive)
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            storages: dict[str, tuple[int, int]] = {}
            for name, member in members.items():
                if name.startswith("data/"):
                    at = _start_of(path, file, member)
                    storages[name.removeprefix("data/")] = (at, at + member.file_size)
            pickle = _content(path, file, members["data.pkl"])
            return Members(pickle, storages, file.seen(_sums(file, archive.start_dir, len(members))))
    except MemstoreError:
        raise
    except Exception as error:  # of zipfile, to whatever bytes
        damaged(path, f"the {size:,} bytes at {start:,} are truncated, or no file of torch.save: {error}")


def _sums(file: _Bounded, directory: int, count: int) -> list[int]:
    """Where the directory has the checksums of members, which nobody looks at."""
    found: list[int] = []
    for _ in range(count):
        head = file.at(directory, _DIRECTORY_HEADER)
        found.append(directory + 16)
        directory += _DIRECTORY_HEADER + sum(int.from_bytes(head[i : i + 2], "little") for i in (28, 30, 32))
    return found


def _read(path: str, file: _Bounded, archive: zipfile.ZipFile) -> Archive:
    members = archive.infolist()
    names = {member.filename.partition("/")[2]: member for member in members}
    if "constants.pkl" in names:
        raise UnsupportedValueError(
            f"{path} is a TorchScript archive, which is code: load it with torch.jit.load, and put its state_dict()"
        )
    if members and all(member.filename.endswith(".npy") for member in members):
        raise UnsupportedValueError(
            f"{path} has arrays of NumPy (.npz): put dict(numpy.load(path)), or attach the .npy of each by itself"
        )
    if "data.pkl" not in names:
        raise UnsupportedValueError(f"{path} is a zip, and none of torch.save")
    if len(names) != len(members):
        damaged(path, "its directory has a name twice")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UnsupportedValueError(
            f"{path} is compressed, as torch.save never does it: load it with torch.load, and put the value"
        )
    pickle, order = names["data.pkl"], names.get("byteorder")
    if pickle.file_size > HEADER_LIMIT:
        damaged(path, f"its data.pkl has {pickle.file_size:,} bytes, and {HEADER_LIMIT:,} are the limit")
    if order is not None and (order.file_size > 16 or _content(path, file, order) != b"little"):
        raise UnsupportedValueError(
            f"{path} was written on a machine of another byte order: load it with torch.load, and put the value"
        )
    content = _content(path, file, pickle)
    return Archive(_places(path, file, members), zlib.crc32(content) == pickle.CRC)


def _content(path: str, file: _Bounded, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member, which need not fit its checksum: torch can be told to write none."""
    return file.at(_start_of(path, file, member), member.file_size)


def _places(path: str, file: _Bounded, members: Sequence[zipfile.ZipInfo]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for member in members:
        if member.file_size and _STORAGE.fullmatch(member.filename):
            start = _start_of(path, file, member)
            found.append((start, start + member.file_size))
    found.sort()
    for (_, end), (start, stop) in zip([(0, 0), *found], found, strict=False):
        if start < end or stop > file.size:
            damaged(path, "storages that overlap, or lie beyond its end")
    return found


def _start_of(path: str, file: _Bounded, member: zipfile.ZipInfo) -> int:
    """Where its bytes start in the zip."""
    head = file.at(member.header_offset, _LOCAL_HEADER)
    if len(head) < _LOCAL_HEADER or not head.startswith(b"PK\3\4"):
        damaged(path, f"its directory says that {member.filename} is where it is not")
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return member.header_offset + _LOCAL_HEADER + lengths


class _Bounded:
    """A file, or a part of one, for zipfile, which would read a directory of any size. Notes what is read."""

    def __init__(self, fd: int, size: int, start: int = 0) -> None:
        self.size = size
        self._fd, self._start, self._at = fd, start, 0
        self._seen: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, "before the start of the file")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self.size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if size > HEADER_LIMIT:
            raise ValueError(f"a part of {size:,} bytes beside the tensors")
        data = self.at(self._at, size)
        self._at += len(data)
        return data

    def at(self, offset: int, size: int) -> bytes:
        """What is at an offset, which another part may have too."""
        data = syscalls.read_at(self._fd, size, self._start + offset)
        if len(data) < size:
            raise ValueError(f"it ends before byte {offset + size:,}")
        if len(data) > len(self._seen.get(offset, b"")):
            self._seen[offset] = data
        return data

    def seen(self, sums: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
        """What was read, and where: in order, without what was read twice, and without checksums of four bytes."""
        found: list[tuple[int, bytes]] = []
        end, left = 0, [*sums, 1 << 63]
        for start, data in sorted(self._seen.items()):
            stop = start + len(data)
            at = max(start, end)
            for place in left[bisect_left(left, at - 3) :]:
                if at < min(place, stop):
                    found.append((at, data[at - start : min(place, stop) - start]))
                at = max(at, place + 4)
                if at >= stop:
                    break
            end = max(end, stop)
        return tuple(found)
