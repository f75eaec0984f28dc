"""A rank's part of a sharded put: what it says of the value, and the draft of the bytes that it holds.

What a part says stands in the header of its segment, so that a repair can merge parts without the catalog, and, with
the checksums of its boxes, in the catalog until the attempt is published (`merge.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from memstore import modes, structure
from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.engine import (
    PART_MARK,
    Content,
    Draft,
    Header,
    Path,
    Root,
    SegmentExtent,
    WritableMemory,
    check_header,
)
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.sharding import Box, StoredBox, whole
from memstore.structure import HeldLeaf, HeldValue, LeafNames, MalformedError, require

_CACHED = 64  # of what parts say
_MOST_RANKS = 1 << 20
_MOST_DIMENSIONS = 64  # of a leaf in boxes, as in torch's own operators
_MOST_BYTES = 1 << 62
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PartBox(msgspec.Struct, frozen=True, array_like=True):
    """A box that the rank holds. `place` is that of its bytes in its segment's data section; None: it wrote none."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int | None


class PartLeaf(msgspec.Struct, frozen=True, array_like=True):
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
    """What a part says of the whole value."""

    rank: int
    world_size: int
    tree: Any
    leaves: tuple[PartLeaf, ...]
    objects: bytes


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # devices, in trees
_decode = msgspec.msgpack.Decoder(PartValue).decode
_decode_content = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes | None, ...]]).decode


class PartDraft(NamedTuple):
    """A rank's part, ready to be put. `content` is what the catalog is to keep; ask once the draft was written."""

    draft: Draft
    content: Callable[[], bytes]


class RankPart(NamedTuple):
    """A part that was put.

    Attributes:
        names: of the leaves that it says something of.
        segment: where its bytes are; None if it has none.
        sums: the checksums of its boxes, in the order of leaves and boxes; empty where nobody knows them, as in a
            repair.
    """

    said: PartValue
    names: LeafNames
    segment: SegmentExtent | None
    sums: tuple[bytes | None, ...] = ()

    @property
    def rank(self) -> int:
        return self.said.rank


def read_part(said: bytes, segment: SegmentExtent | None, sums: tuple[bytes | None, ...] = ()) -> RankPart:
    """A part by what the header of its segment says. Raises CorruptionError unless a put could have said it."""
    try:
        value, names, boxes = _read_value(said, 0 if segment is None else segment.size - segment.start)
        require(not sums or len(sums) == boxes, "other checksums than boxes")
        require(all(one is None or len(one) == CHECKSUM_SIZE for one in sums), "a checksum of another size")
    except (msgspec.MsgspecError, MalformedError, UnsupportedValueError, RecursionError) as error:
        raise CorruptionError(f"what a part says of its value can't be read: {error}") from None
    return RankPart(value, names, segment, sums)


@functools.lru_cache(_CACHED)
def _read_value(said: bytes, nbytes: int) -> tuple[PartValue, LeafNames, int]:
    """What a part says, the names of its leaves, and the number of its boxes. Cached: the next step says the same."""
    value = _decode(said.removeprefix(PART_MARK))
    names = structure.tree_names(value.tree)
    _check(value, names, nbytes)
    return value, names, sum(len(leaf.boxes) for leaf in value.leaves)


def _check(said: PartValue, names: LeafNames, nbytes: int) -> None:
    """Raises MalformedError unless all of it fits a segment with so many bytes of data."""
    require(0 <= said.rank < said.world_size <= _MOST_RANKS, "a rank that can't be")
    require(len(names.tensors) == len(said.leaves), "other leaves than the tree has")
    objects = structure.written_objects(said.objects)
    require(len(names.objects) == len(objects), "other objects than the tree has")
    for number, (name, one) in enumerate(zip(names.tensors, said.leaves, strict=True)):
        require(-1 <= one.same < number, "a leaf that is said to be the same as no earlier leaf")
        stride = None if one.stride is None else list(one.stride)
        leaf, _ = structure.read_leaf(name, [one.dtype, list(one.shape), 0, stride, one.flags])
        if not one.is_plain:
            require(stride is None and len(one.shape) <= _MOST_DIMENSIONS, "a leaf that can't be in boxes")
        else:
            require(len(one.boxes) == (0 not in one.shape), "a plain leaf in boxes")
        for box in one.boxes:
            stored = StoredBox(Box(box.offsets, box.shape), box.place or 0, said.rank, None)
            require(not one.is_plain or stored.box == whole(one.shape), "a plain leaf in boxes")
            structure.check_box(leaf, stored, _MOST_BYTES)
            if box.place is not None:
                size = leaf.nbytes if one.is_plain else structure.box_bytes(leaf, stored)
                require(box.place + size <= nbytes, "a box that lies outside of its segment")
                require(not one.is_plain or one.nbytes == size, "a plain leaf of another size")


def read_content(content: bytes, segment: SegmentExtent | None) -> RankPart:
    """A part by what the catalog keeps of it. Raises CorruptionError."""
    try:
        said, sums = _decode_content(content)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"what the catalog keeps of a part can't be read: {error}") from None
    return read_part(said, segment, sums)


def draft_part(
    root: Root,
    key: str,
    held: HeldValue,
    rank: int,
    world_size: int,
    *,
    expect: int | None,
    dtype: torch.dtype | None,
    others: Collection[Path] = (),
) -> PartDraft:
    """What the engine is to store of what this rank holds.

    Args:
        others: plain leaves that a lower rank is known to write.
    """
    local = _LocalTensors(held, dtype, others)
    with modes.put_aside(entirely=True) if modes.are_active() else nullcontext():
        flat = structure.flatten(local.tensors, inline_limit=0, dtype=dtype)
    said = PART_MARK + _encode(
        PartValue(rank, world_size, held.tree, _describe(held, local, flat, dtype), held.objects)
    )
    sums = _Sums(held, local, flat, dtype)
    plan, settings = flat.plan, root.settings
    empty = Content(said, b"", plan.nbytes)
    if not plan.nbytes:
        check_header(key, len(said))
        return PartDraft(Draft(key.encode(), empty, expect), functools.partial(_content, said, sums))

    def fill(memory: WritableMemory) -> bytes | None:
        array = np.asarray(memory)
        structure.fill(flat, array)
        return sums.take(array.data, everything=settings.checksum)

    checksums = CHECKSUM_SIZE * len(plan.leaves) if settings.checksum else 0
    header = Header(key, settings.store, said, b"", plan.header, checksums=checksums)
    return PartDraft(Draft(key.encode(), empty, expect, header, fill), functools.partial(_content, said, sums))


def _content(said: bytes, sums: _Sums) -> bytes:
    return _encode((said, sums.of_boxes()))


class _LocalTensors:
    """The tensors that this rank writes, by the names that they have in its segment; and which box each of them is."""

    def __init__(self, held: HeldValue, dtype: torch.dtype | None, others: Collection[Path]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[tuple[int, int], int] = {}  # (leaf, shard) -> number in `tensors`
        for i, leaf in enumerate(held.leaves):
            if not leaf.is_primary or (leaf.is_plain and leaf.name in others):
                continue
            for j, shard in enumerate(leaf.shards):
                local = shard.local
                if not leaf.is_plain:
                    local = local.contiguous()  # its box could not say strides
                if leaf.is_fixed and dtype is not None and local.is_floating_point():
                    local = local.view(_BITS[local.dtype.itemsize])
                self.places[i, j] = len(self.tensors)
                self.tensors[self._name(leaf, j)] = local

    def _name(self, leaf: HeldLeaf, shard: int) -> str:
        name = ".".join(map(str, leaf.name)) or "value"
        if not leaf.is_plain:
            name += "@" + ",".join(map(str, leaf.shards[shard].box.offsets))
        while name in self.tensors:
            name += "'"
        return name


def _describe(
    held: HeldValue, local: _LocalTensors, flat: structure.Flat, dtype: torch.dtype | None
) -> tuple[PartLeaf, ...]:
    plan = flat.plan
    leaves: list[PartLeaf] = []
    first_of: dict[int, int] = {}  # by number in `tensors`, the leaf of which it is the first shard
    for i, leaf in enumerate(held.leaves):
        numbers = [local.places.get((i, j)) for j in range(len(leaf.shards))]
        stored = [None if number is None else plan.leaves[number] for number in numbers]
        boxes = tuple(
            PartBox(shard.box.offsets, shard.box.shape, None if at is None else at.offset)
            for shard, at in zip(leaf.shards, stored, strict=True)
        )
        at = stored[0] if leaf.is_plain and stored else None
        same = -1
        if numbers and numbers[0] is not None:
            first_of[numbers[0]] = i
            same = first_of.get(plan.same.get(numbers[0], -1), -1)
        leaves.append(
            PartLeaf(
                dtype=structure.DTYPE_NAMES[_cast_to(leaf, dtype) or leaf.dtype],
                shape=leaf.shape,
                stride=at.stride if at is not None else None,
                flags=structure.to_flags(leaf.traits.kind, leaf.traits.requires_grad),
                is_plain=leaf.is_plain,
                same=same,
                nbytes=at.nbytes if at is not None else 0,
                boxes=boxes,
            )
        )
    return tuple(leaves)


def _cast_to(leaf: HeldLeaf, dtype: torch.dtype | None) -> torch.dtype | None:
    """What the leaf is cast to; None if it stays what it is. As `flatten` decides it."""
    return dtype if leaf.dtype.is_floating_point and not leaf.is_fixed and leaf.dtype is not dtype else None


class _Sums:
    """The checksums of boxes: of all where the store has checksums, else of those that other ranks may hold too."""

    def __init__(self, held: HeldValue, local: _LocalTensors, flat: structure.Flat, dtype: torch.dtype | None) -> None:
        self._held, self._local, self._flat, self._dtype = held, local, flat, dtype
        self._sums: dict[int, bytes] = {}  # by number of the local tensor

    def take(self, data: memoryview, *, everything: bool) -> bytes | None:
        """Reads the data section. Returns the checksums of all leaves of the segment, for its header, or None."""
        needed = {
            number for (i, _), number in self._local.places.items() if everything or self._held.leaves[i].is_replicated
        }
        leaves = self._flat.plan.leaves
        for number in needed:
            at = leaves[number]
            self._sums[number] = xxhash.xxh3_64_digest(data[at.offset : at.offset + at.nbytes])
        return b"".join(self._sums[number] for number in range(len(leaves))) if everything else None

    def of_boxes(self) -> list[bytes | None]:
        """In the order of leaves and boxes."""
        sums: list[bytes | None] = []
        for i, leaf in enumerate(self._held.leaves):
            for j, shard in enumerate(leaf.shards):
                number = self._local.places.get((i, j))
                sums.append(self._of_memory(leaf, shard.local) if number is None else self._sums.get(number))
        return sums

    def _of_memory(self, leaf: HeldLeaf, local: torch.Tensor) -> bytes:
        """Of a box that another rank writes: of the bytes that this one would have written."""
        if not leaf.is_plain:
            local = local.contiguous()
        cast = _cast_to(leaf, self._dtype)
        return xxhash.xxh3_64_digest(structure.contents(structure.flatten(local, inline_limit=0, dtype=cast)))
