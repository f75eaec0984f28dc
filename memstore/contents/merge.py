"""The parts of an attempt, merged into one value: its tree, its leaves with their boxes, its objects. Pure.

1. Trees merge by key (`structure/tree/merge.py`); leaves and objects are told by their names.
2. A leaf of which ranks hold boxes: all ranks must say the same shape and dtype. Equal boxes must have equal checksums,
   and the lowest rank that has written one provides it; others may not overlap; together they must cover the leaf.
3. A leaf that ranks hold whole, as a plain tensor or object, is the lowest rank's. Whether the others have the same is
   looked at, and one warning tells if not: the buffers of a BatchNorm differ by right.
4. The segments are laid one behind the other in one range of addresses. A leaf whose boxes adjoin there lies where they
   lie; room for the others is behind the segments: see `boxes.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from memstore import structure
from memstore.contents.boxes import StoredBox, encode_boxes
from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.contents.parts import PartBox, PartLeaf, RankPart
from memstore.engine import ALIGNMENT, Content, Leaf, Path, SegmentExtent, base_after, encode_extents, end_of
from memstore.errors import PartialCommitError, ShardMismatchError
from memstore.sharding import Box, overlap, uncovered, whole
from memstore.structure import DTYPES, Traits, TreesDifferError

log = logging.getLogger("memstore")

_SHOWN = 8  # names in one message


class _Held(NamedTuple):
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


def merge(key: str, parts: Sequence[RankPart], *, with_checksums: bool) -> Content:
    """What the record of the whole value says, with the checksums of its bytes if the store has them.

    Raises:
        ShardMismatchError: the parts disagree; it names the leaf and the ranks.
        PartialCommitError: no rank holds some part of a leaf.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    extents, data = _place_segments(parts)
    names, objects, tree = _merge_trees(key, parts)
    held = _by_name(parts, names, data)
    laid_out = _Layout(end_of(extents))
    differing: dict[str, list[int]] = {}
    for name, found in held.items():
        text = structure.render_path(name)
        _check_agreement(key, text, found)
        merged = _plain(key, text, found, differing) if found[0].leaf.is_plain else _sharded(key, text, found)
        laid_out.add(merged, name)
    written = _merge_objects(parts, objects, differing)
    _warn(key, differing)
    same = _ties(laid_out.leaves, held)
    described = structure.describe_external_tree(tree, laid_out.leaves, written, laid_out.traits, same)
    return Content(
        description=described.plan.description,
        objects=described.objects,
        nbytes=described.plan.nbytes,
        checksums=laid_out.checksums() if with_checksums else None,
        parts=encode_extents(extents),
        boxes=laid_out.encode_boxes(with_checksums=with_checksums),
    )


def _place_segments(parts: Sequence[RankPart]) -> tuple[list[SegmentExtent], dict[int, int]]:
    """The segments, one behind the other; and by rank, where its data section starts."""
    extents: list[SegmentExtent] = []
    data: dict[int, int] = {}
    for part in parts:
        if part.segment is not None:
            base = base_after(end_of(extents), part.segment.size)
            extents.append(msgspec.structs.replace(part.segment, base=base))
            data[part.rank] = base + part.segment.start
    return extents, data


def _by_name(parts: Sequence[RankPart], names: Sequence[Path], data: dict[int, int]) -> dict[Path, list[_Held]]:
    held: dict[Path, list[_Held]] = {name: [] for name in names}
    for part in parts:
        sums = iter(part.sums or itertools.repeat(None))
        for name, leaf in zip(part.names.tensors, part.said.leaves, strict=True):
            own = tuple(itertools.islice(sums, len(leaf.boxes)))
            twin = part.names.tensors[leaf.same] if leaf.same >= 0 else None
            held[name].append(_Held(part.rank, leaf, own, data.get(part.rank, 0), twin))
    return held


# --- trees and objects ------------------------------------------------------------------------------------------------


def _merge_trees(key: str, parts: Sequence[RankPart]) -> tuple[tuple[Path, ...], tuple[Path, ...], Any]:
    """The names of the leaves, those of the objects, and the tree of the whole value."""
    tree = parts[0].said.tree
    for part in parts[1:]:
        try:
            tree = structure.merge_trees(tree, part.said.tree)
        except TreesDifferError as error:
            found, other = error.found
            raise ShardMismatchError(
                f"{key!r}: {structure.render_path(error.path)} is {found} on rank {parts[0].rank} and {other} on rank "
                f"{part.rank}: dicts merge by key, all else must agree",
                key=key,
            ) from None
    names = structure.tree_names(tree)
    return names.tensors, names.objects, tree


def _merge_objects(parts: Sequence[RankPart], names: Sequence[Path], differing: dict[str, list[int]]) -> list[Any]:
    chosen: dict[Path, tuple[int, Any]] = {}
    for part in parts:
        objects = structure.written_objects(part.said.objects)
        for name, value in zip(part.names.objects, objects, strict=True):
            if name not in chosen:
                chosen[name] = (part.rank, value)
            elif chosen[name][1] != value:
                differing.setdefault(structure.render_path(name), [chosen[name][0]]).append(part.rank)
    return [chosen[name][1] for name in names]


def _warn(key: str, differing: dict[str, list[int]]) -> None:
    if not differing:
        return
    shown = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in list(differing.items())[:_SHOWN]]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    _warn_once(key, ", ".join(shown) + more)


@functools.lru_cache(256)  # the buffers of a BatchNorm differ at every put
def _warn_once(key: str, text: str) -> None:
    log.warning("%r: ranks hold different values of %s; those of the lowest rank are stored", key, text)


# --- leaves -----------------------------------------------------------------------------------------------------------


class _Merged(NamedTuple):
    """A leaf of the whole value. Of a plain one, `boxes` is the one that is stored, and `nbytes` its span."""

    leaf: PartLeaf
    boxes: tuple[StoredBox, ...]
    nbytes: int


def _check_agreement(key: str, name: str, found: Sequence[_Held]) -> None:
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


def _plain(key: str, name: str, found: Sequence[_Held], differing: dict[str, list[int]]) -> _Merged:
    """The lowest rank's that has written it."""
    if not found[0].leaf.boxes:  # no elements
        return _Merged(found[0].leaf, (), 0)
    writers = [one for one in found if one.leaf.boxes[0].place is not None]
    if not writers:
        raise _missing(key, [(name, whole(found[0].leaf.shape))])
    chosen = writers[0]
    others = [one.rank for one in found if one.sums[0] != chosen.sums[0] and one.sums[0] and chosen.sums[0]]
    if others:
        differing[name] = [chosen.rank, *others]
    return _Merged(chosen.leaf, (_stored(chosen, chosen.leaf.boxes[0], 0),), chosen.leaf.nbytes)


def _stored(held: _Held, box: PartBox, number: int) -> StoredBox:
    assert box.place is not None, "a box that was not written"
    return StoredBox(Box(box.offsets, box.shape), held.data + box.place, held.rank, held.sums[number])


def _sharded(key: str, name: str, found: Sequence[_Held]) -> _Merged:
    holders: dict[Box, list[tuple[_Held, int]]] = {}
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
    pair = overlap(boxes)
    if pair is not None:
        one, two = boxes[pair[0]], boxes[pair[1]]
        ranks = [chosen[one].rank, chosen[two].rank]
        raise ShardMismatchError(
            f"{key!r}: {name}: rank {ranks[0]} holds {_shown(one)} and rank {ranks[1]} {_shown(two)}, which overlap "
            "and are not the same box",
            key=key,
        )
    missing = uncovered(whole(found[0].leaf.shape), boxes)
    if missing:
        raise _missing(key, [(name, box) for box in missing])
    return _Merged(found[0].leaf, tuple(chosen[box] for box in boxes), 0)


def _check_equal(key: str, name: str, box: Box, same: Sequence[tuple[_Held, int]]) -> None:
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


# --- where leaves lie -------------------------------------------------------------------------------------------------


class _Layout:
    """The leaves of the whole value, in order, with their places."""

    def __init__(self, end: int) -> None:
        self._end = base_after(end, 0)
        self.leaves: list[Leaf] = []
        self.traits: list[Traits] = []
        self.boxes: dict[int, tuple[StoredBox, ...]] = {}
        self.plain: dict[int, StoredBox] = {}
        self._assembled: dict[tuple[int, ...], int] = {}  # tied leaves share their room

    def add(self, merged: _Merged, name: Path) -> None:
        leaf, boxes = merged.leaf, merged.boxes
        nbytes = merged.nbytes or structure.count(leaf.shape) * DTYPES[leaf.dtype].itemsize
        offset, number = 0, len(self.leaves)
        if boxes and leaf.is_plain:
            self.plain[number], offset = boxes[0], boxes[0].place
        elif boxes:
            self.boxes[number] = boxes
            offset = boxes[0].place if self._adjoin(leaf, boxes) else self._room(boxes, nbytes)
        self.leaves.append(Leaf(name, leaf.dtype, leaf.shape, leaf.stride, offset, nbytes))
        kind, requires_grad = structure.read_flags(leaf.flags)
        self.traits.append(Traits(kind, requires_grad, None))

    def encode_boxes(self, *, with_checksums: bool) -> bytes:
        boxes = self.boxes
        if not with_checksums:
            boxes = {leaf: tuple(one._replace(checksum=None) for one in found) for leaf, found in boxes.items()}
        return encode_boxes(boxes, {leaf: one.rank for leaf, one in self.plain.items()})

    def checksums(self) -> bytes:
        """Of the plain leaves, in the order of all leaves. Boxes have theirs in the table."""
        sums = [self.plain[number].checksum if number in self.plain else None for number in range(len(self.leaves))]
        return b"".join(one or bytes(CHECKSUM_SIZE) for one in sums)

    def _adjoin(self, leaf: PartLeaf, boxes: Sequence[StoredBox]) -> bool:
        """Whether the boxes lie one behind the other, as the whole tensor would."""
        if len(boxes) == 1:
            return True
        place, row = boxes[0].place, DTYPES[leaf.dtype].itemsize * structure.count(leaf.shape[1:])
        start = 0
        for box, at, *_ in boxes:
            if box.shape[1:] != leaf.shape[1:] or (at, box.offsets[0]) != (place + start * row, start):
                return False
            start += box.shape[0]
        return True

    def _room(self, boxes: Sequence[StoredBox], nbytes: int) -> int:
        places = tuple(box.place for box in boxes)
        if places not in self._assembled:
            self._assembled[places] = self._end
            self._end = -(-(self._end + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._assembled[places]


def _ties(leaves: Sequence[Leaf], held: dict[Path, list[_Held]]) -> dict[int, int]:
    """By leaf, the earlier one that is the very same tensor on a rank that holds both, and lies where it lies."""
    numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
    same: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        for one in held[leaf.name]:
            twin = -1 if one.twin is None else numbers[one.twin]
            if (
                0 <= twin < number
                and twin not in same
                and msgspec.structs.replace(leaf, name=leaves[twin].name) == leaves[twin]
            ):
                same[number] = twin
                break
    return same
