"""Ring: an open replay buffer, as the memory that the processes share. Everything else here works on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from memstore import structure
from memstore.datasets import arrays_over
from memstore.engine import ClaimTable, MutableEntry, Refusal, RingNumbers, Seats
from memstore.replay.layout import capacity_of, layout_of, options_of
from memstore.replay.priorities import Priorities
from memstore.replay.sum_tree import SumTree
from memstore.replay.words import Words

T = TypeVar("T")


class NeverFitsError(Refusal):
    """A batch that a rate limiter never lets through, found under the mutex before anything was changed."""


class Ring:
    """The parts of a buffer, mapped.

    Attributes:
        key, entry, page: as the engine has them.
        capacity: how many slots there are.
        options, limiter: what is fixed since it was made.
        plan: of all rows.
        arrays: for each leaf the bits of all rows, [capacity, ...], as integers.
        tensors: the same for torch.
        numbers, claims, words, seats: what the processes share beside the rows.
        priorities: None: it has none.
        notes: what `flush` notes, [capacity, 2]: the hash of a row, and its word. None in memory.
    """

    def __init__(self, entry: MutableEntry) -> None:
        """Raises CorruptionError where the parts don't fit each other."""
        record = entry.record
        self.key, self.entry, self.page = entry.key, entry, entry.page
        self.capacity = capacity = capacity_of(record)
        self.options = options_of(record)
        self.limiter = self.options.rate_limiter
        self.plan = structure.plan_of_rows(record.description, record.nbytes)
        layout = layout_of(self.options, capacity)
        memory = np.asarray(entry.mapping)[record.start : record.start + record.nbytes]
        address = entry.mapping.address + record.start
        self.arrays = arrays_over(self.plan, memory)
        with torch.inference_mode(False):
            self.tensors = tuple(torch.as_tensor(array, device="cpu") for array in self.arrays)
        self.words: Words = np.ndarray(capacity, np.int64, memory, layout.words)
        self.claims = ClaimTable(address + layout.claims, entry.mapping)
        self.numbers = RingNumbers(address, entry.mapping)
        self.seats = Seats(address, entry.mapping)
        self.priorities: Priorities | None = None
        if self.options.alpha is not None:
            nodes: Any = np.ndarray(SumTree.nodes(capacity), np.float64, memory, layout.tree)
            self.priorities = Priorities(SumTree(nodes, capacity), self.numbers, self.options.alpha)
        self.notes: NDArray[np.uint64] | None = None
        if self.options.is_noted:
            self.notes = np.ndarray((capacity, 2), np.uint64, memory, layout.notes)
        self.layout = layout
        self.numbers.check(capacity)

    def run(self, action: Callable[[], T], deadline: float) -> T:
        """Calls `action` under the buffer's mutex. Raises StoreTimeoutError; ValueError for a NeverFitsError."""
        try:
            return self.entry.run(action, deadline)
        except NeverFitsError as error:
            raise ValueError(str(error)) from None
