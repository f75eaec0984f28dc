"""Layouts and shards: which elements of a tensor each rank of a mesh holds, and the tensors that have them.

`sharded_leaf` reads the boxes that a rank holds of DTensors, TensorShards and ShardedTensors; `allocate_like` makes new
memory for them. `layout_of` makes a layout of torch's device meshes and placements, and says why some are refused.

A rank's share of a tensor dimension is a list of intervals, in the order in which the local tensor has them: one after
torch's Shard, several after _StridedShard. What the rank holds is their product over the dimensions: boxes.

Each mesh dimension that shards takes its part of what those before it have left, counted in the local tensor:

    Shard(d)                    chunks as those of torch.chunk: of equal size, rounded up. The last ones may hold less,
                                or nothing
    _StridedShard(d, factor)    `factor` chunks first, and of each of them the chunk that the rank's coordinate names;
                                the local tensor has these one behind the other

So distribute_tensor cuts. FSDP2, for which _StridedShard was made, cuts by the later mesh dimension first: `unstrided`.
With sizes that divide evenly both are the same.

torch.distributed takes long to import, and some builds of torch lack it. Who has a mesh or a placement has imported it:
so it is looked for among the modules that are there, and never imported here.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple, cast

import torch
from torch.nn.parameter import is_lazy

from memstore import _compat
from memstore import _modes as modes
from memstore._compat import STRIDED_SHARD
from memstore._wording import an_instance
from memstore.errors import UnsupportedValueError
from memstore.sharding.boxes import Box, Interval, box_of, narrow_to, overlap

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


# --- What a rank holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A part of a tensor that no DTensor describes.

    Attributes:
        local: the part, of the same number of dimensions as the whole. It may be empty.
        global_shape: of the whole, in elements.
        offsets: where the part starts in the whole, in elements.

    Example:
        >>> shard = TensorShard(torch.ones(2, 8), global_shape=(6, 8), offsets=(2, 0))  # rows 2 and 3 of 6
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorShards:
    """Parts of a tensor that no DTensor describes, where one rank has several of them, or none.

    Attributes:
        dtype, global_shape: of the whole.
        parts: of each its offsets in the whole, and the tensor that has it.
    """

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], torch.Tensor], ...]


class Shard(NamedTuple):
    """A box of a tensor, and the tensor (often a view of a rank's local one) that holds just its elements."""

    box: Box
    local: torch.Tensor


class ShardedLeaf(NamedTuple):
    """The part of one tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        shards: none of them is empty, and no two overlap. There may be none at all.
        is_primary: this rank writes them: of the ranks of a DTensor's mesh that hold the very same boxes, one does.
            What ranks outside of the mesh hold is not known (each replica of a tensor-parallel model may have a mesh of
            its own), nor is who else has a TensorShard: there several ranks may be primary for the same boxes.
        is_replicated: other ranks may hold the same boxes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    is_primary: bool
    is_replicated: bool


def sharded_leaf(value: Any) -> ShardedLeaf | None:
    """Reads what a DTensor, TensorShard or ShardedTensor says of this rank; None for any other value.

    The tensors of the shards are views of the local one: nothing is copied, and they have no autograd history. Whether
    it is a Parameter, or requires a gradient, is for the caller to look up. A local tensor that a collective still
    fills is waited for.

    Raises:
        UnsupportedValueError: a DTensor's placement is Partial or unknown, its local tensor isn't of the shape that its
            placements say, or a part doesn't lie within the whole.
    """
    if not isinstance(value, torch.Tensor):
        if isinstance(value, TensorShards):
            return _aside(_of_tensor_shards, value)
        return _aside(_of_tensor_shard, value) if isinstance(value, TensorShard) else None
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return None
    for module, name, read in _READERS:
        known = loaded(module, name)
        if known is not None and isinstance(value, known):
            return _aside(read, value)
    return None


def _aside(read: Callable[[Any], ShardedLeaf], value: Any) -> ShardedLeaf:
    """Reads without torch's modes: what they make of a view says nothing of the value, and may be a fake one."""
    with modes.put_aside(entirely=True) if modes.are_active() else nullcontext(), torch.no_grad():
        return read(value)


def _of_dtensor(value: Any) -> ShardedLeaf:
    mesh, shape, coordinate = value.device_mesh, tuple(value.shape), value.device_mesh.get_coordinate()
    layout = _layout(tuple(mesh.shape), tuple(value.placements), shape, _compat.shard_order(value))
    local = _plain(value.to_local())
    pieces = () if coordinate is None else _pieces(layout, tuple(coordinate), tuple(local.shape), value.placements)
    shards = tuple(Shard(piece.box, narrow_to(local, piece.local)) for piece in pieces)
    is_replicated = layout.is_replicated or _is_part_of_the_world(layout.mesh_shape)
    return ShardedLeaf(shape, local.dtype, shards, layout.is_primary(coordinate), is_replicated)


def _pieces(
    layout: MeshLayout, coordinate: tuple[int, ...], found: tuple[int, ...], placements: Any
) -> tuple[MeshPiece, ...]:
    """Returns what a rank holds whose local tensor has the shape `found`."""
    readings = _readings(layout, coordinate, found)
    if len(readings) == 1:
        return readings[0]
    where = f"a tensor of shape {layout.shape}, placed as {shown(placements)} on a mesh of shape {layout.mesh_shape}"
    if readings:
        raise UnsupportedValueError(
            f"the DTensor doesn't tell what its local tensor holds: {where}, is not the same at {coordinate} if "
            "FSDP2 made it as if distribute_tensor did; use a size that the ranks divide, or put TensorShards"
        )
    raise UnsupportedValueError(
        f"the DTensor's local tensor is of shape {found}; {where}, has {layout.local_shape(coordinate)} at {coordinate}"
        "; where ranks hold shares of unequal size, give DTensor.from_local the shape and the stride of the whole"
    )


@functools.lru_cache(maxsize=4096)  # the layers of a model are alike, and it is put again and again
def _readings(
    layout: MeshLayout, coordinate: tuple[int, ...], found: tuple[int, ...]
) -> tuple[tuple[MeshPiece, ...], ...]:
    """Returns what the rank may hold, by all that the layout may mean.

    DTensors that FSDP2 made have another layout than those of distribute_tensor with the same placements, where sizes
    don't divide evenly. Mostly the shape tells which of the two it is, or it is the same for this rank.
    """
    unstrided = layout.unstrided() if any(split.factor > 1 for split in layout.splits) else None
    layouts = [layout] if unstrided is None else [layout, unstrided]
    fitting = [tuple(one.pieces(coordinate)) for one in layouts if one.local_shape(coordinate) == found]
    return tuple(dict.fromkeys(fitting))


def _is_part_of_the_world(mesh_shape: Sequence[int]) -> bool:
    """Returns whether ranks outside of the mesh may have the same tensor on meshes of their own."""
    distributed: Any = sys.modules["torch.distributed"]
    return distributed.is_initialized() and math.prod(mesh_shape) < distributed.get_world_size()


_layout = functools.lru_cache(maxsize=4096)(layout_of)  # as `_readings`


def _plain(local: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor itself, when its bytes are there. Of a class with operators of its own it is no view."""
    pending = loaded(_compat.ASYNC_COLLECTIVES, "AsyncCollectiveTensor")
    if pending is not None and isinstance(local, pending):
        local = cast(Any, local).trigger_wait()
    return local if _compat.has_own_operators(type(local)) else local.detach()


def _of_tensor_shard(value: TensorShard) -> ShardedLeaf:
    local: Any = value.local
    if not isinstance(local, torch.Tensor) or sharded_leaf(local) is not None:
        raise UnsupportedValueError(f"a TensorShard whose `local` is {an_instance(local)}; it must be a plain tensor")
    if is_lazy(local):
        raise UnsupportedValueError("a TensorShard whose `local` is not initialized yet, and has no memory")
    shape, offsets = _counts("global_shape", value.global_shape), _counts("offsets", value.offsets)
    shard = _shard("TensorShard", shape, offsets, local)
    return ShardedLeaf(shape, local.dtype, (shard,) * (not shard.box.is_empty), is_primary=True, is_replicated=True)


def _of_tensor_shards(value: TensorShards) -> ShardedLeaf:
    shards = [_shard("part of TensorShards", value.global_shape, offsets, local) for offsets, local in value.parts]
    held = tuple(shard for shard in shards if not shard.box.is_empty)
    _check_apart("parts of TensorShards", value.global_shape, held)
    return ShardedLeaf(value.global_shape, value.dtype, held, is_primary=True, is_replicated=True)


def _of_sharded_tensor(value: Any) -> ShardedLeaf:
    shape = tuple(value.metadata().size)
    shards = [
        _shard("shard of a ShardedTensor", shape, tuple(shard.metadata.shard_offsets), shard.tensor)
        for shard in value.local_shards()
    ]
    held = tuple(shard for shard in shards if not shard.box.is_empty)
    _check_apart("shards of a ShardedTensor", shape, held)
    return ShardedLeaf(shape, value.dtype, held, is_primary=True, is_replicated=True)


def _check_apart(what: str, shape: tuple[int, ...], held: tuple[Shard, ...]) -> None:
    pair = overlap([shard.box for shard in held])
    if pair is not None:
        raise UnsupportedValueError(f"two {what} of shape {shape} overlap: {held[pair[0]].box} and {held[pair[1]].box}")


_READERS: tuple[tuple[str, str, Callable[[Any], ShardedLeaf]], ...] = (
    ("torch.distributed.tensor", "DTensor", _of_dtensor),
    (_compat.SHARDED_TENSORS, "ShardedTensor", _of_sharded_tensor),
)


def _counts(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise UnsupportedValueError(f"a TensorShard's `{name}` must be a tuple of ints, found {values!r}") from None


def _shard(what: str, shape: tuple[int, ...], offsets: tuple[int, ...], local: torch.Tensor) -> Shard:
    """Makes a part, which must lie within the whole."""
    sizes = tuple(local.shape)
    box = Box(offsets, sizes)
    if not box.fits(shape):
        raise UnsupportedValueError(
            f"a {what} of shape {sizes} at the offsets {offsets} does not lie within the whole, of shape {shape}; "
            "the three must have as many dimensions, and offset and size add up to at most the whole's size in each"
        )
    return Shard(box, _plain(local))


# --- New memory for what a rank holds --------------------------------------------------------------------------------


def allocate_like(value: Any) -> Any:
    """Makes a DTensor or TensorShard with the mesh and placements of `value`, whose elements are yet to be written.

    It is a Parameter, and requires a gradient, if `value` is and does. No rank has to know of the others' doing so.
    """
    if isinstance(value, TensorShard):
        made = _empty(value.local)
        return TensorShard(_like(value.local, made), value.global_shape, value.offsets)
    local = _compat.local_tensor(value)
    if local is None:
        name = type(value).__qualname__
        raise UnsupportedValueError(f"like= can't allocate a {name}: allocate one, and fill it with out=")
    kind = cast(Any, type(value))
    made: Any = kind.from_local(
        _empty(local), value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return _like(value, made)


def _like(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


def _empty(local: torch.Tensor) -> torch.Tensor:
    """Allocates as `torch.empty_like` does: dense, in the order of its strides."""
    return torch.empty_like(local, requires_grad=False).detach()
