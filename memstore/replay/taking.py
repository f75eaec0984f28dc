"""Rows that are handed out once, to all openers together: the oldest first, or the newest. See docs/decisions/015."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.replay.picking import Picked
from memstore.replay.ring import Ring
from memstore.replay.words import STATE, WHOLE, positions_of, words_of

Positions = NDArray[np.int64]
_AT_ONCE = 4  # times as many words are looked at as rows are wanted


class Taking:
    """Takes rows. A word says of its row that it was handed out; the cursor, or the top, says where to look."""

    together = 1

    def __init__(self, ring: Ring, *, newest: bool) -> None:
        self._ring, self._newest = ring, newest

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        """Under the mutex only. Takes nothing if there are fewer."""
        if not locked:
            return None
        ring, numbers = self._ring, self._ring.numbers
        late = self._late() if numbers.late else np.empty(0, np.int64)
        late = late[:rows]
        found = np.concatenate([late, self._search(rows - len(late))]) if len(late) < rows else late
        if len(found) < rows:
            return None
        slots = found % ring.capacity
        words: Any = words_of(found, ring.capacity, WHOLE)
        ring.words[slots] = words | 1
        if len(late) < rows and self._newest:
            numbers.top = int(found[-1])
        elif len(late) < rows:
            numbers.cursor = int(found[-1]) + 1
        return Picked(slots, words)

    def _late(self) -> Positions:
        """Rows that were published when the ring had passed over them."""
        ring = self._ring
        slots = np.flatnonzero(ring.words & STATE == WHOLE)
        positions: Positions = positions_of(ring.words[slots], slots, ring.capacity)
        late = np.sort(positions[positions < ring.numbers.head - ring.capacity])
        if not len(late):
            ring.numbers.late = False
        return late[::-1] if self._newest else late

    def _search(self, rows: int) -> Positions:
        """From the cursor up, or from the top down: a part of the words after the other."""
        ring, numbers = self._ring, self._ring.numbers
        low = max(numbers.head - ring.capacity, 0)
        high = min(numbers.top, numbers.head) if self._newest else numbers.head
        if not self._newest:
            low = max(low, numbers.cursor)
        found, width = np.empty(0, np.int64), max(_AT_ONCE * rows, 64)
        while len(found) < rows and low < high:
            if self._newest:
                part = np.arange(max(high - width, low), high)[::-1]
                high -= len(part)
            else:
                part = np.arange(low, min(low + width, high))
                low += len(part)
            words = ring.words.take(part % ring.capacity)
            waiting = part[words == words_of(part, ring.capacity, WHOLE)]
            found = np.concatenate([found, waiting[: rows - len(found)]])
            width *= 2
        self._move_to(found)
        return found

    def _move_to(self, found: Positions) -> None:
        """Nothing waits before the first of them: what is published there later says so itself."""
        numbers = self._ring.numbers
        if self._newest:
            numbers.top = int(found[0]) + 1 if len(found) else 0
        else:
            numbers.cursor = int(found[0]) if len(found) else numbers.head

    def wants(self, rows: int) -> str:
        return f"no {rows:,} rows wait to be handed out"
