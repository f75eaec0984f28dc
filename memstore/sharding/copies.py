"""Copies: from boxes that are stored, to boxes that are wanted, whatever layout each of them comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from memstore.sharding.box import Box
from memstore.sharding.box_index import BoxIndex
from memstore.sharding.coverage import uncovered


class Copies(NamedTuple):
    """What fills tensors that are wanted.

    Attributes:
        pairs: views of the same shape: into the first, from the second. Each element is there once, unless stored
            boxes overlap without being equal in what is wanted of them.
        missing: what nothing stored has, of all that is wanted.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    missing: list[Box]


def copies(wanted: Sequence[tuple[Box, torch.Tensor]], stored: Sequence[tuple[Box, torch.Tensor]]) -> Copies:
    """Which parts of which tensors are to be copied where, so that all that is wanted is filled.

    Nothing is read or written. Where several stored boxes have an element, it is taken from the first of those that
    have the same part of a wanted box.

    Args:
        wanted: boxes of a tensor, each with a tensor of its shape to write to. Without autograd history: the views
            could not be written to otherwise.
        stored: boxes of the same tensor, each with a tensor of its shape.

    Example:
        >>> rows, columns = torch.arange(4).view(2, 2), torch.zeros(2, 1, dtype=torch.int64)
        >>> plan = copies([(Box((0, 1), (2, 1)), columns)], [(Box((0, 0), (2, 2)), rows)])
        >>> for into, source in plan.pairs:
        ...     _ = into.copy_(source)
        >>> columns.tolist(), plan.missing
        ([[1], [3]], [])
    """
    index = BoxIndex([box for box, _ in stored])
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    missing: list[Box] = []
    for box, target in wanted:
        sources: dict[Box, int] = {}
        for number, meet in index.meeting(box):
            sources[meet] = min(number, sources.get(meet, number))
        for meet, number in sources.items():
            held, source = stored[number]
            pairs.append((part(target, meet.within(box)), part(source, meet.within(held))))
        if box not in sources:
            missing += uncovered(box, sources)
    return Copies(pairs, missing)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a box of a tensor; the tensor itself, if that is all of it."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor
