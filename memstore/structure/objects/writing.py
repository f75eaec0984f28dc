"""Objects as msgpack: each exactly of its type, or refused.

What msgpack has (None, bool, int of 64 bits, float, str, bytes, list, map) is written as it is; the rest as extensions,
each of one type, so that a tuple comes back as a tuple and numpy.float32(1) as itself. A container in which no tensor
lies is one object, made of the objects in it: list, tuple and dict have forms of their own, others are written as their
tree, with their entries.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.msgpack import Ext

from memstore.errors import CorruptionError
from memstore.structure.objects import codes, numpy_and_torch, stdlib
from memstore.structure.objects.advice import why_refused
from memstore.structure.objects.pickled import write_pickle
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import Tree, from_msgpack, to_msgpack
from memstore.undecodable import UNDECODABLE

NATIVE = frozenset({type(None), bool, int, float, str, bytes})
_NESTED_BYTES = 1 << 22  # of a tuple in a set or slice: what such tuples share is written for each place


def write_object(value: Any, allow_pickle: bool) -> Any:
    """A leaf in the form that `encode_objects` takes; raises RefusedError."""
    try:
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(value)
        if isinstance(value, np.generic) and type(value).__module__ == "numpy":
            return Ext(codes.NUMPY_SCALAR, numpy_and_torch.write_numpy_scalar(value))
        if isinstance(value, enum.Enum):
            return Ext(codes.ENUM_MEMBER, stdlib.write_enum_member(value))
    except RefusedError:
        if not allow_pickle:
            raise
    if allow_pickle:
        return Ext(codes.PICKLE, write_pickle(value))
    raise RefusedError(why_refused(value))


def encode_objects(objects: list[Any]) -> bytes:
    """The objects of a value, in their written forms, as bytes."""
    return to_msgpack(objects) if objects else b""


def written_objects(encoded: bytes) -> list[Any]:
    """The written forms back, not looked into. Raises CorruptionError."""
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
    return Ext(codes.TUPLE, to_msgpack(items))


def join_dict(keys: Sequence[Any], items: list[Any], ordered: bool) -> Any:
    """Args: keys: as `write_key` made them."""
    if not ordered and all(type(key) is str or type(key) is int for key in keys):
        return dict(zip(keys, items, strict=True))
    return Ext(codes.ORDERED_DICT if ordered else codes.DICT, to_msgpack([list(keys), items]))


def join_tree(tree: Tree, items: list[Any]) -> Any:
    """For other containers."""
    return Ext(codes.TREE, to_msgpack([tree, items]))


# -- builtin types ---------------------------------------------------------------------------------------------------


def _write_int(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(codes.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


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
    """What stands in a set or slice: atoms, and tuples of them."""
    packed = to_msgpack([write_object(item, False) for item in items])
    if len(packed) > _NESTED_BYTES:
        raise RefusedError(f"a tuple or slice of more than {_NESTED_BYTES:,} bytes in a set or slice")
    return packed


_EXTENSIONS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    bytearray: (codes.BYTEARRAY, bytes),
    complex: (codes.COMPLEX, lambda value: struct.pack("<dd", value.real, value.imag)),
    range: (codes.RANGE, lambda value: to_msgpack([_write_int(n) for n in (value.start, value.stop, value.step)])),
    slice: (codes.SLICE, lambda value: _write_nested((value.start, value.stop, value.step))),
    type(...): (codes.ELLIPSIS, lambda value: b""),
    tuple: (codes.TUPLE, _write_nested),  # in sets and slices; elsewhere tuples are containers
    set: (codes.SET, _write_set),
    frozenset: (codes.FROZENSET, _write_set),
    **numpy_and_torch.WRITERS,
    **stdlib.WRITERS,
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
