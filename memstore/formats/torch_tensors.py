"""Single tensors that torch.save wrote into larger files, as torch.distributed.checkpoint and torchsnapshot have them.

Where their bytes lie is read without torch.load, and so without any of the bytes. Their pickles may refer to what makes
a plain tensor, and to nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from memstore.errors import UnsupportedValueError
from memstore.formats.documents import are_sizes, damaged
from memstore.formats.torch_zip import read_members
from memstore.structure import MalformedError, read_known_pickle
from memstore.wording import an

_STORAGES = {  # of classes that torch keeps for the files that name them, and warns of
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
        """The elements from the first of its storage to its own last one."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class _Untyped:
    """Stands for the class of a storage that has no dtype."""


class _Storage(NamedTuple):
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
        """As `read`, of a file in memory; None if nothing like it was read before."""
        for frame in self._known.get(size, ()):
            if all(memory[start + at : start + at + len(data)].tobytes() == data for at, data in frame.seen):
                return frame.tensor._replace(start=frame.tensor.start + start)
        return None

    def read(self, path: str, fd: int, start: int, size: int) -> PlacedTensor:
        """Where the tensor lies that torch.save wrote into these bytes of a file.

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
    """What was written around a tensor: see Members.seen. The tensor's start is counted from that of the frame."""

    seen: tuple[tuple[int, bytes], ...]
    tensor: PlacedTensor


def locate_tensor(path: str, fd: int, start: int, size: int) -> PlacedTensor:
    """As `Frames.read`, of one tensor."""
    return Frames().read(path, fd, start, size)


def _read_frame(path: str, fd: int, start: int, size: int) -> _Frame:
    pickle, storages, seen = read_members(path, fd, start, size)

    def storage_of(said: Any) -> _Storage:
        if not isinstance(said, tuple) or len(said) < 3 or said[0] != "storage" or said[2] not in storages:
            raise MalformedError(f"a storage {said!r:.100} that isn't there")
        return _Storage(said[1], *storages[said[2]])

    try:
        found = read_known_pickle(pickle, _find, storage_of)
    except MalformedError as error:
        damaged(path, f"at {start:,}: {error}")
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{path} at {start:,}: no plain tensor: {error.message}") from None
    if not isinstance(found, PlacedTensor):
        raise UnsupportedValueError(f"{path} at {start:,}: {an(type(found))}, and no tensor")
    return _Frame(seen, found)


def _find(module: str, name: str) -> Any:
    if module == "torch._utils":
        return _MAKERS.get(name)
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if name == "UntypedStorage" and module in ("torch", "torch.storage"):
        return _Untyped
    if module != "torch":
        return None
    if name in _STORAGES:
        return _STORAGES[name]
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    return dtype if isinstance(dtype, torch.dtype) else None


# In the place of torch's functions of these names, with their arguments.


def _rebuild_tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> PlacedTensor:
    return _placed(storage.kind if isinstance(storage, _Storage) else None, storage, offset, shape, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> PlacedTensor:
    return _placed(dtype, storage, offset, shape, stride)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


_MAKERS = {
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
}


def _placed(dtype: Any, storage: Any, offset: Any, shape: Any, stride: Any) -> PlacedTensor:
    fits = (
        isinstance(dtype, torch.dtype)
        and isinstance(storage, _Storage)
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
