"""Each leaf of a sharded value, made of what the ranks say of it: they must agree, and hold all of it. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memstore import structure
from memstore.contents.boxes import StoredBox
from memstore.contents.parts import Look, PartLeaf
from memstore.engine import Path
from memstore.errors import PartialCommitError, ShardMismatchError
from memstore.sharding import Box, overlap, uncovered, whole

_SHOWN = 8  # boxes in one message
_CACHED = 256  # layouts


class LeafOfRank(msgspec.Struct, frozen=True, gc=False):
    """What one rank says of a leaf.

    Attributes:
        sums: the checksums of its boxes.
        data: where the data section of its segment lies.
        twin: the earlier leaf that is the very same tensor.
    """

    rank: int
    leaf: PartLeaf
    look: Look
    sums: tuple[bytes | None, ...]
    data: int
    twin: Path | None


class MergedLeaf(NamedTuple):
    """A leaf of the whole value. Of a plain one, `boxes` is the one that is stored, and `nbytes` its span."""

    leaf: PartLeaf
    boxes: tuple[StoredBox, ...]
    nbytes: int


class _Cut(NamedTuple):
    """The boxes of a leaf, each with its holders: the places of their ranks in the list, and of the box in theirs.

    Attributes:
        stored: each box with the holder whose bytes are stored.
        shared: boxes of several holders.
    """

    stored: tuple[tuple[Box, int, int], ...]
    shared: tuple[tuple[Box, list[tuple[int, int]]], ...]


class LeafMerger:
    """Merges the leaves of one value. Leaves that look alike on every rank are cut alike, which is worked out once."""

    def __init__(self, key: str, differing: dict[str, list[int]]) -> None:
        """Args: differing: gets the names of plain leaves of which ranks have other bytes, with these ranks."""
        self._key, self._differing = key, differing
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def merge(self, name: Path, found: Sequence[LeafOfRank]) -> MergedLeaf:
        """Args: found: by rank, what those say of the leaf that have it."""
        looks = tuple([id(held.look) for held in found])
        cut = self._cuts.get(looks)
        if cut is None:
            text = structure.render_path(name)
            _check_agreement(self._key, text, found)
            cut = self._cuts[looks] = _cut(self._key, text, found)
        if found[0].look.is_plain:
            return self._merge_plain(name, found, cut)
        for box, holders in cut.shared:
            _check_equal(self._key, name, box, [(found[i], number) for i, number in holders])
        boxes = tuple([_stored(found[i], box, number) for box, i, number in cut.stored])
        return MergedLeaf(found[0].leaf, boxes, 0)

    def _merge_plain(self, name: Path, found: Sequence[LeafOfRank], cut: _Cut) -> MergedLeaf:
        """The lowest rank's that has written it."""
        if not cut.stored:  # no elements
            return MergedLeaf(found[0].leaf, (), 0)
        ((box, i, _),) = cut.stored
        chosen = found[i]
        others = [one.rank for one in found if one.sums[0] != chosen.sums[0] and one.sums[0] and chosen.sums[0]]
        if others:
            self._differing[structure.render_path(name)] = [chosen.rank, *others]
        return MergedLeaf(chosen.leaf, (_stored(chosen, box, 0),), chosen.leaf.nbytes)


def _stored(held: LeafOfRank, box: Box, number: int) -> StoredBox:
    place = held.leaf.boxes[number].place
    assert place is not None, "a box that was not written"
    return StoredBox(box, held.data + place, held.rank, held.sums[number])


def _check_agreement(key: str, name: str, found: Sequence[LeafOfRank]) -> None:
    first = found[0]
    for other in found[1:]:
        for what, one, two in (
            ("shape", list(first.look.shape), list(other.look.shape)),
            ("dtype", first.look.dtype, other.look.dtype),
            ("kind", _kind(first.look), _kind(other.look)),
        ):
            if one != two:
                raise ShardMismatchError(
                    f"{key!r}: {name} has {what} {one} on rank {first.rank} and {two} on rank {other.rank}", key=key
                )


def _kind(look: Look) -> str:
    return "whole tensor" if look.is_plain else "shard"


def _cut(key: str, name: str, found: Sequence[LeafOfRank]) -> _Cut:
    """Raises ShardMismatchError if boxes overlap, and PartialCommitError unless they have all of the leaf."""
    holders: dict[Box, list[tuple[int, int]]] = {}
    for i, held in enumerate(found):
        for number, box in enumerate(held.look.boxes):
            holders.setdefault(box, []).append((i, number))
    chosen = {
        box: writers[0]
        for box, same in holders.items()
        if (writers := [(i, number) for i, number in same if found[i].look.written[number]])
    }
    boxes, shape = sorted(chosen), found[0].look.shape
    pair, missing = _compare(shape, tuple(boxes))
    if pair is not None:
        one, two = boxes[pair[0]], boxes[pair[1]]
        ranks = [found[chosen[one][0]].rank, found[chosen[two][0]].rank]
        raise ShardMismatchError(
            f"{key!r}: {name}: rank {ranks[0]} holds {_shown(one)} and rank {ranks[1]} {_shown(two)}, which overlap "
            "and are not the same box",
            key=key,
        )
    if missing:
        raise _missing(key, [(name, box) for box in missing])
    shared = tuple((box, same) for box, same in holders.items() if len(same) > 1)
    return _Cut(tuple((box, *chosen[box]) for box in boxes), shared)


@functools.lru_cache(_CACHED)
def _compare(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[tuple[int, int] | None, list[Box]]:
    """Two boxes that overlap, if any do, and what none of them has. Cached: leaves of one shape are cut alike."""
    return overlap(boxes), uncovered(whole(shape), boxes)


def _check_equal(key: str, name: Path, box: Box, same: Sequence[tuple[LeafOfRank, int]]) -> None:
    sums = [(held.rank, held.sums[number]) for held, number in same if held.sums[number] is not None]
    for rank, checksum in sums[1:]:
        if checksum != sums[0][1]:
            raise ShardMismatchError(
                f"{key!r}: {structure.render_path(name)}: ranks {sums[0][0]} and {rank} hold {_shown(box)} with "
                "different bytes: they should be replicas of each other",
                key=key,
            )


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(*box, strict=True)) + "]"


def _missing(key: str, boxes: Sequence[tuple[str, Box]]) -> PartialCommitError:
    shown = ", ".join(f"{name}{_shown(box)}" for name, box in boxes[:_SHOWN])
    more = f" and {len(boxes) - _SHOWN} more" if len(boxes) > _SHOWN else ""
    return PartialCommitError(
        f"{key!r}: all ranks have put their parts, and none holds {shown}{more}: the offsets and shapes of "
        "the shards must cover the whole tensor",
        key=key,
        missing_boxes=tuple((name, box.offsets, box.shape) for name, box in boxes),
    )
