"""Priorities of rows, changed by their positions. The rules: docs/decisions/015."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.replay.priorities import Given
from memstore.replay.ring import Ring
from memstore.replay.words import READABLE, positions_of

Positions = NDArray[np.int64]


def update(ring: Ring, index: NDArray[Any], given: Given, deadline: float) -> int:
    """Returns how many were changed: others lie there by now, or nothing. Raises TypeError, ValueError."""
    if index.dtype.kind not in "iu" and index.size:
        raise TypeError(f"an index is of integers, and not of {index.dtype}")
    if index.ndim > 1:
        raise ValueError(f"an index has one dimension, and not {index.ndim}")
    positions = np.atleast_1d(index).astype(np.int64, copy=False)
    if not positions.size:
        return 0
    ring.entry.check_in_place()
    leaves = np.broadcast_to(given.leaves, positions.shape)
    return ring.run(partial(_update, ring, positions, leaves, given.largest), deadline)


def _update(ring: Ring, positions: Positions, leaves: Any, largest: float) -> int:
    """Under the mutex."""
    priorities = ring.priorities
    if priorities is None:
        return 0
    ring.entry.check_open()
    slots = positions % ring.capacity
    words: Any = ring.words.take(slots)
    there = (positions_of(words, slots, ring.capacity) == positions) & (words & READABLE != 0)
    priorities.note_largest(largest)
    if not there.all():
        slots, leaves = slots[there], leaves[there]
    if len(slots):
        priorities.set(slots, leaves)
    return len(slots)
