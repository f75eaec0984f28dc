"""Boxes of stored tensors into memory: straight into the target where its elements lie as in the file, else through
a piece of memory of limited size. Every chunk of which something is read is compared with its checksum, if it has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from memstore import modes
from memstore.sharding import Box, Shard
from memstore.snapshot.manifest import StoredTensor
from memstore.snapshot.progress import Meter
from memstore.snapshot.state import own_bytes
from memstore.snapshot.storage import CHUNK, FilePart
from memstore.snapshot.stored import Stored
from memstore.structure import traits

BUDGET = 1 << 28  # bytes of memory for what can't be read straight into its target


class Want(NamedTuple):
    """A stored tensor, and the parts of it that are wanted, each with the tensor that it goes to."""

    tensor: StoredTensor
    shards: Sequence[Shard]


class _Detour(NamedTuple):
    """A part of a stored box that doesn't lie in the file as in its target."""

    file: int
    offset: int  # of the box in the file, in bytes
    shape: tuple[int, ...]  # of the box
    inner: Box  # what is wanted, within it
    target: torch.Tensor  # that has just these elements

    @property
    def start(self) -> int:
        return self.offset + _position(self.inner.offsets, self.shape) * self.target.itemsize

    @property
    def nbytes(self) -> int:
        """From the first element to the last one in the file, with what lies between them."""
        return traits.reach(self.inner.shape, traits.contiguous_stride(self.shape)) * self.target.itemsize


@modes.put_aside()
def read_into(stored: Stored, wants: Sequence[Want], meter: Meter, budget: int = BUDGET) -> None:
    """Fills the shards. They are no Parameters that autograd watches: it isn't told of them.

    Raises:
        CorruptionError: bytes are damaged, or missing. The shards then have any content.
    """
    direct: dict[int, list[FilePart]] = defaultdict(list)
    detours: dict[int, list[_Detour]] = defaultdict(list)
    targets: list[torch.Tensor] = []
    for want in wants:
        for shard in want.shards:
            targets.append(shard.local)
            for box in want.tensor.boxes:
                if shard.box == (box.offsets, box.shape):  # which most are
                    whole = Box((0,) * len(box.shape), box.shape)
                    _plan_part(_Detour(box.file, box.offset, box.shape, whole, shard.local), direct, detours)
                    continue
                meet = shard.box.meet(Box(box.offsets, box.shape))
                if meet is not None:
                    target = shard.local[meet.within(shard.box).slices]
                    inner = meet.within(Box(box.offsets, box.shape))
                    _plan_part(_Detour(box.file, box.offset, box.shape, inner, target), direct, detours)
    for file, parts in direct.items():
        for batch in _apart(parts):
            _read(stored, file, batch, meter)
    for file, found in detours.items():
        _read_detours(stored, file, found, meter, max(budget, CHUNK if stored.manifest.files[file].sums else 1))
    changed = [target for target in targets if not target.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)
    meter.finish()


def _plan_part(detour: _Detour, direct: dict[int, list[FilePart]], detours: dict[int, list[_Detour]]) -> None:
    """Without the detour, where the elements lie in the target as in the file."""
    target = detour.target
    as_in_file = detour.nbytes == target.numel() * target.itemsize
    if as_in_file and target.device.type == "cpu" and target.is_contiguous():
        direct[detour.file].append(FilePart(detour.start, own_bytes(target)))
    else:
        detours[detour.file].append(detour)


def _position(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Of an element, counted in C order."""
    return sum(at * step for at, step in zip(offsets, traits.contiguous_stride(shape), strict=True))


def _read(stored: Stored, file: int, parts: Sequence[FilePart], meter: Meter) -> None:
    found = stored.manifest.files[file]
    stored.check_size(found)
    stored.storage.read(found.name, parts, sums=found.sums or None, done=meter.done)


def _apart(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """Batches in each of which no two parts overlap in the file: tied tensors are read for each target."""
    batches: list[list[FilePart]] = []
    ends: list[int] = []
    for part in sorted(parts, key=lambda part: part.offset):
        free = next((i for i, end in enumerate(ends) if end <= part.offset), len(ends))
        if free == len(ends):
            ends.append(0)
            batches.append([])
        batches[free].append(part)
        ends[free] = part.offset + len(part.memory)
    return batches


# --- what lies otherwise in the target --------------------------------------------------------------------------------


def _read_detours(stored: Stored, file: int, detours: Sequence[_Detour], meter: Meter, budget: int) -> None:
    batch: list[_Detour] = []
    nbytes = 0
    for detour in sorted(detours, key=lambda detour: detour.start):
        for piece in _pieces(detour, budget):
            if batch and nbytes + piece.nbytes > budget:
                _read_batch(stored, file, batch, meter)
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += piece.nbytes
    _read_batch(stored, file, batch, meter)


def _pieces(detour: _Detour, budget: int) -> Iterator[_Detour]:
    """Halves, along the first dimension that can be halved, until each fits."""
    inner = detour.inner
    if detour.nbytes <= budget or max(inner.shape, default=1) == 1:
        yield detour
        return
    dim = next(dim for dim, size in enumerate(inner.shape) if size > 1)
    half = inner.shape[dim] // 2
    for start, size in ((0, half), (half, inner.shape[dim] - half)):
        offsets = tuple(at + start * (i == dim) for i, at in enumerate(inner.offsets))
        shape = tuple(size if i == dim else length for i, length in enumerate(inner.shape))
        target = detour.target.narrow(dim, start, size)
        yield from _pieces(detour._replace(inner=Box(offsets, shape), target=target), budget)


def _read_batch(stored: Stored, file: int, batch: Sequence[_Detour], meter: Meter) -> None:
    memories = [np.empty(piece.nbytes, np.uint8) for piece in batch]
    parts = [FilePart(piece.start, memory) for piece, memory in zip(batch, memories, strict=True)]
    for together in _apart(parts):
        _read(stored, file, together, meter)
    for piece, memory in zip(batch, memories, strict=True):
        storage = torch.from_numpy(memory).untyped_storage()
        stride = traits.contiguous_stride(piece.shape)
        source = traits.over(storage, piece.target.dtype, 0, piece.inner.shape, stride)
        target = piece.target
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            traits.copyable(target).copy_(traits.copyable(source))
