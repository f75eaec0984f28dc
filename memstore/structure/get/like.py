"""get with like=: a stored value in new memory, in the containers of a template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memstore.sharding import NO_BOXES, Boxes, Shard, double, sharded_leaf, whole
from memstore.structure.get.matching import MatchedTarget, match_target, raise_differences
from memstore.structure.get.parts import Checks, copies_of
from memstore.structure.get.pieces import Piece, Sources, wanted_of
from memstore.structure.get.storage import tensors_of
from memstore.structure.get.target_objects import choose_objects
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.tensors import has_gaps, traits
from memstore.structure.tree import Parts


def get_like(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    like: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Callable[[Sequence[torch.Tensor]], None] | None = None,
    count: Callable[[int], None] | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """The stored value in new memory, in the containers of `like`, with the devices, dtypes and strides of its leaves.

    A DTensor or TensorShard becomes another one with the same placements, of which this rank's part alone is read.

    Args:
        boxes, checks, need, count: as in `get_into`.
        strict: each leaf must have a counterpart on the other side; where `like` has DTensors or the like, each leaf of
            `like`. False: tensors that only `like` has are copied, its other leaves are taken as they are, and stored
            leaves that `like` lacks are left out.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: names or shapes differ; all differences are listed.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, like, "like", strict)
    match, differences = found.match, found.differences
    chosen = choose_objects(like, match.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    raise_differences(differences, "like", like)
    with torch.inference_mode(False), torch.no_grad():
        sources = Sources(plan, memory, boxes, tensors_of(plan, memory, None), need)
        made = _Made(found, sources, checks)
        sources.bring(made.pieces)
        for piece in made.pieces:
            traits.copyable(piece.target).copy_(traits.copyable(piece.source), non_blocking=non_blocking)
        if count is not None and (boxes or found.sharded):
            count(sources.nbytes(found, made.pieces))
        return match.root.build(Parts(made.values, chosen, None))


class _Made:
    """New values for a template's tensors, and the pieces to be copied into them.

    Attributes:
        values: in the order of the template's tensors; where those are the same one, so are these.
    """

    def __init__(self, found: MatchedTarget, sources: Sources, checks: Checks | None) -> None:
        self.pieces: list[Piece] = []
        self.values: list[Any] = []
        stored = {want: have for have, want in found.match.pairs}
        made: dict[int, Any] = {}
        for want, tensor in enumerate(found.tensors):
            is_sharded = want in found.sharded
            template = found.sharded[want].value if is_sharded else tensor
            if id(template) not in made:
                made[id(template)], wanted = _allocate_shards(template) if is_sharded else _allocate(tensor)
                if want in stored:
                    self.pieces += sources.pieces_of(stored[want], want, wanted, checks)
                else:
                    own = copies_of(wanted, wanted_of(found, want))
                    self.pieces += [Piece(want, target, source) for target, source in own]
            self.values.append(made[id(template)])


def _allocate(template: torch.Tensor) -> tuple[torch.Tensor, Sequence[Shard]]:
    """Memory like a template's, with its traits; and the parts of the whole that it holds: all of it."""
    stride = template.stride()
    if traits.reach(template.shape, stride) != template.numel() or has_gaps(template.shape, stride):
        stride = traits.contiguous_stride(template.shape)
    tensor = torch.empty_strided(template.shape, stride, dtype=template.dtype, device=template.device)
    shard = Shard(whole(tensor.shape), tensor.detach())
    return traits.with_traits(tensor, traits.traits_of(template)), (shard,)


def _allocate_shards(template: Any) -> tuple[Any, Sequence[Shard]]:
    """As `_allocate`, of a DTensor or TensorShard."""
    value = double(template)
    filled = sharded_leaf(value)
    return value, () if filled is None else filled.shards
