"""Hostile variants of msgpack that somebody wrote on purpose: one place of it is another."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from hypothesis import strategies

_HOSTILE = strategies.sampled_from(
    [
        *(-1, 0, 1, 7, 63, 1 << 31, (1 << 46) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
        *(None, True, 1.5, "", "float32", "quint8", "no dtype", b"", b"12345678", b"\xc1part"),
        *([], [0], [1 << 40, 1 << 40], [-1, 3], [[]], {}, {"a": 0}, ["dict", ["w"], [0]], ["list", [0, 0, 1]]),
        [0] * 2000,
    ]
)


@strategies.composite
def mutated(draw: strategies.DrawFn, packed: bytes, times: int = 2) -> bytes:
    """`packed`, decoded, changed in one or a few places, and encoded again."""
    top = [msgspec.msgpack.decode(packed)]
    for _ in range(draw(strategies.integers(1, times))):
        holder, key = _place(draw, top)
        how = draw(strategies.sampled_from(["replace", "remove", "repeat", "inside"]))
        if how == "remove" and holder is not top:
            del holder[key]
        elif how == "repeat" and isinstance(holder, list) and holder is not top:
            holder.insert(key, holder[key])
        elif how == "inside" and isinstance(holder[key], bytes) and holder[key]:
            holder[key] = draw(_flipped(holder[key]))
        else:
            holder[key] = copy.deepcopy(draw(_HOSTILE))
    return msgspec.msgpack.encode(top[0])


@strategies.composite
def _flipped(draw: strategies.DrawFn, data: bytes) -> bytes:
    at, bit = draw(strategies.integers(0, len(data) - 1)), draw(strategies.integers(0, 7))
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _place(draw: strategies.DrawFn, top: list[Any]) -> tuple[Any, Any]:
    """Some node of the tree, by who holds it."""
    holder, key = top, 0
    while isinstance(holder[key], (list, dict)) and holder[key] and draw(strategies.integers(0, 5)):
        holder = holder[key]
        keys = list(range(len(holder))) if isinstance(holder, list) else list(holder)
        key = draw(strategies.sampled_from(keys))
    return holder, key
