"""The state of a module and its optimizer by names that neither wrappers nor meshes change.

    {"state": {parameter: {name: value}},
     "param_groups": {first parameter: {"params": {parameter: None}, "lr": ..., ...}}}

is what is stored of an optimizer. Groups are named by their first parameters, and not numbered, so that those of ranks
that hold different layers don't meet; and dicts, since ranks' dicts are merged by key.

torch.distributed.checkpoint has functions of this kind, which make a step of an optimizer that has no states yet.
"""

# Trees of any shape: what they hold is looked at, and has no type before.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from memstore.errors import UnsupportedValueError
from memstore.wording import an

MODEL, OPTIMIZER = "model", "optimizer"  # the entries of what save_model stores
STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NAMES = "param_names"  # torch keeps them beside the numbers of named parameters


_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


class ModelEntry(NamedTuple):
    """An entry of a module's state_dict. `key` is its name there; `is_own`: it is a parameter or buffer itself."""

    key: str
    value: Any
    is_own: bool


def model_entries(model: torch.nn.Module) -> dict[str, ModelEntry]:
    """The module's state, by names without the prefixes of wrappers.

    Raises:
        TypeError: it is no module.
        UnsupportedValueError: FSDP1.
    """
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model is a torch.nn.Module, and not {an(type(model))}: put and get are for other values")
    _refuse_fsdp1(model)
    own = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    return {clean_name(model, key): ModelEntry(key, value, id(value) in own) for key, value in state.items()}


def is_spread(model: Any) -> bool:
    """Whether it is a module of which this process may hold a part only: it has DTensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not isinstance(model, torch.nn.Module):
        return False
    return any(isinstance(tensor, kind) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def saved_weights(value: Any) -> Mapping[str, Any] | None:
    """The module's state in what save_model stores. None: it is another value, as a state_dict that was put."""
    if not (isinstance(value, Mapping) and isinstance(value.get(MODEL), Mapping)):
        return None
    others = value.keys() - {MODEL}
    if not others:
        return value[MODEL]
    optimizer = value.get(OPTIMIZER)
    is_saved = others == {OPTIMIZER} and isinstance(optimizer, Mapping) and {STATE, GROUPS} <= optimizer.keys()
    return value[MODEL] if is_saved else None


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """What is stored of a module."""
    with torch.inference_mode(False):  # in it torch can't detach a DTensor that was made outside of it
        return {
            name: entry.value.detach() if isinstance(entry.value, torch.Tensor) else entry.value
            for name, entry in model_entries(model).items()
        }


def clean_name(model: torch.nn.Module, name: str) -> str:
    """The name of a parameter as it is without wrappers."""
    *steps, last = name.split(".")
    kept: list[str] = []
    module: Any = model
    for step in steps:
        if step != _wrapped(module):
            kept.append(step)
        module = getattr(module, step, None)
    return ".".join([*kept, last])


def _wrapped(module: Any) -> str | None:
    """Under which name a wrapper has what it wraps."""
    for home, kind, name in _WRAPPERS:
        if _is_a(home, kind, module):
            return name
    return None


def _is_a(home: str, kind: str, module: Any) -> bool:
    """Whether it is of a class whose module may not have been imported: then it is not."""
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(module, known)


def _refuse_fsdp1(model: torch.nn.Module) -> None:
    if any(_is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module) for module in model.modules()):
        raise UnsupportedValueError(
            "the model has modules of FullyShardedDataParallel, whose state only collectives can give, which know no "
            "timeout; shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
        )


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is stored of an optimizer. Raises UnsupportedValueError if it has parameters that the model has not."""
    names = list(parameter_names(model, optimizer))
    packed = optimizer.state_dict()
    groups: dict[str, dict[str, Any]] = {}
    for group in packed[GROUPS]:
        own = [names[number] for number in group[PARAMS]]
        if own:
            options = {name: value for name, value in group.items() if name not in (PARAMS, _NAMES)}
            groups[own[0]] = {PARAMS: dict.fromkeys(own), **options}
    state = {names[key] if isinstance(key, int) else key: value for key, value in packed[STATE].items()}
    return {**packed, STATE: state, GROUPS: groups}


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters, in its order. Raises as `optimizer_state`, and TypeError for what is none."""
    if not hasattr(optimizer, GROUPS):  # wrappers of optimizers are no torch.optim.Optimizer, and have them
        raise TypeError(f"optimizer is a torch.optim.Optimizer, and not {an(type(optimizer))}")
    known = {id(parameter): clean_name(model, name) for name, parameter in model.named_parameters()}
    found: dict[str, torch.nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group[PARAMS]):
            name = known.get(id(parameter))
            if name is None:
                raise UnsupportedValueError(
                    f"parameter {position} of the optimizer's group {number}, of shape {list(parameter.shape)}, is "
                    "none of the model's: make the optimizer after the model is wrapped and sharded"
                )
            found[name] = parameter
    return found
