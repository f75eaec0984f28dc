"""Who waits for a replay buffer's rate limiter, in the order in which they came. The rules: docs/decisions/015.

In the control page: 512, the next ticket; from 576 on, the seats of those that insert, and then of those that sample.
A seat has a ticket (0: empty), the thread, when it was last kept (nanoseconds since boot), and the rows that it wants.

All of it changes under the entry's mutex. Who waits keeps its seat each second. A seat is empty if its thread is dead,
or hasn't kept it for longer: since it was stopped, or left by an exception.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from memstore.engine import syscalls
from memstore.engine.sync.clocks import boot_clock

INSERTS, SAMPLES = range(2)
SEATS = 12  # a side; who finds none waits without, and comes after them
_NEXT_AT, _SEATS_AT, _WORDS = 512, 576, 4
_KEPT = 3_000_000_000  # nanoseconds; who waits looks each second


class Seat(NamedTuple):
    ticket: int
    rows: int


class Seats:
    """The seats, in a page at an address."""

    __slots__ = ("_memory", "_next", "_sides")

    def __init__(self, page: int, memory: object) -> None:
        """`memory` keeps the page mapped."""
        self._memory = memory
        self._next = syscalls.long_words(page + _NEXT_AT, 1)
        size = SEATS * _WORDS
        self._sides = [syscalls.long_words(page + _SEATS_AT + side * 8 * size, size) for side in (INSERTS, SAMPLES)]

    def line(self, side: int) -> list[Seat]:
        """Who waits, who came first first. Seats of those that are gone become empty."""
        words = self._sides[side]
        found: list[Seat] = []
        for at in range(0, SEATS * _WORDS, _WORDS):
            if not words[at]:
                continue
            ticket, thread, kept, rows = words[at : at + _WORDS]
            if 0 <= boot_clock() - kept <= _KEPT and os.path.exists(f"/proc/{thread}"):
                found.append(Seat(ticket, rows))
            else:
                words[at] = 0
        return sorted(found)

    def sit(self, side: int, ticket: int, rows: int) -> int:
        """Keeps the seat of a ticket, or of 0 takes one. Returns its ticket; 0: there is none left."""
        words = self._sides[side]
        at = next((at for at in range(0, SEATS * _WORDS, _WORDS) if words[at] == ticket), None)
        if at is None:  # taken for gone, or all are taken
            return self.sit(side, 0, rows) if ticket else 0
        if not ticket:
            self._next[0] = ticket = self._next[0] + 1
        words[at + 1], words[at + 2], words[at + 3] = syscalls.thread_id(), boot_clock(), rows
        words[at] = ticket
        return ticket

    def leave(self, side: int, ticket: int) -> None:
        """Makes the seat of a ticket empty."""
        words = self._sides[side]
        for at in range(0, SEATS * _WORDS, _WORDS):
            if ticket and words[at] == ticket:
                words[at] = 0
