"""Files of `torch.save` (the zip format, since torch 1.6), adopted in place.

torch reads the structure, in its safe mode unless pickle is allowed, over a mapping of the file, so no data is read.
Where each tensor lies in the file tells the mapping; the zip's directory tells which bytes are storages. Tensors come
on the CPU, wherever they were saved from.
"""

from __future__ import annotations

import errno
import os
import re
import zipfile
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from memstore import structure
from memstore.engine import syscalls
from memstore.engine.adopted import Sources, opened
from memstore.engine.header import HEADER_LIMIT
from memstore.engine.placing import file_offsets
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.integrations.documents import damaged

_STORAGE = re.compile(r"[^/]+/data/[^/]+")
_LOCAL_HEADER = 30  # bytes, then the name and an extra field


def adopt_file(path: str, sources: Sources, allow_pickle: bool) -> structure.Adopted:
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        storages = _read_directory(path, fd, found.st_size)
        value = _load(path, allow_pickle)
        base = sources.add(path, found)

    def locate(addresses: Sequence[int]) -> list[int]:
        offsets = file_offsets(addresses, path, found.st_ino)
        if offsets is None:
            raise UnsupportedValueError(f"{path}: a tensor that torch made anew, or the file was replaced meanwhile")
        return [base + offset for offset in offsets]

    try:
        adopted = structure.adopt_value(value, locate, allow_pickle=allow_pickle)
    except CorruptionError as error:
        raise UnsupportedValueError(f"{path}: tensors that can't be served in place ({error.detail})") from None
    _check_storages(path, adopted.plan, base, storages)
    return adopted


class _Bounded:
    """A file for zipfile, which would read a directory of any size."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size, self._at = fd, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, "before the start of the file")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if size > HEADER_LIMIT:
            raise ValueError(f"a part of {size:,} bytes beside the tensors")
        data = syscalls.read_at(self._fd, size, self._at)
        self._at += len(data)
        return data


def _read_directory(path: str, fd: int, size: int) -> list[tuple[int, int]]:
    """Where the storages' bytes start and stop, in order."""
    file: Any = _Bounded(fd, size)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = {member.filename.partition("/")[2]: member for member in members}
            if "constants.pkl" in names or "data.pkl" not in names:
                raise UnsupportedValueError(f"{path}: a zip, but not of torch.save (TorchScript can't be attached)")
            if len(names) != len(members):
                damaged(path, "its directory has a name twice")
            if names["data.pkl"].compress_type != zipfile.ZIP_STORED or names["data.pkl"].file_size > HEADER_LIMIT:
                damaged(path, "its data.pkl is compressed, or too large")
            order = names.get("byteorder")
            if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
                raise UnsupportedValueError(f"{path} was written on a machine of another byte order")
            return _places(path, fd, members, size)
    except MemstoreError:
        raise
    except Exception as error:  # of zipfile, to whatever bytes
        damaged(path, f"it is truncated, or no file of torch.save since torch 1.6: {error}")


def _places(path: str, fd: int, members: Sequence[zipfile.ZipInfo], size: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for member in members:
        if _STORAGE.fullmatch(member.filename) and member.compress_type == zipfile.ZIP_STORED and member.file_size:
            head = syscalls.read_at(fd, _LOCAL_HEADER, member.header_offset)
            if len(head) < _LOCAL_HEADER or not head.startswith(b"PK\3\4"):
                damaged(path, f"its directory says that {member.filename} is where it is not")
            start = member.header_offset + _LOCAL_HEADER + int.from_bytes(head[26:28], "little")
            start += int.from_bytes(head[28:30], "little")
            found.append((start, start + member.file_size))
    found.sort()
    for (_, end), (start, stop) in zip([(0, 0), *found], found, strict=False):
        if start < end or stop > size:
            damaged(path, "storages that overlap, or lie beyond its end")
    return found


def _load(path: str, allow_pickle: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except (OSError, MemoryError, RecursionError):
        raise
    except (ImportError, AttributeError) as error:
        raise UnsupportedValueError(f"{path} has objects that can't be read here: {error}") from error
    except Exception as error:  # of the pickle's opcodes, with whatever arguments
        if "Cannot allocate memory" in str(error):
            raise OSError(errno.ENOMEM, "torch can't map it") from error
        if not allow_pickle and "weights_only" in str(error):
            raise UnsupportedValueError(
                f"{path} has objects that only pickle can read, which can run code: open the store with "
                f"allow_pickle=True if you trust whoever wrote it"
            ) from error
        raise CorruptionError(f"{path}: torch can't read it: {error}", path=path, detail=str(error)) from error


def _check_storages(path: str, plan: structure.Plan, base: int, storages: Sequence[tuple[int, int]]) -> None:
    """No tensor may show other bytes than a storage's: those of the directory, or of a compressed part."""
    starts = [start for start, _ in storages]
    for leaf in plan.leaves:
        if leaf.nbytes:
            i = bisect_right(starts, leaf.offset - base) - 1
            if i < 0 or leaf.offset - base + leaf.nbytes > storages[i][1]:
                damaged(path, f"the tensor {leaf.name} lies in none of its storages")
