"""The rows of an open dataset, in the memory that the processes share."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from memstore import structure
from memstore.datasets.batch import NUMPY_SAME_SIZE, Array, Batch
from memstore.datasets.indices import NoLeafError
from memstore.engine import CONTROL_SIZE, MappedEntry, MutableEntry, Record, sync_rows
from memstore.structure import DTYPES, Plan


def arrays_over(plan: Plan, memory: Array) -> tuple[Array, ...]:
    """For each leaf the bits of all rows, over the data section."""
    arrays: list[Array] = []
    for leaf in plan.leaves:
        kind = NUMPY_SAME_SIZE[DTYPES[leaf.dtype].itemsize]
        arrays.append(np.ndarray(leaf.shape, kind, memory, leaf.offset))
    return tuple(arrays)


def capacity_of(record: Record) -> int:
    """Raises CorruptionError."""
    return structure.capacity_of(record.description, record.nbytes)


class Rows:
    """All rows that there is room for, whole ones and others.

    Attributes:
        plan: of all of them.
        arrays: for each leaf the bits of them.
        value: the same as tensors, in the structure of a row. Users get no part of these: see `shared`.
    """

    def __init__(self, entry: MutableEntry) -> None:
        record = entry.record
        self._entry = entry
        self.plan = structure.plan_of_rows(record.description, record.nbytes)
        self._memory = np.asarray(entry.mapping)[record.start : record.start + record.nbytes]
        self.arrays = arrays_over(self.plan, self._memory)
        self.value: Any = structure.rebuild(self.plan, b"", self._memory, entry.mapping)

    def shared(self, index: int | slice, value: Any = None) -> Any:
        """These rows, as tensors over the memory that the processes share. `value`: a part of all of them; None: all.

        Each has a storage of its own: `share_memory_` moves a storage elsewhere, with all tensors over it, and torch
        saves it whole.
        """
        with torch.inference_mode(False):
            rows = (self.value if value is None else value)[index]
            return self._own(rows) if isinstance(rows, torch.Tensor) else rows.apply(self._own)

    def column(self, names: tuple[str, ...], length: int) -> Any:
        """So many rows of one leaf, or of a part of the spec, as `shared`. Raises KeyError, which lists the leaves."""
        found = self.value
        for name in names:
            found = None if isinstance(found, torch.Tensor) else found.get(name, None)
            if found is None:
                asked = names[0] if len(names) == 1 else names
                raise NoLeafError(f"{self._entry.key!r} has no leaf {asked!r}, but {self._leaves()}")
        return self.shared(slice(length), found)

    def names(self) -> list[str]:
        """The names of the columns; of nested leaves the first part. Empty if the rows are of one tensor."""
        return list(dict.fromkeys(str(leaf.name[0]) for leaf in self.plan.leaves if leaf.name))

    def _leaves(self) -> str:
        names = [tuple(map(str, leaf.name)) for leaf in self.plan.leaves]
        if names == [()]:
            return "rows of one tensor: dataset[:] is all of them"
        return ", ".join(repr(name[0] if len(name) == 1 else name) for name in names)

    def _own(self, view: torch.Tensor) -> torch.Tensor:
        return structure.in_own_storage(view, self._memory, self._entry.mapping)

    def store(self, batch: Batch, index: Any) -> None:
        """Copies a batch to its rows, by this thread alone: no helper of torch's stores on when its caller is dead."""
        for array, source in zip(self.arrays, batch.arrays, strict=True):
            array[index] = source

    def sync(self, start: int, stop: int) -> None:
        """These rows are on the disk, if there is one."""
        for leaf in self.plan.leaves:
            row = leaf.nbytes // leaf.shape[0]
            sync_rows(self._entry, leaf.offset + start * row, leaf.offset + stop * row)

    def sync_control_page(self) -> None:
        sync_rows(self._entry, 0, CONTROL_SIZE)


def as_held(entry: MutableEntry) -> MappedEntry:
    """The rows that are there by now as an ordinary entry, for a view: of the same file, as long as it is mapped."""
    rows, length = Rows(entry), entry.length
    plan = structure.plan_at(rows.value[:length], [leaf.offset for leaf in rows.plan.leaves])
    record = msgspec.structs.replace(entry.record, description=plan.description, nbytes=plan.nbytes)
    return MappedEntry(record, entry.mapping)
