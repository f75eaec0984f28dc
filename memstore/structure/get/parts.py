"""What is stored of a leaf: all of it, or boxes that lie apart; and a value's leaves put together of their boxes.

A leaf in boxes has a place of its own behind the bytes of the value, where it is put together when a caller wants all
of it. Boxes that lie there already, one behind the other, are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from memstore.engine import Leaf
from memstore.errors import CorruptionError
from memstore.sharding import Box, Boxes, Shard, StoredBox, copies, part, uncovered, whole
from memstore.structure.checks import MalformedError, require
from memstore.structure.plans import Memory, Plan
from memstore.structure.tensors import DTYPES, modes, over, traits

_CHECKSUM_SIZE = 8


class Checks(Protocol):
    """Compares what is to be read with its checksums. Raises CorruptionError."""

    def compare(self, i: int, /) -> None:
        """All of a leaf."""

    def compare_boxes(self, i: int, boxes: Sequence[StoredBox], /) -> None:
        """Some of a leaf's boxes."""


def check_boxes(plan: Plan, boxes: Boxes, nbytes: int) -> None:
    """Raises CorruptionError unless they are boxes of the plan's leaves, in a data section of so many bytes."""
    sizes: dict[tuple[str, tuple[int, ...], tuple[Box, ...]], list[int]] = {}  # most leaves are cut like others
    try:
        for i, stored in boxes.items():
            require(0 <= i < len(plan.leaves), "boxes of a leaf that doesn't exist")
            leaf = plan.leaves[i]
            require(leaf.stride is None, "boxes of a leaf that isn't contiguous")
            cut = (leaf.dtype, leaf.shape, tuple([one.box for one in stored]))
            if cut not in sizes:
                for box in cut[2]:
                    _check_within(leaf, box)
                missing = uncovered(whole(leaf.shape), cut[2])
                require(not missing, f"no box of leaf {leaf.name} has all of {missing[:1]}")
                sizes[cut] = [box_bytes(leaf, one) for one in stored]
            item = DTYPES[leaf.dtype].itemsize
            for one, size in zip(stored, sizes[cut], strict=True):
                _check_place(one, size, item, nbytes)
    except MalformedError as error:
        raise CorruptionError(f"the boxes of the value are damaged: {error}") from error


def check_box(leaf: Leaf, stored: StoredBox, nbytes: int) -> None:
    """Raises MalformedError unless it is a box of the leaf, in a data section of so many bytes."""
    _check_within(leaf, stored.box)
    _check_place(stored, box_bytes(leaf, stored), DTYPES[leaf.dtype].itemsize, nbytes)


def _check_within(leaf: Leaf, box: Box) -> None:
    offsets, shape = box
    require(len(offsets) == len(shape) == len(leaf.shape), "a box with other dimensions than its leaf")
    for start, size, all_of_it in zip(offsets, shape, leaf.shape, strict=True):
        require(start >= 0 and 0 < size <= all_of_it - start, "a box that lies outside of its leaf")


def _check_place(stored: StoredBox, size: int, item: int, nbytes: int) -> None:
    _, place, _, checksum = stored
    if not (0 <= place <= nbytes - size and place % item == 0):
        raise MalformedError("a box that lies outside of the data")
    if not (checksum is None or len(checksum) == _CHECKSUM_SIZE):
        raise MalformedError("a checksum of another size")


def box_bytes(leaf: Leaf, stored: StoredBox) -> int:
    return traits.count(stored.box.shape) * DTYPES[leaf.dtype].itemsize


def box_tensor(leaf: Leaf, stored: StoredBox, memory: Memory) -> torch.Tensor:
    """The elements of a box, where they lie."""
    start, shape, dtype = stored.place, stored.box.shape, DTYPES[leaf.dtype]
    flat = torch.from_numpy(memory[start : start + box_bytes(leaf, stored)])
    if dtype in traits.WITHOUT_COPY:
        return over(flat.untyped_storage(), dtype, 0, shape, traits.contiguous_stride(shape))
    return flat.view(dtype).view(shape)


def leaf_tensor(leaf: Leaf, memory: Memory) -> torch.Tensor:
    """The place where a leaf in boxes is put together."""
    return box_tensor(leaf, StoredBox(whole(leaf.shape), leaf.offset, 0, None), memory)


def boxes_of_leaf(plan: Plan, boxes: Boxes, i: int) -> Sequence[StoredBox]:
    """Those of a leaf, or of the one that it is the same as. None: it lies whole at its offset."""
    return boxes.get(plan.same.get(i, i), ())


def parts_of(plan: Plan, boxes: Boxes, i: int, tensor: torch.Tensor, memory: Memory) -> list[Shard]:
    """The parts that a leaf is stored in. `tensor` has all of it, if it is one part."""
    leaf = plan.leaves[i]
    stored = boxes_of_leaf(plan, boxes, i)
    if lies_in_order(leaf, stored):
        return [Shard(whole(leaf.shape), tensor)]
    return [Shard(one.box, box_tensor(leaf, one, memory)) for one in stored]


def assemble(plan: Plan, boxes: Boxes, memory: Memory) -> int:
    """Puts every leaf together at its offset. Returns how many bytes were copied for it."""
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        leaves = ((plan.leaves[i], stored) for i, stored in boxes.items() if i not in plan.same)
        return sum(assemble_one(leaf, stored, memory) for leaf, stored in leaves)


def assemble_one(leaf: Leaf, stored: Sequence[StoredBox], memory: Memory) -> int:
    """As `assemble`, of one leaf."""
    if lies_in_order(leaf, stored):
        return 0
    target, copied = traits.copyable(leaf_tensor(leaf, memory)), 0
    for one in stored:
        source = traits.copyable(box_tensor(leaf, one, memory))
        part(target, one.box).copy_(source)
        copied += source.nbytes
    return copied


def copies_of(wanted: Sequence[Shard], parts: Sequence[Shard]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is to be copied where, from the parts of a leaf, which have all of it."""
    return copies(wanted, parts).pairs


def lies_in_order(leaf: Leaf, stored: Sequence[StoredBox]) -> bool:
    """Whether all boxes of a leaf lie where the whole of it has them: then it is read without a copy."""
    return all(_lies_in_place(leaf, one) for one in stored)


def _lies_in_place(leaf: Leaf, stored: StoredBox) -> bool:
    (offsets, shape), item = stored.box, DTYPES[leaf.dtype].itemsize
    first = sum(start * step for start, step in zip(offsets, traits.contiguous_stride(leaf.shape), strict=True))
    if stored.place != leaf.offset + first * item:
        return False
    below = 0  # the dimension below which all of the leaf has to be in the box
    while below < len(shape) and shape[below] == 1:
        below += 1
    return shape[below + 1 :] == leaf.shape[below + 1 :]
