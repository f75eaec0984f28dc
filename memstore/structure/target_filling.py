"""Filling: a stored value is copied into tensors that are there (get with out=), or into new ones like them (like=).

All is compared before anything is written, and all differences are told at once; see target_matching.py. What could
refuse a write is looked for before the first one, too: after it only a device can fail. Into what is spread over ranks
goes just what this rank holds, straight from where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.sharding import NO_BOXES, Box, Boxes, Shard, StoredBox, allocate_like, narrow_to, sharded_leaf, whole
from memstore.structure import ties, traits
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.rebuilding import (
    Checks,
    assemble_one,
    box_tensor,
    boxes_of_leaf,
    copies_of,
    parts_of,
    tensors_of,
)
from memstore.structure.refusals import render_path
from memstore.structure.target_matching import (
    MatchedTarget,
    Setting,
    choose_objects,
    match_target,
    plan_settings,
    raise_differences,
)
from memstore.structure.tensor_memory import copy_all, over
from memstore.structure.traits import has_gaps
from memstore.structure.tree import TreeParts

# --- out=: tensors that are there already ----------------------------------------------------------------------------


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Callable[[Sequence[torch.Tensor]], None] | None = None,
    count: Callable[[int], None] | None = None,
    strict: bool = True,
    cast: bool = False,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Fills `out` in place with the stored value, and returns it.

    Args:
        boxes: of the leaves that don't lie whole in `memory`.
        checks: compares what is read with its checksums, before anything is written.
        need: brings what tensors over `memory` have, if some of it lies on other hosts.
        count: is told how many bytes were read, of boxes or into shards.
        strict: each leaf must have a counterpart on the other side; where `out` has DTensors or the like, each leaf of
            `out`, for other ranks may hold others. False: leaves that have one are filled, and others are left alone.
        cast: leaves of another floating dtype are cast while they are copied. False: they are a difference.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: with every difference; `out` is untouched.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, out, "out", strict, cast)
    match, targets, differences = found.match, found.tensors, found.differences
    with torch.inference_mode(False):
        sources = StoredLeaves(plan, memory, boxes, tensors_of(plan, memory, None), need)
    for have, want in match.exact:
        target, source = targets[want], sources.whole(have, checks)
        alike = target.shape == source.shape and target.dtype == source.dtype and want not in found.missing
        if alike and not torch.equal(target.cpu(), source):
            name = render_path(match.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings: list[Setting] = []
    if values or match.object_names:
        present = set(match.object_names)
        settings = plan_settings(
            out, plan.object_names, values, present, strict, differences, may_lack=bool(found.sharded)
        )
    pieces: list[TargetPiece] = []
    if not differences:  # those that overlap can be compared then
        pieces = sources.pieces(found, checks)
        sources.bring(pieces)
        differences = disagreements(plan, found, pieces)
    raise_differences(differences, "out", out)
    copy_all(
        [piece.target for piece in pieces],
        [piece.source for piece in pieces],
        one_by_one=bool(match.resolved or found.sharded),
        non_blocking=non_blocking,
    )
    for setting in settings:
        setting()
    if count is not None and (boxes or found.sharded):
        count(sources.nbytes(found, pieces))
    return out


# --- like=: new memory, in the containers of a template --------------------------------------------------------------


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
        sources = StoredLeaves(plan, memory, boxes, tensors_of(plan, memory, None), need)
        made = _NewValues(found, sources, checks)
        sources.bring(made.pieces)
        for piece in made.pieces:
            traits.copyable(piece.target).copy_(traits.copyable(piece.source), non_blocking=non_blocking)
        if count is not None and (boxes or found.sharded):
            count(sources.nbytes(found, made.pieces))
        return match.root.build(TreeParts(made.values, chosen, None))


class _NewValues:
    """New values for a template's tensors, and the pieces to be copied into them.

    Attributes:
        values: in the order of the template's tensors; where those are the same one, so are these.
    """

    def __init__(self, found: MatchedTarget, sources: StoredLeaves, checks: Checks | None) -> None:
        self.pieces: list[TargetPiece] = []
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
                    self.pieces += [TargetPiece(want, target, source) for target, source in own]
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
    value = allocate_like(template)
    filled = sharded_leaf(value)
    return value, () if filled is None else filled.shards


# --- Pieces: parts of what is stored, and the places that they fill --------------------------------------------------


class TargetPiece(NamedTuple):
    """Attributes:
    want: the target's tensor that it is a part of.
    target, source: as many elements of both, of one shape.
    """

    want: int
    target: torch.Tensor
    source: torch.Tensor


class StoredLeaves:
    """The stored leaves, to be copied from: whole or in boxes.

    Args:
        tensors: the leaves, as if all of them were whole.
        need: brings what tensors over `memory` have; None: all of it is there.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        boxes: Boxes,
        tensors: list[torch.Tensor],
        need: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._plan, self._memory, self._boxes, self._tensors, self._need = plan, memory, boxes, tensors, need

    def bring(self, pieces: Sequence[TargetPiece]) -> None:
        """Call it before the pieces are read."""
        if self._need is not None:
            self._need([piece.source for piece in pieces])

    def whole(self, have: int, checks: Checks | None) -> torch.Tensor:
        """All of a leaf, checked; put together, if it lies in boxes."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        self._compare(have, stored, checks)
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            assemble_one(self._plan.leaves[have], stored, self._memory)
        return self._tensors[have]

    def pieces(self, found: MatchedTarget, checks: Checks | None) -> list[TargetPiece]:
        """What fills the tensors of a target that a value was matched with, checked."""
        if not (self._boxes or found.sharded):
            if checks is not None:
                for have, _ in found.match.pairs:
                    self._compare(have, (), checks)
            return [TargetPiece(want, found.tensors[want], self._tensors[have]) for have, want in found.match.pairs]
        pieces: list[TargetPiece] = []
        for have, want in found.match.pairs:
            pieces += self.pieces_of(have, want, wanted_of(found, want), checks)
        return pieces

    def pieces_of(self, have: int, want: int, wanted: Sequence[Shard], checks: Checks | None) -> list[TargetPiece]:
        """What fills these parts of one leaf."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        parts = parts_of(self._plan, self._boxes, have, self._tensors[have], self._memory)
        if wanted and checks is not None:
            self._compare(have, [one for one in stored if _meets(one.box, wanted)], checks)
        everything = whole(self._plan.leaves[have].shape)
        if len(parts) == 1 and parts[0].box == everything:
            return [TargetPiece(want, one.local, narrow_to(parts[0].local, one.box)) for one in wanted]
        if len(wanted) == 1 and wanted[0].box == everything:
            return [TargetPiece(want, narrow_to(wanted[0].local, one.box), one.local) for one in parts]
        return [TargetPiece(want, target, source) for target, source in copies_of(wanted, parts)]

    def _compare(self, have: int, stored: Sequence[StoredBox], checks: Checks | None) -> None:
        """Compares some boxes of a leaf with their checksums, or a leaf that lies whole."""
        if checks is None:
            return
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            checks.compare_boxes(have, stored)
        elif not boxes_of_leaf(self._plan, self._boxes, have):
            checks.compare(have)

    def _parts(self, have: int, stored: Sequence[StoredBox]) -> list[torch.Tensor]:
        if not stored:
            return [self._tensors[have]]
        return [box_tensor(self._plan.leaves[have], one, self._memory) for one in stored]

    def nbytes(self, found: MatchedTarget, pieces: Sequence[TargetPiece]) -> int:
        """Of those pieces that are read from boxes, or into shards."""
        have = {want: have for have, want in found.match.pairs}
        return sum(
            piece.source.nbytes
            for piece in pieces
            if piece.want in found.sharded or boxes_of_leaf(self._plan, self._boxes, have[piece.want])
        )


def wanted_of(found: MatchedTarget, want: int) -> Sequence[Shard]:
    """The parts of a target's tensor that this rank holds."""
    target = found.sharded.get(want)
    if target is not None:
        return target.leaf.shards
    tensor = found.tensors[want]
    return (Shard(whole(tensor.shape), tensor),)


def _meets(box: Box, wanted: Sequence[Shard]) -> bool:
    return any(box.meet(one.box) is not None for one in wanted)


# --- Targets that share memory, for which values are stored that can't stand there together --------------------------


class _TargetRange(NamedTuple):
    """The memory of a target's tensor; of one in several storages, what it has of one of them."""

    start: int
    stop: int
    want: int


def disagreements(plan: Plan, found: MatchedTarget, pieces: Sequence[TargetPiece]) -> list[str]:
    """The differences that they make. An answer is kept for the next target in the same memory."""
    match = found.match
    if match.apart == found.addresses and not found.sharded:
        return []
    stored = {want: have for have, want in match.pairs}
    wants = list(stored)
    if not found.sharded and not ties.overlapping(
        [found.addresses[want] for want in wants], match.footprints.spans[wants]
    ):
        match.apart = found.addresses
        return []
    on_devices: dict[torch.device, list[_TargetRange]] = {}
    for one in _ranges(found, stored):
        on_devices.setdefault(found.tensors[one.want].device, []).append(one)
    differences: list[str] = []
    shared = False
    for ranges in on_devices.values():
        for cluster in _clusters(ranges):
            # where the stored ones lie to each other as the targets do, both show the same bytes
            if len({_relation(plan, found, stored[one.want], one) for one in cluster}) > 1:
                shared = True
                wants = {one.want for one in cluster}
                differences += [
                    f"{render_path(match.tensor_names[want])}: it shares memory with another leaf of out, for which "
                    "other values are stored"
                    for want in _overwritten(found, cluster, [piece for piece in pieces if piece.want in wants])
                ]
    if not shared:
        match.apart = found.addresses
    return differences


def _ranges(found: MatchedTarget, wants: dict[int, int]) -> Iterator[_TargetRange]:
    spans = found.match.footprints.spans
    for want in wants:
        target = found.sharded.get(want)
        if target is None or len(target.leaf.shards) == 1:
            yield _TargetRange(found.addresses[want], found.addresses[want] + int(spans[want]), want)
            continue
        storages: dict[int, _TargetRange] = {}
        for one in target.leaf.shards:
            start, storage = one.local.data_ptr(), one.local.untyped_storage().data_ptr()
            stop = start + traits.reach(one.local.shape, one.local.stride()) * one.local.dtype.itemsize
            known = storages.get(storage, _TargetRange(start, stop, want))
            storages[storage] = _TargetRange(min(start, known.start), max(stop, known.stop), want)
        yield from storages.values()


def _relation(plan: Plan, found: MatchedTarget, have: int, one: _TargetRange) -> tuple[Any, ...]:
    target = found.sharded.get(one.want)
    boxes = None if target is None else tuple(shard.box for shard in target.leaf.shards)
    stored, dtype = plan.leaves[have], found.tensors[one.want].dtype
    if dtype != traits.DTYPES[stored.dtype]:  # cast, so that distances in bytes say nothing
        return one.start, stored.offset, stored.dtype, dtype, boxes
    return one.start - stored.offset, boxes


def _clusters(ranges: Sequence[_TargetRange]) -> list[list[_TargetRange]]:
    """Those that overlap others, each with all that it is joined to by such."""
    starts = [one.start for one in ranges]
    spans = np.array([one.stop - one.start for one in ranges], np.int64)
    clusters: list[list[_TargetRange]] = []
    end = -1
    for one in sorted(ranges[i] for i in ties.overlapping(starts, spans)):
        if one.start < end:
            clusters[-1].append(one)
        else:
            clusters.append([one])
        end = max(end, one.stop)
    return clusters


def _overwritten(found: MatchedTarget, cluster: Sequence[_TargetRange], pieces: Sequence[TargetPiece]) -> list[int]:
    """Fills memory like the targets', and returns those that others have written over."""
    start, stop = min(one.start for one in cluster), max(one.stop for one in cluster)
    start -= start % 16
    storage = torch.empty(stop - start, dtype=torch.uint8, device="cpu").untyped_storage()
    doubles: list[torch.Tensor] = []
    inside = [piece for piece in pieces if start <= piece.target.data_ptr() < stop]
    for want, target, source in inside:
        place, rest = divmod(target.data_ptr() - start, target.dtype.itemsize)
        if rest or want in found.match.resolved:
            return sorted({one.want for one in cluster})  # nobody looks
        doubles.append(over(storage, target.dtype, place, target.shape, target.stride()))
        traits.copyable(doubles[-1]).copy_(traits.copyable(source))
    lost = {
        piece.want
        for piece, double in zip(inside, doubles, strict=True)
        if not torch.equal(_bits(double), _bits(piece.source.to(double.dtype)))
    }
    return sorted(lost)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return traits.copyable(tensor).contiguous().reshape(-1).view(torch.uint8)
