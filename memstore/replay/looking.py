"""The rows of a buffer, for who looks at them and writes nothing.

`look_at_rows`: all slots where they lie; some may change meanwhile. `rows_by_age` and `copy_rows_at`: copies of whole
rows, oldest first, made as a sample is: copied, and looked at again (`sampling.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memstore import structure
from memstore.engine import Path, RingNumbers, Root, deadline_after, open_mutable, resource_errors
from memstore.replay.layout import capacity_of
from memstore.replay.picking import Picked
from memstore.replay.ring import Ring
from memstore.replay.sampling import LOADS_IN_ORDER, Targets, copy_picked, new_targets
from memstore.replay.words import READABLE, WHOLE, positions_of, words_of
from memstore.structure import modes

Positions = NDArray[np.int64]


class BufferRows(NamedTuple):
    """The slots of a buffer that rows were written to.

    Attributes:
        rows: how many a sample is taken of. Slots count too that are being written, and those whose writer died.
        capacity: how many slots there are.
        tensors: of each leaf the slots that were written, over the shared memory.
    """

    rows: int
    capacity: int
    tensors: dict[Path, torch.Tensor]


@modes.put_aside()
def look_at_rows(root: Root, key: str, timeout: float) -> BufferRows:
    """Raises KeyNotFoundError, MutableEntryError, CorruptionError."""
    with resource_errors(root.path, key, root), torch.inference_mode(False):
        entry = open_mutable(root, key, "buffer", capacity_of, deadline_after(timeout), writable=False)
        record, mapping = entry.record, entry.mapping
        plan = structure.plan_of_rows(record.description, record.nbytes)
        numbers = RingNumbers(mapping.address + record.start, mapping)
        capacity = capacity_of(record)
        written = min(numbers.head, capacity)
        memory = np.asarray(mapping)[record.start : record.start + record.nbytes]
        tensors = {leaf.name: structure.leaf_tensor(leaf, memory)[:written] for leaf in plan.leaves}
        return BufferRows(min(numbers.rows, capacity), capacity, tensors)


def rows_by_age(ring: Ring) -> Positions:
    """The positions of all rows that are whole by now, those that were handed out too, in their order."""
    words: Any = np.array(ring.words)
    slots = np.flatnonzero(words & READABLE)
    found: Positions = positions_of(words[slots], slots, ring.capacity)
    found.sort()
    return found


def copy_rows_at(ring: Ring, positions: Positions, deadline: float) -> tuple[Targets, Picked]:
    """Copies rows, without those that the ring has written over. Raises StoreTimeoutError where it takes the mutex."""
    picked = Picked(positions % ring.capacity, words_of(positions, ring.capacity, WHOLE))
    targets = new_targets(ring, len(positions))
    if LOADS_IN_ORDER or not ring.entry.writable:
        gone = copy_picked(ring, picked, targets)
    else:
        gone = ring.run(partial(copy_picked, ring, picked, targets), deadline)
    if len(gone):
        left = np.delete(np.arange(len(positions)), gone)
        targets = [target[torch.as_tensor(left)] for target in targets]
        picked = Picked(picked.slots[left], picked.words[left])
    return targets, picked
