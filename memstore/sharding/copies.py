"""Copies: from boxes that are stored, to boxes that are wanted, whatever layout each of them comes from."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from memstore.sharding.box import Box
from memstore.sharding.box_index import BoxIndex
from memstore.sharding.coverage import uncovered

_FEW = 256  # boxes of one tensor


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
    match = _match_again if len(wanted) + len(stored) <= _FEW else _match
    meets, missing = match(tuple(box for box, _ in wanted), tuple(box for box, _ in stored))
    pairs = [(part(wanted[want][1], into), part(stored[have][1], source)) for want, into, have, source in meets]
    return Copies(pairs, list(missing))


class _Meet(NamedTuple):
    """The common part of the boxes `want` and `have`: `into` of the former, `source` of the latter."""

    want: int
    into: Box
    have: int
    source: Box


def _match(wanted: tuple[Box, ...], stored: tuple[Box, ...]) -> tuple[tuple[_Meet, ...], tuple[Box, ...]]:
    """The parts that meet, and what is missing."""
    index = BoxIndex(stored)
    meets: list[_Meet] = []
    missing: list[Box] = []
    for want, box in enumerate(wanted):
        sources: dict[Box, int] = {}
        for have, meet in index.meeting(box):
            sources[meet] = min(have, sources.get(meet, have))
        meets += [_Meet(want, meet.within(box), have, meet.within(stored[have])) for meet, have in sources.items()]
        if box not in sources:
            missing += uncovered(box, sources)
    return tuple(meets), tuple(missing)


_match_again = functools.lru_cache(maxsize=1024)(_match)  # the layers of a model are alike, and got again and again


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a box of a tensor; the tensor itself, if that is all of it."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor
