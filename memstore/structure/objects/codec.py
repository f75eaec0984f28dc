"""The leaves that are no tensors, as msgpack: exact types or nothing. The only importer of pickle.

What msgpack has (None, bool, int of 64 bits, float, str, bytes, list, map) is written as it is; the rest as extensions,
each of one type, so that a tuple comes back as a tuple and numpy.float32(1) as itself. Containers that have a node, and
no tensor below it, are one object: their tree, with their entries. Nothing here imports a module or calls a class that
the bytes name, except `pickle`, and that only if the store was opened with `allow_pickle=True`.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from memstore.depth import nests_too_deeply
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.checks import MalformedError, as_list, require, unpack
from memstore.structure.objects import stdlib
from memstore.structure.objects.advice import why_refused
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import may_be_dtype, need_device, read_device
from memstore.structure.tree import NODES, ObjectNode, Parts, Reader, Tree, read_keys

NATIVE = frozenset({type(None), bool, int, float, str, bytes})
_NUMPY_KINDS = frozenset("biufcSUmMV")

# Extension codes: part of the format, never to be reused.
_TUPLE, _DICT, _ORDERED, _SET, _FROZENSET, _TREE = 1, 2, 3, 4, 5, 6
_INT, _COMPLEX, _BYTEARRAY, _RANGE, _SLICE, _ELLIPSIS = 10, 11, 12, 13, 14, 15
_NUMPY_SCALAR, _NUMPY_ARRAY = 20, 21
_SIZE, _TORCH_CONSTANT, _DEVICE = 30, 31, 32  # 40 to 49: stdlib.py
_PICKLE = 100

_pack = msgspec.msgpack.Encoder().encode


_NESTED_BYTES = 1 << 22  # of a tuple in a set or slice: what such tuples share is written for each place

# -- writing ---------------------------------------------------------------------------------------------------------


def write_object(value: Any, allow_pickle: bool) -> Any:
    """A leaf in the form that `encode_objects` takes; raises RefusedError."""
    try:
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(value)
        if isinstance(value, np.generic) and type(value).__module__ == "numpy":
            return Ext(_NUMPY_SCALAR, _numpy_bytes(value.dtype, (), value.tobytes()))
        if isinstance(value, enum.Enum):
            return Ext(stdlib.MEMBER, stdlib.write_member(value))
    except RefusedError:
        if not allow_pickle:
            raise
    if allow_pickle:
        return Ext(_PICKLE, pickle.dumps(value, protocol=5))
    raise RefusedError(why_refused(value))


def _write_int(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_str(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RefusedError("a str with a lone surrogate, which is no Unicode text") from None
    return value


def _write_set(code: int) -> Callable[[Any], Ext]:
    # sorted by their bytes, so that equal sets have equal bytes
    return lambda value: Ext(code, _pack(sorted(_pack(write_object(item, False)) for item in value)))


def _write_tuple_of_atoms(value: tuple[Any, ...]) -> Ext:
    return Ext(_TUPLE, _pack_nested(value))


def _write_slice(value: slice) -> Ext:
    return Ext(_SLICE, _pack_nested((value.start, value.stop, value.step)))


def _pack_nested(items: Sequence[Any]) -> bytes:
    packed = _pack([write_object(item, False) for item in items])
    if len(packed) > _NESTED_BYTES:
        raise RefusedError(f"a tuple or slice of more than {_NESTED_BYTES:,} bytes in a set or slice")
    return packed


def _write_array(value: np.ndarray[Any, Any]) -> Ext:
    if value.dtype.kind not in _NUMPY_KINDS or value.dtype.names is not None or not value.dtype.itemsize:
        raise RefusedError(f"a numpy array of dtype {value.dtype}, which only allow_pickle=True can store")
    return Ext(_NUMPY_ARRAY, _numpy_bytes(value.dtype, value.shape, value.tobytes()))


def _numpy_bytes(dtype: np.dtype[Any], shape: Sequence[int], data: bytes) -> bytes:
    if dtype.kind not in _NUMPY_KINDS or dtype.names is not None:
        raise RefusedError(f"a numpy scalar of dtype {dtype}, which only allow_pickle=True can store")
    return _pack([dtype.str, list(shape), data])


def _torch_name(value: Any) -> Ext:
    return Ext(_TORCH_CONSTANT, str(value).removeprefix("torch.").encode())


_WRITERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _write_int,
    float: lambda value: value,
    str: _write_str,
    bytes: lambda value: value,
    bytearray: lambda value: Ext(_BYTEARRAY, bytes(value)),
    complex: lambda value: Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag)),
    range: lambda value: Ext(_RANGE, _pack([_write_int(n) for n in (value.start, value.stop, value.step)])),
    slice: _write_slice,
    type(...): lambda value: Ext(_ELLIPSIS, b""),
    tuple: _write_tuple_of_atoms,  # in sets and slices; elsewhere tuples are containers
    set: _write_set(_SET),
    frozenset: _write_set(_FROZENSET),
    np.ndarray: _write_array,
    torch.Size: lambda value: Ext(_SIZE, _pack(list(value))),
    torch.device: lambda value: Ext(_DEVICE, str(value).encode()),
    torch.dtype: _torch_name,
    torch.layout: _torch_name,
    torch.memory_format: _torch_name,
    **{
        kind: lambda value, code=code, write=write: Ext(code, write(value))
        for kind, (code, write) in stdlib.WRITERS.items()
    },
}


def join_list(items: list[Any]) -> Any:
    """A list of written objects as one written object."""
    return items


def join_tuple(items: list[Any]) -> Any:
    return Ext(_TUPLE, _pack(items))


def join_dict(keys: Sequence[Any], items: list[Any], ordered: bool) -> Any:
    """A dict of written objects as one, by its keys as `node.write_key` made them."""
    if not ordered and all(type(key) is str or type(key) is int for key in keys):
        return dict(zip(keys, items, strict=True))
    return Ext(_ORDERED if ordered else _DICT, _pack([list(keys), items]))


def join_tree(tree: Tree, items: list[Any]) -> Any:
    """A container of written objects as one, by its tree."""
    return Ext(_TREE, _pack([tree, items]))


def encode_objects(objects: list[Any]) -> bytes:
    return _pack(objects) if objects else b""


# -- reading ---------------------------------------------------------------------------------------------------------


class _PickleRefused(Exception):
    pass


def decode_objects(data: bytes, count: int, allow_pickle: bool) -> list[Any]:
    """The objects back. CorruptionError for anything that `encode_objects` didn't write."""
    if not data and not count:
        return []
    decoder = _UNPICKLING if allow_pickle else _SAFE
    try:
        objects = decoder.decode(data)
    except MemoryError:
        raise
    except RecursionError as error:
        if not nests_too_deeply(lambda: _SAFE.decode(data)):
            raise
        raise CorruptionError(f"the non-tensor leaves are damaged: {error}") from error
    except _PickleRefused:
        raise UnsupportedValueError(
            "the value has leaves that were stored with pickle, which can run code when it is read; "
            "open the store with allow_pickle=True if you trust whoever wrote it"
        ) from None
    except UnsupportedValueError:
        raise
    except Exception as error:  # msgspec, and whatever constructors say to arguments that nobody wrote
        raise CorruptionError(f"the non-tensor leaves are damaged: {error}") from error
    if type(objects) is not list or len(objects) != count:
        raise CorruptionError(f"the value has {count} non-tensor leaves, but others are stored")
    return objects


def _read_numpy(data: bytes) -> np.ndarray[Any, Any]:
    code, shape, content = _SAFE.decode(data)
    require(type(code) is str and len(code) <= 64 and type(content) is bytes and type(shape) is list, "no array")
    dtype = np.dtype(code)
    require(dtype.str == code and dtype.kind in _NUMPY_KINDS and dtype.names is None, "no array")
    require(not dtype.hasobject and dtype.subdtype is None, "no array")
    require(all(type(size) is int and size >= 0 for size in shape), "no array")
    if dtype.itemsize == 0:
        require(shape == [], "no array")  # the empty str and void scalars; an array of them could claim any shape
        return np.zeros((), dtype)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def _read_scalar(data: bytes) -> Any:
    array = _read_numpy(data)
    require(array.shape == (), "no scalar")
    return array[()]


def _read_torch_constant(data: bytes) -> Any:
    name = data.decode()
    value = vars(torch).get(name)
    if value is None and may_be_dtype(name):
        raise UnsupportedValueError(f"the stored value has torch.{name}, which torch {torch.__version__} hasn't")
    require(isinstance(value, (torch.dtype, torch.layout, torch.memory_format)), "no constant of torch")
    return value


def _read_list(data: bytes, length: int | None = None) -> list[Any]:
    items = _SAFE.decode(data)
    require(type(items) is list and length in (None, len(items)), "no array")
    return items


def _read_size(data: bytes) -> torch.Size:
    items = _read_list(data)
    require(all(type(item) is int for item in items), "no torch.Size")
    return torch.Size(items)


def _read_complex(data: bytes) -> complex:
    return complex(*struct.unpack("<dd", data))


def _read_dict(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> dict[Any, Any]:
    written, values = unpack(as_list(decoder.decode(data)), list, list)
    keys = read_keys(written)
    require(len(keys) == len(values), "no dict")
    return dict(zip(keys, values, strict=True))


def _read_tree(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    tree, items = unpack(as_list(decoder.decode(data)), list, list)
    kind = tree[0] if tree else None
    require(type(kind) is str and kind in NODES and NODES[kind].joins, "no container of objects")
    reader = Reader()
    node = reader.node(tree)
    require(all(type(child) is ObjectNode for _, child in node.children()), "no container of objects")
    require(not reader.tensors and reader.objects == len(items), "no container of objects")
    return node.build(Parts([], items, None))


_READERS: dict[int, Callable[[bytes], Any]] = {
    **stdlib.READERS,
    _INT: lambda data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: _read_complex,
    _BYTEARRAY: bytearray,
    _RANGE: lambda data: range(*_read_list(data, 3)),
    _SLICE: lambda data: slice(*_read_list(data, 3)),
    _ELLIPSIS: lambda data: ...,
    _SET: lambda data: {_SAFE.decode(item) for item in _read_list(data)},
    _FROZENSET: lambda data: frozenset(_SAFE.decode(item) for item in _read_list(data)),
    _NUMPY_SCALAR: _read_scalar,
    _NUMPY_ARRAY: _read_numpy,
    _SIZE: _read_size,
    _TORCH_CONSTANT: _read_torch_constant,
    _DEVICE: lambda data: need_device(read_device(data.decode())),
}


def _extension_hook(allow_pickle: bool) -> Callable[[int, memoryview], Any]:
    def read(code: int, view: memoryview) -> Any:
        decoder = _UNPICKLING if allow_pickle else _SAFE
        data = bytes(view)
        if code == _TUPLE:
            items = decoder.decode(data)
            require(type(items) is list, "no tuple")
            return tuple(items)
        if code == _DICT:
            return _read_dict(decoder, data)
        if code == _ORDERED:
            return OrderedDict(_read_dict(decoder, data))
        if code == _TREE:
            return _read_tree(decoder, data)
        if code == _PICKLE:
            if not allow_pickle:
                raise _PickleRefused
            return unpickle(data)
        reader = _READERS.get(code)
        if reader is None:
            raise MalformedError(f"no extension has the code {code}")
        return reader(data)

    return read


def unpickle(data: bytes) -> Any:
    """Only where `allow_pickle=True` was said: it runs what the bytes say."""
    try:
        return pickle.loads(data)
    except (pickle.UnpicklingError, EOFError) as error:
        raise MalformedError(f"no pickle: {error}") from error
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # classes that this process lacks, and whatever their own code does
        raise UnsupportedValueError(f"a leaf that was stored with pickle can't be read here: {error!r}") from error


_SAFE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook(False))
_UNPICKLING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook(True))
