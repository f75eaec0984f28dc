"""How a stored optimizer differs from the present one, in what load_state_dict would refuse too late, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from memstore.optimizers import loads_as_torch, steps_as_torch, why_of_another

# What torch's own optimizers keep for each element of a parameter. Others may keep more or less under these names.
_OF_ELEMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)


def differences_of(key: str, optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    """Of the groups of parameters, and of the shapes of their states. None where an optimizer loads in its own way.

    Args:
        saved: the state dict that is stored; of its tensors only the shapes count.
    """
    if not loads_as_torch(optimizer) or not isinstance(saved, dict):
        return
    state_dict = cast("dict[str, Any]", saved)
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        yield f"{key}: what is stored is no state dict of an optimizer"
        return
    yield from _groups(key, optimizer, cast("list[Any]", groups))
    if steps_as_torch(optimizer):
        yield from _states(key, optimizer, cast("dict[Any, Any]", states))


def _groups(key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Any]) -> Iterator[str]:
    present = optimizer.param_groups
    if len(groups) != len(present):
        yield f"{key}/param_groups: stored with {len(groups)} groups, here {len(present)}"
        return
    for i, (group, here) in enumerate(zip(groups, present, strict=True)):
        if not isinstance(group, dict) or not isinstance(cast("dict[str, Any]", group).get("params"), list):
            yield f"{key}/param_groups/{i}: what is stored is no group of parameters"
            continue
        if len(group["params"]) != len(here["params"]):
            yield (f"{key}/param_groups/{i}: stored with {len(group['params'])} parameters, here {len(here['params'])}")
        why = why_of_another(optimizer, group)
        if why is not None:
            yield f"{key}/param_groups/{i}: {why}"


def _states(key: str, optimizer: torch.optim.Optimizer, states: dict[Any, Any]) -> Iterator[str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        if not isinstance(number, int) or not 0 <= number < len(parameters) or not isinstance(state, dict):
            continue
        want = list(parameters[number].shape)
        for name, value in cast("dict[Any, Any]", state).items():
            shape = list(getattr(value, "shape", want))
            if name in _OF_ELEMENTS and shape != want:
                yield f"{key}/state/{number}/{name}: stored with shape {shape}, and its parameter has {want}"
