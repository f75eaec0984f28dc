"""Shards: the boxes of a tensor that a rank holds, each with the tensor that has its elements.

`sharded_leaf` reads them of DTensors, TensorShards and ShardedTensors; `allocate_like` makes new memory for them.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.nn.parameter import is_lazy

from memstore import _compat
from memstore import _modes as modes
from memstore._wording import an_instance
from memstore.errors import UnsupportedValueError
from memstore.sharding.boxes import Box, narrow_to, overlap
from memstore.sharding.layouts import MeshLayout, MeshPiece, layout_of, loaded, shown

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
