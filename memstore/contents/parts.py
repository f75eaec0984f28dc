"""Parts of a sharded value: what a rank says of the value, read and checked; and the table of all boxes in a record.

What a part says stands in the header of its segment, so that a repair can merge parts without the catalog, and, with
the checksums of its boxes, in the catalog until the attempt is published (`merging.py`). It is made in `writing.py`.

A record has the boxes as msgpack of `[[[leaf, [[offsets, shape, place, checksum or nil, rank], ...]], ...], [[leaf,
rank], ...]]`: first the leaves of which ranks have put boxes, then those that a rank has put as plain tensors. Places
count in the entry's data section, which is one range of addresses with all segments (`engine/format/records.py`).
Behind the last segment it has room where nothing is stored: there a get assembles leaves whose boxes don't lie in
order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from memstore import structure
from memstore._parsing import UNDECODABLE
from memstore.engine import PART_MARK, Record, SegmentExtent
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.sharding import MOST_DIMENSIONS, NO_BOXES, Box, Boxes, StoredBox, whole
from memstore.structure import DTYPES, LeafNames, MalformedError, Tree, check_boxes, plan_of, require

# --- What a rank says of the value -----------------------------------------------------------------------------------


CHECKSUM_SIZE = 8  # bytes of xxh3-64, a leaf or box
_CACHED_PARTS = 64  # of what parts say
_MOST_RANKS = 1 << 20
_MOST_BYTES = 1 << 62


class PartBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box that the rank holds. `place` is that of its bytes in its segment's data section; None: it wrote none."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int | None


class PartLeaf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leaf of the whole value, as this rank knows it. `nbytes` is the span of a plain leaf, in its segment."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    flags: int
    is_plain: bool
    same: int  # the earlier leaf that is the very same tensor; -1: none
    nbytes: int
    boxes: tuple[PartBox, ...]


class PartValue(msgspec.Struct, frozen=True, array_like=True):
    """The whole value, as a part describes it. The tree is left encoded: most ranks have the same."""

    rank: int
    world_size: int
    tree: msgspec.Raw
    leaves: tuple[PartLeaf, ...]
    objects: bytes


class LeafSignature(NamedTuple):
    """The facts of a leaf on this rank: all but where its bytes are. Leaves that look alike share one.

    Attributes:
        written: by box, whether this rank has written it.
    """

    dtype: str
    shape: tuple[int, ...]
    is_plain: bool
    boxes: tuple[Box, ...]
    written: tuple[bool, ...]


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # devices, in trees
_decode_tree = msgspec.msgpack.Decoder().decode
_decode = msgspec.msgpack.Decoder(PartValue).decode
_decode_content = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes | None, ...]]).decode


class SaidPart(NamedTuple):
    """The description that a part gives, taken apart.

    Attributes:
        tree: not to be changed: other parts have it too.
        names: of the leaves that it says something of.
        looks: of its tensors.
    """

    value: PartValue
    tree: Tree
    names: LeafNames
    looks: tuple[LeafSignature, ...]


class RankPart(NamedTuple):
    """A part that was put.

    Attributes:
        segment: where its bytes are; None if it has none.
        sums: the checksums of its boxes, in the order of leaves and boxes; empty where nobody knows them, as in a
            repair.
    """

    said: SaidPart
    segment: SegmentExtent | None
    sums: tuple[bytes | None, ...] = ()

    @property
    def rank(self) -> int:
        return self.said.value.rank


def encode_said(rank: int, world_size: int, tree: Tree, leaves: tuple[PartLeaf, ...], objects: bytes) -> bytes:
    return PART_MARK + _encode(PartValue(rank, world_size, msgspec.Raw(_encode(tree)), leaves, objects))


def read_part(said: bytes, segment: SegmentExtent | None, sums: tuple[bytes | None, ...] = ()) -> RankPart:
    """Reads a part by what the header of its segment says. Raises CorruptionError unless a put could have said it."""
    try:
        read = _read_said(said, 0 if segment is None else segment.size - segment.start)
        require(not sums or len(sums) == sum(len(look.boxes) for look in read.looks), "other checksums than boxes")
        require(all(one is None or len(one) == CHECKSUM_SIZE for one in sums), "a checksum of another size")
    except (*UNDECODABLE, MalformedError, UnsupportedValueError) as error:
        raise CorruptionError(f"what a part says of its value can't be read: {error}") from None
    return RankPart(read, segment, sums)


@functools.lru_cache(_CACHED_PARTS)
def _read_said(said: bytes, nbytes: int) -> SaidPart:
    """Raises MalformedError unless all of it fits a segment with so many bytes. Cached: the next step says the same."""
    value = _decode(said.removeprefix(PART_MARK))
    tree, names = _read_tree(bytes(value.tree))
    require(0 <= value.rank < value.world_size <= _MOST_RANKS, "a rank that can't be")
    require(len(names.tensors) == len(value.leaves), "other leaves than the tree has")
    objects = structure.written_objects(value.objects)
    require(len(names.objects) == len(objects), "other objects than the tree has")
    return SaidPart(value, tree, names, _signatures_of(value, nbytes))


@functools.lru_cache(_CACHED_PARTS)
def _read_tree(encoded: bytes) -> tuple[Tree, LeafNames]:
    tree = _decode_tree(encoded)
    return tree, structure.tree_names(tree)


def _signatures_of(value: PartValue, nbytes: int) -> tuple[LeafSignature, ...]:
    """Checks every leaf; what is the same for many, once."""
    looks: list[LeafSignature] = []
    known: dict[Any, tuple[LeafSignature, int, list[int]]] = {}
    for number, leaf in enumerate(value.leaves):
        require(-1 <= leaf.same < number, "a leaf that is said to be the same as no earlier leaf")
        boxes = tuple([(box.offsets, box.shape, box.place is None) for box in leaf.boxes])
        alike = (leaf.dtype, leaf.shape, leaf.stride, leaf.flags, leaf.is_plain, leaf.nbytes, boxes)
        found = known.get(alike)
        if found is None:
            found = known[alike] = _check_leaf(leaf, value.rank)
        look, item, sizes = found
        for box, size in zip(leaf.boxes, sizes, strict=True):
            place = box.place
            if place is not None and not (0 <= place <= nbytes - size and place % item == 0):
                raise MalformedError("a box that lies outside of its segment")
        looks.append(look)
    return tuple(looks)


def _check_leaf(leaf: PartLeaf, rank: int) -> tuple[LeafSignature, int, list[int]]:
    """Returns a leaf's look, the bytes of an element, and those of each box. Raises MalformedError."""
    stride = None if leaf.stride is None else list(leaf.stride)
    read, _ = structure.read_leaf((), [leaf.dtype, list(leaf.shape), 0, stride, leaf.flags])
    if not leaf.is_plain:
        require(stride is None and len(leaf.shape) <= MOST_DIMENSIONS, "a leaf that can't be in boxes")
    else:
        require(len(leaf.boxes) == (0 not in leaf.shape), "a plain leaf in boxes")
    boxes = tuple(Box(box.offsets, box.shape) for box in leaf.boxes)
    sizes: list[int] = []
    for box, held in zip(boxes, leaf.boxes, strict=True):
        require(not leaf.is_plain or box == whole(leaf.shape), "a plain leaf in boxes")
        stored = StoredBox(box, 0, rank, None)
        structure.check_box(read, stored, _MOST_BYTES)
        sizes.append(read.nbytes if leaf.is_plain else structure.box_bytes(read, stored))
        is_written = held.place is not None
        require(not (leaf.is_plain and is_written) or leaf.nbytes == sizes[-1], "a plain leaf of another size")
    written = tuple(box.place is not None for box in leaf.boxes)
    return LeafSignature(leaf.dtype, leaf.shape, leaf.is_plain, boxes, written), DTYPES[leaf.dtype].itemsize, sizes


def read_content(content: bytes, segment: SegmentExtent | None) -> RankPart:
    """Reads a part by what the catalog keeps of it. Raises CorruptionError."""
    try:
        said, sums = _decode_content(content)
    except UNDECODABLE as error:
        raise CorruptionError(f"what the catalog keeps of a part can't be read: {error}") from None
    return read_part(said, segment, sums)


def encode_content(said: bytes, sums: list[bytes | None]) -> bytes:
    """Encodes what the catalog keeps of a part, as `read_content` takes it."""
    return _encode((said, sums))


# --- The boxes of a record -------------------------------------------------------------------------------------------


_CACHED_TABLES = 64  # tables


class BoxTable(NamedTuple):
    """The boxes and plain tensors that the ranks have put.

    Attributes:
        boxes: by leaf; they may lie in order, so that the leaf needs no assembling.
        ranks: by leaf that was put as a plain tensor, who put it.
    """

    boxes: Boxes
    ranks: Mapping[int, int]


class _BoxRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    checksum: bytes | None
    rank: int


_encode_table = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(tuple[list[tuple[int, tuple[_BoxRow, ...]]], list[tuple[int, int]]]).decode


def encode_boxes(
    boxes: Mapping[int, Sequence[StoredBox]], ranks: Mapping[int, int], *, with_checksums: bool = True
) -> bytes:
    rows = [
        (leaf, [(*box, place, checksum if with_checksums else None, rank) for box, place, rank, checksum in found])
        for leaf, found in boxes.items()
    ]
    return _encode_table((rows, list(ranks.items())))


def boxes_of(record: Record) -> Boxes:
    """Returns the boxes by leaf; none, for an entry that isn't sharded.

    Raises CorruptionError unless they are all of their leaves.
    """
    return NO_BOXES if record.boxes is None else _checked_boxes(record.boxes, record.description, record.nbytes)


def box_table(record: Record) -> BoxTable:
    """Reads the table of any entry, but doesn't look whether the boxes are those of its leaves.

    Raises CorruptionError.
    """
    return BoxTable(NO_BOXES, {}) if record.boxes is None else _read_table(record.boxes)


@functools.lru_cache(_CACHED_TABLES)
def _checked_boxes(stored: bytes, description: bytes, nbytes: int) -> Boxes:
    boxes = _read_table(stored).boxes
    check_boxes(plan_of(description), boxes, nbytes)
    return boxes


@functools.lru_cache(_CACHED_TABLES)
def _read_table(stored: bytes) -> BoxTable:
    try:
        rows, ranks = _decode_table(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the boxes of a sharded value can't be read: {error}") from None
    box = functools.lru_cache(None)(Box)  # leaves of one shape are mostly cut alike
    boxes = {
        leaf: tuple([StoredBox(box(row.offsets, row.shape), row.place, row.rank, row.checksum) for row in found])
        for leaf, found in rows
    }
    return BoxTable(boxes, dict(ranks))
