"""Files of `torch.save`: values served in place or loaded, the zip that they are, and single tensors in larger files.

1. Whole files: `read_torch` serves those of the zip format (since torch 1.6) in place, `load_torch` loads any for a
   copy. torch reads the structure, in its safe mode unless pickle is allowed, over a mapping of the file, so no data
   is read. The mapping tells where each storage lies in the file; the zip's directory tells which bytes are storages.
   Tensors come on the CPU, wherever they were saved from.
2. The zip: `read_archive` reads and checks its directory. What torch wrote before 1.6 is no zip, but pickles one
   behind the other, and the storages' bytes.

       NAME/data.pkl, NAME/byteorder, NAME/data/0, NAME/data/1, ...    a pickle, and a storage in each of the others

3. Single tensors that torch.save wrote into larger files, as torch.distributed.checkpoint and torchsnapshot have them:
   `Frames` reads where their bytes lie without torch.load, and so without any of the bytes. Their pickles may refer to
   what makes a plain tensor, and to nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zipfile
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch

from memstore import structure
from memstore._wording import an
from memstore.engine import HEADER_LIMIT, ExternalFiles, file_offsets, opened, syscalls
from memstore.errors import CorruptionError, MemstoreError, ResourceLimitError, UnsupportedValueError, lacks_told
from memstore.formats.files import are_sizes, damaged
from memstore.structure import MalformedError, read_known_pickle

# --- Whole files -----------------------------------------------------------------------------------------------------


_GLOBAL = re.compile(r"GLOBAL (\S+)")
_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s+(.+)")
_LOAD_SAYS = re.compile(r"Weights only load failed\. (.+)")


class _WrappersError(Exception):
    """A file has tensors that wrap others, which torch loads only to a device that it is told by name."""


_MapLocation = Callable[[Any, str], Any]  # of storages


def read_torch(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        if is_legacy(syscalls.read_at(fd, 64, 0)):
            raise UnsupportedValueError(
                f"{path} has torch.save's format before torch 1.6, which can't be served in place: attach it with "
                "copy=True"
            )
        archive = read_archive(path, fd, found.st_size)
        value = _load_archive(path, fd, found, archive, allow_pickle)
        base = sources.add(path, found)

    def locate(addresses: Sequence[int]) -> list[int]:
        offsets = file_offsets(addresses, path, found.st_ino)
        if offsets is None:
            raise UnsupportedValueError(
                "it has a NumPy array, a quantized tensor or another that torch makes anew, so that its bytes can't be "
                "served in place: attach it with copy=True"
            )
        return [base + offset for offset in offsets]

    try:
        return structure.describe_external_value(value, locate, allow_pickle=allow_pickle)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{path}: {error.message}") from None
    except CorruptionError as error:
        raise UnsupportedValueError(f"{path}: tensors that can't be served in place ({error.detail})") from None


def load_torch(path: str, allow_pickle: bool) -> Any:
    """Loads what is in a file, as torch.load gives it: for a copy."""
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        if is_legacy(syscalls.read_at(fd, 64, 0)):
            return _load_legacy(path, fd, found.st_size, allow_pickle)
        return _load_archive(path, fd, found, read_archive(path, fd, found.st_size), allow_pickle)


def _load_archive(path: str, fd: int, found: os.stat_result, archive: Archive, allow_pickle: bool) -> Any:
    """Makes the value over a mapping of the file. No storage has other bytes than those that the directory says."""
    spans: list[tuple[int, int]] = []

    def place(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        if storage.nbytes():
            spans.append((storage.data_ptr(), storage.nbytes()))
        return storage

    try:
        value = _load(path, fd, archive, place, allow_pickle)
    except _WrappersError:  # torch takes no function for them
        value = _load(path, fd, archive, "cpu", allow_pickle)
        storages = [tensor.untyped_storage() for tensor in _tensors_of(path, value, allow_pickle)]
        spans = [(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]
    offsets = file_offsets([address for address, _ in spans], path, found.st_ino) or []
    if len(offsets) != len(spans) or not all(
        archive.has(start, start + nbytes) for start, (_, nbytes) in zip(offsets, spans, strict=True)
    ):
        damaged(path, "a tensor lies in none of its storages")
    return value


def _tensors_of(path: str, value: Any, allow_pickle: bool) -> list[torch.Tensor]:
    try:
        _, walk, *_ = structure.take_apart(value, lambda careful: structure.Walk(allow_pickle, careful))
    except structure.RefusedError as error:
        raise UnsupportedValueError(f"{path}: {error.message()}") from None
    return walk.tensors


def _load_legacy(path: str, fd: int, size: int, allow_pickle: bool) -> Any:
    left = size

    def place(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        """Zeros instead of whatever torch found in its memory: a file need not fill what it asks for."""
        nonlocal left
        left -= storage.nbytes()
        if left < 0:
            damaged(path, "its tensors are larger than it is: it is truncated, or none of torch.save")
        return torch.from_numpy(np.zeros(storage.nbytes(), np.uint8)).untyped_storage()

    return _load(path, fd, None, place, allow_pickle)


def _load(path: str, fd: int, archive: Archive | None, place: _MapLocation | str, allow_pickle: bool) -> Any:
    located: Any = place  # torch's stubs name another class of storages than it passes
    name = f"/proc/self/fd/{fd}"  # the file that was looked at, though its path may name another by now
    try:
        with lacks_told(path):
            return torch.load(name, map_location=located, mmap=archive is not None, weights_only=not allow_pickle)
    except ResourceLimitError as error:
        if archive is None or archive.is_intact:
            raise
        text = f"{error.message}; or it is damaged: its data.pkl, which asks for that, doesn't fit its checksum"
        raise ResourceLimitError(text, code=error.errno) from error
    except (OSError, MemoryError, RecursionError, CorruptionError):
        raise
    except RuntimeError as error:
        if "Callable map_location" in str(error) and archive is not None:
            raise _WrappersError from error
        _refuse_unloadable(path, archive, allow_pickle, error)
    except Exception as error:  # of the pickle's opcodes, with whatever arguments
        _refuse_unloadable(path, archive, allow_pickle, error)


def _refuse_unloadable(path: str, archive: Archive | None, allow_pickle: bool, error: Exception) -> NoReturn:
    """Raises the error of a file that torch could not load. Only damage is told as damage."""
    text = str(error)
    said = _UNPICKLER_SAYS.search(text) or _LOAD_SAYS.search(text)
    detail = said[1] if said else f"{type(error).__name__}: {text}"
    missing = _GLOBAL.search(text)
    if archive is not None and not archive.is_intact:
        damaged(path, f"its data.pkl doesn't fit its checksum, and torch can't read it: {detail}")
    if "must be imported" in text:
        raise UnsupportedValueError(f"{path}: {detail}: import them, and attach it again") from error
    if not allow_pickle and missing:
        raise UnsupportedValueError(
            f"{path} has objects ({missing[1]}) that only pickle can read, which can run code: open the store with "
            "allow_pickle=True if you trust whoever wrote it"
        ) from error
    if not allow_pickle and said:
        other = "" if archive else ", or is damaged"
        raise UnsupportedValueError(
            f"{path} needs pickle{other} ({detail}), which can run code: open the store with allow_pickle=True if you "
            "trust whoever wrote it; or, if it was saved with a pickle_protocol other than 2, save it anew without"
        ) from error
    if allow_pickle and isinstance(error, (ImportError, AttributeError)):
        raise UnsupportedValueError(f"{path} has objects of a class that this process hasn't: {text}") from error
    if allow_pickle and archive is not None:
        raise UnsupportedValueError(f"{path} has objects that can't be loaded: {detail}") from error
    damaged(path, f"torch can't read it: {detail}")


# --- The zip ---------------------------------------------------------------------------------------------------------


_STORAGE_NAME = re.compile(r"[^/]+/data/[^/]+")
_LOCAL_HEADER = 30  # bytes, then the name and an extra field
_DIRECTORY_HEADER = 46  # bytes, then the name, an extra field and a comment
_LEGACY = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", b"119547037146038801333356L")  # the number that it starts with, pickled
_PICKLES = tuple(b"\x80%c" % protocol for protocol in range(2, 6))  # older protocols have no mark


class Members(NamedTuple):
    """The members of a zip that torch.save wrote of one tensor.

    Attributes:
        pickle: what describes it.
        storages: where the bytes of each storage start and stop in the zip, by its name.
        seen: what was looked at, and where in the zip. Whatever has these bytes there has the same members.
    """

    pickle: bytes
    storages: dict[str, tuple[int, int]]
    seen: tuple[tuple[int, bytes], ...]


class Archive(NamedTuple):
    """The directory of such a zip.

    Attributes:
        storages: where each storage's bytes start and stop in the file, in order.
        is_intact: whether the pickle fits its checksum. (torch need not write one.)
    """

    storages: list[tuple[int, int]]
    is_intact: bool

    def has(self, start: int, stop: int) -> bool:
        """Returns whether these bytes are those of a storage."""
        i = bisect_right(self.storages, start, key=itemgetter(0)) - 1
        return i >= 0 and stop <= self.storages[i][1]


def is_legacy(head: bytes) -> bool:
    """Returns whether a file that starts with `head` (64 bytes) was written as torch did before 1.6."""
    return any(mark in head for mark in _LEGACY)


def is_pickle(head: bytes) -> bool:
    """Returns whether a file that starts so is a pickle, as torch wrote before 1.6; never a safetensors file."""
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
    file = _BoundedFile(fd, size)
    with _zip_in(path, file, f"it has {size:,} bytes, and is truncated, or no file of torch.save") as archive:
        return _read_directory(path, file, archive)


def read_members(path: str, fd: int, start: int, size: int) -> Members:
    """Reads the members of a zip that is `size` bytes of a larger file, from `start` on. Raises as `read_archive`."""
    file = _BoundedFile(fd, size, start)
    damage = f"the {size:,} bytes at {start:,} are truncated, or no file of torch.save"
    with _zip_in(path, file, damage) as archive:
        _read_directory(path, file, archive)
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        storages: dict[str, tuple[int, int]] = {}
        for name, member in members.items():
            if name.startswith("data/"):
                at = _start_of(path, file, member)
                storages[name.removeprefix("data/")] = (at, at + member.file_size)
        pickle = _content_of(path, file, members["data.pkl"])
        return Members(pickle, storages, file.seen(_checksum_offsets(file, archive.start_dir, len(members))))


@contextlib.contextmanager
def _zip_in(path: str, file: _BoundedFile, damage: str) -> Generator[zipfile.ZipFile]:
    """Opens a zip. What zipfile, or the block, finds wrong with its bytes becomes a CorruptionError of this damage."""
    try:
        with lacks_told(path), zipfile.ZipFile(cast("Any", file)) as archive:
            yield archive
    except MemstoreError:
        raise
    except Exception as error:  # of zipfile, to whatever bytes
        damaged(path, f"{damage}: {error}")


def _checksum_offsets(file: _BoundedFile, directory: int, count: int) -> list[int]:
    """Returns where the directory has the checksums of members, which nobody looks at."""
    found: list[int] = []
    for _ in range(count):
        head = file.at(directory, _DIRECTORY_HEADER)
        found.append(directory + 16)
        directory += _DIRECTORY_HEADER + sum(int.from_bytes(head[i : i + 2], "little") for i in (28, 30, 32))
    return found


def _read_directory(path: str, file: _BoundedFile, archive: zipfile.ZipFile) -> Archive:
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
    if order is not None and (order.file_size > 16 or _content_of(path, file, order) != b"little"):
        raise UnsupportedValueError(
            f"{path} was written on a machine of another byte order: load it with torch.load, and put the value"
        )
    content = _content_of(path, file, pickle)
    return Archive(_storages_of(path, file, members), zlib.crc32(content) == pickle.CRC)


def _content_of(path: str, file: _BoundedFile, member: zipfile.ZipInfo) -> bytes:
    """Returns the bytes of a member, which need not fit its checksum: torch can be told to write none."""
    return file.at(_start_of(path, file, member), member.file_size)


def _storages_of(path: str, file: _BoundedFile, members: Sequence[zipfile.ZipInfo]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for member in members:
        if member.file_size and _STORAGE_NAME.fullmatch(member.filename):
            start = _start_of(path, file, member)
            found.append((start, start + member.file_size))
    found.sort()
    for (_, end), (start, stop) in zip([(0, 0), *found], found, strict=False):
        if start < end or stop > file.size:
            damaged(path, "storages that overlap, or lie beyond its end")
    return found


def _start_of(path: str, file: _BoundedFile, member: zipfile.ZipInfo) -> int:
    """Returns where its bytes start in the zip."""
    head = file.at(member.header_offset, _LOCAL_HEADER)
    if len(head) < _LOCAL_HEADER or not head.startswith(b"PK\3\4"):
        damaged(path, f"its directory says that {member.filename} is where it is not")
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return member.header_offset + _LOCAL_HEADER + lengths


class _BoundedFile:
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
        """Reads what is at an offset, which another part may have too."""
        data = syscalls.read_at(self._fd, size, self._start + offset)
        if len(data) < size:
            raise ValueError(f"it ends before byte {offset + size:,}")
        if len(data) > len(self._seen.get(offset, b"")):
            self._seen[offset] = data
        return data

    def seen(self, sums: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
        """Returns what was read, and where: in order, nothing twice, and without checksums of four bytes."""
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


# --- Single tensors in larger files ----------------------------------------------------------------------------------


_STORAGE_DTYPES = {  # of classes that torch keeps for the files that name them, and warns of
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}

_LONG = 8192  # bytes around a tensor, of which torch writes 1,500: more aren't remembered
_MOST_KNOWN = 4096  # frames that are remembered
_MOST_ALIKE = 16  # of these of one size: of several shapes, as a rule


class PlacedTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        start: where its storage's bytes start in the file.
        offset, stride: in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    offset: int
    stride: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Counts the elements from the first of its storage to its own last one."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class _Untyped:
    """Stands for the class of a storage that has no dtype."""


class _StorageSpan(NamedTuple):
    kind: Any  # a dtype, or _Untyped
    start: int
    stop: int


class Frames:
    """Finds tensors that torch.save wrote into larger files.

    What it has written around tensors of a dtype and a shape is the same, but for checksums. So that is read once, and
    compared with what it was where the next tensor is: the same bytes mean the same.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[_Frame]] = {}  # by the size of all that was written
        self._count = 0

    def locate(self, memory: memoryview, start: int, size: int) -> PlacedTensor | None:
        """Locates a tensor as `read` does, in a file in memory; None if nothing like it was read before."""
        for frame in self._known.get(size, ()):
            if all(memory[start + at : start + at + len(data)].tobytes() == data for at, data in frame.seen):
                return frame.tensor._replace(start=frame.tensor.start + start)
        return None

    def read(self, path: str, fd: int, start: int, size: int) -> PlacedTensor:
        """Returns where the tensor lies that torch.save wrote into these bytes of a file.

        Raises:
            UnsupportedValueError: it is no plain tensor.
            CorruptionError: nothing that torch.save writes.
        """
        frame = _read_frame(path, fd, start, size)
        known = self._known.setdefault(size, [])
        if len(known) < _MOST_ALIKE and self._count < _MOST_KNOWN and sum(len(data) for _, data in frame.seen) < _LONG:
            known.append(frame)
            self._count += 1
        return frame.tensor._replace(start=frame.tensor.start + start)


class _Frame(NamedTuple):
    """The bytes written around a tensor: see Members.seen. The tensor's start is counted from that of the frame."""

    seen: tuple[tuple[int, bytes], ...]
    tensor: PlacedTensor


def _read_frame(path: str, fd: int, start: int, size: int) -> _Frame:
    pickle, storages, seen = read_members(path, fd, start, size)

    def storage_of(said: Any) -> _StorageSpan:
        if not isinstance(said, tuple) or len(said) < 3 or said[0] != "storage" or said[2] not in storages:
            raise MalformedError(f"a storage {said!r:.100} that isn't there")
        return _StorageSpan(said[1], *storages[said[2]])

    try:
        found = read_known_pickle(pickle, _find_allowed, storage_of)
    except MalformedError as error:
        damaged(path, f"at {start:,}: {error}")
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{path} at {start:,}: no plain tensor: {error.message}") from None
    if not isinstance(found, PlacedTensor):
        raise UnsupportedValueError(f"{path} at {start:,}: {an(type(found))}, and no tensor")
    return _Frame(seen, found)


def _find_allowed(module: str, name: str) -> Any:
    if module == "torch._utils":
        return _MAKERS.get(name)
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if name == "UntypedStorage" and module in ("torch", "torch.storage"):
        return _Untyped
    if module != "torch":
        return None
    if name in _STORAGE_DTYPES:
        return _STORAGE_DTYPES[name]
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    return dtype if isinstance(dtype, torch.dtype) else None


# In the place of torch's functions of these names, with their arguments.


def _rebuild_tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> PlacedTensor:
    return _placed_tensor(storage.kind if isinstance(storage, _StorageSpan) else None, storage, offset, shape, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> PlacedTensor:
    return _placed_tensor(dtype, storage, offset, shape, stride)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


_MAKERS = {
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
}


def _placed_tensor(dtype: Any, storage: Any, offset: Any, shape: Any, stride: Any) -> PlacedTensor:
    fits = (
        isinstance(dtype, torch.dtype)
        and isinstance(storage, _StorageSpan)
        and isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and len(shape) == len(stride)  # pyright: ignore[reportUnknownArgumentType]
        and are_sizes([offset, *shape, *stride], most=129)
    )
    if not fits:
        raise MalformedError("a tensor of impossible arguments")
    placed = PlacedTensor(dtype, tuple(shape), storage.start, offset, tuple(stride))
    if placed.reach * dtype.itemsize > storage.stop - storage.start:
        raise MalformedError(f"a tensor of shape {shape!r:.100} in a storage of {storage.stop - storage.start:,} bytes")
    return placed
