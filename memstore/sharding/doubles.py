"""New memory like a rank's part of a tensor."""

from __future__ import annotations

from typing import Any, cast

import torch

from memstore.errors import UnsupportedValueError
from memstore.sharding.shards import TensorShard


def double(value: Any) -> Any:
    """A DTensor or TensorShard with the mesh and placements of `value`, whose own elements are yet to be written.

    It is a Parameter, and requires a gradient, if `value` is and does. No rank has to know of the others' doing so.
    """
    if isinstance(value, TensorShard):
        made = _empty(value.local)
        return TensorShard(_like(value.local, made), value.global_shape, value.offsets)
    local = getattr(value, "_local_tensor", None)
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
    """Dense: in the order of its strides, as `torch.empty_like` allocates."""
    return torch.empty_like(local, requires_grad=False).detach()
