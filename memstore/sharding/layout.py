"""Layouts: which elements of a tensor each rank of a mesh holds, and where in its local tensor. Pure arithmetic.

A rank's share of a tensor dimension is a list of intervals, in the order in which the local tensor has them: one after
torch's Shard, several after _StridedShard. What the rank holds is their product over the dimensions: boxes.

Each mesh dimension that shards takes its part of what those before it have left, counted in the local tensor:

    Shard(d)                    chunks as those of torch.chunk: of equal size, rounded up. The last ones may hold less,
                                or nothing
    _StridedShard(d, factor)    `factor` chunks first, and of each of them the chunk that the rank's coordinate names;
                                the local tensor has these one behind the other

So distribute_tensor cuts. FSDP2, for which _StridedShard was made, cuts by the later mesh dimension first: `unstrided`.
With sizes that divide evenly both are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from memstore.sharding.box import Box, Interval, box_of


class Split(NamedTuple):
    """A mesh dimension shards a tensor dimension.

    Attributes:
        mesh_dim: counted from 0.
        dim: of the tensor, counted from 0.
        factor: in how many chunks the dimension is cut before each is cut for the ranks. 1 is torch's Shard.
    """

    mesh_dim: int
    dim: int
    factor: int = 1


class Piece(NamedTuple):
    """A box of the whole tensor, and the box of the rank's local tensor that has its elements."""

    box: Box
    local: Box


class Layout(NamedTuple):
    """How a tensor is spread over a mesh of ranks. A coordinate of None stands for a rank outside of the mesh.

    Attributes:
        shape: of the whole tensor.
        mesh_shape: ranks along each mesh dimension.
        splits: in the order in which they apply; a mesh dimension that has none replicates.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    splits: tuple[Split, ...]

    def shares(self, coordinate: Sequence[int]) -> list[list[Interval]]:
        """What the rank holds of each tensor dimension, in the order of its local tensor."""
        shares = [[(0, size)] if size else [] for size in self.shape]
        for mesh_dim, dim, factor in self.splits:
            shares[dim] = _share(shares[dim], factor, self.mesh_shape[mesh_dim], coordinate[mesh_dim])
        return shares

    def unstrided(self) -> Layout | None:
        """The layout that FSDP2 describes by these splits, in splits without a factor.

        A split that has one applies after as many later mesh dimensions as make up the factor. None if none do.
        """
        by_dim: dict[int, list[Split]] = {}
        for mesh_dim, dim, factor in sorted(self.splits, reverse=True):
            in_order = by_dim.setdefault(dim, [])
            ranks = (self.mesh_shape[split.mesh_dim] for split in in_order)
            products = list(itertools.accumulate(ranks, mul, initial=1))
            if factor not in products:
                return None
            in_order.insert(products.index(factor), Split(mesh_dim, dim))
        return Layout(self.shape, self.mesh_shape, tuple(itertools.chain.from_iterable(by_dim.values())))

    def pieces(self, coordinate: Sequence[int] | None) -> list[Piece]:
        """What the rank holds: no piece is empty, and no two share an element."""
        if coordinate is None:
            return []
        sides = [list(zip(share, _behind_each_other(share), strict=True)) for share in self.shares(coordinate)]
        return [
            Piece(box_of([held for held, _ in product]), box_of([place for _, place in product]))
            for product in itertools.product(*sides)
        ]

    def local_shape(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        """The shape of the rank's local tensor; (0,) outside of the mesh, as torch has it."""
        if coordinate is None:
            return (0,)
        return tuple(_length(share) for share in self.shares(coordinate))

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks hold the same elements."""
        return any(self.mesh_shape[dim] > 1 for dim in self._replicating)

    def is_primary(self, coordinate: Sequence[int] | None) -> bool:
        """Whether this is, of the ranks that hold the same elements, the first: only one of them is."""
        return coordinate is not None and all(coordinate[dim] == 0 for dim in self._replicating)

    @property
    def _replicating(self) -> set[int]:
        return set(range(len(self.mesh_shape))) - {split.mesh_dim for split in self.splits}


def _share(held: list[Interval], factor: int, ranks: int, index: int) -> list[Interval]:
    """What the rank of this index keeps of what all of the mesh dimension's ranks held."""
    if not held:
        return []
    total = _length(held)
    chunk = -(-total // factor)
    kept: list[Interval] = []
    for first in range(0, total, chunk):
        size = min(chunk, total - first)
        part = -(-size // ranks)
        _cut(held, first + min(index * part, size), first + min((index + 1) * part, size), kept)
    return kept


def _cut(held: list[Interval], first: int, last: int, kept: list[Interval]) -> None:
    """Appends what lies from `first` up to `last`, counted in the local tensor; what adjoins becomes one."""
    passed = 0
    for start, stop in held:
        begin, end = start + max(first - passed, 0), min(stop, start + last - passed)
        passed += stop - start
        if begin >= end:
            continue
        if kept and kept[-1][1] == begin:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((begin, end))


def _length(share: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in share)


def _behind_each_other(share: Sequence[Interval]) -> list[Interval]:
    """Where the intervals lie in the local tensor."""
    ends = list(itertools.accumulate(stop - start for start, stop in share))
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
