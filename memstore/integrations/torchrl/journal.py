"""Rows that are written over in place: a batch is whole or absent, and no reader takes a row that is half written.

A TorchRL sampler draws a slot, and wants what stands there. So a slot must never be empty, or hold half a row, because
its writer died: there is nothing to draw instead. That is why a storage isn't a ring of memstore's (`memstore/replay`),
whose slots a dead writer leaves empty, and which chooses the slots by itself. Instead, a batch is written twice.

The entry is a dataset of `{"rows": ..., "word": int64}`. It has *slots*, and behind them some rows more, where batches
are *staged*. A slot's word is twice the number of times that it was written, and odd while it is; negative: written
before the storage was emptied. The word of a staged row is its slot. The *state* stands in the control page: the
length, and the words below. Writing, under the entry's mutex:

1. Copy rows and slots to the staging rows. Killed here: the batch is absent.
2. Note what cursor, count and last slot will be, and how many rows are staged: **the moment of publication**.
3. Make the words of the slots odd, copy the rows, make the words even, move the length and the other state, stage none.
   Killed here: whoever holds the mutex next finds staged rows, and does 3 again.

Reading takes no lock: load the words, copy the rows, load the words again; take what is even and the same. This rests
on x86-64's order of stores and loads, as docs/decisions/015 says; elsewhere rows are read under the mutex. Who finds a
row written again and again reads it under the mutex too.

A batch of more rows than can be staged is several, one after the other.
"""

from __future__ import annotations

import platform
from enum import Enum
from typing import Any

import numpy as np

from memstore.datasets import Batch, SharedRows
from memstore.engine import SPARE_AT, SPARE_END
from memstore.errors import CorruptionError

Array = np.ndarray[Any, Any]
Words = np.ndarray[Any, np.dtype[np.int64]]

READS_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")
WORD = ("word",)
_STAGED_BYTES, _STAGED_ROWS = 8 << 20, 4096
_PENDING, _CURSOR, _WRITTEN, _LAST, _REVISION = range(5)  # of the state
_NEXT = slice(5, 8)  # cursor, written and last, once the staged rows are stored
_WINDOW = 4096


class Moves(Enum):
    """What a write moves besides: nothing, the last slot, or the cursor with it."""

    NOTHING = 0
    LAST = 1
    CURSOR = 2


def staging_rows(slots: int, row_bytes: int) -> int:
    """How many rows are staged at once, in a storage of so many slots."""
    return max(1, min(slots, _STAGED_ROWS, _STAGED_BYTES // max(row_bytes, 1)))


class Journal:
    """The slots of an open storage, and the state that its processes share. See the module.

    Attributes:
        slots: how many there are.
        words: theirs.
    """

    def __init__(self, shared: SharedRows) -> None:
        entry, plan = shared.entry, shared.rows.plan
        self._page, self._key = entry.page, entry.key
        capacity = plan.leaves[0].shape[0]
        word = next(number for number, leaf in enumerate(plan.leaves) if leaf.name == WORD)
        row = sum(leaf.nbytes // capacity for leaf in plan.leaves)
        self.slots = slots_of(capacity, row)
        self.room = capacity - self.slots
        rows = [array for number, array in enumerate(shared.rows.arrays) if number != word]
        self._rows = [(array[: self.slots], array[self.slots :]) for array in rows]
        self._word = word
        words: Words = shared.rows.arrays[word]
        self.words, self._staged_slots = words[: self.slots], words[self.slots :]
        start = entry.record.start
        memory = np.asarray(entry.mapping)[start + SPARE_AT : start + SPARE_END]
        self._state: Words = memory.view(np.int64)
        self._entry_mapping = entry.mapping

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The slots that were written, from the first on."""
        return min(self._page.length, self.slots)

    @property
    def cursor(self) -> int:
        """The slot that `stage_next` takes first."""
        return int(self._state[_CURSOR])

    @property
    def written(self) -> int:
        """Rows ever written."""
        return int(self._state[_WRITTEN])

    @property
    def last(self) -> int | None:
        """The slot that was written last, by a write that isn't a correction."""
        return int(self._state[_LAST]) - 1 if self._state[_LAST] else None

    @property
    def revision(self) -> int:
        """Changes with the rows."""
        return int(self._state[_REVISION])

    # --- under the mutex ----------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """First in every hold: completes what the last owner had published. Raises CorruptionError.

        The slot behind the length was never written, unless the host crashed: then the length is as it was flushed, and
        what is behind it isn't known to be whole.
        """
        if self._state[_PENDING]:
            self._store()
        elif self.length < self.slots and self.words[self.length] > 0:
            self._forget_from(self.length)

    def stage(self, batch: Batch, start: int, stop: int, slots: Words, moves: Moves) -> None:
        """Writes rows `start` to `stop` of a batch to slots."""
        count, state = stop - start, self._state
        sources = [array for number, array in enumerate(batch.arrays) if number != self._word]
        for (_, staged), source in zip(self._rows, sources, strict=True):
            staged[:count] = source[start:stop]
        self._staged_slots[:count] = slots
        last = int(slots[-1]) + 1
        cursor = last % self.slots if moves is Moves.CURSOR else self.cursor
        state[_NEXT] = (cursor, self.written + count, state[_LAST] if moves is Moves.NOTHING else last)
        state[_PENDING] = count  # the moment of publication
        self._store()

    def next_slots(self, count: int) -> Words:
        return (np.arange(count, dtype=np.int64) + self.cursor) % self.slots

    def _store(self) -> None:
        """Step 3, from wherever it stopped."""
        state, words = self._state, self.words
        count = int(state[_PENDING])
        slots = self._staged_slots[: max(count, 0)].copy()
        if not 0 < count <= self.room or slots.min() < 0 or slots.max() >= self.slots:
            detail = f"{count} rows are staged, of at most {self.room}, or they are for slots that aren't there"
            raise CorruptionError(f"{self._key!r}: {detail}", key=self._key, detail=detail)
        words[slots] = np.abs(words[slots]) | 1
        start, stop = int(slots[0]), int(slots[0]) + count
        is_run = stop <= self.slots and np.array_equal(slots, np.arange(start, stop))
        for target, staged in self._rows:
            target[slice(start, stop) if is_run else slots] = staged[:count]
        words[slots] += 1
        self._page.length = self._first_unwritten(self.length)
        state[_CURSOR : _LAST + 1] = state[_NEXT]
        self.bump()
        state[_PENDING] = 0

    def _first_unwritten(self, length: int) -> int:
        while length < self.slots:
            window = self.words[length : length + _WINDOW]
            unwritten = np.flatnonzero(window <= 0)
            if unwritten.size:
                return length + int(unwritten[0])
            length += len(window)
        return length

    def bump(self) -> None:
        self._state[_REVISION] += 1

    def set_length(self, length: int) -> None:
        """Says which slots count as written, whether they were or not."""
        if not 0 <= length <= self.slots:
            raise ValueError(f"{self._key!r}: a length is from 0 to {self.slots:,}, and not {length:,}")
        self._page.length = min(length, self.length)
        self._forget_from(length)
        self._page.length = length
        self.bump()

    def _forget_from(self, slot: int) -> None:
        """These count as not written, until they are."""
        behind = self.words[slot:]
        behind[:] = -np.abs(behind)

    def set_counts(self, cursor: int, written: int) -> None:
        if not (0 <= cursor < self.slots and written >= 0):
            raise ValueError(f"{self._key!r}: cursor {cursor} of {self.slots} slots, or {written} rows written")
        self._state[_CURSOR], self._state[_WRITTEN] = cursor, written

    def set_last(self, slot: int | None) -> None:
        self._state[_LAST] = 0 if slot is None else slot % self.slots + 1

    def advance(self) -> None:
        """Every slot was emptied, so what was sampled of it is out of date."""
        words = self.words
        words[:] = np.where(words == 0, 0, -(np.abs(words) + 2))


def slots_of(capacity: int, row_bytes: int) -> int:
    """Of a dataset with that many rows, which `staging_rows` has made larger than its slots."""
    largest = staging_rows(capacity, row_bytes)
    return capacity - largest if capacity >= 2 * largest else capacity // 2
