"""How a snapshot is restored. Every rank runs these steps; one that fails anywhere fails on all of them.

1. the state dicts of the present objects are asked for: most give their own tensors
2. they are compared with what is stored; all differences are told at once, and nothing was written yet
3. what is stored is read straight into these tensors, and into new ones where there are none
4. load_state_dict of each object gets the stored state dict, made of these tensors; the random state comes last
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore.errors import StructureMismatchError
from memstore.snapshot.layouts import layouts_of
from memstore.snapshot.names import path_of
from memstore.snapshot.progress import Meter
from memstore.snapshot.ranks import Ranks
from memstore.snapshot.reading import Want, read_into
from memstore.snapshot.stateful import AppState, RNGState, check_app_state
from memstore.snapshot.stored import Stored, Value
from memstore.snapshot.targets import Name, Target, find_targets, new_target, why_not_filled
from memstore.structure import traits

_LISTED = 20  # differences in one message


class Match(NamedTuple):
    """What is stored for an object, and the tensors that it is read into.

    Attributes:
        tensors: one for each leaf of the value.
        others: of leaves that this rank's value lacks and the object has: values of other ranks, by their keys.
    """

    value: Value
    tensors: list[Any]
    others: dict[str, Any]
    wants: list[Want]


def restore(stored: Stored, app_state: AppState, ranks: Ranks, *, strict: bool, allow_pickle: bool) -> None:
    """As `Snapshot.restore`."""
    said = ranks.together(lambda: "\0".join(check_app_state(app_state)).encode())
    keys = sorted({key for names in said for key in names.decode().split("\0") if key})
    last = [key for key in keys if isinstance(app_state.get(key), RNGState)]
    order = [key for key in keys if key not in last]
    dicts = {key: app_state[key].state_dict() for key in last}
    for key in order:
        if key in app_state:
            dicts[key] = app_state[key].state_dict()
        ranks.wait()
    matches: dict[str, Match] = {}

    def match() -> bytes:
        differences: list[str] = []
        for key, state_dict in dicts.items():
            found = _match(stored, ranks.rank, key, app_state[key], state_dict, strict, differences)
            if found is not None:
                matches[key] = found
        _raise(stored, differences)
        return b""

    def read() -> bytes:
        wants = [want for found in matches.values() for want in found.wants]
        read_into(stored, wants, Meter(None, 0, ""))
        return b""

    ranks.together(match)
    ranks.together(read)
    for key in [*order, *last]:
        if key in matches:
            _load(stored, app_state[key], matches[key], strict, allow_pickle)
        if key not in last:
            ranks.wait()


def _raise(stored: Stored, differences: list[str]) -> None:
    if differences:
        more = f"\n  and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        lines = "".join(f"\n  {difference}" for difference in differences[:_LISTED])
        raise StructureMismatchError(
            f"app_state differs from the snapshot {stored.path}, nothing was restored:{lines}{more}"
        )


def _match(
    stored: Stored, rank: int, key: str, stateful: Any, state_dict: Any, strict: bool, differences: list[str]
) -> Match | None:
    value = stored.value(rank, key)
    if value is None:
        differences.append(f"{key}: the snapshot has nothing of this name; it has {', '.join(stored.keys(rank))}")
        return None
    stored.check_files(value.tensors)
    is_module = isinstance(stateful, torch.nn.Module)
    must_fit = is_module or isinstance(stateful, torch.optim.Optimizer)
    targets = find_targets(state_dict)
    layouts = layouts_of(stateful)
    match = Match(value, [], {}, [])
    unread = set[int]() if strict or not is_module else _not_loaded(stateful, state_dict, value)
    for i, (leaf, tensor) in enumerate(zip(value.plan.leaves, value.tensors, strict=True)):
        if i in unread:
            match.tensors.append(torch.empty(tensor.shape, dtype=structure.DTYPES[tensor.dtype], device="meta"))
            continue
        if i in value.plan.same:
            match.tensors.append(match.tensors[value.plan.same[i]])
            continue
        target = targets.get(leaf.name)
        problem = None if target is None else why_not_filled(tensor, target)
        if problem and must_fit:
            differences.append(f"{path_of((key, *leaf.name))}: {problem}")
        if target is None or problem:
            made = layouts.make(leaf.name, tensor)
            match.tensors.append(traits.with_traits(made.value, value.plan.traits[i]))
        else:
            made = target
            match.tensors.append(target.value)
        match.wants.append(Want(tensor, made.shards))
    if is_module:
        _match_module(stored, match, state_dict, targets, strict, differences)
    return match


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
                match.wants.append(Want(other, target.shards))
                continue
        elif not strict:
            continue
        differences.append(f"{path}: {problem}")
    if strict:
        differences += [
            f"{path_of((key, name))}: unexpected: the snapshot has it, and the module doesn't"
            for name in sorted(have - want, key=str)
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
    return {i for i in first if first[i] not in loaded}


def _load(stored: Stored, stateful: Any, match: Match, strict: bool, allow_pickle: bool) -> None:
    state_dict = stored.build(match.value, match.tensors, allow_pickle=allow_pickle)
    if isinstance(stateful, torch.nn.Module):
        state_dict.update(match.others)
        stateful.load_state_dict(state_dict, strict=strict)
    else:
        stateful.load_state_dict(state_dict)


def state_dict_of(stored: Stored, value: Value, *, allow_pickle: bool) -> Any:
    """A stored state dict in new memory."""
    stored.check_files(value.tensors)
    tensors: list[Any] = []
    wants: list[Want] = []
    for i, tensor in enumerate(value.tensors):
        if i in value.plan.same:
            tensors.append(tensors[value.plan.same[i]])
            continue
        made = new_target(tensor)
        tensors.append(traits.with_traits(made.value, value.plan.traits[i]))
        wants.append(Want(tensor, made.shards))
    read_into(stored, wants, Meter(None, 0, ""))
    return stored.build(value, tensors, allow_pickle=allow_pickle)
