"""Restores: how the state dicts of a snapshot come into the objects of an app state.

`restore` has the steps. `match_value` compares an object with what is stored for it, `come_apart` finds targets that
share memory, `_new_target` makes tensors that an object doesn't have yet, and `optimizer_differences` looks for what
load_state_dict of an optimizer would refuse too late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import torch

from memstore import _modes as modes
from memstore import structure
from memstore._compat import may_rename_what_it_loads
from memstore._info import Progress
from memstore._wording import an, first_of, listed
from memstore.errors import SnapshotMismatchError, StructureMismatchError
from memstore.sharding import Shard, allocate_like, sharded_leaf
from memstore.snapshot.manifest import ManifestTensor, path_of
from memstore.snapshot.ranks import RankGroup
from memstore.snapshot.reading import (
    Name,
    ReadRequest,
    Target,
    build_unread,
    find_targets,
    new_memory,
    new_target,
    read_into,
    why_not_filled,
)
from memstore.snapshot.stateful import RNGState, ask_state_dicts, check_app_state
from memstore.snapshot.storage import SILENT, ProgressMeter
from memstore.snapshot.stored import Stored, Value
from memstore.store.model_fit import loads_as_torch, steps_as_torch, why_of_another
from memstore.structure import DTYPES, ByteRange, clusters_of, traits, which_would_stay

# --- The steps -------------------------------------------------------------------------------------------------------


def restore(
    open_stored: Callable[[], Stored],
    app_state: Any,
    ranks: RankGroup,
    progress: Progress | bool | None,
    *,
    strict: bool,
    allow_pickle: bool,
) -> None:
    """Restores an app state. Every rank runs these steps; one that fails anywhere fails on all of them.

    Up to step 4 nothing in the objects has changed. A rank that fails or dies in step 4 or 5 leaves tensors of any
    content.
    """
    try:
        # 1. The snapshot is opened, and the ranks tell each other the names in their app states.
        with ranks.together() as step:
            names = list(check_app_state(app_state))
            stored = open_stored()
            random = [name for name in names if isinstance(app_state[name], RNGState)]
            step.said = msgspec.msgpack.encode((names, random))
        said = [msgspec.msgpack.decode(text, type=tuple[list[str], list[str]]) for text in step.heard]
        last = sorted({key for _, random in said for key in random})  # random states: other objects may draw numbers
        order = [*sorted({key for names, _ in said for key in names} - set(last)), *last]
        # 2. The present objects are asked for their state dicts: most give their own tensors.
        dicts = ask_state_dicts(ranks, order, app_state)
        # 3. They are compared with what is stored. All differences are told at once. Before that the ranks tell each
        #    other which names their modules have, where those that took the snapshot had different ones (pipelines).
        with ranks.together() as step:
            told = {
                key: [str(structure.name_of(name)) for name in state_dict]
                for key, state_dict in dicts.items()
                if isinstance(app_state[key], torch.nn.Module)
                and len({values[key] for values in stored.manifest.ranks if key in values}) > 1
            }
            step.said = msgspec.msgpack.encode(told)
        elsewhere: dict[str, set[str]] = {}
        for text in step.heard:
            for key, names in msgspec.msgpack.decode(text, type=dict[str, list[str]]).items():
                elsewhere.setdefault(key, set()).update(names)
        with ranks.together():
            matches, wants = _match_all(stored, ranks.rank, app_state, dicts, elsewhere, strict, allow_pickle)
        # 4. What is stored is read straight into these tensors, and into new ones where there are none.
        with ranks.together():
            nbytes = sum(shard.local.numel() * shard.local.itemsize for want in wants for shard in want.shards)
            read_into(stored, wants, ProgressMeter(progress, nbytes, "reading", rank=ranks.rank))
        # 5. load_state_dict of each object gets the stored state dict, made of these tensors.
        for key in order:
            with ranks.together():
                if key in matches:
                    _load(stored, app_state[key], dicts[key], matches[key], strict=strict, allow_pickle=allow_pickle)
        ranks.end()
    except BaseException as error:
        ranks.leave(error)
        raise


def _match_all(
    stored: Stored,
    rank: int,
    app_state: Any,
    dicts: Mapping[str, Any],
    elsewhere: Mapping[str, set[str]],
    strict: bool,
    allow_pickle: bool,
) -> tuple[dict[str, RestoreMatch], list[ReadRequest]]:
    """Compares all objects with what is stored for them. Returns the matches by key, and what is to be read.

    Raises SnapshotMismatchError, which lists the differences.
    """
    matches: dict[str, RestoreMatch] = {}
    differences: list[str] = []
    for key, state_dict in dicts.items():
        others = elsewhere.get(key, set())
        found = match_value(stored, rank, key, app_state[key], state_dict, others, strict, differences)
        if found is None:
            continue
        matches[key] = found
        stored.objects_of(found.value, allow_pickle=allow_pickle)  # what can't be read is told in time
        if any(map(structure.has_wrapped_shards, _leaves_of(state_dict))):
            unread = build_unread(stored, found.value, found.tensors, allow_pickle=allow_pickle)
            _with_present(unread, state_dict, (key,), lambda built, present: structure.pair_shards(present, built))
        if isinstance(app_state[key], torch.optim.Optimizer):
            saved = build_unread(stored, found.value, found.tensors, allow_pickle=allow_pickle)
            differences += optimizer_differences(path_of((key,)), app_state[key], saved)
    places: list[RestorePlace] = []
    if not differences:
        places, differences = come_apart(stored, [place for found in matches.values() for place in found.places])
    if differences:
        raise SnapshotMismatchError(
            f"app_state differs from the snapshot {stored.path}, nothing was restored:{listed(differences)}"
        )
    return matches, [ReadRequest(place.tensor, place.shards) for place in places]


def _load(
    stored: Stored, stateful: Any, present: Any, match: RestoreMatch, *, strict: bool, allow_pickle: bool
) -> None:
    """Gives an object its stored state dict.

    Args:
        present: the state dict of the object, whose tensors have been filled where `match` says so.
    """
    # torch writes what was read to itself; to inference tensors only in their mode
    is_inference = any(isinstance(one, torch.Tensor) and one.is_inference() for one in match.tensors)
    with torch.inference_mode() if is_inference else nullcontext():
        built = stored.build(match.value, match.tensors, allow_pickle=allow_pickle)
        state_dict = _with_present(built, present, (match.value.key,))
        if not isinstance(stateful, torch.nn.Module):
            stateful.load_state_dict(state_dict)
            return
        for name in match.left:
            del state_dict[name]
        state_dict.update(match.others)
        stateful.load_state_dict(state_dict, strict=strict)


def _leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for entry in cast("Mapping[Any, Any]", value).values():
            yield from _leaves_of(entry)
    elif isinstance(value, list | tuple):
        for entry in cast("list[Any]", value):
            yield from _leaves_of(entry)
    else:
        yield value


def _with_present(
    built: Any,
    present: Any,
    path: tuple[str | int, ...],
    fits: Callable[[Any, Any], object] = structure.are_shards_of,
) -> Any:
    """Returns the state dict, with a DTensor that is there in place of what its parts make, where they were filled.

    Args:
        fits: whether a DTensor (the second) has what was built. Before anything is read that is asked of their kinds.
    """
    if structure.has_wrapped_shards(present):
        if not fits(built, present):
            raise StructureMismatchError(
                f"{path_of(path)}: {an(type(present))} whose local tensor wraps others was saved with another "
                "sharding, or none: its parts can't be cut anew, so restore it with the sharding that it was saved with"
            )
        return present
    if isinstance(built, Mapping) and isinstance(present, Mapping):
        entries, there = cast("dict[Any, Any]", built), cast("Mapping[Any, Any]", present)
        for key in entries:
            if key in there:
                made = _with_present(entries[key], there[key], (*path, structure.name_of(key)), fits)
                if made is not entries[key]:
                    entries[key] = made
    elif type(built) is list and type(present) is list:
        pairs = zip(cast("list[Any]", built), cast("list[Any]", present), strict=False)
        made = [_with_present(one, there, (*path, i), fits) for i, (one, there) in enumerate(pairs)]
        return [*made, *built[len(present) :]]
    return built


# --- What is stored for an object: which tensors it is read into, and what differs. Nothing is changed ---------------


_OF_DCP = {"state", "bytes", "dcp"}  # the names in a checkpoint that memstore.integrations.dcp has saved
_ALSO_OF_DCP = {"wrapped"}


class RestoreMatch(NamedTuple):
    """The value that is stored for an object, and the tensors that it is read into.

    Attributes:
        tensors: one for each leaf of the value.
        others: of leaves that this rank's value lacks and the object has: values of other ranks, by their keys.
        places: where what is stored is read to.
        left: names of a module's leaves that this rank's value has, and only other ranks' modules do.
    """

    value: Value
    tensors: list[Any]
    others: dict[str, Any]
    places: list[RestorePlace]
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
) -> RestoreMatch | None:
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
    parameters = _spread_parameters(stateful)
    reused = set(value.plan.same.values())
    left = {leaf.name[0] for leaf in value.plan.leaves if leaf.name and str(leaf.name[0]) in elsewhere}
    match = RestoreMatch(value, [], {}, [], left - set(map(structure.name_of, state_dict)))
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
        is_spread = target is not None and bool(target.why_not) and target.is_spread
        if problem and (must_fit or is_spread):  # else it gets memory of its own
            differences.append(f"{path}: {problem}")
        if target is None or problem:
            made = _new_target(leaf.name, tensor, parameters)
            match.tensors.append(traits.with_traits(made.value, value.plan.traits[i]))
        else:
            made = target
            match.tensors.append(target.value)
        replace = None if is_module else partial(match.replace, i)
        if i in reused or not leaf.name or leaf.name[0] not in match.left:
            match.places.append(RestorePlace(path, tensor, made.value, made.shards, replace))
    if is_module:
        differences += _other_kinds(match.value, state_dict, targets)
        _match_module(stored, match, state_dict, targets, strict, differences)
    return match


def _other_kinds(value: Value, state_dict: Any, targets: dict[Name, Target]) -> list[str]:
    """Names tensors of a module that wrap others where what is stored doesn't, or the reverse."""
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
    match: RestoreMatch,
    state_dict: Any,
    targets: dict[Name, Target],
    strict: bool,
    differences: list[str],
) -> None:
    """Compares names: what a module has and the snapshot lacks, and the reverse, is an error if `strict`.

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
                match.places.append(RestorePlace(path, other, target.value, target.shards))
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
    """Returns the leaves that a module lacks and that needn't be read. Where it may rename what it loads, all are."""
    if any(map(may_rename_what_it_loads, module.modules())):
        return set()
    names = set(map(structure.name_of, state_dict))
    first = {i: value.plan.same.get(i, i) for i in range(len(value.plan.leaves))}
    loaded = {first[i] for i, leaf in enumerate(value.plan.leaves) if leaf.name and leaf.name[0] in names}
    return {i for i in first if first[i] not in loaded} - value.plan.loaded  # which must be there to be built


# --- Targets that share memory, while the snapshot has a tensor for each: the last would win -------------------------
# A module's tensors stay where they are. What other objects have in the same memory gets memory of its own: a dict of
# the best weights that still are the model's. What can't come apart so must fit together: then the stored values agree.


_NAMED = 4  # paths in one message


class RestorePlace(NamedTuple):
    """The tensor that a stored one is read into.

    Attributes:
        value, shards: the tensor in the object, and what of it is here.
        replace: puts another tensor in its stead; None in a module.
    """

    path: str
    tensor: ManifestTensor
    value: Any
    shards: tuple[Shard, ...]
    replace: Callable[[Any], None] | None = None


class _MemoryRange(NamedTuple):
    start: int
    place: int
    shard: Shard

    @property
    def look(self) -> tuple[Any, ...]:
        local = self.shard.local
        bits = local.is_conj(), local.is_neg()
        return local.device, self.start, local.dtype, local.shape, local.stride(), bits, self.shard.box


def come_apart(stored: Stored, places: Sequence[RestorePlace]) -> tuple[list[RestorePlace], list[str]]:
    """Returns places in which all that is stored can stand together, and the differences where there are none."""
    apart, clusters = list(places), _clusters(places)
    for cluster in clusters:
        firsts: dict[tuple[Any, ...], int] = {}
        for one in sorted(cluster, key=lambda one: (apart[one.place].replace is not None, one.place)):
            place, first = apart[one.place], apart[firsts.setdefault(one.look, one.place)]
            if place.tensor is not first.tensor and place.replace is not None:
                apart[one.place] = _moved(place, place.replace)
    differences: list[str] = []
    for cluster in _clusters(apart) if clusters else ():
        if len({(id(apart[one.place].tensor), one.look) for one in cluster}) > 1 and not _agree(stored, apart, cluster):
            paths = list(dict.fromkeys(apart[one.place].path for one in cluster))
            what = "they share memory here (tied), and are stored apart, with different values"
            differences.append(f"{first_of(paths, _NAMED)}: {what}")
    return apart, differences


def _clusters(places: Sequence[RestorePlace]) -> list[list[_MemoryRange]]:
    """Finds the shards that overlap others in memory. Each cluster has all that are joined by such."""
    shards: list[tuple[int, Shard]] = []
    on_devices: dict[torch.device, list[ByteRange]] = {}
    for number, place in enumerate(places):
        for shard in place.shards:
            local = shard.local
            reach = local.numel() if local.is_contiguous() else traits.reach(local.shape, local.stride())
            if reach:
                start = local.data_ptr()
                one = ByteRange(start, start + reach * local.itemsize, len(shards))
                on_devices.setdefault(local.device, []).append(one)
                shards.append((number, shard))
    return [
        [_MemoryRange(one.start, *shards[one.leaf]) for one in cluster]
        for ranges in on_devices.values()
        for cluster in clusters_of(ranges)
        if len(cluster) > 1
    ]


@modes.put_aside()
def _moved(place: RestorePlace, replace: Callable[[Any], None]) -> RestorePlace:
    with torch.inference_mode(False), torch.no_grad():
        leaf = sharded_leaf(place.value)
        if leaf is None:
            value: Any = torch.empty_like(place.value.detach())
            shards = (Shard(place.shards[0].box, value),)
        else:
            value = allocate_like(place.value)
            made = sharded_leaf(value)
            shards = () if made is None else made.shards
    replace(value)
    return place._replace(value=value, shards=shards)


@modes.put_aside()
def _agree(stored: Stored, places: Sequence[RestorePlace], cluster: Sequence[_MemoryRange]) -> bool:
    """Returns whether what is stored for them can stand in memory like theirs. Reads it into memory of its own."""
    with torch.inference_mode(False), torch.no_grad():
        locals = [one.shard.local for one in cluster]
        read = [torch.empty(local.shape, dtype=local.dtype, device="cpu") for local in locals]
        wants = [
            ReadRequest(places[one.place].tensor, (Shard(one.shard.box, made),))
            for one, made in zip(cluster, read, strict=True)
        ]
        read_into(stored, wants, SILENT)
        return all(which_would_stay(locals, read))


# --- New tensors for what an object doesn't have yet: in the layout that its own tensors will need -------------------
# An optimizer makes its state with the first step. Restored before that, the moments of a parameter that is spread over
# ranks are spread as the parameter is: each rank reads its own boxes.


_STATE_NAME = 3  # parts of the name of an optimizer's state: "state", the parameter's number, "exp_avg"


def _spread_parameters(stateful: Any) -> list[Any]:
    """Returns the parameters of an optimizer, as its state dict numbers them; None for one that isn't spread."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    return [one if type(one).__name__ == "DTensor" else None for one in parameters]


def _new_target(name: Name, tensor: ManifestTensor, parameters: Sequence[Any]) -> Target:
    """Makes a new tensor for a stored leaf of an object's state dict.

    Args:
        parameters: as `_spread_parameters` returns them.
    """
    number = name[1] if len(name) == _STATE_NAME and name[0] == "state" else None
    parameter = parameters[number] if isinstance(number, int) and 0 <= number < len(parameters) else None
    if parameter is None or tuple(parameter.shape) != tensor.shape or sharded_leaf(parameter) is None:
        return new_target(tensor)
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
    return Target(made, made.dtype, tensor.shape, () if leaf is None else leaf.shards)


# --- Optimizers: what load_state_dict would refuse too late, or not at all -------------------------------------------


# What torch's own optimizers keep for each element of a parameter. Others may keep more or less under these names.
_OF_ELEMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)


def optimizer_differences(key: str, optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    """Compares the groups of parameters, and the shapes of their states, unless the optimizer loads in its own way.

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
    yield from _group_differences(key, optimizer, cast("list[Any]", groups))
    if steps_as_torch(optimizer):
        yield from _state_differences(key, optimizer, cast("dict[Any, Any]", states))


def _group_differences(key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Any]) -> Iterator[str]:
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


def _state_differences(key: str, optimizer: torch.optim.Optimizer, states: dict[Any, Any]) -> Iterator[str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        if not isinstance(number, int) or not 0 <= number < len(parameters) or not isinstance(state, dict):
            continue
        want = list(parameters[number].shape)
        for name, value in cast("dict[Any, Any]", state).items():
            shape = list(getattr(value, "shape", want))
            if name in _OF_ELEMENTS and shape != want:
                yield f"{key}/state/{number}/{name}: stored with shape {shape}, and its parameter has {want}"
