"""Plain values of the standard library as bytes: dates, paths, exact numbers, members of enumerations.

Each is stored by what it is made of, and only if it is exactly of the type: a subclass may mean something else.
"""

from __future__ import annotations

import datetime
import enum
import functools
import re
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError, as_list, require, unpack
from memstore.structure.objects import codes
from memstore.structure.objects.classes import class_name, find_class
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import from_msgpack, to_msgpack

# -- dates -----------------------------------------------------------------------------------------------------------

_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")  # no path could leave the folder of zones


def _zone_parts(zone: datetime.tzinfo | None) -> Any:
    """A time zone: nil, the parts of its offset and its name, or the key of a zoneinfo."""
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


def _read_date(data: bytes) -> datetime.date:
    return datetime.date(*unpack(as_list(from_msgpack(data)), int, int, int))


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
    return to_msgpack([part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True) for part in parts])


def _read_fraction(data: bytes) -> Fraction:
    parts = unpack(as_list(from_msgpack(data)), bytes, bytes)
    require(all(len(part) <= _FRACTION_BITS // 8 + 1 for part in parts), "a Fraction of too many digits")
    return Fraction(*(int.from_bytes(part, "little", signed=True) for part in parts))


def _read_uuid(data: bytes) -> uuid.UUID:
    content, safe = unpack(as_list(from_msgpack(data)), bytes, (NoneType, int))
    return uuid.UUID(bytes=content, is_safe=uuid.SafeUUID(safe))


# -- members of enumerations -----------------------------------------------------------------------------------------


def write_enum_member(value: enum.Enum) -> bytes:
    """By names: one, or of a Flag all that it is made of."""
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


# -- the tables for writing.py and reading.py ------------------------------------------------------------------------

WRITERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    datetime.datetime: (codes.DATETIME, _write_datetime),
    datetime.date: (codes.DATE, lambda value: to_msgpack([value.year, value.month, value.day])),
    datetime.time: (codes.TIME, _write_time),
    datetime.timedelta: (codes.TIMEDELTA, lambda value: to_msgpack(_span_parts(value))),
    datetime.timezone: (codes.TIMEZONE, lambda value: to_msgpack(_zone_parts(value))),
    zoneinfo.ZoneInfo: (codes.TIMEZONE, lambda value: to_msgpack(_zone_parts(value))),
    **dict.fromkeys(_PATHS.values(), (codes.PATH, _write_path)),
    Decimal: (codes.DECIMAL, lambda value: str(value).encode()),
    Fraction: (codes.FRACTION, _write_fraction),
    uuid.UUID: (codes.UUID, lambda value: to_msgpack([value.bytes, value.is_safe.value])),
}

READERS: dict[int, Callable[[bytes], Any]] = {
    codes.DATETIME: _read_datetime,
    codes.DATE: _read_date,
    codes.TIME: _read_time,
    codes.TIMEDELTA: lambda data: _span_of(from_msgpack(data)),
    codes.TIMEZONE: _read_zone,
    codes.PATH: _read_path,
    codes.DECIMAL: lambda data: Decimal(data.decode()),
    codes.FRACTION: _read_fraction,
    codes.UUID: _read_uuid,
    codes.ENUM_MEMBER: _read_enum_member,
}
