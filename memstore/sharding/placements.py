"""What torch says of a DTensor, as a layout: device meshes and placements, with the reasons why some are refused.

torch.distributed takes long to import, and some builds of torch lack it. Who has a mesh or a placement has imported it:
so it is looked for among the modules that are there, and never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from memstore.errors import UnsupportedValueError
from memstore.sharding.layout import Layout, Piece, Split

_PLACEMENTS = "torch.distributed.tensor.placement_types"
_KNOWN = "known are Replicate(), Shard(dim), and the _StridedShard(dim, split_factor=) of FSDP2"


def place(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> list[Piece]:
    """What this rank holds of a tensor that is spread so: boxes, and where they lie in its local tensor.

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
    """The shape of this rank's local tensor; (0,) for a rank outside of the mesh. As `place` in all else."""
    return layout_of(_shape_of(mesh), placements, shape).local_shape(mesh.get_coordinate())


def layout_of(
    mesh_shape: Sequence[int], placements: Sequence[Any], shape: Sequence[int], order: Sequence[int] | None = None
) -> Layout:
    """The layout that placements describe.

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
    return Layout(shape, tuple(mesh_shape), tuple(split for split in in_order if split is not None))


def shown(placements: Sequence[Any]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def loaded(module: str, name: str) -> Any:
    """A class of a module, if that was imported."""
    return getattr(sys.modules.get(module), name, None)


def _shape_of(mesh: Any) -> tuple[int, ...]:
    known = loaded("torch.distributed.device_mesh", "DeviceMesh")
    if known is None or not isinstance(mesh, known):
        raise UnsupportedValueError(f"expected a DeviceMesh of torch, found {mesh!r}")
    return tuple(mesh.shape)


def _split(mesh_dim: int, placement: Any, shape: tuple[int, ...]) -> Split | None:
    """What a placement does with its mesh dimension; None if it replicates."""
    if _is_a("Replicate", placement):
        return None
    what = f"the placement {placement!r} of mesh dimension {mesh_dim}"
    is_strided = _is_a("_StridedShard", placement)
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
    """Whether it is of that class, and no subclass, which may cut tensors in other ways."""
    kind = loaded(_PLACEMENTS, name)
    return kind is not None and type(placement) is kind


def _dim(what: str, dim: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= dim < len(shape):
        dims = f"a dimension from {-len(shape)} to {len(shape) - 1}, or " if shape else ""
        raise UnsupportedValueError(
            f"{what} shards a dimension that a tensor of shape {shape} doesn't have; use {dims}Replicate()"
        )
    return dim % len(shape)
