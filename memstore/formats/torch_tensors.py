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


def locate_tensor(path: str, fd: int, start: int, size: int) -> PlacedTensor:
    """Where the tensor lies that torch.save wrote into these bytes of a file.

    Raises:
        UnsupportedValueError: it is no plain tensor.
        CorruptionError: nothing that torch.save writes.
    """
    pickle, storages = read_members(path, fd, start, size)

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
        raise UnsupportedValueError(f"{path} at {start:,}: a {type(found).__name__}, and no tensor")
    return found


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
