"""The rows of a buffer, for who looks at them and writes nothing: some may change meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from memstore import structure
from memstore.engine import Path, RingNumbers, Root, deadline_after, open_mutable, resource_errors
from memstore.replay.layout import capacity_of
from memstore.structure import modes


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
