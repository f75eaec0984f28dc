"""Rows that are handed out once, to all openers together: the oldest first, or the newest. See docs/decisions/015.

1. *Pick* rows that wait, and *copy* them, without the mutex.
2. *Take* them, under the mutex, if they wait there still: their words say that they are handed out.
3. *Put back*, if the caller doesn't get them after all: they wait again, unless the ring has written over them.

So a consumer that dies, or is written over, has taken nothing that it hasn't got. Another one that is faster makes it
begin anew; after some rounds all is done under the mutex.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.abandoned import ABANDONED, is_abandoned
from memstore.engine import SAMPLES
from memstore.replay.picking import Picked
from memstore.replay.ring import Ring
from memstore.replay.sampling import LOADS_IN_ORDER, Targets, copy_picked, reason, wait_for_rows
from memstore.replay.turns import Turn
from memstore.replay.waiting import wait_for
from memstore.replay.words import STATE, WHOLE, positions_of, words_of

Positions = NDArray[np.int64]
_ROUNDS = 3
_AT_ONCE = 4  # times as many words are looked at as rows are wanted


class Taking:
    """Picks rows that wait, and takes them. A word says of its row that it was handed out; the cursor, or the top,
    where to look.
    """

    together = 1

    def __init__(self, ring: Ring, *, newest: bool) -> None:
        self._ring, self._newest = ring, newest

    def never(self, rows: int) -> str | None:
        if rows <= self._ring.capacity:
            return None
        return f"{rows:,} rows never wait in it to be handed out: sample fewer at a time"

    def wants(self, rows: int) -> str:
        return f"no {rows:,} rows wait to be handed out" if rows > 1 else "no row waits to be handed out"

    # --- pick ---------------------------------------------------------------------------------------------------------

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        """None: there are fewer; or it seems so, without the mutex."""
        ring = self._ring
        late = self._late(locked=locked)[:rows] if ring.numbers.late else np.empty(0, np.int64)
        found = late if len(late) == rows else np.concatenate([late, self._search(rows - len(late))])
        if len(found) < rows:
            return None
        return Picked(found % ring.capacity, words_of(found, ring.capacity, WHOLE))

    def _late(self, *, locked: bool) -> Positions:
        """Rows that were published when the ring had passed over them."""
        ring = self._ring
        words: Any = np.array(ring.words)
        slots = np.flatnonzero(words & STATE == WHOLE)
        positions: Positions = positions_of(words[slots], slots, ring.capacity)
        late = np.sort(positions[positions < ring.numbers.head - ring.capacity])
        if locked and not len(late):
            ring.numbers.late = False
        return late[::-1] if self._newest else late

    def _search(self, rows: int) -> Positions:
        """From the cursor up, or from the top down: a part of the words after the other."""
        ring, numbers = self._ring, self._ring.numbers
        head = numbers.head
        low, high = max(head - ring.capacity, 0), head
        if self._newest:
            high = min(head, numbers.top)
        else:
            low = max(low, numbers.cursor)
        found, width = np.empty(0, np.int64), max(_AT_ONCE * rows, 64)
        while len(found) < rows and low < high:
            if self._newest:
                part = np.arange(max(high - width, low), high)[::-1]
                high -= len(part)
            else:
                part = np.arange(low, min(low + width, high))
                low += len(part)
            found = np.concatenate([found, self._waiting(part)[: rows - len(found)]])
            width *= 2
        return found

    def _waiting(self, positions: Positions) -> Positions:
        ring = self._ring
        words: Any = ring.words.take(positions % ring.capacity)
        return positions[words == words_of(positions, ring.capacity, WHOLE)]

    # --- take ---------------------------------------------------------------------------------------------------------

    def take(self, picked: Picked) -> bool:
        """Under the mutex. False: one of them waits no more, and nothing was taken."""
        ring = self._ring
        if not np.array_equal(ring.words.take(picked.slots), picked.words):
            return False
        ring.words[picked.slots] = picked.words | 1
        positions = positions_of(picked.words, picked.slots, ring.capacity)
        self._move_behind(int(positions.min()), int(positions.max()))
        return True

    def _move_behind(self, lowest: int, highest: int) -> None:
        """Cursor or top: behind what was taken, but over nothing that waits, as what was published there meanwhile."""
        ring, numbers = self._ring, self._ring.numbers
        oldest = max(numbers.head - ring.capacity, 0)
        if self._newest:
            waiting = self._waiting(np.arange(max(lowest, oldest), min(numbers.top, numbers.head)))
            numbers.top = min(numbers.top, int(waiting[-1]) + 1 if len(waiting) else lowest)
        else:
            waiting = self._waiting(np.arange(max(numbers.cursor, oldest), highest))
            numbers.cursor = max(numbers.cursor, int(waiting[0]) if len(waiting) else highest + 1)


def put_back(ring: Ring, picked: Picked, deadline: float, *, are_taken: bool) -> None:
    """Undoes a sample that its caller doesn't get: its rows wait again, and count for no rate limiter.

    Killed in between, it leaves rows that are handed out, and a cursor that stands where none of them waits.

    Args:
        are_taken: they were handed out once. False: a sample takes no rows, and only counts.
    """
    if (
        len(picked.slots)
        and (are_taken or ring.limiter is not None)
        and ring.run(partial(_put_back, ring, picked, are_taken=are_taken), deadline)
    ):
        ring.page.wake()


def _put_back(ring: Ring, picked: Picked, *, are_taken: bool) -> bool:
    """Under the mutex. Whether somebody is to be woken after it."""
    if are_taken:
        numbers = ring.numbers
        still: Any = ring.words.take(picked.slots) == picked.words | 1
        slots, words = picked.slots[still], picked.words[still]
        if len(slots):
            positions = positions_of(words, slots, ring.capacity)
            first, end = int(positions.min()), int(positions.max()) + 1
            numbers.publish(first, end, numbers.added, ring.capacity)  # cursor, top and late
            ring.words[slots] = words
    if ring.limiter is not None:
        ring.numbers.sampled = max(ring.numbers.sampled - len(picked.slots), 0)
    return ring.page.ring()


def hand_out(ring: Ring, taking: Taking, rows: int, targets: Targets, deadline: float) -> Picked:
    """Fills targets with rows, and takes them. Raises StoreTimeoutError: not so many wait, or a limiter says no."""
    turn = Turn(ring, SAMPLES, rows)
    for _ in range(_ROUNDS if LOADS_IN_ORDER else 0):
        picked = taking.pick(rows, locked=False) if ring.limiter is None else None
        if picked is None:
            picked = wait_for_rows(ring, taking, rows, deadline)
        copy_picked(ring, picked, targets)
        taken, sleeps = ring.run(partial(_take, ring, taking, picked, turn), deadline)
        if sleeps:
            ring.page.wake()
        if taken:
            return picked
    look = partial(_hand_out, ring, taking, rows, targets, turn)
    picked, sleeps = wait_for(ring, look, deadline, partial(reason, taking, rows, turn), turn)
    if sleeps:
        ring.page.wake()
    return picked


def _take(ring: Ring, taking: Taking, picked: Picked, turn: Turn) -> tuple[bool, bool]:
    """Under the mutex. Whether they were taken, and whether somebody is to be woken after it."""
    rows = len(picked.slots)
    if ABANDONED and is_abandoned():  # they would be taken for nobody; `wait_for` raises
        turn.leave()
        return False, turn.has_left() and ring.page.ring()
    if not turn.has_come() or not taking.take(picked):
        return False, False
    turn.leave()
    if ring.limiter is None:
        return True, False
    ring.numbers.sampled += rows
    return True, ring.page.ring()


def _hand_out(ring: Ring, taking: Taking, rows: int, targets: Targets, turn: Turn) -> tuple[Picked, bool] | None:
    """All of it, under the mutex."""
    picked = taking.pick(rows, locked=True)
    if picked is None:
        turn.leave()
        return None
    copy_picked(ring, picked, targets)
    taken, sleeps = _take(ring, taking, picked, turn)
    return (picked, sleeps) if taken else None
