"""How a snapshot is restored. Every rank runs these steps; one that fails anywhere fails on all of them.

1. the state dicts of the present objects are asked for: most give their own tensors
2. they are compared with what is stored; all differences are told at once, and nothing was written yet
3. what is stored is read straight into these tensors, and into new ones where there are none
4. load_state_dict of each object gets the stored state dict, made of these tensors; the random state comes last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import msgspec
import torch

from memstore import modes, structure
from memstore.errors import SnapshotMismatchError, StructureMismatchError
from memstore.info import Progress
from memstore.snapshot.format import path_of
from memstore.snapshot.progress import SILENT, Meter
from memstore.snapshot.ranks import Ranks, ask
from memstore.snapshot.read import Stored, Target, Value, Want, build_unread, new_target, read_into
from memstore.snapshot.restore.matching import Match, match_value
from memstore.snapshot.restore.optimizer_fit import differences_of
from memstore.snapshot.restore.sharing import come_apart
from memstore.snapshot.stateful import RNGState, check_app_state
from memstore.structure import traits
from memstore.wording import an

_LISTED = 20  # differences in one message


def restore(
    open_stored: Callable[[], Stored],
    app_state: Any,
    ranks: Ranks,
    progress: Progress | bool | None,
    *,
    strict: bool,
    allow_pickle: bool,
) -> None:
    """As `Snapshot.restore`."""
    try:
        _restore(open_stored, app_state, ranks, progress, strict, allow_pickle)
        ranks.end()
    except BaseException as error:
        ranks.leave(error)
        raise


def _restore(
    open_stored: Callable[[], Stored],
    app_state: Any,
    ranks: Ranks,
    progress: Progress | bool | None,
    strict: bool,
    allow_pickle: bool,
) -> None:
    opened: list[Stored] = []

    def begin() -> bytes:
        names = list(check_app_state(app_state))
        opened.append(open_stored())
        return msgspec.msgpack.encode((names, [name for name in names if isinstance(app_state[name], RNGState)]))

    said = [msgspec.msgpack.decode(text, type=tuple[list[str], list[str]]) for text in ranks.together(begin)]
    last = sorted({key for _, random in said for key in random})
    order = [*sorted({key for names, _ in said for key in names} - set(last)), *last]
    (stored,) = opened
    dicts = ask(ranks, order, app_state)
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
            found = match_value(stored, ranks.rank, key, app_state[key], state_dict, others, strict, differences)
            if found is not None:
                matches[key] = found
                stored.objects_of(found.value, allow_pickle=allow_pickle)  # what can't be read is told in time
                if any(map(structure.has_wrapped_shards, _leaves_of(state_dict))):
                    unread = build_unread(stored, found.value, found.tensors, allow_pickle=allow_pickle)
                    _with_present(unread, state_dict, (key,), _are_alike)
            if found is not None and isinstance(app_state[key], torch.optim.Optimizer):
                saved = build_unread(stored, found.value, found.tensors, allow_pickle=allow_pickle)
                differences += differences_of(path_of((key,)), app_state[key], saved)
        if not differences:
            places, differences = come_apart(stored, [place for found in matches.values() for place in found.places])
            wants.extend(Want(place.tensor, place.shards) for place in places)
        _raise(stored, differences)
        return b""

    def read() -> bytes:
        nbytes = sum(shard.local.numel() * shard.local.itemsize for want in wants for shard in want.shards)
        read_into(stored, wants, Meter(progress, nbytes, "reading", rank=ranks.rank))
        return b""

    def load(key: str) -> bytes:
        if key in matches:
            _load(stored, app_state[key], dicts[key], matches[key], strict, allow_pickle)
        return b""

    ranks.together(match)
    ranks.together(read)
    for key in order:
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
        raise SnapshotMismatchError(
            f"app_state differs from the snapshot {stored.path}, nothing was restored:{lines}{more}"
        )


def _load(stored: Stored, stateful: Any, present: Any, match: Match, strict: bool, allow_pickle: bool) -> None:
    """Args: present: the state dict of the object, whose tensors have been filled where `match` says so."""
    # torch writes what was read to itself; to inference tensors only in their mode
    is_inference = any(isinstance(one, torch.Tensor) and one.is_inference() for one in match.tensors)
    with torch.inference_mode() if is_inference else nullcontext():
        built = stored.build(match.value, match.tensors, allow_pickle=allow_pickle)
        _load_built(stateful, _with_present(built, present, (match.value.key,)), match, strict)


def _load_built(stateful: Any, state_dict: Any, match: Match, strict: bool) -> None:
    if isinstance(stateful, torch.nn.Module):
        for name in match.left:
            del state_dict[name]
        state_dict.update(match.others)
        stateful.load_state_dict(state_dict, strict=strict)
    else:
        stateful.load_state_dict(state_dict)


def _leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for entry in cast("Mapping[Any, Any]", value).values():
            yield from _leaves_of(entry)
    elif isinstance(value, list | tuple):
        for entry in cast("list[Any]", value):
            yield from _leaves_of(entry)
    else:
        yield value


def _are_alike(built: Any, target: Any) -> bool:
    return bool(structure.pair_shards(target, built))


def _with_present(
    built: Any,
    present: Any,
    path: tuple[str | int, ...],
    fits: Callable[[Any, Any], bool] = structure.are_shards_of,
) -> Any:
    """The state dict, with a DTensor that is there in the stead of what its parts make, where they were filled.

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
    read_into(stored, wants, SILENT)
    return stored.build(value, tensors, allow_pickle=allow_pickle)
