"""How a snapshot is restored. Every rank runs these steps; one that fails anywhere fails on all of them.

1. the state dicts of the present objects are asked for: most give their own tensors
2. they are compared with what is stored; all differences are told at once, and nothing was written yet
3. what is stored is read straight into these tensors, and into new ones where there are none
4. load_state_dict of each object gets the stored state dict, made of these tensors; the random state comes last
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import modes, structure
from memstore.errors import StructureMismatchError
from memstore.snapshot.layouts import layouts_of
from memstore.snapshot.names import path_of
from memstore.snapshot.objects_out import build_unread
from memstore.snapshot.optimizer_fit import differences_of
from memstore.snapshot.progress import Meter
from memstore.snapshot.ranks import Ranks
from memstore.snapshot.reading import Want, read_into
from memstore.snapshot.sharing import Place, come_apart
from memstore.snapshot.stateful import RNGState, check_app_state
from memstore.snapshot.stored import Stored, Value
from memstore.snapshot.targets import Name, Target, find_targets, new_target, why_not_filled
from memstore.structure import traits

_LISTED = 20  # differences in one message


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


def restore(
    open_stored: Callable[[], Stored], app_state: Any, ranks: Ranks, *, strict: bool, allow_pickle: bool
) -> None:
    """As `Snapshot.restore`."""
    opened: list[Stored] = []
    dicts: dict[str, Any] = {}

    def begin() -> bytes:
        names = list(check_app_state(app_state))
        opened.append(open_stored())
        # the random state first: other state dicts may draw from it
        dicts.update((name, app_state[name].state_dict()) for name in names if isinstance(app_state[name], RNGState))
        return msgspec.msgpack.encode((names, list(dicts)))

    def ask(key: str) -> bytes:
        if key in app_state and key not in dicts:
            dicts[key] = app_state[key].state_dict()
        return b""

    said = [msgspec.msgpack.decode(text, type=tuple[list[str], list[str]]) for text in ranks.together(begin)]
    last = sorted({key for _, random in said for key in random})
    order = sorted({key for names, _ in said for key in names} - set(last))
    (stored,) = opened
    for key in order:  # one after the other on all ranks, since they may have collectives inside
        ranks.together(partial(ask, key))
    elsewhere: dict[str, set[str]] = {}
    for text in ranks.together(lambda: msgspec.msgpack.encode(_spread_names(stored, dicts, app_state))):
        for key, names in msgspec.msgpack.decode(text, type=dict[str, list[str]]).items():
            elsewhere.setdefault(key, set()).update(names)
    matches: dict[str, Match] = {}
    wants: list[Want] = []

    def match() -> bytes:
        differences: list[str] = []
        for key, state_dict in dicts.items():
            others = elsewhere.get(key, set())
            found = _match(stored, ranks.rank, key, app_state[key], state_dict, others, strict, differences)
            if found is not None:
                matches[key] = found
                stored.objects_of(found.value, allow_pickle=allow_pickle)  # what can't be read is told in time
            if found is not None and isinstance(app_state[key], torch.optim.Optimizer):
                saved = build_unread(stored, found.value, found.tensors, allow_pickle=allow_pickle)
                differences += differences_of(path_of((key,)), app_state[key], saved)
        if not differences:
            places, differences = come_apart(stored, [place for found in matches.values() for place in found.places])
            wants.extend(Want(place.tensor, place.shards) for place in places)
        _raise(stored, differences)
        return b""

    def read() -> bytes:
        read_into(stored, wants, Meter(None, 0, ""))
        return b""

    def load(key: str) -> bytes:
        if key in matches:
            _load(stored, app_state[key], matches[key], strict, allow_pickle)
        return b""

    ranks.together(match)
    ranks.together(read)
    for key in [*order, *last]:
        ranks.together(partial(load, key))


def _spread_names(stored: Stored, dicts: dict[str, Any], app_state: Any) -> dict[str, list[str]]:
    """What this rank's modules have, where the ranks that took the snapshot had different ones (pipelines)."""
    return {
        key: [str(structure.name_of(name)) for name in state_dict]
        for key, state_dict in dicts.items()
        if isinstance(app_state[key], torch.nn.Module)
        and len({values[key] for values in stored.manifest.ranks if key in values}) > 1
    }


def _raise(stored: Stored, differences: list[str]) -> None:
    if differences:
        more = f"\n  and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        lines = "".join(f"\n  {difference}" for difference in differences[:_LISTED])
        raise StructureMismatchError(
            f"app_state differs from the snapshot {stored.path}, nothing was restored:{lines}{more}"
        )


def _match(
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
        differences.append(f"{key}: the snapshot has nothing of this name; it has {', '.join(stored.keys(rank))}")
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


def _load(stored: Stored, stateful: Any, match: Match, strict: bool, allow_pickle: bool) -> None:
    state_dict = stored.build(match.value, match.tensors, allow_pickle=allow_pickle)
    if isinstance(stateful, torch.nn.Module):
        for name in match.left:
            del state_dict[name]
        state_dict.update(match.others)
        stateful.load_state_dict(state_dict, strict=strict)
    else:
        stateful.load_state_dict(state_dict)


def state_dict_of(stored: Stored, value: Value, *, allow_pickle: bool) -> Any:
    """A stored state dict in new memory."""
    stored.check_files(value.tensors)
    tensors: list[Any] = []
    made: dict[int, Target] = {}  # what was one tensor in memory is one again
    wants: list[Want] = []
    for i, tensor in enumerate(value.tensors):
        if i in value.plan.same:
            tensors.append(tensors[value.plan.same[i]])
            continue
        if id(tensor) not in made:
            made[id(tensor)] = new_target(tensor)
            wants.append(Want(tensor, made[id(tensor)].shards))
        with torch.inference_mode(False), modes.put_aside():
            tensors.append(traits.with_traits(made[id(tensor)].value.detach(), value.plan.traits[i]))
    read_into(stored, wants, Meter(None, 0, ""))
    return stored.build(value, tensors, allow_pickle=allow_pickle)
