"""Objects, the leaves that are no tensors, as msgpack and back: each exactly of its type, or refused.

What msgpack has (None, bool, int of 64 bits, float, str, bytes, list, map) is written as it is; the rest as extensions,
each of one type, so that a tuple comes back as a tuple and numpy.float32(1) as itself: by what a value is made of, and
only if it is exactly of the type, since a subclass may mean something else. A container in which no tensor lies is one
object, made of the objects in it: list, tuple and dict have forms of their own, others are written as their tree, with
their entries.

What the bytes name is looked up, never imported or called; only a pickle runs code. A store that was not opened with
`allow_pickle=True` refuses pickles, on every level.
"""

from __future__ import annotations

import datetime
import enum
import functools
import re
import struct
import uuid
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from memstore._parsing import UNDECODABLE, nests_too_deeply
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.classes import class_name, find_class, read_pickle, write_pickle
from memstore.structure.refusals import MalformedError, RefusedError, as_list, require, unpack, why_refused
from memstore.structure.traits import may_be_dtype, need_device, read_device
from memstore.structure.tree import KINDS, ObjectNode, Tree, TreeParts, TreeReader, from_msgpack, read_keys, to_msgpack

# --- The codes of extensions: a part of the format, so no code is ever used for something else ------------------------


# Containers.
TUPLE, DICT, ORDERED_DICT, SET, FROZENSET = 1, 2, 3, 4, 5
TREE = 6  # a container of objects that has a node, as its tree

# Other builtin types.
INT, COMPLEX, BYTEARRAY, RANGE, SLICE, ELLIPSIS = 10, 11, 12, 13, 14, 15

NUMPY_SCALAR, NUMPY_ARRAY = 20, 21
TORCH_SIZE, TORCH_CONSTANT, TORCH_DEVICE = 30, 31, 32

# Of the standard library.
DATETIME, DATE, TIME, TIMEDELTA, TIMEZONE = 40, 41, 42, 43, 44
PATH, DECIMAL, FRACTION, UUID, ENUM_MEMBER = 45, 46, 47, 48, 49

PICKLE = 100


# --- numpy's scalars and arrays, and torch's sizes, devices and constants, as bytes ----------------------------------
# An array comes here only if no tensor can hold it: one of text, dates or foreign byte order.


_NUMPY_KINDS = frozenset("biufcSUmMV")

# -- numpy: [dtype, shape, bytes] ------------------------------------------------------------------------------------


def _write_scalar(value: np.generic) -> bytes:
    return _write_numpy("scalar", value)


def _write_array(value: np.ndarray[Any, Any]) -> bytes:
    if not value.dtype.itemsize:
        raise _refused_dtype("array", value.dtype)
    return _write_numpy("array", value)


def _write_numpy(what: str, value: np.generic | np.ndarray[Any, Any]) -> bytes:
    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS or dtype.names is not None:  # before its bytes are copied
        raise _refused_dtype(what, dtype)
    return to_msgpack([dtype.str, list(value.shape), value.tobytes()])


def _refused_dtype(what: str, dtype: np.dtype[Any]) -> RefusedError:
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


def _read_device(data: bytes) -> torch.device | None:
    return need_device(read_device(data.decode()))


def _write_constant(value: Any) -> bytes:
    return str(value).removeprefix("torch.").encode()


def _read_constant(data: bytes) -> Any:
    name = data.decode()
    value = vars(torch).get(name)
    if value is None and may_be_dtype(name):
        raise UnsupportedValueError(f"the stored value has torch.{name}, which torch {torch.__version__} hasn't")
    require(isinstance(value, (torch.dtype, torch.layout, torch.memory_format)), "a malformed constant of torch")
    return value


# --- The standard library --------------------------------------------------------------------------------------------


# -- dates -----------------------------------------------------------------------------------------------------------

_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")  # no path could leave the folder of zones


def _zone_parts(zone: datetime.tzinfo | None) -> Any:
    """Returns what is written of a time zone: nil, its offset and its name, or the key of a zoneinfo."""
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [*_span_parts(offset), *name]
    if type(zone) is zoneinfo.ZoneInfo and zone.key and _ZONE_NAME.fullmatch(zone.key) and _zone_of(zone.key) is zone:
        return zone.key
    kind = type(zone)
    raise RefusedError(
        f"a time zone of type {kind.__module__}.{kind.__qualname__}; put a datetime.timezone, or a zoneinfo.ZoneInfo "
        "of a key that the system knows"
    )


def _zone_of(parts: Any) -> Any:
    if parts is None:
        return None
    if type(parts) is list:
        require(len(parts) in (3, 4), "a malformed time zone")
        return datetime.timezone(_span_of(parts[:3]), *parts[3:])
    require(type(parts) is str and bool(_ZONE_NAME.fullmatch(parts)), "a malformed time zone")
    try:
        return zoneinfo.ZoneInfo(parts)
    except (LookupError, OSError, ValueError) as error:
        raise UnsupportedValueError(
            f"the stored value has a time of the zone {parts!r}, which this system doesn't know ({error}); "
            "install tzdata"
        ) from None


def _span_parts(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _span_of(parts: Any) -> datetime.timedelta:
    return datetime.timedelta(*unpack(as_list(parts), int, int, int))


def _read_span(data: bytes) -> datetime.timedelta:
    return _span_of(from_msgpack(data))


def _write_datetime(value: datetime.datetime) -> bytes:
    zone = _zone_parts(value.tzinfo)
    parts = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return to_msgpack([*parts, value.fold, zone])


def _read_datetime(data: bytes) -> datetime.datetime:
    *numbers, zone = as_list(from_msgpack(data))
    *parts, fold = unpack(numbers, *(int,) * 8)
    return datetime.datetime(*parts, tzinfo=_zone_of(zone), fold=fold)


def _write_time(value: datetime.time) -> bytes:
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return to_msgpack([*parts, _zone_parts(value.tzinfo)])


def _read_time(data: bytes) -> datetime.time:
    *numbers, zone = as_list(from_msgpack(data))
    *parts, fold = unpack(numbers, *(int,) * 5)
    return datetime.time(*parts, tzinfo=_zone_of(zone), fold=fold)


def _write_date(value: datetime.date) -> bytes:
    return to_msgpack([value.year, value.month, value.day])


def _read_date(data: bytes) -> datetime.date:
    return datetime.date(*unpack(as_list(from_msgpack(data)), int, int, int))


def _write_zone(value: datetime.tzinfo) -> bytes:
    return to_msgpack(_zone_parts(value))


def _read_zone(data: bytes) -> datetime.tzinfo:
    parts = from_msgpack(data)
    require(parts is not None, "a malformed time zone")
    return _zone_of(parts)


# -- paths and numbers -----------------------------------------------------------------------------------------------

_PATHS: dict[str, Any] = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath)}
_FRACTION_BITS = 1 << 14  # of numerator and denominator: to reduce a fraction takes the square of them


def _write_path(value: Any) -> bytes:
    # names of files may be no text: os.fsdecode makes lone surrogates of them
    return to_msgpack([type(value).__name__, str(value).encode("utf-8", "surrogatepass")])


def _read_path(data: bytes) -> Any:
    name, text = unpack(as_list(from_msgpack(data)), str, bytes)
    require(name in _PATHS, "a malformed path")
    return _PATHS[name](text.decode("utf-8", "surrogatepass"))


def _write_fraction(value: Fraction) -> bytes:
    parts = (value.numerator, value.denominator)
    if max(part.bit_length() for part in parts) > _FRACTION_BITS:
        raise RefusedError(f"a Fraction of more than {_FRACTION_BITS:,} bits; put its numerator and its denominator")
    return to_msgpack(list(map(_write_long, parts)))


def _read_fraction(data: bytes) -> Fraction:
    parts = unpack(as_list(from_msgpack(data)), bytes, bytes)
    require(all(len(part) <= _FRACTION_BITS // 8 + 1 for part in parts), "a Fraction of too many digits")
    return Fraction(*(int.from_bytes(part, "little", signed=True) for part in parts))


def _write_uuid(value: uuid.UUID) -> bytes:
    return to_msgpack([value.bytes, value.is_safe.value])


def _read_uuid(data: bytes) -> uuid.UUID:
    content, safe = unpack(as_list(from_msgpack(data)), bytes, (NoneType, int))
    return uuid.UUID(bytes=content, is_safe=uuid.SafeUUID(safe))


# -- members of enumerations -----------------------------------------------------------------------------------------


def _write_enum_member(value: enum.Enum) -> bytes:
    """Writes a member by its name; a Flag by the names of all that it is made of."""
    kind: Any = type(value)
    name = class_name(kind)
    members: dict[str, Any] = kind._member_map_  # __members__ may be a class's own code
    if members.get(value._name_) is value:
        return to_msgpack([name, [value._name_]])
    if issubclass(kind, enum.Flag):
        bits = value._value_
        names = [key for key, one in members.items() if one._value_ and bits & one._value_ == one._value_]
        if _combined(kind, [members[key] for key in names]) is value:
            return to_msgpack([name, names])
    raise RefusedError(f"a member of {kind.__qualname__} that can't be found by its name: put its value")


def _read_enum_member(data: bytes) -> enum.Enum:
    name, names = unpack(as_list(from_msgpack(data)), str, list)
    kind = find_class(name, lambda found: issubclass(found, enum.Enum), "an Enum")
    members: dict[str, Any] = kind._member_map_
    if not all(type(key) is str for key in names) or not (len(names) == 1 or issubclass(kind, enum.Flag)):
        raise MalformedError("a malformed member of an Enum")
    for key in names:
        if key not in members:
            raise UnsupportedValueError(f"the stored value has a {kind.__qualname__}.{key}, but {name} has none here")
    return members[names[0]] if len(names) == 1 else _combined(kind, [members[key] for key in names])


def _combined(kind: Any, members: list[Any]) -> Any:
    return functools.reduce(enum.Flag.__or__, members) if members else kind(0)


# --- Writing ---------------------------------------------------------------------------------------------------------


NATIVE = frozenset({type(None), bool, int, float, str, bytes})
_NESTED_BYTES = 1 << 22  # of a tuple in a set or slice: what such tuples share is written for each place


def write_object(value: Any, allow_pickle: bool) -> Any:
    """Returns a leaf in the form that `encode_objects` takes. Raises RefusedError."""
    kind = type(value)
    try:
        if kind in NATIVE:
            return _write_int(value) if kind is int else _write_str(value) if kind is str else value
        if kind is tuple:  # in a set or slice; elsewhere tuples are containers
            return Ext(TUPLE, _write_nested(value))
        extension = _BY_TYPE.get(kind)
        if extension is None and isinstance(value, np.generic) and kind.__module__ == "numpy":
            extension = _BY_CODE[NUMPY_SCALAR]
        elif extension is None and isinstance(value, enum.Enum):
            extension = _BY_CODE[ENUM_MEMBER]
        if extension is not None:
            return Ext(extension.code, extension.write(value))
    except RefusedError:
        if not allow_pickle:
            raise
    if allow_pickle:
        return Ext(PICKLE, write_pickle(value))
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
    return Ext(TUPLE, to_msgpack(items))


def join_dict(keys: Sequence[Any], items: list[Any], ordered: bool) -> Any:
    """Writes a dict as one object. The keys are as `write_key` made them."""
    if not ordered and all(type(key) is str or type(key) is int for key in keys):
        return dict(zip(keys, items, strict=True))
    return Ext(ORDERED_DICT if ordered else DICT, to_msgpack([list(keys), items]))


def join_tree(tree: Tree, items: list[Any]) -> Any:
    """Writes any other container as one object: its tree, and its entries."""
    return Ext(TREE, to_msgpack([tree, items]))


# -- builtin types ---------------------------------------------------------------------------------------------------


def _write_int(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(INT, _write_long(value))


def _write_long(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _write_complex(value: complex) -> bytes:
    return struct.pack("<dd", value.real, value.imag)


def _write_range(value: range) -> bytes:
    return to_msgpack([_write_int(number) for number in (value.start, value.stop, value.step)])


def _write_slice(value: slice) -> bytes:
    return _write_nested((value.start, value.stop, value.step))


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


# --- Reading ---------------------------------------------------------------------------------------------------------


class _PickleRefused(Exception):
    pass


@dataclass(frozen=True, slots=True, repr=False)
class Pickled:
    """Stands for an object that only pickle could read, where nobody said that its writer is to be trusted."""

    data: bytes = b""

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


class _Extension(NamedTuple):
    """An extension: the types of its values, and how these become its bytes, and its bytes a value.

    Of NUMPY_SCALAR and ENUM_MEMBER, `write_object` finds the types.
    """

    code: int
    types: tuple[type, ...]
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


_EXTENSIONS = (
    _Extension(SET, (set,), _write_set, lambda data: {_SAFE.decode(item) for item in _read_list(data)}),
    _Extension(FROZENSET, (frozenset,), _write_set, lambda data: frozenset(map(_SAFE.decode, _read_list(data)))),
    _Extension(INT, (), _write_long, lambda data: int.from_bytes(data, "little", signed=True)),
    _Extension(COMPLEX, (complex,), _write_complex, lambda data: complex(*struct.unpack("<dd", data))),
    _Extension(BYTEARRAY, (bytearray,), bytes, bytearray),
    _Extension(RANGE, (range,), _write_range, lambda data: range(*_read_list(data, 3))),
    _Extension(SLICE, (slice,), _write_slice, lambda data: slice(*_read_list(data, 3))),
    _Extension(ELLIPSIS, (type(...),), lambda value: b"", lambda data: ...),
    _Extension(NUMPY_SCALAR, (), _write_scalar, _read_scalar),
    _Extension(NUMPY_ARRAY, (np.ndarray,), _write_array, _read_array),
    _Extension(TORCH_SIZE, (torch.Size,), lambda value: to_msgpack(list(value)), _read_size),
    _Extension(TORCH_CONSTANT, (torch.dtype, torch.layout, torch.memory_format), _write_constant, _read_constant),
    _Extension(TORCH_DEVICE, (torch.device,), lambda value: str(value).encode(), _read_device),
    _Extension(DATETIME, (datetime.datetime,), _write_datetime, _read_datetime),
    _Extension(DATE, (datetime.date,), _write_date, _read_date),
    _Extension(TIME, (datetime.time,), _write_time, _read_time),
    _Extension(TIMEDELTA, (datetime.timedelta,), lambda value: to_msgpack(_span_parts(value)), _read_span),
    _Extension(TIMEZONE, (datetime.timezone, zoneinfo.ZoneInfo), _write_zone, _read_zone),
    _Extension(PATH, tuple(_PATHS.values()), _write_path, _read_path),
    _Extension(DECIMAL, (Decimal,), lambda value: str(value).encode(), lambda data: Decimal(data.decode())),
    _Extension(FRACTION, (Fraction,), _write_fraction, _read_fraction),
    _Extension(UUID, (uuid.UUID,), _write_uuid, _read_uuid),
    _Extension(ENUM_MEMBER, (), _write_enum_member, _read_enum_member),
)
_BY_CODE = {one.code: one for one in _EXTENSIONS}
_BY_TYPE = {kind: one for one in _EXTENSIONS for kind in one.types}


def _extension_hook(pickles: Literal["refuse", "load", "show"]) -> Callable[[int, memoryview], Any]:
    def read(code: int, view: memoryview) -> Any:
        decoder = _DECODERS[pickles]
        data = bytes(view)
        if code == TUPLE:
            items = decoder.decode(data)
            require(type(items) is list, "a malformed tuple")
            return tuple(items)
        if code == DICT:
            return _read_dict(decoder, data)
        if code == ORDERED_DICT:
            return OrderedDict(_read_dict(decoder, data))
        if code == TREE:
            return _read_tree(decoder, data)
        if code == PICKLE:
            if pickles == "refuse":
                raise _PickleRefused
            return read_pickle(data) if pickles == "load" else Pickled(data)
        extension = _BY_CODE.get(code)
        if extension is None:
            raise MalformedError(f"no extension has the code {code}")
        return extension.read(data)

    return read


_SAFE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("refuse"))
_UNPICKLING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("load"))
_SHOWING: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_extension_hook("show"))
_DECODERS = {"refuse": _SAFE, "load": _UNPICKLING, "show": _SHOWING}
