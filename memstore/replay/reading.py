"""Rows on their way out of a replay buffer: copied without a lock, and looked at again. See docs/decisions/015."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memstore.errors import StoreTimeoutError
from memstore.replay.ring import Ring
from memstore.replay.words import are_same, positions_of
from memstore.rows import copy_rows

Slots = NDArray[np.int64]
Pick = Callable[[int], "tuple[Slots, Slots] | None"]
"""Picks so many slots that can be read, and gives their words too; None: there are none."""

_ROUNDS = 16  # before the rest is copied under the mutex
_LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


def new_targets(ring: Ring, rows: int) -> list[torch.Tensor]:
    """A tensor for each leaf, of its bits: not every dtype has the kernels."""
    return [torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in ring.tensors]


def read_picked(
    ring: Ring, slots: Slots, words: Slots, targets: list[torch.Tensor], pick: Pick, deadline: float
) -> Slots:
    """Copies rows to targets; those that went meanwhile are picked anew. Returns the positions of what was copied."""
    wrong = _copy_checked(ring, slots, words, targets) if _LOADS_IN_ORDER else np.arange(len(slots))
    rounds = 0
    while len(wrong):
        rounds += 1
        again = partial(_copy_again, ring, slots, words, targets, wrong, pick)
        if _LOADS_IN_ORDER and (rounds <= _ROUNDS or not ring.entry.writable):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(
                    f"{ring.entry.key!r}: rows were written over faster than they could be copied", key=ring.entry.key
                )
            wrong = again()
        else:
            wrong = ring.run(again, deadline)
    return positions_of(words, slots, ring.capacity)


def _copy_checked(ring: Ring, slots: Slots, words: Slots, targets: list[torch.Tensor]) -> Slots:
    """Copies rows. Returns the numbers of those that lie there no more."""
    rows = torch.as_tensor(slots)
    for tensor, target in zip(ring.tensors, targets, strict=True):
        copy_rows(tensor, rows, target, is_mapped=True)
    return np.flatnonzero(~are_same(words, ring.words.take(slots)))


def _copy_again(ring: Ring, slots: Slots, words: Slots, targets: list[torch.Tensor], wrong: Slots, pick: Pick) -> Slots:
    """Picks others for some rows, and copies these. Returns the numbers of those that went again."""
    picked = pick(len(wrong))
    if picked is None:
        return wrong
    slots[wrong], words[wrong] = picked
    copies = new_targets(ring, len(wrong))
    still = _copy_checked(ring, picked[0], picked[1], copies)
    places = torch.as_tensor(wrong)
    for target, copy in zip(targets, copies, strict=True):
        target[places] = copy
    return wrong[still]


class Uniform:
    """Picks slots with equal probabilities, each time anew."""

    def __init__(self, ring: Ring, generator: np.random.Generator) -> None:
        self._ring, self._generator = ring, generator

    def pick(self, rows: int) -> tuple[Slots, Slots] | None:
        """None: there is nothing to be read."""
        ring = self._ring
        there = min(ring.numbers.head, ring.capacity)
        if not there:
            return None
        slots: Any = self._generator.integers(0, there, rows)
        words: Any = ring.words.take(slots)
        wrong = np.flatnonzero(words & 2 == 0)
        if len(wrong):
            readable = np.flatnonzero(ring.words[:there] & 2)
            if not len(readable):
                return None
            slots[wrong] = readable[self._generator.integers(0, len(readable), len(wrong))]
            words[wrong] = ring.words[slots[wrong]]
            if (words & 2 == 0).any():  # taken away in this moment
                return self.pick(rows)
        return slots, words
