"""One small row at a time, into a buffer that has no priorities and no rate limiter: by a short way.

The steps are those of a small batch in `writing.py`, in the same order, with half of its calls: they take longer than
the row. Whatever is not as it mostly is, is left to that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from memstore.abandoned import ABANDONED, check_abandoned
from memstore.engine import CLAIMED, FREE
from memstore.replay.ring import Ring
from memstore.replay.words import READABLE, STATE, WHOLE, WRITING, words_of
from memstore.structure import modes

_NOT_SO = -1, False  # nothing was done


@modes.uncompiled_methods
class RowWriter:
    """Writes single rows into one ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def write(self, arrays: Sequence[Any], deadline: float) -> int:
        """Returns the row's position; -1: it can't be done so. Raises what `ReplayBuffer.add` does.

        Args:
            arrays: for each leaf [1, ...], as `Batch` has them.
        """
        ring = self._ring
        position, is_awaited = ring.run(partial(self._write, arrays), deadline)
        if is_awaited:
            ring.page.wake()
        return position

    def _write(self, arrays: Sequence[Any]) -> tuple[int, bool]:
        """Under the mutex. Also whether somebody is to be woken after it."""
        ring = self._ring
        numbers, claims, words, entry = ring.numbers, ring.claims, ring.words, ring.entry
        entry.check_open()
        if ABANDONED:
            check_abandoned()
        position = numbers.head
        slot = position % ring.capacity
        before = words.item(slot)
        number = claims.find_free()
        if before & STATE == WRITING or number is None or claims.left_over() is not None:
            return _NOT_SO
        claims.note(number, position, position + 1, 1)
        words[slot] = words_of(position, ring.capacity, WRITING, number)
        numbers.hand_out(position + 1, 1 if before & READABLE else 0)
        claims.set_stage(number, CLAIMED)
        for array, source in zip(ring.arrays, arrays, strict=True):
            entry.check_held()
            array[slot] = source[0]
        entry.check_held()
        claims.note_publication(number, numbers.added)
        words[slot] = words_of(position, ring.capacity, WHOLE)
        numbers.publish(position, position + 1, numbers.added + 1, ring.capacity)
        numbers.rows += 1
        claims.set_stage(number, FREE)
        return position, ring.page.ring()
