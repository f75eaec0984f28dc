"""get with like=: a stored value in new memory, in the containers of a template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memstore.structure.get.matching import match_target, raise_differences
from memstore.structure.get.storage import tensors_of
from memstore.structure.get.target_objects import choose_objects
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.tensors import traits
from memstore.structure.tree import Parts


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
        strict: each leaf must have a counterpart on the other side. False: tensors that only `like` has are copied,
            its other leaves are taken as they are, and stored leaves that `like` lacks are left out.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: names or shapes differ; all differences are listed.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, like, "like", strict)
    match, templates, differences = found.match, found.tensors, found.differences
    chosen = choose_objects(like, match.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    raise_differences(differences, "like")
    with torch.inference_mode(False), torch.no_grad():
        stored = tensors_of(plan, memory, None)
        sources = list(templates)
        for have, want in match.pairs:
            sources[want] = stored[have]
        made = _allocate(templates, sources, non_blocking)
        return match.root.build(Parts(made, chosen, None))


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
