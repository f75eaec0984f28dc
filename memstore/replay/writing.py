"""Rows on their way into a replay buffer: claim slots, copy, publish. The rules: docs/decisions/015.

1. *Claim*, under the mutex, for a whole batch: the next slots in the ring's order, without those that others write who
   live. What the dead had claimed is given back first.
2. *Copy*, without it, by plain stores of this thread alone.
3. *Publish*, under the mutex. After an error the slots are given back instead.

A small batch goes through all three in one hold, and its claim needs no mutex of its own. One plain row takes a shorter
way yet (`adding.py`).

Killed in between, the claim's mutex tells the others. What an exception at an unlucky moment left, the thread gives
back at its next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memstore.abandoned import ABANDONED, check_abandoned
from memstore.datasets import Batch
from memstore.engine import CLAIMED, FREE, INSERTS, deadline_after, syscalls
from memstore.errors import ContentionError, StoreFullError, StoreTimeoutError
from memstore.replay.adding import RowWriter
from memstore.replay.priorities import Given
from memstore.replay.recovery import count, give_back, give_back_the_dead
from memstore.replay.ring import Ring
from memstore.replay.turns import Turn, rows_under_way
from memstore.replay.waiting import wait_for
from memstore.replay.words import READABLE, STATE, WHOLE, WRITING, claims_of, words_of
from memstore.wording import count_of

Positions = Any  # of a batch: a range, as a rule; an array of int64 where it passed over slots

_CLEANUP = 1.0  # seconds to wait for the mutex after an error
_SMALL = 16 << 10  # bytes of a batch; the copy takes 1 or 2 us, a second hold of the mutex 10


class Claimed(NamedTuple):
    number: int  # of the claim
    end: int
    positions: Positions
    slots: Any  # to index with, as `places_of` gives them
    places: Any


class Writer:
    """Writes rows into one ring.

    Attributes:
        small_batch: how many rows are written in one hold of the mutex, at most.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._rows = RowWriter(ring)
        self._is_plain = ring.priorities is None and ring.limiter is None
        self._inside: dict[int, bool] = {}  # thread ids that are at it
        self.small_batch = _SMALL // max(1, sum(array.nbytes for array in ring.arrays) // ring.capacity)

    def write(self, batch: Batch, given: Given | None, deadline: float) -> Positions:
        """Returns the positions of the rows, which are there now. Raises what `ReplayBuffer.extend` does.

        Args:
            given: their priorities; None: those of new rows.
        """
        ring, me = self._ring, syscalls.thread_id()
        ring.entry.check_in_place()
        if batch.count > ring.capacity:
            raise StoreFullError(
                f"{ring.key!r} has {ring.capacity:,} slots, and a batch of {batch.count:,} rows never fits: "
                "extend it in parts",
                key=ring.key,
            )
        if me in self._inside:
            raise ContentionError(
                f"{ring.key!r}: this thread is in the middle of a write already: a signal handler or finalizer "
                "must not make another one",
                key=ring.key,
            )
        if batch.count == 1 and self._is_plain and self.small_batch:
            position = self._rows.write(batch.arrays, deadline)
            if position >= 0:
                return range(position, position + 1)
        self._inside[me] = True
        try:
            turn = None if ring.limiter is None else Turn(ring, INSERTS, batch.count)
            reason = partial(self._reason, batch.count, turn)
            if batch.count <= self.small_batch:
                write = partial(self._write_at_once, batch, given, turn)
                positions, is_awaited = wait_for(ring, write, deadline, reason, turn)
            else:
                claim = partial(self._claim, batch.count, turn, ring.claims.take)
                claimed = wait_for(ring, claim, deadline, reason, turn)
                self._copy(batch, claimed, self._check_mine)
                publish = partial(self._publish, claimed, given, self._check_mine)
                positions, is_awaited = claimed.positions, ring.run(publish, deadline)
            if is_awaited:
                ring.page.wake()
            return positions
        except BaseException:
            self._abandon(deadline)
            raise
        finally:
            self._inside.pop(me, None)

    def _write_at_once(self, batch: Batch, given: Given | None, turn: Turn | None) -> tuple[Positions, bool] | None:
        """Under the mutex. Killed in here, it leaves a claim whose mutex nobody holds: one of the dead."""
        claimed = self._claim(batch.count, turn, self._ring.claims.find_free)
        if claimed is None:
            return None
        self._copy(batch, claimed, self._check_held)
        return claimed.positions, self._publish(claimed, given, self._check_held)

    # --- claim --------------------------------------------------------------------------------------------------------

    def _claim(self, rows: int, turn: Turn | None, take: Callable[[], int | None]) -> Claimed | None:
        """Under the mutex. None: there is no room by now. `take` gives the number of a claim that was free."""
        ring = self._ring
        ring.entry.check_open()
        self._release_left_over()
        while True:
            positions, end = None, 0
            if turn is None or turn.has_come():
                if turn is not None:
                    turn.leave()  # also if there is no room: that others may have
                positions, end = self._plan(rows)
            number = None if positions is None else take()
            if number is not None:
                return self._mark(Claimed(number, end, positions, *places_of(positions, ring.capacity)))
            if not give_back_the_dead(ring):
                return None

    def _plan(self, rows: int) -> tuple[Positions, int]:
        """The next slots in the ring's order, and where they end. None: there are not so many."""
        ring, head = self._ring, self._ring.numbers.head
        if rows == 1 and int(ring.words[head % ring.capacity]) & STATE != WRITING:
            return range(head, head + 1), head + 1
        widths = [ring.capacity, min(rows + rows_under_way(ring), ring.capacity), rows]
        while widths:
            width = widths.pop()
            positions = np.arange(head, head + width)
            words: Any = ring.words.take(positions % ring.capacity)
            written = words & STATE == WRITING
            if width == rows and not written.any():
                return range(head, head + rows), head + rows
            found = positions[~written][:rows]
            if len(found) == rows:
                end = int(found[-1]) + 1
                return range(head, end) if end - head == rows else found, end
            in_the_way = set(claims_of(words[written]).tolist()).intersection(ring.claims.of_the_dead())
            for claim in in_the_way:
                give_back(ring, claim)
            if in_the_way:
                widths.append(width)
        return None, 0

    def _mark(self, claimed: Claimed) -> Claimed:
        ring, (number, end, positions, slots, places) = self._ring, claimed
        first = ring.numbers.head
        ring.claims.note(number, first, end, len(positions))
        covered = ring.words[slots] & READABLE
        if ring.priorities is not None:
            ring.priorities.set(np.atleast_1d(slots), 0.0)
        ring.words[slots] = words_of(places, ring.capacity, WRITING, number)
        ring.numbers.hand_out(end, int(np.count_nonzero(covered)) if len(positions) > 1 else int(covered != 0))
        ring.claims.set_stage(number, CLAIMED)
        return claimed

    def _reason(self, rows: int, turn: Turn | None) -> str:
        writers = self._ring.claims.writers()
        why = None if turn is None else turn.reason()
        return why or f"no room for {count_of(rows, 'row', 'rows')}, while its slots or claims are held by {writers}"

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _copy(self, batch: Batch, claimed: Claimed, check: Callable[[int], None]) -> None:
        runs = runs_of(claimed.positions, self._ring.capacity)
        for array, source in zip(self._ring.arrays, batch.arrays, strict=True):
            check(claimed.number)
            for slot, start, stop in runs:
                array[slot : slot + stop - start] = source[start:stop]
        if ABANDONED:
            check_abandoned()

    def _check_mine(self, claim: int) -> None:
        """A forked child must not go on with what its parent claimed."""
        if not self._ring.claims.is_mine(claim):
            raise ContentionError(
                f"{self._ring.key!r}: this process was forked in the middle of a write, which its parent goes on with",
                key=self._ring.key,
            )

    def _check_held(self, claim: int) -> None:
        """The same, for one that is the mutex's owner throughout."""
        self._ring.entry.check_held()

    # --- publish ------------------------------------------------------------------------------------------------------

    def _publish(self, claimed: Claimed, given: Given | None, check: Callable[[int], None]) -> bool:
        """Under the mutex. Whether somebody is to be woken after it."""
        ring, (number, _, positions, slots, places) = self._ring, claimed
        ring.entry.check_open()
        check(number)
        before = ring.numbers.added
        ring.claims.note_publication(number, before)
        if ring.priorities is not None:
            if given is not None:
                ring.priorities.note_largest(given.largest)
            leaves = ring.priorities.of_new_rows if given is None else given.leaves
            ring.priorities.set(np.atleast_1d(slots), leaves)
        ring.words[slots] = words_of(places, ring.capacity, WHOLE)
        count(ring, ring.claims.read(number))
        ring.numbers.rows += len(positions)
        ring.claims.set_stage(number, FREE)
        if ring.claims.is_mine(number):
            ring.claims.release(number)
        return ring.page.ring()

    # --- after an error -----------------------------------------------------------------------------------------------

    def _abandon(self, deadline: float) -> None:
        """Gives back what this thread has claimed, if it has."""
        ring = self._ring
        if ring.claims.left_over() is None:
            return
        with contextlib.suppress(StoreTimeoutError):  # its next call does it
            if ring.run(self._release_left_over, max(deadline, deadline_after(_CLEANUP))):
                ring.page.wake()

    def _release_left_over(self) -> bool:
        """Under the mutex. Whether somebody is to be woken after it."""
        ring = self._ring
        number = ring.claims.left_over()
        if number is None:
            return False
        if ring.claims.stage(number) != FREE:
            give_back(ring, number)
        ring.claims.release_left_over(number)
        return ring.page.ring()


def places_of(positions: Positions, capacity: int) -> tuple[Any, Any]:
    """Slots and positions, to index with: numbers for one row, which takes a tenth of the time, else arrays."""
    if len(positions) == 1:
        place = int(positions[0])
        return place % capacity, place
    places = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
    return places % capacity, places


def runs_of(positions: Positions, capacity: int) -> list[tuple[int, int, int]]:
    """Positions as runs of slots that follow each other: (first slot, start, stop), the latter counted in the batch."""
    rows = len(positions)
    if isinstance(positions, range):
        slot = positions.start % capacity
        whole = min(rows, capacity - slot)
        return [(slot, 0, rows)] if whole == rows else [(slot, 0, whole), (0, whole, rows)]
    slots = positions % capacity
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), rows]
    return [(int(slots[start]), start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
