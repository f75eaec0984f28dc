"""This rank's part of a tensor, as a DTensor: of a source's tensor just that part is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore.errors import StructureMismatchError
from memstore.late_imports import between_forks
from memstore.sharding import local_shape, part, place
from memstore.structure import contiguous_stride, modes
from memstore.wording import short

Placements = Sequence[Any] | Mapping[str, Any] | Callable[[str, torch.Tensor], Any]


class Spread(NamedTuple):
    """A DeviceMesh, and torch's placements on it."""

    mesh: Any
    placements: Sequence[Any]


def check_placements(chosen: Any, names: Iterable[Sequence[str]]) -> None:
    """
    Args:
        names: of each tensor, all its names.

    Raises:
        StructureMismatchError: a dict has names that no tensor has, or says different things of a tied one.
    """
    if not isinstance(chosen, Mapping):
        return
    groups = list(names)
    known = {name for group in groups for name in group}
    unknown = [str(name) for name in chosen if name not in known]
    if unknown:
        raise StructureMismatchError(
            f"placements has names that the module lacks: {_few(unknown)}; the module has {_few(sorted(known))}"
        )
    for group in groups:
        found = [name for name in group if name in chosen]
        if any(_listed(chosen[name]) != _listed(chosen[found[0]]) for name in found):
            raise StructureMismatchError(
                f"{_few(found)} are names of one tensor, and placements has different ones for them: name it once"
            )


def _listed(placements: Any) -> Any:
    return list(placements) if isinstance(placements, (list, tuple)) else placements


def _few(names: Sequence[str]) -> str:
    return ", ".join(short(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")


def placements_of(chosen: Any, name: str, names: Sequence[str], tensor: torch.Tensor, *, is_parameter: bool) -> Any:
    """How a tensor is spread; None: it isn't, and each rank has all of it.

    Args:
        name: that of the place which asks.
        names: all of the tensor, if it is tied: a dict may have any of them.
    """
    if callable(chosen):
        return chosen(name, tensor)
    if isinstance(chosen, Mapping):
        return next((chosen[one] for one in names if one in chosen), None)
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
