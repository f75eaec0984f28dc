"""Drafts of puts: a value taken apart, and what the engine is to write of it.

`flatten` and `draft` make that of a plain put, `draft_part` that of a rank's part of a sharded put.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from memstore import _modes as modes
from memstore import structure
from memstore._threads import ABANDONED, check_abandoned
from memstore.contents.reading import CHECKSUM_SIZE, PartBox, PartLeaf, encode_content, encode_said
from memstore.engine import (
    HEADER_LIMIT,
    OBJECTS_IN_RECORD,
    SMALL,
    Content,
    Draft,
    Header,
    Path,
    Root,
    WritableMemory,
    check_header,
    resource_errors,
)
from memstore.errors import UnsupportedValueError
from memstore.structure import HeldLeaf, HeldValue

# --- Whole values ----------------------------------------------------------------------------------------------------


_NEXT_IN_SEGMENTS = 64  # values that a process puts into segments once the catalog had no room for one


def inline_limit(root: Root) -> int:
    """Returns up to how many bytes the next value may have to lie in its record, for `flatten` and `draft`."""
    limit = root.settings.inline_limit
    if root.catalog.crowded and limit > SMALL:
        root.catalog.crowded -= 1
        return SMALL
    return limit


def inline_limit_when_crowded(root: Root) -> int:
    """Returns the limit for another try of a put that raised CatalogCrowded."""
    root.catalog.crowded = _NEXT_IN_SEGMENTS
    return SMALL


def flatten(
    key: str,
    value: Any,
    root: Root,
    *,
    limit: int,
    allow_pickle: bool,
    dtype: torch.dtype | None = None,
    below: Path = (),
) -> structure.FlatValue:
    """Takes a value apart. `dtype` is for leaves whose names start with `below`.

    `limit` is `inline_limit(root)`: up to so many bytes are laid out for a record.

    Raises UnsupportedValueError, naming the leaf, or TypeError of `dtype`, before anything is written.
    """
    try:
        return structure.flatten(value, allow_pickle=allow_pickle, inline_limit=limit, dtype=dtype, below=below)
    except Exception as error:
        if modes.are_active():  # what they do says nothing of the value
            with modes.put_aside(entirely=True):
                return flatten(key, value, root, limit=limit, allow_pickle=allow_pickle, dtype=dtype, below=below)
        if isinstance(error, UnsupportedValueError):
            error.key = key
        raise


def draft(root: Root, key: bytes, flat: structure.FlatValue, limit: int, expect: int | None) -> Draft:
    """Returns what the engine is to store of a flattened value: in its record up to `limit` bytes, else in a segment.

    The bytes of a small value are copied here, those of others when the draft is put.
    """
    plan, objects, settings = flat.plan, flat.objects, root.settings
    try:
        if limit and plan.inline and plan.nbytes + len(objects) <= limit:
            if len(plan.description) > HEADER_LIMIT:
                check_header(key.decode(), len(plan.description))
            memory = structure.contents(flat)
            if ABANDONED:
                check_abandoned()
            checksums = leaf_checksums(plan, memoryview(memory)) if settings.checksum else None
            return Draft(key, Content(plan.description, objects, plan.nbytes, memory, checksums), expect)
        if len(objects) > OBJECTS_IN_RECORD:
            content = Content(plan.description, b"", plan.nbytes, objects_checksum=xxhash.xxh3_64_digest(objects))
        else:
            content = Content(plan.description, objects, plan.nbytes)
        size = CHECKSUM_SIZE * len(plan.leaves) if settings.checksum else 0
        header = Header(key.decode(), settings.store, plan.description, objects, plan.header, checksums=size)
        sums = functools.partial(leaf_checksums, plan) if settings.checksum else None
        return Draft(key, content, expect, header, functools.partial(_copy_leaves, flat, sums))
    except MemoryError:
        with resource_errors(root.path, key.decode(), root):
            raise


def leaf_checksums(plan: structure.Plan, data: memoryview) -> bytes:
    """Computes the checksums of all leaves of a data section, in their order."""
    return b"".join(xxhash.xxh3_64_digest(data[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in plan.leaves)


def _copy_leaves(
    flat: structure.FlatValue, sums: Callable[[memoryview], bytes | None] | None, memory: WritableMemory
) -> bytes | None:
    """Copies the leaves to their places in the data section. Returns their checksums, if the store has them."""
    array = np.asarray(memory)
    structure.fill(flat, array)
    if ABANDONED:
        check_abandoned()
    return None if sums is None else sums(array.data)


# --- A rank's part of a sharded value --------------------------------------------------------------------------------


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PartDraft(NamedTuple):
    """A rank's part, ready to be put. `content` is what the catalog is to keep; ask once the draft was written."""

    draft: Draft
    content: Callable[[], bytes]


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
    """Returns what the engine is to store of what this rank holds.

    A rank that writes no bytes gets a segment, of a header alone, if it may be the only one that says something: else a
    repair that has nothing but the segments would lose that.

    Args:
        others: plain leaves and objects that a lower rank is known to write.
    """
    part = _WrittenPart(held, dtype, others, is_alone=world_size == 1)
    said = encode_said(rank, world_size, held.tree, part.describe(), held.objects)
    plan, settings = part.flat.plan, root.settings
    content = functools.partial(part.content, said)
    empty = Content(said, b"", plan.nbytes)
    # objects, and tensors that no rank has bytes of: which no other rank may have
    without_bytes = (*held.object_names, *(leaf.name for leaf in held.leaves if 0 in leaf.shape))
    if not plan.nbytes and set(others).issuperset(without_bytes):
        check_header(key, len(said))
        return PartDraft(Draft(key.encode(), empty, expect), content)
    checksums = CHECKSUM_SIZE * len(plan.leaves) if settings.checksum else 0
    header = Header(key, settings.store, said, b"", plan.header, checksums=checksums)
    fill = functools.partial(_copy_leaves, part.flat, functools.partial(part.sum_up, everything=settings.checksum))
    return PartDraft(Draft(key.encode(), empty, expect, header, fill), content)


class _WrittenPart:
    """The tensors that this rank writes: which box each of them is, what is said of them, and their checksums.

    There are checksums of all boxes where the store has checksums, else of those that may be held twice: by other
    ranks, or in a list of shards.
    """

    def __init__(self, held: HeldValue, dtype: torch.dtype | None, others: Collection[Path], *, is_alone: bool) -> None:
        self._held, self._dtype = held, dtype
        self._may_be_twice = [
            leaf.is_replicated and not (is_alone and len(leaf.shards) == 1)  # of one rank: a copy is enough
            for leaf in held.leaves
        ]
        self._numbers: dict[tuple[int, int], int] = {}  # (leaf, shard) -> number among the tensors
        self._sums: dict[int, bytes] = {}  # by this number
        tensors: dict[str, torch.Tensor] = {}  # by the names that they have in the segment
        for i, leaf in enumerate(held.leaves):
            if not leaf.is_primary or (leaf.is_plain and leaf.name in others):
                continue
            for j, shard in enumerate(leaf.shards):
                # a box could not say strides
                local = shard.local if leaf.is_plain else shard.local.contiguous()
                if leaf.is_fixed and dtype is not None and local.is_floating_point():
                    local = local.view(_BITS[local.dtype.itemsize])
                name = ".".join(map(str, leaf.name)) or "value"
                if not leaf.is_plain:
                    name += "@" + ",".join(map(str, shard.box.offsets))
                while name in tensors:
                    name += "'"
                self._numbers[i, j] = len(tensors)
                tensors[name] = local
        with modes.put_aside(entirely=True) if modes.are_active() else nullcontext():
            self.flat = structure.flatten(tensors, inline_limit=0, dtype=dtype)

    def describe(self) -> tuple[PartLeaf, ...]:
        """Says of all leaves what this rank knows of them."""
        plan = self.flat.plan
        leaves: list[PartLeaf] = []
        first_of: dict[int, int] = {}  # by number, the leaf of which it is the first shard
        for i, leaf in enumerate(self._held.leaves):
            numbers = [self._numbers.get((i, j)) for j in range(len(leaf.shards))]
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
                    dtype=structure.DTYPE_NAMES[self._cast_of(leaf) or leaf.dtype],
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

    def _cast_of(self, leaf: HeldLeaf) -> torch.dtype | None:
        """Returns what `flatten` casts the leaf to; None if it stays what it is."""
        is_cast = leaf.dtype.is_floating_point and not leaf.is_fixed and leaf.dtype is not self._dtype
        return self._dtype if is_cast else None

    def sum_up(self, data: memoryview, *, everything: bool) -> bytes | None:
        """Computes the checksums of a filled data section. Returns those of all leaves, for its header, or None."""
        leaves = self.flat.plan.leaves
        for number in {number for (i, _), number in self._numbers.items() if everything or self._may_be_twice[i]}:
            at = leaves[number]
            self._sums[number] = xxhash.xxh3_64_digest(data[at.offset : at.offset + at.nbytes])
        return b"".join(self._sums[number] for number in range(len(leaves))) if everything else None

    def content(self, said: bytes) -> bytes:
        """Returns what the catalog is to keep: what is said, and the checksums in the order of leaves and boxes."""
        sums: list[bytes | None] = []
        for i, leaf in enumerate(self._held.leaves):
            for j, shard in enumerate(leaf.shards):
                number = self._numbers.get((i, j))
                if number is not None:
                    sums.append(self._sums.get(number))
                    continue
                # of a box that another rank writes: of the bytes that this one would have written
                local = shard.local if leaf.is_plain else shard.local.contiguous()
                flat = structure.flatten(local, inline_limit=0, dtype=self._cast_of(leaf))
                sums.append(xxhash.xxh3_64_digest(structure.contents(flat)))
        return encode_content(said, sums)
