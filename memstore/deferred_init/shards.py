"""This rank's part of a tensor, as a DTensor: of a source's tensor just that part is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore.late_imports import between_forks
from memstore.sharding import local_shape, part, place
from memstore.structure import contiguous_stride, modes

Placements = Sequence[Any] | Mapping[str, Any] | Callable[[str, torch.Tensor], Any]


class Spread(NamedTuple):
    """A DeviceMesh, and torch's placements on it."""

    mesh: Any
    placements: Sequence[Any]


def placements_of(chosen: Any, name: str, tensor: torch.Tensor, *, is_parameter: bool) -> Any:
    """How a tensor is spread; None: it isn't, and each rank has all of it."""
    if callable(chosen):
        return chosen(name, tensor)
    if isinstance(chosen, Mapping):
        return chosen.get(name)
    return chosen if is_parameter else None


def spread_as(wrapper: Any) -> Spread | None:
    """How a DTensor is spread; None: it wraps tensors for another reason."""
    mesh, placements = getattr(wrapper, "device_mesh", None), getattr(wrapper, "placements", None)
    return None if mesh is None or placements is None else Spread(mesh, placements)


def distribute(tensor: torch.Tensor, spread: Spread, dtype: torch.dtype) -> Any:
    """This rank's part, in memory of its own. There is no collective.

    Raises:
        UnsupportedValueError: there is no such dimension, or a placement is Partial or unknown.
    """
    with between_forks():
        from torch.distributed.tensor import DTensor
    mesh, placements = spread
    shape = tuple(tensor.shape)
    pieces, own = place(mesh, placements, shape), local_shape(mesh, placements, shape)
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        local = torch.empty(own, dtype=dtype, device=mesh.device_type)
        for piece in pieces:
            part(local, piece.local).copy_(part(tensor, piece.box))
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )
