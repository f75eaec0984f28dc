"""Objects from msgpack. What the bytes name is looked up, never imported or called; only a pickle runs code.

A store that was not opened with `allow_pickle=True` refuses pickles, on every level.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from memstore.depth import nests_too_deeply
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.checks import MalformedError, as_list, require, unpack
from memstore.structure.objects import codes, numpy_and_torch, stdlib
from memstore.structure.objects.pickled import read_pickle
from memstore.structure.tree import NODES, ObjectNode, Parts, Reader, read_keys


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
    """The objects back. CorruptionError for anything that `encode_objects` didn't write."""
    if not data and not count:
        return []
    return _decode(data, count, _UNPICKLING if allow_pickle else _SAFE)


def show_objects(data: bytes, count: int) -> list[Any]:
    """As `decode_objects`, with a Pickled in the place of what was stored with pickle: nothing is run."""
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
    require(type(kind) is str and kind in NODES and NODES[kind].may_be_object, "a malformed container of objects")
    reader = Reader()
    node = reader.node(tree)
    require(all(type(child) is ObjectNode for _, child in node.children()), "a malformed container of objects")
    require(not reader.tensors and reader.objects == len(items), "a malformed container of objects")
    return node.build(Parts([], items, None))


# -- values in which no pickle may stand -----------------------------------------------------------------------------


def _read_list(data: bytes, length: int | None = None) -> list[Any]:
    items = _SAFE.decode(data)
    require(type(items) is list and length in (None, len(items)), "a malformed array")
    return items


_READERS: dict[int, Callable[[bytes], Any]] = {
    codes.SET: lambda data: {_SAFE.decode(item) for item in _read_list(data)},
    codes.FROZENSET: lambda data: frozenset(_SAFE.decode(item) for item in _read_list(data)),
    codes.INT: lambda data: int.from_bytes(data, "little", signed=True),
    codes.COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    codes.BYTEARRAY: bytearray,
    codes.RANGE: lambda data: range(*_read_list(data, 3)),
    codes.SLICE: lambda data: slice(*_read_list(data, 3)),
    codes.ELLIPSIS: lambda data: ...,
    **numpy_and_torch.READERS,
    **stdlib.READERS,
}


def _extension_hook(pickles: Literal["refuse", "load", "show"]) -> Callable[[int, memoryview], Any]:
    def read(code: int, view: memoryview) -> Any:
        decoder = _DECODERS[pickles]
        data = bytes(view)
        if code == codes.TUPLE:
            items = decoder.decode(data)
            require(type(items) is list, "a malformed tuple")
            return tuple(items)
        if code == codes.DICT:
            return _read_dict(decoder, data)
        if code == codes.ORDERED_DICT:
            return OrderedDict(_read_dict(decoder, data))
        if code == codes.TREE:
            return _read_tree(decoder, data)
        if code == codes.PICKLE:
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
