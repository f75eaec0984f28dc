"""Keys of dicts, as a tree has them.

str and int keys stand for themselves. The others are tagged, so that True, 1 and 1.0, which Python holds equal, stay
three keys, in a description and in the plan cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from memstore.structure.checks import MalformedError, as_list, require

Key = Any


def write_key(key: Any) -> Key:
    """The form of a dict's key in a tree; raises TypeError for a type that has none, UnicodeEncodeError for no text."""
    kind = type(key)
    if kind is str:
        if not key.isascii():
            key.encode()
        return key
    if kind is int:
        return key if -(1 << 63) <= key < 1 << 63 else ("int", str(key))
    if kind is bool:
        return ("bool", int(key))
    if key is None:
        return ("none",)
    if kind is float:
        return ("float", struct.pack("<d", key))
    if kind is bytes:
        return ("bytes", key)
    if kind is tuple:
        if _count_parts(key) > _MAX_PARTS:
            raise TypeError(f"a key of more than {_MAX_PARTS:,} parts")
        return ("tuple", *map(write_key, key))
    raise TypeError(f"a key of type {kind.__qualname__}")


_MAX_PARTS = 1 << 12  # of a tuple: what stands in it in several places counts, and is written, for each


def _count_parts(key: tuple[Any, ...]) -> int:
    """The number of items in a tuple, on all levels; counted no further than needed to see that there are too many."""
    count, left = 0, [key]
    while left and count <= _MAX_PARTS:
        one = left.pop()
        count += len(one)
        left += [part for part in one if type(part) is tuple]
    return count


_KEY_READERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "bool": (int, bool),
    "int": (str, int),
    "float": (bytes, lambda data: struct.unpack("<d", data)[0]),
    "bytes": (bytes, bytes),
}


def read_key(key: Any) -> Any:
    if type(key) is str or type(key) is int:
        return key
    key = as_list(key)
    require(len(key) > 0 and type(key[0]) is str, "a malformed key")
    tag = key[0]
    if tag == "tuple":
        return tuple(map(read_key, key[1:]))
    if tag == "none" and len(key) == 1:
        return None
    kind, convert = _KEY_READERS.get(tag, (None, bytes))
    require(kind is not None and len(key) == 2 and type(key[1]) is kind, "a malformed key")
    require(tag != "int" or len(key[1]) <= 4000, "a key of too many digits")  # Python refuses more than 4300
    try:
        return convert(key[1])
    except (ValueError, struct.error):
        raise MalformedError("a malformed key") from None


def read_keys(keys: Any) -> tuple[Any, ...]:
    found = tuple(map(read_key, as_list(keys)))
    require(len(set(found)) == len(found) or any(key != key for key in found), "a key that occurs twice")
    return found


def name_of(key: Any) -> str | int:
    """What a key is called in the name of a leaf, where only str and int are allowed: its repr, if it is neither."""
    return key if type(key) in (str, int) and (type(key) is str or -(1 << 63) <= key < 1 << 63) else repr(key)
