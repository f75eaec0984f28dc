"""get with out=: a stored value, copied into tensors that are there already.

All is compared before anything is written, and all differences are told at once; see matching.py. What could refuse a
write is looked for before the first one, too: after it only a device can fail.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from memstore.structure.get.matching import MatchedTarget, match_target, raise_differences
from memstore.structure.get.storage import tensors_of
from memstore.structure.get.target_objects import Setting, plan_settings
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.refusals import render_path
from memstore.structure.tensors import modes, over, ties, traits


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
        strict: each leaf must have a counterpart on the other side. False: leaves that have one are filled, and
            others are left alone.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: with every difference; `out` is untouched.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, out, "out", strict)
    match, targets, differences = found.match, found.tensors, found.differences
    with torch.inference_mode(False):
        sources = tensors_of(plan, memory, None)
    for have, want in match.exact:
        target, source = targets[want], sources[have]
        alike = target.shape == source.shape and target.dtype == source.dtype and want not in found.missing
        if alike and not torch.equal(target.cpu(), source):
            name = render_path(match.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings: list[Setting] = []
    if values or match.object_names:
        present = set(match.object_names)
        settings = plan_settings(out, plan.object_names, values, present, strict, differences)
    if not differences:  # those that overlap can be compared then
        differences = _disagreements(plan, found, sources)
    raise_differences(differences, "out")
    _copy_all(found, sources, non_blocking)
    for setting in settings:
        setting()
    return out


def _disagreements(plan: Plan, found: MatchedTarget, sources: Sequence[torch.Tensor]) -> list[str]:
    """Targets that share memory, for which values are stored that can't stand there together."""
    match = found.match
    if match.apart == found.addresses:
        return []
    stored = {want: have for have, want in match.pairs}
    on_devices: dict[torch.device, list[int]] = {}
    for want in stored:
        on_devices.setdefault(found.tensors[want].device, []).append(want)
    differences: list[str] = []
    shared = False
    for wants in on_devices.values():
        crossing = ties.overlapping([found.addresses[want] for want in wants], match.footprints.spans[wants])
        chosen = [wants[i] for i in crossing]
        # where the stored ones lie to each other as the targets do, both show the same bytes
        if len({found.addresses[want] - plan.leaves[stored[want]].offset for want in chosen}) > 1:
            shared = True
            differences += [
                f"{render_path(match.tensor_names[want])}: it shares memory with another leaf of out, for which "
                "other values are stored"
                for want in _overwritten(found, chosen, {want: sources[stored[want]] for want in chosen})
            ]
    if not shared:
        match.apart = found.addresses
    return differences


def _overwritten(found: MatchedTarget, wants: Sequence[int], sources: dict[int, torch.Tensor]) -> list[int]:
    """Fills memory like the targets', and returns those that others have written over."""
    start = min(found.addresses[want] for want in wants)
    start -= start % 16
    stop = max(found.addresses[want] + int(found.match.footprints.spans[want]) for want in wants)
    storage = torch.empty(stop - start, dtype=torch.uint8, device="cpu").untyped_storage()
    doubles: dict[int, torch.Tensor] = {}
    for want in wants:
        target = found.tensors[want]
        place, rest = divmod(found.addresses[want] - start, target.dtype.itemsize)
        if rest or want in found.match.resolved:
            return list(wants)  # nobody looks
        doubles[want] = over(storage, target.dtype, place, target.shape, target.stride())
        traits.copyable(doubles[want]).copy_(traits.copyable(sources[want]))
    return [want for want in wants if not torch.equal(_bits(doubles[want]), _bits(sources[want]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return traits.copyable(tensor).contiguous().reshape(-1).view(torch.uint8)


def _copy_all(found: MatchedTarget, sources: Sequence[torch.Tensor], non_blocking: bool) -> None:
    """Every target is written as torch lets it be: inference tensors in inference mode, Parameters without autograd."""
    groups: dict[bool, list[tuple[int, int]]] = {}
    for have, want in found.match.pairs:
        groups.setdefault(found.tensors[want].is_inference(), []).append((have, want))
    for is_inference, pairs in groups.items():
        aside = modes.put_aside(entirely=True) if is_inference else nullcontext()
        with aside, torch.inference_mode(is_inference), torch.no_grad():  # inference_mode(False) would turn autograd on
            targets = [traits.copyable(found.tensors[want]) for _, want in pairs]
            chosen = [traits.copyable(sources[have]) for have, _ in pairs]
            if found.match.resolved or forward_ad._current_level >= 0:  # has no kernel for these
                for target, source in zip(targets, chosen, strict=True):
                    target.copy_(source, non_blocking=non_blocking)
            else:
                # a third of the time of 300 calls
                torch._foreach_copy_(targets, chosen, non_blocking=non_blocking)
