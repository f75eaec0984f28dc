"""Random boxes, and random layouts of tensors over meshes of up to 12 ranks."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from memstore.sharding import Box, MeshLayout, MeshPiece, layout_of

RANKS = 12

# Shapes of tensors and of meshes, and placements: the odd ones of each kind.
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], ...] = (
    ((5, 3), (2,), (Shard(0),)),
    ((5, 3), (4,), (Shard(-1),)),
    ((2,), (4,), (Shard(0),)),
    ((), (2,), (Replicate(),)),
    ((0, 3), (2,), (Shard(1),)),
    ((7, 4), (2, 2), (Shard(0), Shard(1))),
    ((7, 4), (2, 2), (Shard(0), Shard(0))),
    ((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((9, 3), (2, 2), (_StridedShard(0, split_factor=2), Replicate())),
    ((4, 9), (2, 3), (Replicate(), _StridedShard(-1, split_factor=2))),
    ((4, 5, 6), (2, 1, 2), (Shard(2), Replicate(), Shard(1))),
)


class Spread(NamedTuple):
    """A tensor's shape, a mesh's, and torch's placements."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def layout(self) -> MeshLayout:
        return layout_of(self.mesh_shape, self.placements, self.shape)

    @property
    def coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.mesh_shape))

    def local(self, tensor: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """The local tensor that torch gives the rank."""
        for placement, ranks, index in zip(self.placements, self.mesh_shape, coordinate, strict=True):
            if not isinstance(placement, Replicate):
                dim = placement.dim % tensor.ndim  # torch's distribute_tensor does this, its placements don't
                if isinstance(placement, Shard):
                    placement = Shard(dim)
                else:
                    placement = _StridedShard(dim, split_factor=placement.split_factor)
                tensor = placement._split_tensor(tensor, ranks, with_padding=False)[0][index]
        return tensor


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 9), max_size=4)))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, ...]:
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, RANKS // math.prod(sizes))))
    return tuple(sizes)


def placements(ndim: int) -> st.SearchStrategy[Any]:
    if not ndim:
        return st.builds(Replicate)
    dims = st.integers(-ndim, ndim - 1)
    return st.one_of(
        st.builds(Replicate), st.builds(Shard, dims), st.builds(_StridedShard, dims, split_factor=st.integers(1, 5))
    )


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Spread:
    shape = draw(shapes()) if shape is None else shape
    mesh_shape = draw(meshes())
    return Spread(shape, mesh_shape, tuple(draw(placements(len(shape))) for _ in mesh_shape))


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """A box of a tensor of this shape; it may be empty."""
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """A tensor of which no two elements are equal."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def assembled(pieces: Sequence[MeshPiece], local_shape: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor that has these pieces of the whole one; -1 where none of them lies."""
    local = torch.full(tuple(local_shape), -1)
    for piece in pieces:
        local[piece.local.slices] = tensor[piece.box.slices]
    return local


def counts(shape: Sequence[int], held: Sequence[Box]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many of the boxes have each element."""
    count = np.zeros(tuple(shape), np.int64)
    for box in held:
        count[box.slices] += 1
    return count
