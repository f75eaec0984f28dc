"""What is stored for an object, compared with the object: which tensors it is read into, and what differs.

Nothing is read, and nothing in the object changes.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore.snapshot.format import path_of
from memstore.snapshot.read import Name, Stored, Target, Value, find_targets, why_not_filled
from memstore.snapshot.restore.layouts import layouts_of
from memstore.snapshot.restore.sharing import Place
from memstore.structure import traits
from memstore.wording import an

_OF_DCP = {"state", "bytes", "dcp"}  # the names in a checkpoint that memstore.integrations.dcp has saved
_ALSO_OF_DCP = {"wrapped"}


class Match(NamedTuple):
    """What is stored for an object, and the tensors that it is read into.

    Attributes:
        tensors: one for each leaf of the value.
        others: of leaves that this rank's value lacks and the object has: values of other ranks, by their keys.
        places: where what is stored is read to.
        left: names of a module's leaves that this rank's value has, and only other ranks' modules do.
    """

    value: Value
    tensors: list[Any]
    others: dict[str, Any]
    places: list[Place]
    left: set[Any]

    def replace(self, number: int, made: Any) -> None:
        """Puts another tensor in the stead of a leaf's, and of those that are the very same."""
        same = [other for other, first in self.value.plan.same.items() if first == number]
        for leaf in (number, *same):
            self.tensors[leaf] = traits.with_traits(made, self.value.plan.traits[leaf])


def match_value(
    stored: Stored,
    rank: int,
    key: str,
    stateful: Any,
    state_dict: Any,
    elsewhere: set[str],
    strict: bool,
    differences: list[str],
) -> Match | None:
    value = stored.value(rank, key)
    if value is None:
        has = stored.keys(rank)
        others = (
            "; it was saved by memstore.integrations.dcp, whose load reads it"
            if set(has) - _ALSO_OF_DCP == _OF_DCP
            else ""
        )
        differences.append(f"{key}: the snapshot has nothing of this name; it has {', '.join(has)}{others}")
        return None
    stored.check_files(value.tensors)
    is_module = isinstance(stateful, torch.nn.Module)
    must_fit = is_module or isinstance(stateful, torch.optim.Optimizer)
    targets = find_targets(state_dict)
    layouts = layouts_of(stateful)
    reused = set(value.plan.same.values())
    left = {leaf.name[0] for leaf in value.plan.leaves if leaf.name and str(leaf.name[0]) in elsewhere}
    match = Match(value, [], {}, [], left - set(map(structure.name_of, state_dict)))
    unread = set[int]() if strict or not is_module else _not_loaded(stateful, state_dict, value)
    for i, (leaf, tensor) in enumerate(zip(value.plan.leaves, value.tensors, strict=True)):
        if i in unread:
            match.tensors.append(torch.empty(tensor.shape, dtype=structure.DTYPES[tensor.dtype], device="meta"))
            continue
        if i in value.plan.same:
            match.tensors.append(match.tensors[value.plan.same[i]])
            continue
        path, target = path_of((key, *leaf.name)), targets.get(leaf.name)
        problem = None if target is None else why_not_filled(tensor, target)
        if problem and must_fit:
            differences.append(f"{path}: {problem}")
        if target is None or problem:
            made = layouts.make(leaf.name, tensor)
            match.tensors.append(traits.with_traits(made.value, value.plan.traits[i]))
        else:
            made = target
            match.tensors.append(target.value)
        replace = None if is_module else partial(match.replace, i)
        if i in reused or not leaf.name or leaf.name[0] not in match.left:
            match.places.append(Place(path, tensor, made.value, made.shards, replace))
    if is_module:
        differences += _other_kinds(match.value, state_dict, targets)
        _match_module(stored, match, state_dict, targets, strict, differences)
    return match


def _other_kinds(value: Value, state_dict: Any, targets: dict[Name, Target]) -> list[str]:
    """Tensors of a module that wrap others where what is stored doesn't, or is made of others; and the reverse."""
    stored: dict[Any, list[Name]] = {}
    for leaf in value.plan.leaves:
        if leaf.name:
            stored.setdefault(leaf.name[0], []).append(leaf.name)
    found: list[str] = []
    for key, present in state_dict.items():
        names = stored.get(structure.name_of(key))
        if names is None or not isinstance(present, torch.Tensor):
            continue
        is_whole = len(names[0]) == 1
        if structure.has_wrapped_shards(present) and not all(name in targets for name in names):
            boxes = ", ".join(str(name[1]) for name in names if len(name) > 1)
            found.append(
                f"{path_of((value.key, structure.name_of(key)))}: it was saved as {boxes or 'a plain tensor'}, whose "
                f"inner tensors can't be cut anew for {an(type(present))}: restore it with the sharding that it was "
                "saved with"
            )
            continue
        if structure.is_made_of_several(present) and not all(name in targets for name in names):
            what = "a plain tensor" if is_whole else f"one that wraps {', '.join(str(name[-1]) for name in names)}"
        elif type(present) in (torch.Tensor, torch.nn.Parameter) and not is_whole:
            what = f"one that wraps {', '.join(str(name[-1]) for name in names)}"
        else:
            continue
        found.append(
            f"{path_of((value.key, structure.name_of(key)))}: stored as {what}, here {an(type(present))}: make the "
            "module's as it was when the snapshot was taken"
        )
    return found


def _match_module(
    stored: Stored,
    match: Match,
    state_dict: Any,
    targets: dict[Name, Target],
    strict: bool,
    differences: list[str],
) -> None:
    """A module's names are its own: what it has and the snapshot lacks, and the reverse, is an error if `strict`.

    What this rank's value lacks may be another rank's: of a module whose layers were on several ranks.
    """
    key, plan = match.value.key, match.value.plan
    have = {name[0] for name in (*(leaf.name for leaf in plan.leaves), *plan.object_names) if name} - {"__dict__"}
    want = set(map(structure.name_of, state_dict))
    for name in sorted(want - have, key=str):
        path, target = path_of((key, name)), targets.get((name,))
        other = stored.by_path().get(path)
        problem = "missing: the snapshot doesn't have it"
        if other is not None and target is not None:
            problem = why_not_filled(other, target)
            if problem is None:
                match.others[str(name)] = target.value
                match.places.append(Place(path, other, target.value, target.shards))
                continue
        elif not strict:
            continue
        differences.append(f"{path}: {problem}")
    if strict:
        differences += [
            f"{path_of((key, name))}: unexpected: the snapshot has it, and the module doesn't"
            for name in sorted(have - want - match.left, key=str)
        ]


def _not_loaded(module: torch.nn.Module, state_dict: Any, value: Value) -> set[int]:
    """The leaves that a module doesn't have, and that needn't be read. Where it may rename what it loads, all are."""
    plain = torch.nn.Module
    for one in module.modules():
        own = type(one)._load_from_state_dict
        if (
            one._load_state_dict_pre_hooks
            or type(one).load_state_dict is not plain.load_state_dict
            or (own is not plain._load_from_state_dict and not own.__module__.startswith("torch.nn.modules."))
        ):
            return set()
    names = set(map(structure.name_of, state_dict))
    first = {i: value.plan.same.get(i, i) for i in range(len(value.plan.leaves))}
    loaded = {first[i] for i, leaf in enumerate(value.plan.leaves) if leaf.name and leaf.name[0] in names}
    return {i for i in first if first[i] not in loaded} - value.plan.loaded  # which must be there to be built
