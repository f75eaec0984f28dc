"""The state of models by name, and how a stored one fits a module and its optimizer.

`model_state` and `optimizer_state` give what is stored, by names that neither wrappers nor meshes change. `Fit` finds
what goes where, and all that doesn't fit; it writes nothing before `fill`. `why_of_another` tells whether a stored
group of parameters is of the present kind of optimizer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from memstore import contents, structure
from memstore._compat import MODULE_WRAPPERS, copy_module_versions, has_load_hooks
from memstore._threads import between_forks, writing
from memstore._wording import an
from memstore.engine import HeldVersion
from memstore.errors import UnsupportedValueError
from memstore.sharding import TensorShards, sharded_leaf
from memstore.structure import (
    clone_parts,
    copy_into,
    is_made_of_several,
    is_wrapper,
    pair_parts,
    pair_shards,
    why_not_filled,
    why_parts_not_filled,
)
from memstore.view import StoredTensor, view

# --- The state of a module and its optimizer by names that neither wrappers nor meshes change ------------------------
#     {"state": {parameter: {name: value}},
#      "param_groups": {first parameter: {"params": {parameter: None}, "lr": ..., ...}}}
#
# is what is stored of an optimizer. Groups are named by their first parameters, and not numbered, so that those of
# ranks that hold different layers don't meet; and dicts, since ranks' dicts are merged by key.
#
# torch.distributed.checkpoint has functions of this kind, which make a step of an optimizer that has no states yet.


# Trees of any shape: what they hold is looked at, and has no type before.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false


MODEL, OPTIMIZER = "model", "optimizer"  # the entries of what save_model stores
STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NAMES = "param_names"  # torch keeps them beside the numbers of named parameters


class ModelEntry(NamedTuple):
    """An entry of a module's state_dict. `key` is its name there; `is_own`: it is a parameter or buffer itself."""

    key: str
    value: Any
    is_own: bool


def model_entries(model: torch.nn.Module) -> dict[str, ModelEntry]:
    """Returns the module's state, by names without the prefixes of wrappers.

    Raises:
        TypeError: it is no module.
        UnsupportedValueError: FSDP1.
    """
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model is a torch.nn.Module, and not {an(type(model))}: put and get are for other values")
    if any(_is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module) for module in model.modules()):
        raise UnsupportedValueError(
            "the model has modules of FullyShardedDataParallel, whose state only collectives can give, which know no "
            "timeout; shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    own = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    return {clean_name(model, key): ModelEntry(key, value, id(value) in own) for key, value in state.items()}


def is_spread(model: Any) -> bool:
    """Returns whether this process may hold only a part of the module: whether it has DTensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not isinstance(model, torch.nn.Module):
        return False
    return any(isinstance(tensor, kind) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def saved_weights(value: Any) -> Mapping[str, Any] | None:
    """Returns the module's state in a value of save_model's.

    Returns None for another value, as a state_dict that was put.
    """
    if not (isinstance(value, Mapping) and isinstance(value.get(MODEL), Mapping)):
        return None
    others = value.keys() - {MODEL}
    if not others:
        return value[MODEL]
    optimizer = value.get(OPTIMIZER)
    is_saved = others == {OPTIMIZER} and isinstance(optimizer, Mapping) and {STATE, GROUPS} <= optimizer.keys()
    return value[MODEL] if is_saved else None


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the state of a module, as it is stored."""
    with torch.inference_mode(False):  # in it torch can't detach a DTensor that was made outside of it
        return {
            name: entry.value.detach() if isinstance(entry.value, torch.Tensor) else entry.value
            for name, entry in model_entries(model).items()
        }


def clean_name(model: torch.nn.Module, name: str) -> str:
    """Returns the name of a parameter without those of wrappers."""
    *steps, last = name.split(".")
    kept: list[str] = []
    module: Any = model
    for step in steps:
        if step != _wrapped(module):
            kept.append(step)
        module = getattr(module, step, None)
    return ".".join([*kept, last])


def _wrapped(module: Any) -> str | None:
    """Returns the name under which a wrapper has the module that it wraps."""
    for home, kind, name in MODULE_WRAPPERS:
        if _is_a(home, kind, module):
            return name
    return None


def _is_a(home: str, kind: str, module: Any) -> bool:
    """Returns whether it is of a class whose module may not have been imported: then it is not."""
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(module, known)


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer, as it is stored.

    Raises UnsupportedValueError if it has parameters that the model has not.
    """
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
    """Returns the names of the optimizer's parameters, in its order.

    Raises UnsupportedValueError as `optimizer_state`, and TypeError for what is no optimizer.
    """
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


# --- Kinds of optimizers ---------------------------------------------------------------------------------------------


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether it takes a state dict as torch's own optimizers do, and no hook changes the state dict before."""
    is_torchs = getattr(type(optimizer), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
    return is_torchs and not has_load_hooks(optimizer)


def steps_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether its options and states mean the same as those of torch's own optimizers."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def why_of_another(optimizer: torch.optim.Optimizer, group: Container[str]) -> str | None:
    """Says, for an error, which option a stored group lacks that this optimizer needs. Returns None if it lacks none.

    Later versions of torch add flags, which optimizers set themselves where a group lacks them; schedulers add keys.
    """
    if not type(optimizer).__setstate__.__module__.startswith("torch.optim."):
        return None
    needed = [name for name, value in optimizer.defaults.items() if value is not None and not isinstance(value, bool)]
    missing = [name for name in needed if name not in group]
    if not missing:
        return None
    return f"stored without {', '.join(missing)}, which {type(optimizer).__name__} needs: it is another optimizer's"


# --- A stored model, fitted to a module and its optimizer: what goes where, and all that doesn't fit -----------------
# The module's own tensors are the targets, and so are the optimizer's states where it has them; others are made here,
# laid out as their parameter is. Nothing is written before `fill`.


class Fit:
    """The plan of a load.

    Attributes:
        problems: what keeps it from doing it. All of them, as lines for an error.
        unexpected: what is stored, and the module or the optimizer has no place for.
    """

    def __init__(
        self,
        pin: HeldVersion,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        self._pin, self._model, self._optimizer, self._strict, self._cast = pin, model, optimizer, strict, cast
        self.problems: list[str] = []
        self.unexpected: list[str] = []
        self._out: dict[str, Any] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of tensors that wrap others: their parts
        self._loaded: dict[str, Any] = {}  # what the module is to load itself
        self._optimizer_state: dict[str, Any] | None = None
        assert pin.held is not None, "a pin that is mapped"
        stored = view(pin.root, pin.key, pin.held, pin.options, "cpu")
        if not isinstance(stored, Mapping):
            kind = torch.Tensor if isinstance(stored, StoredTensor) else type(stored)
            self.problems.append(f"{an(kind)} is stored, which save_model didn't make, and is no state_dict")
            return
        entries = model_entries(model)
        if isinstance(stored.get(MODEL), Mapping):
            self._out[MODEL] = self._fit_model(stored[MODEL], entries)
        elif entries and not any(name in stored or entry.key in stored for name, entry in entries.items()):
            known = f"it has none of the model's names: its first is {next(iter(stored), None)!r:.100}"
            self.problems.append(f"{an(type(stored))} is stored, which save_model didn't make; as a state_dict {known}")
            return
        else:  # a state_dict that was put, perhaps with the names that a wrapper gives
            self._out = self._fit_model(stored, entries)
        if optimizer is not None:
            self._fit_optimizer(stored.get(OPTIMIZER), optimizer)

    def fill(self) -> None:
        """Copies what is stored into the module and the optimizer. Raises AbandonedError before it writes anything."""
        with writing():
            self._fill()

    def _fill(self) -> None:
        pin, options = self._pin, contents.ReadOptions(out=self._out, strict=False, cast=self._cast)
        assert pin.held is not None, "a pin that is mapped"
        chosen = pin.options
        contents.read(pin.root, pin.key, pin.held, options, verify=chosen.verify, allow_pickle=chosen.allow_pickle)
        for target, source in self._pairs:
            copy_into(target, source)
        if self._loaded:
            state: Any = self._model.state_dict(keep_vars=True)  # for the versions of its modules, which some ask for
            loaded: Any = OrderedDict(self._loaded)
            copy_module_versions(state, loaded)
            self._model.load_state_dict(loaded, strict=False)
        if self._optimizer is not None and self._optimizer_state is not None:
            self._optimizer.load_state_dict(self._optimizer_state)

    # --- the module ---------------------------------------------------------------------------------------------------

    def _fit_model(self, stored: Mapping[str, Any], entries: Mapping[str, ModelEntry]) -> dict[str, Any]:
        """Returns what a get is to fill, by the stored names."""
        targets: dict[str, Any] = {}
        known: set[str] = set()
        for name, entry in entries.items():
            label = entry.key if name not in stored and entry.key in stored else name
            known.add(label)
            if label not in stored:
                self._miss(f"model[{name!r}]: not stored")
                continue
            found, value = stored[label], entry.value
            is_part = isinstance(found, TensorShards)
            problem = (
                None if is_part or not isinstance(value, torch.Tensor) else _why_not_into(found, value, self._cast)
            )
            if problem:
                self.problems.append(f"model[{name!r}]: {problem}")
            elif entry.is_own and isinstance(found, StoredTensor):
                targets[label] = value
            elif _has_several(found):  # which no get can fill, so that the view has them loaded already
                self._fit_several(name, entry, found)
            else:
                targets[label] = self._loaded[entry.key] = _target(found, value, _fresh)
        self.unexpected += [f"model[{name!r}]" for name in stored if name not in known]
        return targets

    def _fit_several(self, name: str, entry: ModelEntry, found: Any) -> None:
        """Plans for what is stored as several tensors: it is filled part by part where the module has its like."""
        value = entry.value
        pairs = (pair_parts(value, found) or pair_shards(value, found)) if isinstance(value, torch.Tensor) else None
        if pairs is not None:
            self._pairs += pairs
        elif isinstance(found, TensorShards) or (isinstance(found, torch.Tensor) and is_wrapper(type(found))):
            self.problems.append(
                f"model[{name!r}]: stored as {an(type(found))}, here {an(type(entry.value))}, or one that is made "
                "otherwise: make the module's as it was when it was saved"
            )
        else:
            self._loaded[entry.key] = _target(found, None, lambda stored, _: stored.clone())

    def _miss(self, problem: str) -> None:
        if self._strict:
            self.problems.append(problem)

    # --- the optimizer ------------------------------------------------------------------------------------------------

    def _fit_optimizer(self, stored: Any, optimizer: torch.optim.Optimizer) -> None:
        if not (isinstance(stored, Mapping) and all(isinstance(stored.get(key), Mapping) for key in (STATE, GROUPS))):
            instead = "leave optimizer= out, or store it by save_model(key, model, optimizer)"
            if isinstance(stored, Mapping) and "param_groups" in stored:
                instead = f"optimizer.load_state_dict(store.get({self._pin.key!r})[{OPTIMIZER!r}]) loads it"
            what = "none is stored" if stored is None else "not as save_model stores it"
            self._miss(f"optimizer: {what}: {instead}")
            return
        parameters = parameter_names(self._model, optimizer)
        present = optimizer.state_dict()
        homes = {name: key for key, group in stored[GROUPS].items() for name in group[PARAMS]}
        states: dict[Any, Any] = {}
        filled: dict[str, Any] = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            if name not in homes:
                self._miss(f"optimizer: it had no parameter {name!r}")
            if name in stored[STATE]:
                make = _maker_for(parameter)
                states[number] = _target(stored[STATE][name], present[STATE].get(number), make)
                filled[name] = _filled(states[number])
        named = {key: value for key, value in stored[STATE].items() if key not in homes}
        for key, value in named.items():  # states of no parameter
            states[key] = _target(value, present[STATE].get(key), _fresh)
            filled[key] = _filled(states[key])
        groups, options = self._fit_groups(stored[GROUPS], homes, list(parameters), present[GROUPS])
        if loads_as_torch(optimizer) and steps_as_torch(optimizer):
            own = dict.fromkeys(homes[name] for name in parameters if name in homes)  # other ranks may have other kinds
            reasons = [why_of_another(optimizer, stored[GROUPS][key]) for key in own]
            self.problems += [f"optimizer: {why}" for why in dict.fromkeys(reasons) if why is not None]
        others = _target({key: value for key, value in stored.items() if key not in (STATE, GROUPS)}, present, _fresh)
        self._out[OPTIMIZER] = {**others, STATE: filled, GROUPS: options}
        self._optimizer_state = {**others, STATE: states, GROUPS: groups}
        self.unexpected += [f"optimizer: parameter {name!r}" for name in homes if name not in parameters]

    def _fit_groups(
        self, stored: Mapping[str, Any], homes: Mapping[str, str], names: list[str], present: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the groups as they are to be, and the stored options for which tensors are read."""
        groups: list[dict[str, Any]] = []
        read: dict[str, Any] = {}
        for number, group in enumerate(present):
            keys = dict.fromkeys(homes[names[i]] for i in group[PARAMS] if names[i] in homes)
            found = [{name: value for name, value in stored[key].items() if name != PARAMS} for key in keys]
            if not found:
                groups.append(group)
                continue
            if any(not _are_equal(found[0], other) for other in found[1:]):
                texts = " and ".join(repr(key) for key in keys)
                self.problems.append(f"optimizer: group {number} has parameters of the stored groups of {texts}, "
                                     "whose options differ")  # fmt: skip
            first = next(iter(keys))
            options = read.setdefault(first, _target(found[0], group, _fresh))
            groups.append({**group, **options})
        return groups, read


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


# --- targets ----------------------------------------------------------------------------------------------------------

_Make = Callable[[torch.Tensor, Any], torch.Tensor]


def _why_not_into(stored: Any, target: torch.Tensor, cast: bool = False) -> str | None:
    if not isinstance(stored, torch.Tensor):
        return f"stored as {an(type(stored))}, here a tensor"
    if is_lazy(target):
        return why_not_filled(target)
    if stored.shape != target.shape:
        return f"stored with shape {list(stored.shape)}, here {list(target.shape)}"
    can_cast = isinstance(stored, StoredTensor) and structure.can_cast(stored.dtype, target.dtype)
    if stored.dtype != target.dtype and not (cast and can_cast):
        advice = "cast=True casts it, and " if can_cast else ""
        return f"stored as {stored.dtype}, here {target.dtype}; {advice}save_model(dtype=) stores another"
    leaf = sharded_leaf(target)
    here = [target] if leaf is None else [shard.local for shard in leaf.shards]
    return next(filter(None, map(why_parts_not_filled, here)), None)


def _target(stored: Any, present: Any, make: _Make) -> Any:
    """Makes the target of a get with out=: as the value is stored, with the tensors that are there, or made for it."""
    if isinstance(stored, Mapping):
        there = present if isinstance(present, Mapping) else {}
        return {key: _target(value, there.get(key), make) for key, value in stored.items()}
    if isinstance(stored, list | tuple) and type(stored) in (list, tuple):
        there = present if isinstance(present, list | tuple) and len(present) == len(stored) else [None] * len(stored)
        return type(stored)(_target(value, one, make) for value, one in zip(stored, there, strict=True))
    if isinstance(stored, torch.Tensor) and is_made_of_several(stored):
        return clone_parts(stored)  # the view has loaded it
    if not isinstance(stored, StoredTensor):
        return stored  # an object
    if isinstance(present, torch.Tensor) and _why_not_into(stored, present) is None:
        return present.detach()
    return make(stored, present)


def _has_several(stored: Any) -> bool:
    """Returns whether there is a tensor that is stored as several."""
    if isinstance(stored, Mapping):
        return any(map(_has_several, stored.values()))
    if isinstance(stored, list | tuple):
        return any(map(_has_several, stored))
    return isinstance(stored, TensorShards) or (isinstance(stored, torch.Tensor) and is_made_of_several(stored))


def _filled(target: Any) -> Any:
    """Returns what a get is to fill of a target: tensors stored as several are copied from the view already."""
    if not isinstance(target, Mapping):
        return target
    return {
        key: _filled(value)
        for key, value in target.items()
        if not (isinstance(value, torch.Tensor) and is_made_of_several(value))
    }


def _fresh(stored: torch.Tensor, present: Any) -> torch.Tensor:
    device = present.device if isinstance(present, torch.Tensor) and not present.is_meta else "cpu"
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def _maker_for(parameter: torch.nn.Parameter) -> _Make:
    """Makes states of a parameter that has none yet: laid out as the parameter is, if they are of its shape."""

    def make(stored: torch.Tensor, _: Any) -> torch.Tensor:
        local = parameter.detach()
        if stored.shape == parameter.shape and stored.ndim:
            return torch.empty_like(local, dtype=stored.dtype)
        mesh = getattr(parameter, "device_mesh", None)
        device = parameter.device if stored.ndim else "cpu"  # counts of steps; the optimizer moves them if need be
        plain = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        if mesh is None or not stored.ndim:
            return plain
        with between_forks():
            from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return make
