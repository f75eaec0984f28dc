"""Waiting in a replay buffer: for rows, for free slots, and for the rate limiter, in the order in which callers came.

`wait_for` looks under the mutex, and sleeps until another process changes something. `LimiterWait` is the wait of one
call for the rate limiter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from memstore._threads import ABANDONED, AbandonedError, check_abandoned, is_abandoned
from memstore._wording import count_of
from memstore.engine import INSERTS, SAMPLES
from memstore.errors import MemstoreError, StoreTimeoutError
from memstore.replay.entry import RateLimiter
from memstore.replay.ring import NeverFitsError, Ring, checked_claim

# --- The queue before the rate limiter -------------------------------------------------------------------------------
# The first that came goes first, so that small batches don't pass a large one for ever. Inserts and samples have a
# queue each. If the first of a queue can't go, and somebody in the other can't either, nobody would ever go on. Then
# any caller that can go may pass. That doesn't happen where the limiter's tolerance is as large as it is to be.


def rows_under_way(ring: Ring) -> int:
    """Returns the number of rows of all claims."""
    return sum(checked_claim(ring, number).rows for number in ring.claims.in_use())


def is_permitted(ring: Ring, side: int, rows: int) -> bool:
    """Whether the rate limiter lets so many rows through, whoever waits. The mutex is held."""
    numbers, limiter = ring.numbers, ring.limiter
    if limiter is None:
        return True
    if side == INSERTS:
        return limiter.may_insert(numbers.added + rows_under_way(ring), numbers.sampled, rows)
    return limiter.may_sample(numbers.added, numbers.sampled, rows)


class LimiterWait:
    """The wait of one call for the rate limiter. All methods are called under the mutex."""

    def __init__(self, ring: Ring, side: int, rows: int) -> None:
        self._ring, self._side, self._rows = ring, side, rows
        self._ticket = 0
        self._has_left = False
        self._is_behind = False  # others

    def may_go(self) -> bool:
        """Whether the limiter permits it, and nobody came first. If so, go on, and `leave`; if not, it queues now.

        Raises NeverFitsError: so many rows never fit between the limiter's bounds.
        """
        ring, side, rows = self._ring, self._side, self._rows
        if ring.limiter is None:
            return True
        waiting = ring.queue.waiting(side)
        is_first = not waiting or waiting[0].ticket == self._ticket
        if is_permitted(ring, side, rows) and (is_first or self._may_pass(waiting[0].rows)):
            return True
        self._is_behind = not is_first
        if ring.limiter.may_ever_go(rows, is_insert=side == INSERTS):
            self._ticket = ring.queue.keep(side, self._ticket, rows)
        elif side == SAMPLES or not ring.limiter.may_insert(ring.numbers.added, ring.numbers.sampled, rows):
            raise NeverFitsError(self._never(ring.limiter))  # also if the rows under way are given back
        return False

    def _may_pass(self, rows_of_first: int) -> bool:
        """Whether the queues block each other: the first of this one can't go, and some caller of the other can't."""
        ring, other = self._ring, SAMPLES if self._side == INSERTS else INSERTS
        if is_permitted(ring, self._side, rows_of_first):
            return False
        return any(not is_permitted(ring, other, place.rows) for place in ring.queue.waiting(other))

    def leave(self) -> None:
        """Leaves the queue. The next one in it is to be woken: see `has_left`."""
        if self._ticket:
            self._ring.queue.leave(self._side, self._ticket)
            self._ticket, self._has_left = 0, True

    def has_left(self) -> bool:
        """Whether it left the queue since this was asked last."""
        left, self._has_left = self._has_left, False
        return left

    def _never(self, limiter: RateLimiter) -> str:
        is_insert = self._side == INSERTS
        most = count_of(limiter.most_at_once(is_insert=is_insert), "row", "rows")
        advice = "extend it in parts" if is_insert else "sample fewer at a time"
        after = f" beyond the first {limiter.min_size:,}" if is_insert and limiter.min_size > 1 else ""
        return f"{self._ring.key!r}: {limiter} lets {most} through at once{after}, and never {self._rows:,}: {advice}"

    def reason(self) -> str | None:
        """Says why the limiter lets it not through, for an error; None if it does."""
        ring, rows = self._ring, self._rows
        counts = f"{ring.limiter}, {ring.numbers.added:,} rows added, {ring.numbers.sampled:,} sampled"
        if is_permitted(ring, self._side, rows):
            return f"others came first, and wait for its rate limiter: {counts}" if self._is_behind else None
        if self._side == INSERTS and ring.limiter is not None and ring.numbers.added < ring.limiter.min_size:
            return f"its rate limiter lets no {rows:,} rows in at once at the beginning: {counts}; extend it in parts"
        if self._side == INSERTS:
            return f"its rate limiter lets no {rows:,} rows in until others are sampled: {counts}"
        return f"its rate limiter lets nobody sample {rows:,} rows until more are added: {counts}"


# --- Look and sleep --------------------------------------------------------------------------------------------------


T = TypeVar("T")

_PAUSE = 0.002  # seconds
_TO_LEAVE = 1.0  # seconds
_GIVEN_UP = -1  # in place of the bell's word


def wait_for(
    ring: Ring,
    look: Callable[[], T | None],
    deadline: float,
    reason: Callable[[], str],
    wait: LimiterWait | None = None,
) -> T:
    """Calls `look` under the mutex until it returns something, and returns that.

    Args:
        reason: says what it waits for, for the error.
        wait: the wait for the rate limiter, which `look` asks. A caller that was cancelled meanwhile leaves the queue,
            and `look` isn't called.

    Raises:
        StoreTimeoutError: the deadline has passed.
        NotAStoreError: the store was removed meanwhile.
        AbandonedError: whoever awaited the call was cancelled.
    """
    while True:
        try:
            ring.entry.root.glance()
        except MemstoreError:
            if wait is not None:  # the store was moved, and others may go on in it
                with contextlib.suppress(MemstoreError):  # otherwise its place is empty after some seconds
                    ring.run(wait.leave, time.monotonic() + _TO_LEAVE)
            raise
        is_last = time.monotonic() >= deadline
        found, seen, sleeps = ring.run(partial(_look, ring, look, wait, is_last), deadline)
        if sleeps:
            ring.page.wake()
        if found is not None:
            return found
        if seen == _GIVEN_UP:
            raise AbandonedError("whoever awaited this was cancelled")
        if is_last:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        ring.page.sleep(seen, deadline)


def _look(
    ring: Ring, look: Callable[[], T | None], wait: LimiterWait | None, is_last: bool
) -> tuple[T | None, int, bool]:
    """Returns what `look` found, the bell, and whether somebody is to be woken who is next in the queue."""
    is_given_up = bool(ABANDONED) and is_abandoned()
    found = None if is_given_up else look()
    if wait is not None and (is_last or is_given_up):
        wait.leave()
    sleeps = wait is not None and wait.has_left() and ring.page.ring()
    if is_given_up:
        return None, _GIVEN_UP, sleeps
    return found, 0 if found is not None or is_last else ring.page.listen(), sleeps


def pause(look: Callable[[], T | None], ring: Ring, deadline: float, reason: Callable[[], str]) -> T:
    """Waits like `wait_for`, for a process that may only read: it can't take the mutex, nor say that it sleeps."""
    while (found := look()) is None:
        if ABANDONED:
            check_abandoned()
        ring.entry.check_in_place()
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        time.sleep(min(_PAUSE, left))
    return found
