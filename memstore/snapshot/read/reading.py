"""Boxes of stored tensors into memory: straight into the target where its elements lie as in the file, else through
a piece of memory of limited size. Every chunk of which something is read is compared with its checksum, if it has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from memstore import modes
from memstore.sharding import Box, Shard
from memstore.snapshot.format import StoredBox, StoredTensor
from memstore.snapshot.progress import Meter
from memstore.snapshot.read.box_parts import BoxPart
from memstore.snapshot.read.stored import Stored
from memstore.snapshot.storage import CHUNK, FilePart, by_width
from memstore.structure import memory_of

BUDGET = 1 << 28  # bytes of memory for what can't be read straight into its target


Read = Callable[[int, Sequence[FilePart]], None]  # parts of a file, by its number in the manifest


class Want(NamedTuple):
    """A stored tensor, and the parts of it that are wanted, each with the tensor that it goes to."""

    tensor: StoredTensor
    shards: Sequence[Shard]


@modes.put_aside()
def read_into(
    stored: Stored, wants: Sequence[Want], meter: Meter, budget: int = BUDGET, *, check_narrow: bool = True
) -> None:
    """Fills the shards. They are no Parameters that autograd watches: it isn't told of them.

    Args:
        check_narrow: False: chunks of which less than half is wanted are neither read whole nor compared.

    Raises:
        CorruptionError: bytes are damaged, or missing. The shards then have any content.
        VersionGoneError: another snapshot has taken the place of this one. The shards then have any content, too.
    """
    read = partial(_read, stored, meter, check_narrow)
    direct: dict[int, list[FilePart]] = defaultdict(list)
    detours: dict[int, list[BoxPart]] = defaultdict(list)
    targets: list[torch.Tensor] = []
    for want in wants:
        for shard in want.shards:
            targets.append(shard.local)
            for box in want.tensor.boxes:
                _plan(box, shard, direct, detours)
    with stored.reading():
        for file, parts in direct.items():
            for batch in _apart(parts):
                read(file, batch)
        for file, found in detours.items():
            _read_detours(read, file, found, max(budget, CHUNK if stored.manifest.files[file].sums else 1))
    changed = [target for target in targets if not target.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)
    meter.finish()


def _plan(box: StoredBox, shard: Shard, direct: dict[int, list[FilePart]], detours: dict[int, list[BoxPart]]) -> None:
    """What the shard needs of the box: straight into its memory, where the elements lie there as in the file."""
    local = shard.local
    if shard.box == (box.offsets, box.shape) and local.is_cpu and local.is_contiguous():  # which most are
        direct[box.file].append(FilePart(box.offset, memory_of(local)))
        return
    there = Box(box.offsets, box.shape)
    meet = shard.box.meet(there)
    if meet is None:
        return
    part = BoxPart(box.file, box.offset, box.shape, meet.within(there), local[meet.within(shard.box).slices])
    if part.is_direct:
        direct[box.file] += part.into_target()
    else:
        detours[box.file].append(part)


def _read(stored: Stored, meter: Meter, check_narrow: bool, file: int, parts: Sequence[FilePart]) -> None:
    found = stored.manifest.files[file]
    stored.check_size(found)
    checked, narrow = (parts, ()) if check_narrow or not found.sums else by_width(parts, found.size)
    if checked or not narrow:
        stored.storage.read(found.name, checked, sums=found.sums or None, done=meter.done)
    if narrow:
        stored.storage.read(found.name, narrow, done=meter.done)


def _apart(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """Batches in each of which no two parts overlap in the file: tied tensors are read for each target."""
    batches: list[list[FilePart]] = []
    ends: list[int] = []
    for part in sorted(parts, key=lambda part: part.offset):
        free = 0
        while free < len(ends) and ends[free] > part.offset:
            free += 1
        if free == len(ends):
            ends.append(0)
            batches.append([])
        batches[free].append(part)
        ends[free] = part.offset + len(part.memory)
    return batches


# --- what lies otherwise in the target --------------------------------------------------------------------------------


def _read_detours(read: Read, file: int, detours: Sequence[BoxPart], budget: int) -> None:
    batch: list[BoxPart] = []
    nbytes = 0
    for detour in sorted(detours, key=lambda detour: detour.start):
        for piece in detour.pieces(budget):
            if batch and nbytes + piece.nbytes > budget:
                _read_batch(read, file, batch)
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += piece.nbytes
    _read_batch(read, file, batch)


def _read_batch(read: Read, file: int, batch: Sequence[BoxPart]) -> None:
    memories = [np.empty(piece.nbytes, np.uint8) for piece in batch]
    parts = [part for piece, memory in zip(batch, memories, strict=True) for part in piece.into_memory(memory)]
    for together in _apart(parts):
        read(file, together)
    for piece, memory in zip(batch, memories, strict=True):
        piece.copy_from(memory)
