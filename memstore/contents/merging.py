"""Merging: the parts that ranks have put become one value, in a put's publication and in a repair.

1. `_place_segments` lays the segments one behind the other in one range of addresses.
2. `_merge_trees` merges the trees by key (`structure/tree.py`); leaves and objects are told by their names.
3. `MergedLeaves` merges each leaf. All ranks must say the same shape and dtype of one that they hold in boxes. Equal
   boxes must have equal checksums, and the lowest rank that has written one provides it; others may not overlap;
   together they must cover the leaf. A leaf that ranks hold whole is the lowest rank's. Whether the others have the
   same is looked at, and one warning tells if not: the buffers of a BatchNorm differ by right.
4. It also gives the leaf its place. A leaf whose boxes adjoin lies where they lie; room for the others is behind the
   segments: see `reading.py`.
5. `_merge_objects` takes the objects of the lowest rank, with the same warning.

A repair merges what the headers of segments say (`content_of_headers`), and makes damaged headers anew (`header_of`).
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from memstore import structure
from memstore._wording import first_of
from memstore.contents.reading import (
    CHECKSUM_SIZE,
    LeafSignature,
    PartLeaf,
    RankPart,
    box_table,
    compare,
    encode_boxes,
    placed_objects,
    read_part,
)
from memstore.engine import (
    ALIGNMENT,
    HEAD_SIZE,
    PART_MARK,
    Content,
    FoundPart,
    Header,
    Leaf,
    Path,
    Record,
    SegmentExtent,
    base_after,
    belongs,
    encode_extents,
    end_of,
    names_put,
)
from memstore.errors import CorruptionError, PartialCommitError, ShardMismatchError
from memstore.sharding import Box, StoredBox, cover_of
from memstore.structure import DTYPES, Traits, TreesDifferError

# --- The merge -------------------------------------------------------------------------------------------------------


log = logging.getLogger("memstore")

_SHOWN_NAMES = 8  # names in one message
_encode_object = msgspec.msgpack.Encoder().encode


def merge(key: str, parts: Sequence[RankPart], *, with_checksums: bool) -> Content:
    """Returns what the record of the whole value says, with the checksums of its bytes if the store has them.

    Raises:
        ShardMismatchError: the parts disagree; it names the leaf and the ranks.
        PartialCommitError: no rank holds some part of a leaf.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    extents, data = _place_segments(parts)
    names, objects, tree = _merge_trees(key, parts)
    _check_wrapped_shards(key, tree)
    held = _by_name(parts, names, data)
    merged = MergedLeaves(key, end_of(extents))
    for name, found in held.items():
        merged.add(name, found)
    written = _merge_objects(parts, objects, merged.differing)
    if merged.differing:
        shown = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in merged.differing.items()]
        _warn_once(key, first_of(shown, _SHOWN_NAMES))
    same = find_ties(merged.leaves, held)
    described = structure.describe_external_tree(tree, merged.leaves, written, merged.traits, same)
    return Content(
        description=described.plan.description,
        objects=described.objects,
        nbytes=described.plan.nbytes,
        checksums=merged.checksums() if with_checksums else None,
        parts=encode_extents(extents),
        boxes=merged.encode_boxes(with_checksums=with_checksums),
    )


def _place_segments(parts: Sequence[RankPart]) -> tuple[list[SegmentExtent], dict[int, int]]:
    """Lays the segments one behind the other. Returns also, by rank, where its data section starts."""
    extents: list[SegmentExtent] = []
    data: dict[int, int] = {}
    for part in parts:
        if part.segment is not None:
            base = base_after(end_of(extents), part.segment.size)
            extents.append(msgspec.structs.replace(part.segment, base=base))
            data[part.rank] = base + part.segment.start
    return extents, data


def _by_name(parts: Sequence[RankPart], names: Sequence[Path], data: dict[int, int]) -> dict[Path, list[LeafOfRank]]:
    held: dict[Path, list[LeafOfRank]] = {name: [] for name in names}
    for part in parts:
        sums = iter(part.sums or itertools.repeat(None))
        rank, own_names = part.rank, part.said.names.tensors
        start = data.get(rank, 0)
        for name, leaf, look in zip(own_names, part.said.value.leaves, part.said.looks, strict=True):
            own = tuple(itertools.islice(sums, len(leaf.boxes)))
            twin = own_names[leaf.same] if leaf.same >= 0 else None
            held[name].append(LeafOfRank(rank, leaf, look, own, start, twin))
    return held


# --- trees and objects ------------------------------------------------------------------------------------------------


def _merge_trees(key: str, parts: Sequence[RankPart]) -> tuple[tuple[Path, ...], tuple[Path, ...], Any]:
    """Returns the names of the leaves, those of the objects, and the tree of the whole value."""
    tree = parts[0].said.tree
    merged: set[int] = set()  # parts with the same tree share it
    for part in parts[1:]:
        if id(part.said.tree) in merged:
            continue
        merged.add(id(part.said.tree))
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


def _check_wrapped_shards(key: str, tree: Any) -> None:
    """Raises ShardMismatchError and PartialCommitError, as for other leaves that ranks hold in parts."""
    for name, (pair, missing, _) in structure.check_wrapped_shards(tree):
        text = structure.render_path(name)
        if pair is not None:
            raise ShardMismatchError(
                f"{key!r}: {text}: two ranks hold parts that overlap and are not the same", key=key
            )
        if missing:
            raise _missing(key, text, missing)


def _merge_objects(parts: Sequence[RankPart], names: Sequence[Path], differing: dict[str, list[int]]) -> list[Any]:
    chosen: dict[Path, tuple[int, Any]] = {}
    for part in parts:
        objects = structure.written_objects(part.said.value.objects)
        for name, value in zip(part.said.names.objects, objects, strict=True):
            if name not in chosen:
                chosen[name] = (part.rank, value)
            elif _encode_object(chosen[name][1]) != _encode_object(value):  # by bytes: a NaN is no other NaN's equal
                differing.setdefault(structure.render_path(name), [chosen[name][0]]).append(part.rank)
    return [chosen[name][1] for name in names]


@functools.lru_cache(256)  # the buffers of a BatchNorm differ at every put
def _warn_once(key: str, text: str) -> None:
    log.warning("%r: ranks hold different values of %s; those of the lowest rank are stored", key, text)


# --- Leaves: the ranks must agree, and hold all of them --------------------------------------------------------------


_SHOWN_BOXES = 8  # boxes in one message
_OF_NOTHING = xxhash.xxh3_64_digest(b"")  # the checksum of a leaf that has no bytes
_CACHED_LAYOUTS = 256  # layouts


class LeafOfRank(msgspec.Struct, frozen=True, gc=False):
    """A leaf, as one rank describes it.

    Attributes:
        sums: the checksums of its boxes.
        data: where the data section of its segment lies.
        twin: the earlier leaf that is the very same tensor.
    """

    rank: int
    leaf: PartLeaf
    look: LeafSignature
    sums: tuple[bytes | None, ...]
    data: int
    twin: Path | None


class _Cut(NamedTuple):
    """The boxes of a leaf, each with its holders: the places of their ranks in the list, and of the box in theirs.

    Attributes:
        stored: each box with the holder whose bytes are stored.
        shared: boxes of several holders.
    """

    stored: tuple[tuple[Box, int, int], ...]
    shared: tuple[tuple[Box, list[tuple[int, int]]], ...]


class MergedLeaves:
    """The leaves of the whole value, in order, with their places.

    Leaves that look alike on every rank are cut alike, which is worked out once.

    Attributes:
        boxes: of the leaves that ranks hold in boxes, by number.
        plain: of those that they hold whole, where they are stored.
        differing: names of plain leaves of which ranks have other bytes, with these ranks.
    """

    def __init__(self, key: str, end: int) -> None:
        self._key, self._end = key, base_after(end, 0)
        self._cuts: dict[tuple[int, ...], _Cut] = {}
        self._assembled: dict[tuple[int, ...], int] = {}  # tied leaves share their room
        self.leaves: list[Leaf] = []
        self.traits: list[Traits] = []
        self.boxes: dict[int, tuple[StoredBox, ...]] = {}
        self.plain: dict[int, StoredBox] = {}
        self.differing: dict[str, list[int]] = {}

    def add(self, name: Path, found: Sequence[LeafOfRank]) -> None:
        """Merges what the ranks that have a leaf say of it, in the order of the ranks."""
        looks = tuple([id(held.look) for held in found])
        cut = self._cuts.get(looks)
        if cut is None:
            text = structure.render_path(name)
            _check_agreement(self._key, text, found)
            cut = self._cuts[looks] = _cut(self._key, text, found)
        leaf, nbytes = found[0].leaf, structure.count(found[0].leaf.shape) * DTYPES[found[0].leaf.dtype].itemsize
        if leaf.is_plain and cut.stored:  # the lowest rank's that has written it
            ((_, i, _),) = cut.stored
            chosen = found[i]
            leaf, nbytes = chosen.leaf, chosen.leaf.nbytes
            others = [one.rank for one in found if one.sums[0] != chosen.sums[0] and one.sums[0] and chosen.sums[0]]
            if others:
                self.differing[structure.render_path(name)] = [chosen.rank, *others]
        elif not leaf.is_plain:
            for box, holders in cut.shared:
                _check_equal(self._key, name, box, [(found[i], number) for i, number in holders])
        boxes = tuple([_stored(found[i], box, number) for box, i, number in cut.stored])
        laid = Leaf(name, leaf.dtype, leaf.shape, leaf.stride, boxes[0].place if boxes else 0, nbytes)
        if boxes and leaf.is_plain:
            self.plain[len(self.leaves)] = boxes[0]
        elif boxes:
            self.boxes[len(self.leaves)] = boxes
            if len(boxes) > 1 and not structure.lies_in_order(laid, boxes):
                laid = msgspec.structs.replace(laid, offset=self._room(boxes, nbytes))
        self.leaves.append(laid)
        self.traits.append(Traits(*structure.read_flags(leaf.flags), None))

    def _room(self, boxes: Sequence[StoredBox], nbytes: int) -> int:
        places = (nbytes, *[box.place for box in boxes])
        if places not in self._assembled:
            self._assembled[places] = self._end
            self._end = -(-(self._end + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._assembled[places]

    def encode_boxes(self, *, with_checksums: bool) -> bytes:
        ranks = {leaf: one.rank for leaf, one in self.plain.items()}
        return encode_boxes(self.boxes, ranks, with_checksums=with_checksums)

    def checksums(self) -> bytes:
        """Returns the checksums of the plain leaves, in the order of all leaves. Boxes have theirs in the table."""
        sums = [self.plain[number].checksum if number in self.plain else None for number in range(len(self.leaves))]
        return b"".join(one or _OF_NOTHING for one in sums)


def _stored(held: LeafOfRank, box: Box, number: int) -> StoredBox:
    place = held.leaf.boxes[number].place
    assert place is not None, "a box that was not written"
    return StoredBox(box, held.data + place, held.rank, held.sums[number])


def _check_agreement(key: str, name: str, found: Sequence[LeafOfRank]) -> None:
    first, kinds = found[0], ("shard", "whole tensor")
    for other in found[1:]:
        for what, one, two in (
            ("shape", list(first.look.shape), list(other.look.shape)),
            ("dtype", first.look.dtype, other.look.dtype),
            ("kind", kinds[first.look.is_plain], kinds[other.look.is_plain]),
        ):
            if one != two:
                raise ShardMismatchError(
                    f"{key!r}: {name} has {what} {one} on rank {first.rank} and {two} on rank {other.rank}", key=key
                )


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
    pair, missing, _ = _cover(shape, tuple(boxes))
    if pair is not None:
        one, two = boxes[pair[0]], boxes[pair[1]]
        ranks = [found[chosen[one][0]].rank, found[chosen[two][0]].rank]
        raise ShardMismatchError(
            f"{key!r}: {name}: rank {ranks[0]} holds [{one.text}] and rank {ranks[1]} [{two.text}], which overlap "
            "and are not the same box",
            key=key,
        )
    if missing:
        raise _missing(key, name, missing)
    shared = tuple((box, same) for box, same in holders.items() if len(same) > 1)
    return _Cut(tuple((box, *chosen[box]) for box in boxes), shared)


_cover = functools.lru_cache(_CACHED_LAYOUTS)(cover_of)  # leaves of one shape are cut alike


def _check_equal(key: str, name: Path, box: Box, same: Sequence[tuple[LeafOfRank, int]]) -> None:
    sums = [(held.rank, held.sums[number]) for held, number in same if held.sums[number] is not None]
    for rank, checksum in sums[1:]:
        if checksum != sums[0][1]:
            raise ShardMismatchError(
                f"{key!r}: {structure.render_path(name)}: ranks {sums[0][0]} and {rank} hold [{box.text}] with "
                "different bytes: they should be replicas of each other",
                key=key,
            )


def _missing(key: str, name: str, boxes: Sequence[Box]) -> PartialCommitError:
    shown = first_of([f"{name}[{box.text}]" for box in boxes], _SHOWN_BOXES)
    return PartialCommitError(
        f"{key!r}: all ranks have put their parts, and none holds {shown}: the offsets and shapes of "
        "the shards must cover the whole tensor",
        key=key,
        missing_boxes=tuple((name, box.offsets, box.shape) for box in boxes),
    )


def find_ties(leaves: Sequence[Leaf], held: dict[Path, list[LeafOfRank]]) -> dict[int, int]:
    """Finds by leaf the earlier one that is the very same tensor on a rank that holds both, and lies where it lies."""
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


# --- Repair: headers made anew, and values of headers ----------------------------------------------------------------


def header_of(store: str, key: str, record: Record, content: memoryview) -> bytes | None:
    """Makes the header that a put wrote anew of its record, for a file of that content whose header is damaged.

    None if nothing shows that the content is that put's. Raises CorruptionError if it isn't.
    """
    if record.is_mutable:  # nothing tells whether the bytes are its rows
        return None
    plan = structure.plan_of(record.description)
    memory = np.frombuffer(content, np.uint8, record.nbytes, record.start)
    if plan.nbytes != record.nbytes:
        return None
    if record.checksums is None and not _names_put(content, store, record.put_id, record.version):
        return None
    compare(record, plan, memory)
    objects = record.objects
    if record.objects_checksum is not None:
        objects = placed_objects(record, key, store, content)
    header = Header(key, store, plan.description, objects, plan.header, checksums=len(record.checksums or b""))
    slack = record.size - record.start - record.nbytes
    if header.nbytes != record.start or slack < 0:
        return None
    return bytes(header.finish(record.put_id, record.nbytes, slack, record.checksums))


def header_of_part(store: str, key: str, record: Record, extent: SegmentExtent, content: memoryview) -> bytes | None:
    """Makes the header of one segment of a sharded value anew. The record alone can tell its value from then on.

    What its rank said of the value is nowhere else, so the header says nothing in its place, and calls all of the data
    slack. As long as there is the record, that is enough.
    """
    if record.checksums is None and not _names_put(content, store, extent.put_id, record.version):
        return None
    if not _fits_checksums(record, extent, content):
        raise CorruptionError("the bytes of a part don't fit the checksums of its boxes")
    header = Header(key, store, PART_MARK, b"", b"", room=extent.start)
    if header.nbytes != extent.start:
        return None
    return bytes(header.finish(extent.put_id, 0, extent.size - extent.start, None))


def _names_put(content: memoryview, store: str, put_id: int, version: int) -> bool:
    head = bytes(content[:HEAD_SIZE])
    return belongs(head, put_id, store) or names_put(head, put_id, version)


def _fits_checksums(record: Record, extent: SegmentExtent, content: memoryview) -> bool:
    """Returns whether all that the record knows to lie in a segment fits its checksum, where there is one."""
    plan, table, stored = structure.plan_of(record.description), box_table(record), record.checksums
    places = [
        (box.place, structure.box_bytes(plan.leaves[leaf], box), box.checksum)
        for leaf, boxes in table.boxes.items()
        for box in boxes
    ]
    for leaf in table.ranks:
        checksum = stored and stored[leaf * CHECKSUM_SIZE : (leaf + 1) * CHECKSUM_SIZE]
        places.append((plan.leaves[leaf].offset, plan.leaves[leaf].nbytes, checksum))
    for place, nbytes, checksum in places:
        start = place - extent.base
        if not 0 <= start < extent.size or checksum is None:
            continue
        if start + nbytes > extent.size or xxhash.xxh3_64_digest(content[start : start + nbytes]) != checksum:
            return False
    return True


def content_of_headers(key: str, parts: Sequence[FoundPart], *, of_all_ranks: bool = False) -> Content | None:
    """Merges parts of which only their segments are left. Returns None if they are not all of one value.

    A rank that held no bytes, and nothing else that others may lack, has no segment: see `draft_part`.

    Args:
        of_all_ranks: None, too, if a rank has no segment among them: it may have put something on another host.
    """
    try:
        found = [_read_found(part) for part in parts]
        if of_all_ranks and {part.rank for part in found} != set(range(found[0].said.value.world_size)):
            return None
        content = merge(key, found, with_checksums=all(part.checksums is not None for part in parts))
    except (CorruptionError, ShardMismatchError, PartialCommitError) as error:
        log.warning("%r can't be made of the headers of its parts: %s", key, error)
        return None
    _warn_of_silent_ranks(key, found)
    return content


def _read_found(part: FoundPart) -> RankPart:
    said = read_part(part.said, part.extent)
    if part.checksums is None:
        return said
    written = [box.place is not None for leaf in said.said.value.leaves for box in leaf.boxes]
    if len(part.checksums) != CHECKSUM_SIZE * sum(written):
        raise CorruptionError("the header of a part has checksums of other boxes than it names")
    sums = (part.checksums[at : at + CHECKSUM_SIZE] for at in range(0, len(part.checksums), CHECKSUM_SIZE))
    return said._replace(sums=tuple(next(sums) if is_written else None for is_written in written))


def _warn_of_silent_ranks(key: str, found: Sequence[RankPart]) -> None:
    silent = set(range(found[0].said.value.world_size)) - {part.rank for part in found}
    if silent:
        log.warning(
            "%r is back without what only ranks %s held, if they held any: empty containers, and in stores of older "
            "versions objects and empty tensors, since who puts no bytes may have no file",
            *(key, ", ".join(map(str, sorted(silent)))),
        )
