"""Objects, the leaves that are no tensors, as msgpack and back: each exactly of its type, or refused.

What msgpack has (None, bool, int of 64 bits, float, str, bytes, list, map) is written as it is; the rest as extensions,
each of one type, so that a tuple comes back as a tuple and numpy.float32(1) as itself. A container in which no tensor
lies is one object, made of the objects in it: list, tuple and dict have forms of their own, others are written as their
tree, with their entries.

What the bytes name is looked up, never imported or called; only a pickle runs code. A store that was not opened with
`allow_pickle=True` refuses pickles, on every level.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from memstore._parsing import UNDECODABLE, nests_too_deeply
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import extensions
from memstore.structure.pickled import read_pickle, why_refused, write_pickle
from memstore.structure.refusals import MalformedError, RefusedError, as_list, require, unpack
from memstore.structure.tree import KINDS, ObjectNode, Tree, TreeParts, TreeReader, from_msgpack, read_keys, to_msgpack

# --- Writing ---------------------------------------------------------------------------------------------------------


NATIVE = frozenset({type(None), bool, int, float, str, bytes})
_NESTED_BYTES = 1 << 22  # of a tuple in a set or slice: what such tuples share is written for each place


def write_object(value: Any, allow_pickle: bool) -> Any:
    """Returns a leaf in the form that `encode_objects` takes. Raises RefusedError."""
    try:
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(value)
        if isinstance(value, np.generic) and type(value).__module__ == "numpy":
            return Ext(extensions.NUMPY_SCALAR, extensions.write_numpy_scalar(value))
        if isinstance(value, enum.Enum):
            return Ext(extensions.ENUM_MEMBER, extensions.write_enum_member(value))
    except RefusedError:
        if not allow_pickle:
            raise
    if allow_pickle:
        return Ext(extensions.PICKLE, write_pickle(value))
    raise RefusedError(why_refused(value))


def encode_objects(objects: list[Any]) -> bytes:
    """Encodes the objects of a value, which are in their written forms."""
    return to_msgpack(objects) if objects else b""


def written_objects(encoded: bytes) -> list[Any]:
    """Returns the written forms, not looked into. Raises CorruptionError."""
    try:
        found = from_msgpack(encoded) if encoded else []
    except UNDECODABLE as error:
        raise CorruptionError(f"the non-tensor leaves are damaged: {error}") from None
    if type(found) is not list:
        raise CorruptionError("the non-tensor leaves are damaged: they are no list")
    return found


# -- containers of written objects as one written object -------------------------------------------------------------


def join_list(items: list[Any]) -> Any:
    return items


def join_tuple(items: list[Any]) -> Any:
    return Ext(extensions.TUPLE, to_msgpack(items))


def join_dict(keys: Sequence[Any], items: list[Any], ordered: bool) -> Any:
    """Args: keys: as `write_key` made them."""
    if not ordered and all(type(key) is str or type(key) is int for key in keys):
        return dict(zip(keys, items, strict=True))
    return Ext(extensions.ORDERED_DICT if ordered else extensions.DICT, to_msgpack([list(keys), items]))


def join_tree(tree: Tree, items: list[Any]) -> Any:
    """Writes any other container as one object: its tree, and its entries."""
    return Ext(extensions.TREE, to_msgpack([tree, items]))


# -- builtin types ---------------------------------------------------------------------------------------------------


def _write_int(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(extensions.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_str(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RefusedError("a str with a lone surrogate, which is no Unicode text") from None
    return value


def _write_set(value: Any) -> bytes:
    # sorted by their bytes, so that equal sets have equal bytes
    return to_msgpack(sorted(to_msgpack(write_object(item, False)) for item in value))


def _write_nested(items: Sequence[Any]) -> bytes:
    """Writes the content of a set or slice: atoms, and tuples of them."""
    packed = to_msgpack([write_object(item, False) for item in items])
    if len(packed) > _NESTED_BYTES:
        raise RefusedError(f"a tuple or slice of more than {_NESTED_BYTES:,} bytes in a set or slice")
    return packed


_EXTENSIONS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    bytearray: (extensions.BYTEARRAY, bytes),
    complex: (extensions.COMPLEX, lambda value: struct.pack("<dd", value.real, value.imag)),
    range: (extensions.RANGE, lambda value: to_msgpack([_write_int(n) for n in (value.start, value.stop, value.step)])),
    slice: (extensions.SLICE, lambda value: _write_nested((value.start, value.stop, value.step))),
    type(...): (extensions.ELLIPSIS, lambda value: b""),
    tuple: (extensions.TUPLE, _write_nested),  # in sets and slices; elsewhere tuples are containers
    set: (extensions.SET, _write_set),
    frozenset: (extensions.FROZENSET, _write_set),
    **extensions.NUMPY_AND_TORCH_WRITERS,
    **extensions.STDLIB_WRITERS,
}

_WRITERS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool, float, bytes), lambda value: value),
    int: _write_int,
    str: _write_str,
    **{
        kind: lambda value, code=code, write=write: Ext(code, write(value))
        for kind, (code, write) in _EXTENSIONS.items()
    },
}


# --- Reading ---------------------------------------------------------------------------------------------------------


class _PickleRefused(Exception):
    pass


class Pickled:
    """Stands for an object that only pickle could read, where nobody said that its writer is to be trusted."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pickled) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return "<stored with pickle>"


PICKLED = Pickled()  # for who doesn't compare the bytes


def decode_objects(data: bytes, count: int, allow_pickle: bool) -> list[Any]:
    """Decodes the objects. Raises CorruptionError for anything that `encode_objects` didn't write."""
    if not data and not count:
        return []
    return _decode(data, count, _UNPICKLING if allow_pickle else _SAFE)


def show_objects(data: bytes, count: int) -> list[Any]:
    """Decodes the objects, but runs nothing: a Pickled stands for what was stored with pickle."""
    return _decode(data, count, _SHOWING) if data or count else []


def _decode(data: bytes, count: int, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
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
            "open the store with allow_pickle=True (a snapshot with storage_options={'allow_pickle': True}) "
            "if you trust whoever wrote it"
        ) from None
    except UnsupportedValueError:
        raise
    except Exception as error:  # msgspec's, and what constructors raise for arguments that nobody wrote
        raise CorruptionError(f"the non-tensor leaves are damaged: {error}") from error
    if type(objects) is not list or len(objects) != count:
        raise CorruptionError(f"the value has {count} non-tensor leaves, but others are stored")
    return objects


# -- containers, in which a pickle may stand -------------------------------------------------------------------------


def _read_dict(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> dict[Any, Any]:
    written, values = unpack(as_list(decoder.decode(data)), list, list)
    keys = read_keys(written)
    require(len(keys) == len(values), "a malformed dict")
    return dict(zip(keys, values, strict=True))


def _read_tree(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    tree, items = unpack(as_list(decoder.decode(data)), list, list)
    kind = tree[0] if tree else None
    require(type(kind) is str and kind in KINDS and KINDS[kind].may_be_object, "a malformed container of objects")
    reader = TreeReader()
    node = reader.node(tree)
    require(all(type(child) is ObjectNode for _, child in node.children()), "a malformed container of objects")
    require(not reader.tensors and reader.objects == len(items), "a malformed container of objects")
    return node.build(TreeParts([], items, None))


# -- values in which no pickle may stand -----------------------------------------------------------------------------


def _read_list(data: bytes, length: int | None = None) -> list[Any]:
    items = _SAFE.decode(data)
    require(type(items) is list and length in (None, len(items)), "a malformed array")
    return items


_READERS: dict[int, Callable[[bytes], Any]] = {
    extensions.SET: lambda data: {_SAFE.decode(item) for item in _read_list(data)},
    extensions.FROZENSET: lambda data: frozenset(_SAFE.decode(item) for item in _read_list(data)),
    extensions.INT: lambda data: int.from_bytes(data, "little", signed=True),
    extensions.COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    extensions.BYTEARRAY: bytearray,
    extensions.RANGE: lambda data: range(*_read_list(data, 3)),
    extensions.SLICE: lambda data: slice(*_read_list(data, 3)),
    extensions.ELLIPSIS: lambda data: ...,
    **extensions.NUMPY_AND_TORCH_READERS,
    **extensions.STDLIB_READERS,
}


def _extension_hook(pickles: Literal["refuse", "load", "show"]) -> Callable[[int, memoryview], Any]:
    def read(code: int, view: memoryview) -> Any:
        decoder = _DECODERS[pickles]
        data = bytes(view)
        if code == extensions.TUPLE:
            items = decoder.decode(data)
            require(type(items) is list, "a malformed tuple")
            return tuple(items)
        if code == extensions.DICT:
            return _read_dict(decoder, data)
        if code == extensions.ORDERED_DICT:
            return OrderedDict(_read_dict(decoder, data))
        if code == extensions.TREE:
            return _read_tree(decoder, data)
        if code == extensions.PICKLE:
            if pickles == "refuse":
                raise _PickleRefused
            return read_pickle(data) if pickles == "load" else Pickled(data)
        reader = _READERS.get(code)
        if reader is None:
            raise MalformedError(f"no extension has the code {code}")
        return reader(data)

    return read


_SAFE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("refuse"))
_UNPICKLING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("load"))
_SHOWING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("show"))
_DECODERS = {"refuse": _SAFE, "load": _UNPICKLING, "show": _SHOWING}
