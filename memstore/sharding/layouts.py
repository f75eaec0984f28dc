"""Layouts: which elements of a tensor each rank of a mesh holds, and where in its local tensor.

A rank's share of a tensor dimension is a list of intervals, in the order in which the local tensor has them: one after
torch's Shard, several after _StridedShard. What the rank holds is their product over the dimensions: boxes.

Each mesh dimension that shards takes its part of what those before it have left, counted in the local tensor:

    Shard(d)                    chunks as those of torch.chunk: of equal size, rounded up. The last ones may hold less,
                                or nothing
    _StridedShard(d, factor)    `factor` chunks first, and of each of them the chunk that the rank's coordinate names;
                                the local tensor has these one behind the other

So distribute_tensor cuts. FSDP2, for which _StridedShard was made, cuts by the later mesh dimension first: `unstrided`.
With sizes that divide evenly both are the same.

`layout_of` makes a layout of torch's device meshes and placements, and says why some are refused. torch.distributed
takes long to import, and some builds of torch lack it. Who has a mesh or a placement has imported it: so it is looked
for among the modules that are there, and never imported here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

from memstore._compat import STRIDED_SHARD
from memstore.errors import UnsupportedValueError
from memstore.sharding.boxes import Box, Interval, box_of

# --- Layouts ---------------------------------------------------------------------------------------------------------


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


class MeshPiece(NamedTuple):
    """A box of the whole tensor, and the box of the rank's local tensor that has its elements."""

    box: Box
    local: Box


class MeshLayout(NamedTuple):
    """The spread of a tensor over a mesh of ranks. A coordinate of None stands for a rank outside of the mesh.

    Attributes:
        shape: of the whole tensor.
        mesh_shape: ranks along each mesh dimension.
        splits: in the order in which they apply; a mesh dimension that has none replicates.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    splits: tuple[Split, ...]

    def shares(self, coordinate: Sequence[int]) -> list[list[Interval]]:
        """Returns what the rank holds of each tensor dimension, in the order of its local tensor."""
        shares = [[(0, size)] if size else [] for size in self.shape]
        for mesh_dim, dim, factor in self.splits:
            shares[dim] = _share(shares[dim], factor, self.mesh_shape[mesh_dim], coordinate[mesh_dim])
        return shares

    def unstrided(self) -> MeshLayout | None:
        """Returns the layout that FSDP2 describes by these splits, in splits without a factor.

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
        return MeshLayout(self.shape, self.mesh_shape, tuple(itertools.chain.from_iterable(by_dim.values())))

    def pieces(self, coordinate: Sequence[int] | None) -> list[MeshPiece]:
        """Returns what the rank holds: no piece is empty, and no two share an element."""
        if coordinate is None:
            return []
        sides = [list(zip(share, _behind_each_other(share), strict=True)) for share in self.shares(coordinate)]
        return [
            MeshPiece(box_of([held for held, _ in product]), box_of([place for _, place in product]))
            for product in itertools.product(*sides)
        ]

    def local_shape(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the shape of the rank's local tensor; (0,) outside of the mesh, as torch has it."""
        if coordinate is None:
            return (0,)
        return tuple(_length(share) for share in self.shares(coordinate))

    @property
    def is_replicated(self) -> bool:
        """Returns whether several ranks hold the same elements."""
        return any(self.mesh_shape[dim] > 1 for dim in self._replicating)

    def is_primary(self, coordinate: Sequence[int] | None) -> bool:
        """Returns whether this is, of the ranks that hold the same elements, the first: only one of them is."""
        return coordinate is not None and all(coordinate[dim] == 0 for dim in self._replicating)

    @property
    def _replicating(self) -> set[int]:
        return set(range(len(self.mesh_shape))) - {split.mesh_dim for split in self.splits}


def _share(held: list[Interval], factor: int, ranks: int, index: int) -> list[Interval]:
    """Returns what the rank of this index keeps of what all of the mesh dimension's ranks held."""
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
    """Returns where the intervals lie in the local tensor."""
    ends = list(itertools.accumulate(stop - start for start, stop in share))
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


# --- Torch's meshes and placements as layouts ------------------------------------------------------------------------


_PLACEMENTS = "torch.distributed.tensor.placement_types"
_KNOWN = "known are Replicate(), Shard(dim), and the _StridedShard(dim, split_factor=) of FSDP2"


def place(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> list[MeshPiece]:
    """Returns what this rank holds of a tensor that is spread so: boxes, and where they lie in its local tensor.

    Args:
        mesh: a DeviceMesh of torch.
        placements: one of torch's placements a mesh dimension. They apply from left to right.
        shape: of the whole tensor.

    Returns:
        No piece is empty, and together they are the local tensor. A rank that holds nothing has none.

    Raises:
        UnsupportedValueError: this is no mesh; a placement is Partial, unknown, or of a dimension that isn't there.
    """
    return layout_of(_shape_of(mesh), placements, shape).pieces(mesh.get_coordinate())


def local_shape(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of this rank's local tensor; (0,) for a rank outside of the mesh. Raises what `place` does."""
    return layout_of(_shape_of(mesh), placements, shape).local_shape(mesh.get_coordinate())


def layout_of(
    mesh_shape: Sequence[int], placements: Sequence[Any], shape: Sequence[int], order: Sequence[int] | None = None
) -> MeshLayout:
    """Returns the layout that placements describe.

    Args:
        mesh_shape: ranks along each dimension of the mesh.
        placements: one of torch's placements a mesh dimension.
        shape: of the whole tensor.
        order: of the mesh dimensions, in which they shard: left to right by default.

    Raises:
        UnsupportedValueError: as `place` does.
    """
    if not isinstance(placements, (list, tuple)):
        raise UnsupportedValueError(
            f"placements are a list with one of torch's placements for each dimension of the mesh, and not "
            f"{placements!r:.100}: write [{placements!r:.100}]"
        )
    if len(placements) != len(mesh_shape):
        raise UnsupportedValueError(
            f"{len(placements)} placements for a mesh of {len(mesh_shape)} dimensions: {shown(placements)}; "
            "give one for each"
        )
    shape = tuple(shape)
    splits = [_split(mesh_dim, placement, shape) for mesh_dim, placement in enumerate(placements)]
    in_order = (splits[mesh_dim] for mesh_dim in (range(len(splits)) if order is None else order))
    return MeshLayout(shape, tuple(mesh_shape), tuple(split for split in in_order if split is not None))


def shown(placements: Sequence[Any]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def loaded(module: str, name: str) -> Any:
    """Returns a class of a module, if that was imported."""
    return getattr(sys.modules.get(module), name, None)


def _shape_of(mesh: Any) -> tuple[int, ...]:
    known = loaded("torch.distributed.device_mesh", "DeviceMesh")
    if known is None or not isinstance(mesh, known):
        raise UnsupportedValueError(f"expected a DeviceMesh of torch, found {mesh!r}")
    return tuple(mesh.shape)


def _split(mesh_dim: int, placement: Any, shape: tuple[int, ...]) -> Split | None:
    """Says what a placement does with its mesh dimension; None if it replicates."""
    if _is_a("Replicate", placement):
        return None
    what = f"the placement {placement!r} of mesh dimension {mesh_dim}"
    is_strided = _is_a(STRIDED_SHARD, placement)
    if is_strided or _is_a("Shard", placement):
        return Split(mesh_dim, _dim(what, placement.dim, shape), int(placement.split_factor) if is_strided else 1)
    partial = loaded(_PLACEMENTS, "Partial")
    if partial is not None and isinstance(placement, partial):
        raise UnsupportedValueError(
            f"{what}: each rank has a term of a reduction that is still to be done, and none has the values; "
            "redistribute to Replicate() or Shard(dim) there first"
        )
    raise UnsupportedValueError(f"{what} is unknown; {_KNOWN}")


def _is_a(name: str, placement: Any) -> bool:
    """Returns whether it is of that class, and no subclass, which may cut tensors in other ways."""
    kind = loaded(_PLACEMENTS, name)
    return kind is not None and type(placement) is kind


def _dim(what: str, dim: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= dim < len(shape):
        dims = f"a dimension from {-len(shape)} to {len(shape) - 1}, or " if shape else ""
        raise UnsupportedValueError(
            f"{what} shards a dimension that a tensor of shape {shape} doesn't have; use {dims}Replicate()"
        )
    return dim % len(shape)
