"""The boxes of a sharded entry: which rank has put which part of each leaf, and where its bytes lie.

A record has them as msgpack of `[tail, [[leaf, [[offsets, shape, place, rank, checksum or nil], ...]], ...]]`. Places
count in the entry's data section, which is one range of addresses with all segments (`engine/format/extents.py`). The
*tail* is its end, behind the last segment: nothing is stored there, and it is where a get assembles leaves whose boxes
don't lie one behind the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from memstore.engine import Record
from memstore.errors import CorruptionError
from memstore.sharding import NO_BOXES, Box, Boxes, StoredBox
from memstore.structure import count, plan_of

__all__ = ["NO_BOXES", "BoxTable", "Boxes", "StoredBox", "box_table", "boxes_of", "encode_boxes"]

_CACHED = 64
_encode = msgspec.msgpack.Encoder().encode


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    rank: int
    checksum: bytes | None = None


_decode = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, tuple[_Row, ...]]]]).decode


class BoxTable(NamedTuple):
    """All boxes of an entry.

    Attributes:
        tail: where it starts, in the data section.
        whole: by leaf, the boxes of leaves that lie whole at their offset: one box, or several that adjoin.
        assembled: by leaf, the boxes of the others.
    """

    tail: int
    whole: Mapping[int, tuple[StoredBox, ...]]
    assembled: Boxes


def encode_boxes(tail: int, boxes: Mapping[int, Sequence[StoredBox]]) -> bytes:
    rows = [
        (leaf, [(one.box.offsets, one.box.shape, one.place, one.rank, one.checksum) for one in found])
        for leaf, found in boxes.items()
    ]
    return _encode((tail, rows))


def boxes_of(record: Record) -> Boxes:
    """The boxes of leaves that are to be assembled. None, for an entry that is not sharded. Raises CorruptionError."""
    return NO_BOXES if record.boxes is None else box_table(record).assembled


def box_table(record: Record) -> BoxTable:
    """All boxes of a sharded entry. Raises CorruptionError unless they lie where the entry has bytes."""
    return _table(record.boxes or b"", record.description, record.nbytes)


@functools.lru_cache(_CACHED)
def _table(stored: bytes, description: bytes, nbytes: int) -> BoxTable:
    try:
        tail, rows = _decode(stored)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"the boxes of a sharded value can't be read: {error}") from None
    leaves = plan_of(description).leaves
    whole: dict[int, tuple[StoredBox, ...]] = {}
    assembled: dict[int, tuple[StoredBox, ...]] = {}
    for leaf, found in rows:
        if not 0 <= leaf < len(leaves):
            raise CorruptionError(f"there are boxes of leaf {leaf}, and {len(leaves)} leaves")
        at = leaves[leaf]
        boxes = tuple(StoredBox(Box(row.offsets, row.shape), row.place, row.rank, row.checksum) for row in found)
        if at.offset < tail:
            whole[leaf] = boxes
            continue
        itemsize = at.nbytes // max(count(at.shape), 1)
        for one in boxes:
            _check(one, at.shape, itemsize, min(tail, nbytes), at.name)
        assembled[leaf] = boxes
    return BoxTable(tail, whole, assembled)


def _check(one: StoredBox, shape: tuple[int, ...], itemsize: int, end: int, name: object) -> None:
    (offsets, sizes), place = one.box, one.place
    fits = len(offsets) == len(sizes) == len(shape) and all(
        start >= 0 and size > 0 and start + size <= total
        for start, size, total in zip(offsets, sizes, shape, strict=True)
    )
    if not fits or place < 0 or place + count(sizes) * itemsize > end:
        raise CorruptionError(f"a box of leaf {name} lies where the leaf, or the entry, has nothing")
