"""What the description of a mutable entry says: an entry whose rows are written in place (see docs/decisions/015).

The description is a mark that no msgpack starts with, and msgpack of `[kind, plan, options]`. The plan is what any
description is; it tells of all rows that the entry has room for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memstore.errors import CorruptionError
from memstore.undecodable import UNDECODABLE

MARK = b"\xc1rows"

MutableKind = Literal["dataset", "buffer"]


class MutableDescription(msgspec.Struct, frozen=True, array_like=True):
    """`options` is what the kind fixes at creation besides, opaque here."""

    kind: MutableKind
    plan: bytes
    options: bytes = b""


_decode = msgspec.msgpack.Decoder(MutableDescription).decode


def is_mutable(description: bytes) -> bool:
    return description.startswith(MARK)


def encode_mutable(description: MutableDescription) -> bytes:
    return MARK + msgspec.msgpack.encode(description)


def decode_mutable(description: bytes) -> MutableDescription:
    """Raises CorruptionError."""
    try:
        return _decode(memoryview(description)[len(MARK) :])
    except UNDECODABLE as error:
        raise CorruptionError(f"what it says of its rows can't be read: {error}") from None


def plan_bytes(description: bytes) -> bytes:
    """The plan of any entry: of a mutable one that of all rows. Raises CorruptionError."""
    return decode_mutable(description).plan if is_mutable(description) else description
