"""Each leaf of a sharded value, made of what the ranks say of it: they must agree, and hold all of it. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from memstore.contents.boxes import StoredBox
from memstore.contents.parts import PartBox, PartLeaf
from memstore.engine import Path
from memstore.errors import PartialCommitError, ShardMismatchError
from memstore.sharding import Box, overlap, uncovered, whole

_SHOWN = 8  # boxes in one message
_CACHED = 256  # layouts


class LeafOfRank(NamedTuple):
    """What one rank says of a leaf.

    Attributes:
        sums: the checksums of its boxes.
        data: where the data section of its segment lies.
        twin: the earlier leaf that is the very same tensor.
    """

    rank: int
    leaf: PartLeaf
    sums: tuple[bytes | None, ...]
    data: int
    twin: Path | None


class MergedLeaf(NamedTuple):
    """A leaf of the whole value. Of a plain one, `boxes` is the one that is stored, and `nbytes` its span."""

    leaf: PartLeaf
    boxes: tuple[StoredBox, ...]
    nbytes: int


def check_agreement(key: str, name: str, found: Sequence[LeafOfRank]) -> None:
    first = found[0]
    for other in found[1:]:
        for what, one, two in (
            ("shape", list(first.leaf.shape), list(other.leaf.shape)),
            ("dtype", first.leaf.dtype, other.leaf.dtype),
            ("kind", _kind(first.leaf), _kind(other.leaf)),
        ):
            if one != two:
                raise ShardMismatchError(
                    f"{key!r}: {name} has {what} {one} on rank {first.rank} and {two} on rank {other.rank}", key=key
                )


def _kind(leaf: PartLeaf) -> str:
    return "whole tensor" if leaf.is_plain else "shard"


def merge_plain(key: str, name: str, found: Sequence[LeafOfRank], differing: dict[str, list[int]]) -> MergedLeaf:
    """The lowest rank's that has written it."""
    if not found[0].leaf.boxes:  # no elements
        return MergedLeaf(found[0].leaf, (), 0)
    writers = [one for one in found if one.leaf.boxes[0].place is not None]
    if not writers:
        raise _missing(key, [(name, whole(found[0].leaf.shape))])
    chosen = writers[0]
    others = [one.rank for one in found if one.sums[0] != chosen.sums[0] and one.sums[0] and chosen.sums[0]]
    if others:
        differing[name] = [chosen.rank, *others]
    return MergedLeaf(chosen.leaf, (_stored(chosen, chosen.leaf.boxes[0], 0),), chosen.leaf.nbytes)


def _stored(held: LeafOfRank, box: PartBox, number: int) -> StoredBox:
    assert box.place is not None, "a box that was not written"
    return StoredBox(Box(box.offsets, box.shape), held.data + box.place, held.rank, held.sums[number])


def merge_boxes(key: str, name: str, found: Sequence[LeafOfRank]) -> MergedLeaf:
    holders: dict[Box, list[tuple[LeafOfRank, int]]] = {}
    for held in found:
        for number, box in enumerate(held.leaf.boxes):
            holders.setdefault(Box(box.offsets, box.shape), []).append((held, number))
    chosen: dict[Box, StoredBox] = {}
    for box, same in holders.items():
        _check_equal(key, name, box, same)
        for held, number in same:
            if held.leaf.boxes[number].place is not None:
                chosen[box] = _stored(held, held.leaf.boxes[number], number)
                break
    boxes = sorted(chosen)
    pair, missing = _compare(tuple(found[0].leaf.shape), tuple(boxes))
    if pair is not None:
        one, two = boxes[pair[0]], boxes[pair[1]]
        ranks = [chosen[one].rank, chosen[two].rank]
        raise ShardMismatchError(
            f"{key!r}: {name}: rank {ranks[0]} holds {_shown(one)} and rank {ranks[1]} {_shown(two)}, which overlap "
            "and are not the same box",
            key=key,
        )
    if missing:
        raise _missing(key, [(name, box) for box in missing])
    return MergedLeaf(found[0].leaf, tuple(chosen[box] for box in boxes), 0)


@functools.lru_cache(_CACHED)
def _compare(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[tuple[int, int] | None, list[Box]]:
    """Two boxes that overlap, if any do, and what none of them has. Cached: leaves of one shape are cut alike."""
    return overlap(boxes), uncovered(whole(shape), boxes)


def _check_equal(key: str, name: str, box: Box, same: Sequence[tuple[LeafOfRank, int]]) -> None:
    sums = [(held.rank, held.sums[number]) for held, number in same if held.sums[number] is not None]
    for rank, checksum in sums[1:]:
        if checksum != sums[0][1]:
            raise ShardMismatchError(
                f"{key!r}: {name}: ranks {sums[0][0]} and {rank} hold {_shown(box)} with different bytes: they should "
                "be replicas of each other",
                key=key,
            )


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(*box, strict=True)) + "]"


def _missing(key: str, boxes: Sequence[tuple[str, Box]]) -> PartialCommitError:
    shown = ", ".join(f"{name}{_shown(box)}" for name, box in boxes[:_SHOWN])
    more = f" and {len(boxes) - _SHOWN} more" if len(boxes) > _SHOWN else ""
    return PartialCommitError(
        f"{key!r}: all ranks have put their parts, and none holds {shown}{more}",
        key=key,
        missing_boxes=tuple((name, box.offsets, box.shape) for name, box in boxes),
    )
