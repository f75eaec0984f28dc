"""Which slots a sample gets: with equal probabilities, each once a pass, or by their priorities.

What is picked was whole in that moment; it is copied, and looked at again. The rules: docs/decisions/015.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memstore.arguments import whole_number
from memstore.late_imports import Hooks, around_forks
from memstore.replay.priorities import Priorities
from memstore.replay.ring import Ring
from memstore.replay.words import READABLE, WHOLE, positions_of, words_of

Slots = NDArray[np.int64]
Floats = NDArray[np.float64]

_DRAWS = 3  # without the mutex, while priorities change


class Picked(NamedTuple):
    """
    Attributes:
        slots, words: int64 [n]: which, and what their words were.
        odds: float64 [n]: how much likelier each was than with equal probabilities; None: they are equal.
    """

    slots: Slots
    words: Slots
    odds: Floats | None = None


class Picker(Protocol):
    """One way to pick.

    Attributes:
        together: how many rows, one behind the other, are picked as one.
    """

    together: int

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        """Picks so many rows; `locked`: the caller has the mutex. None: there are none, or not so many."""
        ...

    def never(self, rows: int) -> str | None:
        """Why no buffer of this capacity ever has such a sample, for an error; None: it may be had."""
        ...

    def wants(self, rows: int) -> str:
        """What it waits for, for an error."""
        ...


class Dice:
    """Random numbers of one opener. A forked child has others than its parent."""

    __slots__ = ("__weakref__", "generator", "lock")

    def __init__(self, seed: int | None) -> None:
        """Raises TypeError, ValueError."""
        if seed is not None and whole_number("seed", seed) < 0:
            raise ValueError(f"seed is a whole number, 0 or more, or None, and not {seed}")
        self.generator = np.random.default_rng(seed)
        self.lock = threading.RLock()
        _dice.add(self)

    def renew(self) -> None:
        """In a forked child: of the old ones another thread may have been in the middle."""
        self.generator, self.lock = np.random.default_rng(), threading.RLock()


_dice: weakref.WeakSet[Dice] = weakref.WeakSet()


def _nothing() -> None:
    pass


def _renew_all() -> None:
    for dice in list(_dice):
        dice.renew()


around_forks(Hooks(_nothing, _nothing, _renew_all))


class Uniform:
    """Each row with the same probability, each time."""

    together = 1

    def __init__(self, ring: Ring, dice: Dice) -> None:
        self._ring, self._dice = ring, dice

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        ring, generator = self._ring, self._dice.generator
        there = min(ring.numbers.head, ring.capacity)
        if not there:
            return None
        slots: Slots = generator.integers(0, there, rows)
        words: Any = ring.words.take(slots)
        while not (words & READABLE).all():
            wrong = np.flatnonzero(words & READABLE == 0)
            readable = np.flatnonzero(ring.words[:there] & READABLE)
            if not len(readable):
                return None
            slots[wrong] = readable[generator.integers(0, len(readable), len(wrong))]
            words[wrong] = ring.words[slots[wrong]]
        return Picked(slots, words)

    def never(self, rows: int) -> None:
        """Rows may come more than once: a sample is as large as it likes."""

    def wants(self, rows: int) -> str:
        return "it has no rows to sample: add some, or wait longer for them with timeout="


class EachOnce:
    """Each row once in a pass of this opener: a pass has the rows that were there when it began, in random order."""

    together = 1

    def __init__(self, ring: Ring, dice: Dice) -> None:
        self._ring, self._dice = ring, dice
        self._left: Slots = np.empty(0, np.int64)  # positions of this pass

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        """No row twice in a batch either: a batch that begins a pass has no row of the last one's end."""
        with self._dice.lock:
            taken, self._left = self._readable(self._left[:rows]), self._left[rows:]
            while len(taken) < rows and len(self._left):
                more = self._readable(self._left[: rows - len(taken)])
                taken, self._left = np.concatenate([taken, more]), self._left[rows - len(taken) :]
            if len(taken) < rows and not self._begin(taken, rows):
                self._left = taken
                return None
            if len(taken) < rows:
                more = rows - len(taken)
                taken, self._left = np.concatenate([taken, self._left[:more]]), self._left[more:]
        capacity = self._ring.capacity
        return Picked(taken % capacity, words_of(taken, capacity, WHOLE))

    def _begin(self, taken: Slots, rows: int) -> bool:
        """Begins a pass, in which those that are taken already come later. False: it would have too few rows."""
        slots = np.flatnonzero(self._ring.words & READABLE)
        positions: Slots = positions_of(self._ring.words[slots], slots, self._ring.capacity)
        self._dice.generator.shuffle(positions)
        again = np.isin(positions, taken)
        if len(positions) - np.count_nonzero(again) < rows - len(taken):
            return False
        self._left = np.concatenate([positions[~again], positions[again]])
        return True

    def _readable(self, positions: Slots) -> Slots:
        """Those that lie there still."""
        slots = positions % self._ring.capacity
        words: Any = self._ring.words.take(slots)
        found = positions_of(words, slots, self._ring.capacity)
        return positions[(found == positions) & (words & READABLE != 0)]

    def never(self, rows: int) -> str | None:
        if rows <= self._ring.capacity:
            return None
        return f"without replacement a sample of {rows:,} different rows never fits: sample fewer at a time"

    def wants(self, rows: int) -> str:
        return (
            f"it has {self._ring.numbers.rows:,} rows, and without replacement a sample takes {rows:,} different ones"
        )


class Prioritized:
    """Rows by their priorities."""

    together = 1

    def __init__(self, ring: Ring, priorities: Priorities, dice: Dice) -> None:
        self._ring, self._priorities, self._dice = ring, priorities, dice

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
        """Without the mutex, also None where priorities changed each time: then it is to be had with it."""
        ring, tree = self._ring, self._priorities.tree
        for _ in range(1 if locked else _DRAWS):
            before = self._priorities.sequence
            if before & 1 and not locked:
                continue
            total, there = tree.total(), ring.numbers.rows
            if not (total > 0 and there):
                return None
            slots = tree.draw(rows, self._dice.generator)
            leaves, words = tree.priorities.take(slots), ring.words.take(slots)
            wrong: Any = np.flatnonzero((leaves <= 0) | (words & READABLE == 0))  # by rounding, or while it changes
            if locked and len(wrong):
                others = np.flatnonzero((tree.priorities > 0) & (ring.words & READABLE != 0))
                if not len(others):
                    return None
                slots[wrong] = self._dice.generator.choice(others, len(wrong))
                leaves, words = tree.priorities.take(slots), ring.words.take(slots)
            if locked or (self._priorities.sequence == before and not len(wrong)):
                return Picked(slots, words, leaves * (there / total))
        return None

    def never(self, rows: int) -> None:
        """Rows may come more than once: a sample is as large as it likes."""

    def wants(self, rows: int) -> str:
        return "it has no rows with a priority above 0: add some, or call update_priority"
