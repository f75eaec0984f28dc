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

from memstore.sharding import NO_BOXES, Boxes, Shard, StoredBox, allocate_like, copies, sharded_leaf, whole
from memstore.structure import ties, traits
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Plan
from memstore.structure.rebuilding import (
    Checks,
    assemble_one,
    box_tensor,
    boxes_of_leaf,
    parts_of,
    tensors_of,
)
from memstore.structure.refusals import render_path
from memstore.structure.target_matching import (
    MatchedTarget,
    Setting,
    ShardedTarget,
    choose_objects,
    match_target,
    plan_settings,
    raise_differences,
)
from memstore.structure.tensor_memory import Memory, copy_all, over
from memstore.structure.ties import ByteRange
from memstore.structure.traits import has_gaps
from memstore.structure.tree import TreeParts

Need = Callable[[Sequence[torch.Tensor]], None]

# --- out=: tensors that are there already ----------------------------------------------------------------------------


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Need | None = None,
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
    # 1. Match, and collect all differences: nothing is written before all is compared.
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, out, "out", strict, cast)
    match, differences = found.match, found.differences
    with torch.inference_mode(False):
        sources = StoredLeaves(plan, memory, boxes, checks, need)
    for have, want in match.exact:
        target, source = found.tensors[want], sources.whole(have)
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
        pieces = sources.pieces(found)
        sources.bring(pieces)
        differences = disagreements(plan, found, pieces)
    raise_differences(differences, "out", out)
    # 2. Write: from here on only a device can fail.
    _copy(pieces, one_by_one=bool(match.resolved or found.sharded), non_blocking=non_blocking)
    for setting in settings:
        setting()
    sources.count(found, pieces, count)
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
    need: Need | None = None,
    count: Callable[[int], None] | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Returns the stored value in new memory: in containers like those of `like`, with its devices, dtypes and strides.

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
    # 1. Match.
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, like, "like", strict)
    match, differences = found.match, found.differences
    chosen = choose_objects(like, match.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    raise_differences(differences, "like", like)
    with torch.inference_mode(False), torch.no_grad():
        # 2. Allocate: a target like the template. What is not stored comes from the template.
        made = _allocate(found)
        sources = StoredLeaves(plan, memory, boxes, checks, need)
        pieces = sources.pieces(made)
        sources.bring(pieces)
        stored = {want for _, want in match.pairs}
        for want in range(len(made.tensors)):
            if want not in stored:
                own = copies(wanted_of(made, want), wanted_of(found, want)).pairs
                pieces += [TargetPiece(want, target, source) for target, source in own]
        # 3. Fill it, and put it into its containers.
        _copy(pieces, one_by_one=bool(match.resolved or found.sharded), non_blocking=non_blocking)
        sources.count(found, [piece for piece in pieces if piece.want in stored], count)
        values = [made.sharded[i].value if i in made.sharded else tensor for i, tensor in enumerate(made.tensors)]
        return match.root.build(TreeParts(values, chosen, None))


def _allocate(template: MatchedTarget) -> MatchedTarget:
    """Returns a match of new tensors, which are not filled yet. Those that are one tensor are one here, too."""
    made: dict[int, Any] = {}
    tensors: list[torch.Tensor] = []
    sharded: dict[int, ShardedTarget] = {}
    for want, tensor in enumerate(template.tensors):
        if want not in template.sharded:
            if id(tensor) not in made:
                made[id(tensor)] = _allocate_tensor(tensor)
            tensors.append(made[id(tensor)])
            continue
        value = template.sharded[want].value
        if id(value) not in made:
            new = allocate_like(value)
            leaf = sharded_leaf(new)
            assert leaf is not None, "no DTensor or the like was allocated"
            made[id(value)] = ShardedTarget(new, leaf)
        sharded[want] = made[id(value)]
        tensors.append(tensor)
    return template._replace(tensors=tensors, sharded=sharded)


def _allocate_tensor(template: torch.Tensor) -> torch.Tensor:
    """Returns memory like a template's, with its traits."""
    stride = template.stride()
    if traits.reach(template.shape, stride) != template.numel() or has_gaps(template.shape, stride):
        stride = traits.contiguous_stride(template.shape)
    tensor = torch.empty_strided(template.shape, stride, dtype=template.dtype, device=template.device)
    return traits.with_traits(tensor, traits.traits_of(template))


# --- Pieces: parts of what is stored, and the places that they fill --------------------------------------------------


class TargetPiece(NamedTuple):
    """Attributes:
    want: the target's tensor that it is a part of.
    target, source: as many elements of both, of one shape.
    """

    want: int
    target: torch.Tensor
    source: torch.Tensor


def _copy(pieces: Sequence[TargetPiece], *, one_by_one: bool, non_blocking: bool) -> None:
    targets, sources = [piece.target for piece in pieces], [piece.source for piece in pieces]
    copy_all(targets, sources, one_by_one=one_by_one, non_blocking=non_blocking)


class StoredLeaves:
    """The stored leaves, to be copied from: whole or in boxes.

    Args:
        checks: compares what is read; None: nothing is compared.
        need: brings what tensors over `memory` have; None: all of it is there.
    """

    def __init__(self, plan: Plan, memory: Memory, boxes: Boxes, checks: Checks | None, need: Need | None) -> None:
        self._plan, self._memory, self._boxes, self._checks, self._need = plan, memory, boxes, checks, need
        self._tensors = tensors_of(plan, memory, None)  # as if all of them were whole

    def bring(self, pieces: Sequence[TargetPiece]) -> None:
        """Brings what these pieces have. Call it before they are read."""
        if self._need is not None:
            self._need([piece.source for piece in pieces])

    def whole(self, have: int) -> torch.Tensor:
        """Returns all of a leaf, checked; put together, if it lies in boxes."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        self._compare(have, stored)
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            assemble_one(self._plan.leaves[have], stored, self._memory)
        return self._tensors[have]

    def pieces(self, found: MatchedTarget) -> list[TargetPiece]:
        """Returns what fills the tensors of a target that a value was matched with, checked."""
        if not self._boxes and not found.sharded and self._checks is None:  # which most are, of hundreds of leaves
            return [TargetPiece(want, found.tensors[want], self._tensors[have]) for have, want in found.match.pairs]
        pieces: list[TargetPiece] = []
        for have, want in found.match.pairs:
            stored = boxes_of_leaf(self._plan, self._boxes, have)
            if not stored and want not in found.sharded:
                self._compare(have, ())
                pieces.append(TargetPiece(want, found.tensors[want], self._tensors[have]))
                continue
            wanted = wanted_of(found, want)
            if wanted:
                meeting = [one for one in stored if any(one.box.meet(shard.box) is not None for shard in wanted)]
                self._compare(have, meeting)
            parts = parts_of(self._plan, self._boxes, have, self._tensors[have], self._memory)
            pieces += [TargetPiece(want, target, source) for target, source in copies(wanted, parts).pairs]
        return pieces

    def _compare(self, have: int, stored: Sequence[StoredBox]) -> None:
        """Compares some boxes of a leaf with their checksums, or a leaf that lies whole."""
        if self._checks is None:
            return
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            self._checks.compare_boxes(have, stored)
        elif not boxes_of_leaf(self._plan, self._boxes, have):
            self._checks.compare(have)

    def _parts(self, have: int, stored: Sequence[StoredBox]) -> list[torch.Tensor]:
        if not stored:
            return [self._tensors[have]]
        return [box_tensor(self._plan.leaves[have], one, self._memory) for one in stored]

    def count(self, found: MatchedTarget, pieces: Sequence[TargetPiece], count: Callable[[int], None] | None) -> None:
        """Tells `count` the bytes of those pieces that are read from boxes, or into shards."""
        if count is None or not (self._boxes or found.sharded):
            return
        in_boxes = {want for have, want in found.match.pairs if boxes_of_leaf(self._plan, self._boxes, have)}
        count(sum(one.source.nbytes for one in pieces if one.want in found.sharded or one.want in in_boxes))


def wanted_of(found: MatchedTarget, want: int) -> Sequence[Shard]:
    """Returns the parts of a target's tensor that this rank holds."""
    target = found.sharded.get(want)
    if target is not None:
        return target.leaf.shards
    tensor = found.tensors[want]
    return (Shard(whole(tensor.shape), tensor),)


# --- Targets that share memory, for which values are stored that can't stand there together --------------------------


def disagreements(plan: Plan, found: MatchedTarget, pieces: Sequence[TargetPiece]) -> list[str]:
    """Finds targets in shared memory for which other values are stored. An answer is kept for the next such target."""
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
    on_devices: dict[torch.device, list[ByteRange]] = {}
    for one in _ranges(found, stored):
        on_devices.setdefault(found.tensors[one.leaf].device, []).append(one)
    differences: list[str] = []
    shared = False
    for ranges in on_devices.values():
        spans = np.array([one.stop - one.start for one in ranges], np.int64)
        for cluster in ties.clusters_of([ranges[i] for i in ties.overlapping([one.start for one in ranges], spans)]):
            # where the stored ones lie to each other as the targets do, both show the same bytes
            if len({_relation(plan, found, stored[one.leaf], one) for one in cluster}) > 1:
                shared = True
                wants = {one.leaf for one in cluster}
                differences += [
                    f"{render_path(match.tensor_names[want])}: it shares memory with another leaf of out, for which "
                    "other values are stored"
                    for want in _overwritten(found, cluster, [piece for piece in pieces if piece.want in wants])
                ]
    if not shared:
        match.apart = found.addresses
    return differences


def _ranges(found: MatchedTarget, wants: dict[int, int]) -> Iterator[ByteRange]:
    """Iterates over the memory of a target's tensors; of one in several storages, what it has of each."""
    spans = found.match.footprints.spans
    for want in wants:
        target = found.sharded.get(want)
        if target is None or len(target.leaf.shards) == 1:
            yield ByteRange(found.addresses[want], found.addresses[want] + int(spans[want]), want)
            continue
        storages: dict[int, ByteRange] = {}
        for one in target.leaf.shards:
            start, storage = one.local.data_ptr(), one.local.untyped_storage().data_ptr()
            stop = start + traits.reach(one.local.shape, one.local.stride()) * one.local.dtype.itemsize
            known = storages.get(storage, ByteRange(start, stop, want))
            storages[storage] = ByteRange(min(start, known.start), max(stop, known.stop), want)
        yield from storages.values()


def _relation(plan: Plan, found: MatchedTarget, have: int, one: ByteRange) -> tuple[Any, ...]:
    target = found.sharded.get(one.leaf)
    boxes = None if target is None else tuple(shard.box for shard in target.leaf.shards)
    stored, dtype = plan.leaves[have], found.tensors[one.leaf].dtype
    if dtype != traits.DTYPES[stored.dtype]:  # cast, so that distances in bytes say nothing
        return one.start, stored.offset, stored.dtype, dtype, boxes
    return one.start - stored.offset, boxes


def _overwritten(found: MatchedTarget, cluster: Sequence[ByteRange], pieces: Sequence[TargetPiece]) -> list[int]:
    """Fills memory like the targets', and returns those that others have written over."""
    start, stop = min(one.start for one in cluster), max(one.stop for one in cluster)
    start -= start % 16
    storage = torch.empty(stop - start, dtype=torch.uint8, device="cpu").untyped_storage()
    doubles: list[torch.Tensor] = []
    inside = [piece for piece in pieces if start <= piece.target.data_ptr() < stop]
    for want, target, source in inside:
        place, rest = divmod(target.data_ptr() - start, target.dtype.itemsize)
        if rest or want in found.match.resolved:
            return sorted({one.leaf for one in cluster})  # nobody looks
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
