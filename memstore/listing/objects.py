"""The types of the objects in a value, by how they are written; nothing is built of them. Codes: structure/objects."""

from __future__ import annotations

from typing import Any

import msgspec

from memstore.undecodable import UNDECODABLE

OBJECT = "object"

# Of msgpack's extensions; those of other types are called by what wrote them.
_EXTENSIONS = {
    1: "tuple",
    2: "dict",
    3: "OrderedDict",
    4: "set",
    5: "frozenset",
    10: "int",
    11: "complex",
    12: "bytearray",
    13: "range",
    14: "slice",
    20: "numpy scalar",
    21: "numpy array",
    30: "Size",
    31: "torch constant",
    32: "device",
    40: "datetime",
    41: "date",
    42: "time",
    43: "timedelta",
    44: "timezone",
    45: "path",
    46: "Decimal",
    47: "Fraction",
    48: "UUID",
    49: "enum",
    100: "pickle",
}


def object_types(written: bytes) -> list[str]:
    """Of each object: "int", "None", "pickle". None of them, if they aren't here: large ones lie in the segment."""
    if not written:
        return []
    try:
        found: Any = msgspec.msgpack.decode(written)
    except UNDECODABLE:
        return []
    return [_type_of(one) for one in found]


def _type_of(written: Any) -> str:
    if isinstance(written, msgspec.msgpack.Ext):
        return _EXTENSIONS.get(written.code, OBJECT)
    return "None" if written is None else type(written).__name__
