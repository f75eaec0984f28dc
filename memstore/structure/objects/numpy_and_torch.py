"""numpy's scalars and arrays, and torch's sizes, devices and constants, as bytes.

An array comes here only if no tensor can hold it: one of text, dates or foreign byte order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import require
from memstore.structure.objects import codes
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import may_be_dtype, need_device, read_device
from memstore.structure.tree import from_msgpack, to_msgpack

_NUMPY_KINDS = frozenset("biufcSUmMV")

# -- numpy: [dtype, shape, bytes] ------------------------------------------------------------------------------------


def write_numpy_scalar(value: np.generic) -> bytes:
    return _write_numpy("scalar", value)


def _write_array(value: np.ndarray[Any, Any]) -> bytes:
    if not value.dtype.itemsize:
        raise _refused("array", value.dtype)
    return _write_numpy("array", value)


def _write_numpy(what: str, value: np.generic | np.ndarray[Any, Any]) -> bytes:
    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS or dtype.names is not None:  # before its bytes are copied
        raise _refused(what, dtype)
    return to_msgpack([dtype.str, list(value.shape), value.tobytes()])


def _refused(what: str, dtype: np.dtype[Any]) -> RefusedError:
    return RefusedError(f"a numpy {what} of dtype {dtype}, which only allow_pickle=True can store")


def _read_array(data: bytes) -> np.ndarray[Any, Any]:
    code, shape, content = from_msgpack(data)
    require(
        type(code) is str and len(code) <= 64 and type(content) is bytes and type(shape) is list, "a malformed array"
    )
    dtype = np.dtype(code)
    require(dtype.str == code and dtype.kind in _NUMPY_KINDS and dtype.names is None, "a malformed array")
    require(not dtype.hasobject and dtype.subdtype is None, "a malformed array")
    require(all(type(size) is int and size >= 0 for size in shape), "a malformed array")
    if dtype.itemsize == 0:
        require(
            shape == [], "a malformed array"
        )  # the empty str and void scalars; an array of them could claim any shape
        return np.zeros((), dtype)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def _read_scalar(data: bytes) -> Any:
    array = _read_array(data)
    require(array.shape == (), "a malformed scalar")
    return array[()]


# -- torch -----------------------------------------------------------------------------------------------------------


def _read_size(data: bytes) -> torch.Size:
    sizes = from_msgpack(data)
    require(type(sizes) is list and all(type(size) is int for size in sizes), "a malformed torch.Size")
    return torch.Size(sizes)


def _write_constant(value: Any) -> bytes:
    return str(value).removeprefix("torch.").encode()


def _read_constant(data: bytes) -> Any:
    name = data.decode()
    value = vars(torch).get(name)
    if value is None and may_be_dtype(name):
        raise UnsupportedValueError(f"the stored value has torch.{name}, which torch {torch.__version__} hasn't")
    require(isinstance(value, (torch.dtype, torch.layout, torch.memory_format)), "a malformed constant of torch")
    return value


# -- the tables for writing.py and reading.py ------------------------------------------------------------------------

WRITERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    np.ndarray: (codes.NUMPY_ARRAY, _write_array),
    torch.Size: (codes.TORCH_SIZE, lambda value: to_msgpack(list(value))),
    torch.device: (codes.TORCH_DEVICE, lambda value: str(value).encode()),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), (codes.TORCH_CONSTANT, _write_constant)),
}

READERS: dict[int, Callable[[bytes], Any]] = {
    codes.NUMPY_SCALAR: _read_scalar,
    codes.NUMPY_ARRAY: _read_array,
    codes.TORCH_SIZE: _read_size,
    codes.TORCH_DEVICE: lambda data: need_device(read_device(data.decode())),
    codes.TORCH_CONSTANT: _read_constant,
}
