"""get with out= and like=: a stored value into memory that is there, or into new memory shaped like a template.

Everything is compared before anything is written, and all differences are told at once; see meeting.py. So is all that
could refuse a write: after the first byte only a device's error can come.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from memstore.structure.get import target_objects as places
from memstore.structure.get.matching import Met, meet, raise_differences
from memstore.structure.get.storage import tensors_of
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.refusals import render_path
from memstore.structure.tensors import modes, over, ties, traits
from memstore.structure.tree import Parts


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Fills `out` in place with the stored value, and returns it.

    Args:
        strict: all leaves of both must meet. False: those that do are filled, the others left alone.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: with every difference; `out` is untouched.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = meet(plan, out, "out", strict)
    meeting, targets, differences = found.meeting, found.tensors, found.differences
    with torch.inference_mode(False):
        sources = tensors_of(plan, memory, None)
    for have, want in meeting.exact:
        target, source = targets[want], sources[have]
        alike = target.shape == source.shape and target.dtype == source.dtype and want not in found.missing
        if alike and not torch.equal(target.cpu(), source):
            name = render_path(meeting.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings: list[places.Setting] = []
    if values or meeting.object_names:
        present = set(meeting.object_names)
        settings = places.find(out, plan.object_names, values, present, strict, differences)
    if not differences:  # those that overlap can be compared then
        differences = _disagreements(plan, found, sources)
    raise_differences(differences, "out")
    _copy_all(found, sources, non_blocking)
    for setting in settings:
        setting()
    return out


def _disagreements(plan: Plan, found: Met, sources: Sequence[torch.Tensor]) -> list[str]:
    """Targets that share memory, for which values are stored that can't stand there together."""
    meeting = found.meeting
    if meeting.apart == found.addresses:
        return []
    stored = {want: have for have, want in meeting.pairs}
    on_devices: dict[torch.device, list[int]] = {}
    for want in stored:
        on_devices.setdefault(found.tensors[want].device, []).append(want)
    differences: list[str] = []
    shared = False
    for wants in on_devices.values():
        crossing = ties.overlapping([found.addresses[want] for want in wants], meeting.extents.spans[wants])
        chosen = [wants[i] for i in crossing]
        # where the stored ones lie to each other as the targets do, both show the same bytes
        if len({found.addresses[want] - plan.leaves[stored[want]].offset for want in chosen}) > 1:
            shared = True
            differences += [
                f"{render_path(meeting.tensor_names[want])}: it shares memory with another leaf of out, for which "
                "other values are stored"
                for want in _overwritten(found, chosen, {want: sources[stored[want]] for want in chosen})
            ]
    if not shared:
        meeting.apart = found.addresses
    return differences


def _overwritten(found: Met, wants: Sequence[int], sources: dict[int, torch.Tensor]) -> list[int]:
    """Fills memory like the targets', and returns those that others have written over."""
    start = min(found.addresses[want] for want in wants)
    start -= start % 16
    stop = max(found.addresses[want] + int(found.meeting.extents.spans[want]) for want in wants)
    storage = torch.empty(stop - start, dtype=torch.uint8, device="cpu").untyped_storage()
    doubles: dict[int, torch.Tensor] = {}
    for want in wants:
        target = found.tensors[want]
        place, rest = divmod(found.addresses[want] - start, target.dtype.itemsize)
        if rest or want in found.meeting.resolved:
            return list(wants)  # nobody looks
        doubles[want] = over(storage, target.dtype, place, target.shape, target.stride())
        traits.copyable(doubles[want]).copy_(traits.copyable(sources[want]))
    return [want for want in wants if not torch.equal(_bits(doubles[want]), _bits(sources[want]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return traits.copyable(tensor).contiguous().reshape(-1).view(torch.uint8)


def _copy_all(found: Met, sources: Sequence[torch.Tensor], non_blocking: bool) -> None:
    """Every target is written as torch lets it be: inference tensors in inference mode, Parameters without autograd."""
    groups: dict[bool, list[tuple[int, int]]] = {}
    for have, want in found.meeting.pairs:
        groups.setdefault(found.tensors[want].is_inference(), []).append((have, want))
    for is_inference, pairs in groups.items():
        aside = modes.put_aside(entirely=True) if is_inference else nullcontext()
        with aside, torch.inference_mode(is_inference), torch.no_grad():  # inference_mode(False) would turn autograd on
            targets = [traits.copyable(found.tensors[want]) for _, want in pairs]
            chosen = [traits.copyable(sources[have]) for have, _ in pairs]
            if found.meeting.resolved or forward_ad._current_level >= 0:  # has no kernel for these
                for target, source in zip(targets, chosen, strict=True):
                    target.copy_(source, non_blocking=non_blocking)
            else:
                # a third of the time of 300 calls
                torch._foreach_copy_(targets, chosen, non_blocking=non_blocking)


def get_like(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    like: Any,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """The stored value in new memory, in the containers of `like`, with the devices, dtypes and strides of its leaves.

    Args:
        strict: all leaves of both must meet. False: tensors that only `like` has are copied from it, its other leaves
            are taken as they are, and stored leaves that `like` lacks are left out.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: names or shapes differ; all differences are listed.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = meet(plan, like, "like", strict)
    meeting, templates, differences = found.meeting, found.tensors, found.differences
    chosen = places.choose(like, meeting.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    raise_differences(differences, "like")
    with torch.inference_mode(False), torch.no_grad():
        stored = tensors_of(plan, memory, None)
        sources = list(templates)
        for have, want in meeting.pairs:
            sources[want] = stored[have]
        made = _allocate(templates, sources, non_blocking)
        return meeting.root.build(Parts(made, chosen, None))


def _allocate(
    templates: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool
) -> list[torch.Tensor]:
    made: dict[int, torch.Tensor] = {}
    for template, source in zip(templates, sources, strict=True):
        if id(template) not in made:
            stride = template.stride()
            if traits.reach(template.shape, stride) != template.numel():
                stride = traits.contiguous_stride(template.shape)
            tensor = torch.empty_strided(template.shape, stride, dtype=template.dtype, device=template.device)
            traits.copyable(tensor).copy_(traits.copyable(source), non_blocking=non_blocking)
            made[id(template)] = traits.with_traits(tensor, traits.traits_of(template))
    return [made[id(template)] for template in templates]
