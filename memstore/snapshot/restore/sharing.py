"""Targets of a restore that share memory, while the snapshot has a tensor of its own for each: the last would win.

A module's tensors stay where they are. What other objects have in the same memory gets memory of its own: a dict of the
best weights that still are the model's. What can't come apart so must fit together: then the stored values agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memstore import modes
from memstore.sharding import Shard, double, sharded_leaf
from memstore.snapshot.format import StoredTensor
from memstore.snapshot.progress import SILENT
from memstore.snapshot.read import Stored, Want, read_into
from memstore.structure import over, traits

_ALIGNMENT = 16  # bytes of the widest element
_NAMED = 4  # paths in one message


class Place(NamedTuple):
    """Where a stored tensor goes.

    Attributes:
        value, shards: the tensor in the object, and what of it is here.
        replace: puts another tensor in its stead; None in a module.
    """

    path: str
    tensor: StoredTensor
    value: Any
    shards: tuple[Shard, ...]
    replace: Callable[[Any], None] | None = None


class _Range(NamedTuple):
    start: int
    stop: int
    place: int
    shard: Shard

    @property
    def look(self) -> tuple[Any, ...]:
        local = self.shard.local
        return local.device, self.start, local.dtype, local.shape, local.stride(), self.shard.box


def come_apart(stored: Stored, places: Sequence[Place]) -> tuple[list[Place], list[str]]:
    """Places in which all that is stored can stand together; and the differences, where there are none such."""
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
            more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
            differences.append(
                f"{', '.join(paths[:_NAMED])}{more}: they share memory here (tied), and are stored apart, with "
                "different values"
            )
    return apart, differences


def _clusters(places: Sequence[Place]) -> list[list[_Range]]:
    """The shards that overlap others in memory, each with all that it is joined to by such."""
    shards: list[tuple[int, Shard]] = []
    ranges: list[tuple[str, int, int, int]] = []  # device, start, stop; then which shard, by number
    for number, place in enumerate(places):
        for shard in place.shards:
            local = shard.local
            reach = local.numel() if local.is_contiguous() else traits.reach(local.shape, local.stride())
            if reach:
                start, device = local.data_ptr(), "cpu" if local.is_cpu else str(local.device)
                ranges.append((device, start, start + reach * local.itemsize, len(shards)))
                shards.append((number, shard))
    clusters: list[list[int]] = []
    device, end = "", 0
    ranges.sort()
    for i, (on, start, stop, _) in enumerate(ranges):
        if on == device and start < end:
            clusters[-1].append(i)
            end = max(end, stop)
        else:
            clusters.append([i])
            device, end = on, stop
    return [
        [_Range(ranges[i][1], ranges[i][2], *shards[ranges[i][3]]) for i in cluster]
        for cluster in clusters
        if len(cluster) > 1
    ]


@modes.put_aside()
def _moved(place: Place, replace: Callable[[Any], None]) -> Place:
    with torch.inference_mode(False), torch.no_grad():
        leaf = sharded_leaf(place.value)
        if leaf is None:
            value: Any = torch.empty_like(place.value.detach())
            shards = (Shard(place.shards[0].box, value),)
        else:
            value = double(place.value)
            made = sharded_leaf(value)
            shards = () if made is None else made.shards
    replace(value)
    return place._replace(value=value, shards=shards)


@modes.put_aside()
def _agree(stored: Stored, places: Sequence[Place], cluster: Sequence[_Range]) -> bool:
    """Whether what is stored for them can stand in memory like theirs. Reads it, into memory of its own."""
    start, stop = min(one.start for one in cluster), max(one.stop for one in cluster)
    start -= start % _ALIGNMENT
    if any((one.start - start) % one.shard.local.itemsize for one in cluster):
        return False  # nobody looks
    with torch.inference_mode(False), torch.no_grad():
        storage = torch.empty(stop - start, dtype=torch.uint8, device="cpu").untyped_storage()
        read = [Shard(one.shard.box, _new(one.shard.local)) for one in cluster]
        wants = [Want(places[one.place].tensor, (shard,)) for one, shard in zip(cluster, read, strict=True)]
        read_into(stored, wants, SILENT)
        doubles: list[torch.Tensor] = []
        for one, shard in zip(cluster, read, strict=True):
            local = one.shard.local
            at = (one.start - start) // local.itemsize
            doubles.append(over(storage, local.dtype, at, local.shape, local.stride()))
            traits.copyable(doubles[-1]).copy_(traits.copyable(shard.local))
        return all(torch.equal(_bits(there), _bits(shard.local)) for there, shard in zip(doubles, read, strict=True))


def _new(local: torch.Tensor) -> torch.Tensor:
    return torch.empty(local.shape, dtype=local.dtype, device="cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return traits.copyable(tensor).contiguous().reshape(-1).view(torch.uint8)
