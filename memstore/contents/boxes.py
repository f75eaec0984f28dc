"""The boxes of a sharded entry: which rank has put which part of each leaf, and where its bytes lie.

A record has them as msgpack of `[[[leaf, [[offsets, shape, place, checksum or nil, rank], ...]], ...], [[leaf, rank],
...]]`: first the leaves of which ranks have put boxes, then those that a rank has put as plain tensors. Places count in
the entry's data section, which is one range of addresses with all segments (`engine/format/extents.py`). Behind the
last segment it has room where nothing is stored: there a get assembles leaves whose boxes don't lie in order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from memstore.engine import Record
from memstore.errors import CorruptionError
from memstore.sharding import NO_BOXES, Box, Boxes, StoredBox
from memstore.structure import check_boxes, plan_of
from memstore.undecodable import UNDECODABLE

__all__ = ["NO_BOXES", "BoxTable", "Boxes", "StoredBox", "box_table", "boxes_of", "encode_boxes"]

_CACHED = 64  # tables


class BoxTable(NamedTuple):
    """What the ranks have put.

    Attributes:
        boxes: by leaf; they may lie in order, so that the leaf needs no assembling.
        ranks: by leaf that was put as a plain tensor, who put it.
    """

    boxes: Boxes
    ranks: Mapping[int, int]


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    checksum: bytes | None
    rank: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[tuple[int, tuple[_Row, ...]]], list[tuple[int, int]]]).decode


def encode_boxes(
    boxes: Mapping[int, Sequence[StoredBox]], ranks: Mapping[int, int], *, with_checksums: bool = True
) -> bytes:
    rows = [
        (leaf, [(*box, place, checksum if with_checksums else None, rank) for box, place, rank, checksum in found])
        for leaf, found in boxes.items()
    ]
    return _encode((rows, list(ranks.items())))


def boxes_of(record: Record) -> Boxes:
    """By leaf; none, for an entry that is not sharded. Raises CorruptionError unless they are all of their leaves."""
    return NO_BOXES if record.boxes is None else _checked(record.boxes, record.description, record.nbytes)


def box_table(record: Record) -> BoxTable:
    """Of any entry. Raises CorruptionError; whether the boxes are those of its leaves is not looked at."""
    return BoxTable(NO_BOXES, {}) if record.boxes is None else _table(record.boxes)


@functools.lru_cache(_CACHED)
def _checked(stored: bytes, description: bytes, nbytes: int) -> Boxes:
    boxes = _table(stored).boxes
    check_boxes(plan_of(description), boxes, nbytes)
    return boxes


@functools.lru_cache(_CACHED)
def _table(stored: bytes) -> BoxTable:
    try:
        rows, ranks = _decode(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the boxes of a sharded value can't be read: {error}") from None
    box = functools.lru_cache(None)(Box)  # leaves of one shape are mostly cut alike
    boxes = {
        leaf: tuple([StoredBox(box(row.offsets, row.shape), row.place, row.rank, row.checksum) for row in found])
        for leaf, found in rows
    }
    return BoxTable(boxes, dict(ranks))
