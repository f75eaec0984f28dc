"""Waiting in a replay buffer: for rows, for free slots, and for the rate limiter, in the order in which callers came.

`wait_for` looks under the mutex, and sleeps until another process changes something. `LimiterWait` is the place of one
call in the line before the rate limiter.
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

# --- The line before the rate limiter --------------------------------------------------------------------------------
# A rate limiter's waiters, in turn: who came first goes first, so that a large batch is not passed by small ones.
#
# Those that insert wait in one line, and those that sample in another. If the first of a line can't go, and neither can
# somebody in the other, nobody would ever go on; so then whoever can may pass. It does not happen where the limiter's
# tolerance is as large as it is to be.


def rows_under_way(ring: Ring) -> int:
    """The rows of all claims."""
    return sum(checked_claim(ring, number).rows for number in ring.claims.in_use())


def may_go(ring: Ring, side: int, rows: int) -> bool:
    """Under the mutex: whether the rate limiter says so, whoever waits."""
    numbers, limiter = ring.numbers, ring.limiter
    if limiter is None:
        return True
    if side == INSERTS:
        return limiter.may_insert(numbers.added + rows_under_way(ring), numbers.sampled, rows)
    return limiter.may_sample(numbers.added, numbers.sampled, rows)


class LimiterWait:
    """That of one call. All under the mutex."""

    def __init__(self, ring: Ring, side: int, rows: int) -> None:
        self._ring, self._side, self._rows = ring, side, rows
        self._ticket = 0
        self._has_left = False
        self._is_behind = False  # others

    def has_come(self) -> bool:
        """Whether the limiter says so, and nobody came first: then do it, and `leave`. Else it waits in line now.

        Raises NeverFitsError: so many rows never fit between the limiter's bounds.
        """
        ring = self._ring
        if ring.limiter is None:
            return True
        line = ring.seats.line(self._side)
        is_first = not line or line[0].ticket == self._ticket
        if may_go(ring, self._side, self._rows) and (is_first or self._is_stuck(line[0].rows)):
            return True
        self._is_behind = not is_first
        if ring.limiter.may_ever_go(self._rows, is_insert=self._side == INSERTS):
            self._ticket = ring.seats.sit(self._side, self._ticket, self._rows)
        elif self._side == SAMPLES or not ring.limiter.may_insert(ring.numbers.added, ring.numbers.sampled, self._rows):
            raise NeverFitsError(self._never(ring.limiter))  # also if those under way are given back
        return False

    def _never(self, limiter: RateLimiter) -> str:
        is_insert = self._side == INSERTS
        most = count_of(limiter.most_at_once(is_insert=is_insert), "row", "rows")
        advice = "extend it in parts" if is_insert else "sample fewer at a time"
        after = f" beyond the first {limiter.min_size:,}" if is_insert and limiter.min_size > 1 else ""
        return f"{self._ring.key!r}: {limiter} lets {most} through at once{after}, and never {self._rows:,}: {advice}"

    def leave(self) -> None:
        """Gives the turn to the next, who is to be woken: see `has_left`."""
        if self._ticket:
            self._ring.seats.leave(self._side, self._ticket)
            self._ticket, self._has_left = 0, True

    def has_left(self) -> bool:
        """Whether it left since this was asked."""
        left, self._has_left = self._has_left, False
        return left

    def _is_stuck(self, rows: int) -> bool:
        ring, other = self._ring, SAMPLES if self._side == INSERTS else INSERTS
        if may_go(ring, self._side, rows):
            return False  # the first is about to go
        return any(not may_go(ring, other, seat.rows) for seat in ring.seats.line(other))

    def reason(self) -> str | None:
        """Why the limiter lets nobody through, for an error; None: it does."""
        ring, rows = self._ring, self._rows
        stands = f"{ring.limiter}, {ring.numbers.added:,} rows added, {ring.numbers.sampled:,} sampled"
        if may_go(ring, self._side, rows):
            return f"others came first, and wait for its rate limiter: {stands}" if self._is_behind else None
        if self._side == INSERTS and ring.limiter is not None and ring.numbers.added < ring.limiter.min_size:
            return f"its rate limiter lets no {rows:,} rows in at once at the beginning: {stands}; extend it in parts"
        if self._side == INSERTS:
            return f"its rate limiter lets no {rows:,} rows in until others are sampled: {stands}"
        return f"its rate limiter lets nobody sample {rows:,} rows until more are added: {stands}"


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
    turn: LimiterWait | None = None,
) -> T:
    """Calls `look` under the mutex until it gives something. Raises StoreTimeoutError, which says the reason.

    Raises also NotAStoreError, where the store was removed meanwhile, and what `look` raises.

    `turn` is what `look` asks whether it may go. Who was cancelled meanwhile leaves its turn, and takes nothing.
    """
    while True:
        try:
            ring.entry.check_in_place()
        except MemstoreError:
            if turn is not None:  # the store was moved, and others may go on in it
                with contextlib.suppress(MemstoreError):  # else its seat is taken away after some seconds
                    ring.run(turn.leave, time.monotonic() + _TO_LEAVE)
            raise
        is_last = time.monotonic() >= deadline
        found, seen, sleeps = ring.run(partial(_look, ring, look, turn, is_last=is_last), deadline)
        if sleeps:
            ring.page.wake()
        if found is not None:
            return found
        if seen == _GIVEN_UP:
            raise AbandonedError("whoever awaited this was cancelled")
        if is_last:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        ring.page.sleep(seen, deadline)


def pause(look: Callable[[], T | None], ring: Ring, deadline: float, reason: Callable[[], str]) -> T:
    """As `wait_for`, for who may only read, and can neither have the mutex nor say that it sleeps."""
    while (found := look()) is None:
        if ABANDONED:
            check_abandoned()
        ring.entry.check_in_place()
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        time.sleep(min(_PAUSE, left))
    return found


def _look(
    ring: Ring, look: Callable[[], T | None], turn: LimiterWait | None, *, is_last: bool
) -> tuple[T | None, int, bool]:
    """Also the bell, and whether somebody is to be woken, who is next in line."""
    is_given_up = bool(ABANDONED) and is_abandoned()
    found = None if is_given_up else look()
    if turn is not None and (is_last or is_given_up):
        turn.leave()
    sleeps = turn is not None and turn.has_left() and ring.page.ring()
    if is_given_up:
        return None, _GIVEN_UP, sleeps
    return found, 0 if found is not None or is_last else ring.page.listen(), sleeps
