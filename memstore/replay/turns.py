"""A rate limiter's waiters, in turn: who came first goes first, so that a large batch is not passed by small ones.

Those that insert wait in one line, and those that sample in another. If the first of a line can't go, and neither can
somebody in the other, nobody would ever go on; so then whoever can may pass. It does not happen where the limiter's
tolerance is as large as it is to be.
"""

from __future__ import annotations

from memstore.engine import INSERTS, SAMPLES
from memstore.replay.limits import RateLimiter
from memstore.replay.recovery import checked_claim
from memstore.replay.ring import NeverFitsError, Ring
from memstore.wording import count_of


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


class Turn:
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
