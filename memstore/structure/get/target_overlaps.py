"""Tensors of a target that share memory, for which values are stored that can't stand there together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.structure.get.matching import MatchedTarget
from memstore.structure.get.pieces import Piece
from memstore.structure.plans import Plan
from memstore.structure.refusals import render_path
from memstore.structure.tensors import over, ties, traits


class _Range(NamedTuple):
    """The memory of a target's tensor; of one in several storages, what it has of one of them."""

    start: int
    stop: int
    want: int


def disagreements(plan: Plan, found: MatchedTarget, pieces: Sequence[Piece]) -> list[str]:
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
    on_devices: dict[torch.device, list[_Range]] = {}
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


def _ranges(found: MatchedTarget, wants: dict[int, int]) -> Iterator[_Range]:
    spans = found.match.footprints.spans
    for want in wants:
        target = found.sharded.get(want)
        if target is None or len(target.leaf.shards) == 1:
            yield _Range(found.addresses[want], found.addresses[want] + int(spans[want]), want)
            continue
        storages: dict[int, _Range] = {}
        for one in target.leaf.shards:
            start, storage = one.local.data_ptr(), one.local.untyped_storage().data_ptr()
            stop = start + traits.reach(one.local.shape, one.local.stride()) * one.local.dtype.itemsize
            known = storages.get(storage, _Range(start, stop, want))
            storages[storage] = _Range(min(start, known.start), max(stop, known.stop), want)
        yield from storages.values()


def _relation(plan: Plan, found: MatchedTarget, have: int, one: _Range) -> tuple[Any, ...]:
    target = found.sharded.get(one.want)
    boxes = None if target is None else tuple(shard.box for shard in target.leaf.shards)
    stored, dtype = plan.leaves[have], found.tensors[one.want].dtype
    if dtype != traits.DTYPES[stored.dtype]:  # cast, so that distances in bytes say nothing
        return one.start, stored.offset, stored.dtype, dtype, boxes
    return one.start - stored.offset, boxes


def _clusters(ranges: Sequence[_Range]) -> list[list[_Range]]:
    """Those that overlap others, each with all that it is joined to by such."""
    starts = [one.start for one in ranges]
    spans = np.array([one.stop - one.start for one in ranges], np.int64)
    clusters: list[list[_Range]] = []
    end = -1
    for one in sorted(ranges[i] for i in ties.overlapping(starts, spans)):
        if one.start < end:
            clusters[-1].append(one)
        else:
            clusters.append([one])
        end = max(end, one.stop)
    return clusters


def _overwritten(found: MatchedTarget, cluster: Sequence[_Range], pieces: Sequence[Piece]) -> list[int]:
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
