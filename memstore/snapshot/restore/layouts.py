"""New tensors for what is stored and an object doesn't have yet: in the layout that its own tensors will need.

An optimizer makes its state with the first step. Restored before that, the moments of a parameter that is spread over
ranks are spread as the parameter is: each rank reads its own boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memstore import modes
from memstore.sharding import sharded_leaf
from memstore.snapshot.format import StoredTensor
from memstore.snapshot.read import Name, Target, new_memory, new_target
from memstore.structure import DTYPES

_STATE_NAME = 3  # parts of the name of an optimizer's state: "state", the parameter's number, "exp_avg"


class Layouts:
    """Args: parameters: of an optimizer, in the order in which its state dict numbers them; else none."""

    def __init__(self, parameters: Sequence[Any] = ()) -> None:
        self._parameters = parameters

    def make(self, name: Name, tensor: StoredTensor) -> Target:
        """A new tensor for a stored leaf of an object's state dict."""
        number = name[1] if len(name) == _STATE_NAME and name[0] == "state" else None
        if isinstance(number, int) and 0 <= number < len(self._parameters):
            parameter = self._parameters[number]
            if tuple(parameter.shape) == tensor.shape and sharded_leaf(parameter) is not None:
                return _spread_as(parameter, tensor)
        return new_target(tensor)


def _spread_as(parameter: Any, tensor: StoredTensor) -> Target:
    with torch.inference_mode(False), torch.no_grad(), modes.put_aside():
        like: torch.Tensor = parameter.to_local()
        made: Any = type(parameter).from_local(
            new_memory(tensor.path, like.shape, DTYPES[tensor.dtype], like.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        leaf = sharded_leaf(made)
    shards = () if leaf is None else leaf.shards
    return Target(made, made.dtype, tensor.shape, shards)


def layouts_of(stateful: Any) -> Layouts:
    """Of an optimizer, its parameters'; of other objects, none."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return Layouts()
    groups = stateful.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return Layouts([one if type(one).__name__ == "DTensor" else torch.empty(0) for one in parameters])
