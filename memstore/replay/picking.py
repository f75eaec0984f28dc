"""Pickers: which slots a sample gets. With equal probabilities, once a pass, by priorities, as slices, or once at all.

`Uniform`, `EachOnce`, `Prioritized`, `Slices` and `ConsumingPicker` implement `Picker`. A picked slot was whole in that
moment; it is copied, and looked at again. The rules: docs/decisions/015.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstore._arguments import whole_number
from memstore._threads import Hooks, around_forks
from memstore.replay.priorities import Priorities
from memstore.replay.ring import READABLE, STATE, WHOLE, Ring, Slots, positions_of, words_of

# --- Single rows -----------------------------------------------------------------------------------------------------


Floats = NDArray[np.float64]

_DRAWS = 3  # without the mutex, while priorities change


class PickedSlots(NamedTuple):
    """
    Attributes:
        slots, words: int64 [n]: which, and what their words were.
        odds: float64 [n]: how much likelier each was than with equal probabilities; None: they are equal.
    """

    slots: Slots
    words: Slots
    odds: Floats | None = None


class Picker(ABC):
    """One way to pick.

    Attributes:
        together: how many rows, one behind the other, are picked as one.
    """

    together = 1

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @abstractmethod
    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        """Picks so many rows. Returns None if there are too few. `locked` says whether the caller has the mutex."""

    def never(self, rows: int) -> str | None:
        """Says why no buffer of this capacity ever has such a sample, for an error; None if one may.

        One may where rows come more than once: a sample is as large as it likes.
        """
        return None

    @abstractmethod
    def wants(self, rows: int) -> str:
        """Says what it waits for, for an error."""


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
        """Makes new numbers in a forked child: another thread may have been in the middle of the old ones."""
        self.generator, self.lock = np.random.default_rng(), threading.RLock()


_dice: weakref.WeakSet[Dice] = weakref.WeakSet()


def _renew_all() -> None:
    for dice in list(_dice):
        dice.renew()


around_forks(Hooks(after_in_child=_renew_all))


class Uniform(Picker):
    """Picker of rows with equal probabilities, each time."""

    def __init__(self, ring: Ring, dice: Dice) -> None:
        super().__init__(ring)
        self._dice = dice

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
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
        return PickedSlots(slots, words)

    def wants(self, rows: int) -> str:
        return "it has no rows to sample: add some, or wait longer for them with timeout="


class EachOnce(Picker):
    """Picker of each row once in a pass of this opener.

    A pass has the rows that were there when it began, in random order.
    """

    def __init__(self, ring: Ring, dice: Dice) -> None:
        super().__init__(ring)
        self._dice = dice
        self._left: Slots = np.empty(0, np.int64)  # positions of this pass

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        """Picks rows. No row is twice in a batch either: one that begins a pass has no row of the last one's end."""
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
        return PickedSlots(taken % capacity, words_of(taken, capacity, WHOLE))

    def _begin(self, taken: Slots, rows: int) -> bool:
        """Begins a pass, in which rows that are taken already come later.

        Returns False if it would have too few rows.
        """
        slots = np.flatnonzero(self._ring.words & READABLE)
        positions: Slots = positions_of(self._ring.words[slots], slots, self._ring.capacity)
        self._dice.generator.shuffle(positions)
        again = np.isin(positions, taken)
        if len(positions) - np.count_nonzero(again) < rows - len(taken):
            return False
        self._left = np.concatenate([positions[~again], positions[again]])
        return True

    def _readable(self, positions: Slots) -> Slots:
        """Returns the positions whose rows lie there still."""
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


class Prioritized(Picker):
    """Picker of rows by their priorities."""

    def __init__(self, ring: Ring, priorities: Priorities, dice: Dice) -> None:
        super().__init__(ring)
        self._priorities, self._dice = priorities, dice

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        """Picks rows. Without the mutex it also returns None if priorities changed each time: try again with it."""
        ring, tree = self._ring, self._priorities.tree
        for _ in range(1 if locked else _DRAWS):
            before = self._priorities.sequence
            if before & 1 and not locked:
                continue
            sums, there = tree.sums(), ring.numbers.rows
            total = sums[-1]
            if not (total > 0 and there):
                return None
            slots = tree.draw(rows, self._dice.generator, sums)
            leaves, words = tree.priorities.take(slots), ring.words.take(slots)
            wrong: Any = np.flatnonzero((leaves <= 0) | (words & READABLE == 0))  # by rounding, or while it changes
            if locked and len(wrong):
                others = np.flatnonzero((tree.priorities > 0) & (ring.words & READABLE != 0))
                if not len(others):
                    return None
                slots[wrong] = self._dice.generator.choice(others, len(wrong))
                leaves, words = tree.priorities.take(slots), ring.words.take(slots)
            if locked or (self._priorities.sequence == before and not len(wrong)):
                return PickedSlots(slots, words, leaves * (there / total))
        return None

    def wants(self, rows: int) -> str:
        return "it has no rows with a priority above 0: add some, or call update_priority"


# --- Slices of episodes ----------------------------------------------------------------------------------------------
# Trajectories: rows of positions that follow each other, none but the last the end of an episode.
#
# Slots and slots wrap together: so a slice may run over the ring's end, and never over its head. Starts are drawn
# at random; if few of them fit, all that fit are found in one pass over the flags. The rules: docs/decisions/015.


Bools = NDArray[np.bool_]

_TRIES = 3  # of starts at random


class Slices(Picker):
    """Picks slices of one length. `pick` counts rows, so it is asked for multiples of that.

    Words are loaded before flags, and looked at again after the copy: so the flags were those of the same rows.
    """

    def __init__(self, ring: Ring, dice: Dice, length: int, end: int | None) -> None:
        """Takes the number of the leaf that says where episodes end; None if nothing does."""
        super().__init__(ring)
        self._dice, self._length, self.together = dice, length, length
        self._end = None if end is None else EpisodeEnds(ring.arrays[end], ring.plan.leaves[end].dtype)

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        ring, wanted = self._ring, rows // self._length
        starts = np.empty(0, np.int64)
        there = min(ring.numbers.head, ring.capacity)
        if not there:
            return None
        for _ in range(_TRIES):
            slots = self._dice.generator.integers(0, there, 2 * wanted)
            tried: Any = positions_of(ring.words.take(slots), slots, ring.capacity)
            starts = np.concatenate([starts, tried[self._fit(tried)]])
            if len(starts) >= wanted:
                break
        else:
            fitting = self._all()
            if not len(fitting):
                return None
            starts = fitting[self._dice.generator.integers(0, len(fitting), wanted)]
        positions = (starts[:wanted, None] + np.arange(self._length)).ravel()
        return PickedSlots(positions % ring.capacity, words_of(positions, ring.capacity, WHOLE))

    def _fit(self, starts: Slots) -> Bools:
        """Tells which positions begin a slice."""
        positions = starts[:, None] + np.arange(self._length)
        slots = positions % self._ring.capacity
        words: Any = self._ring.words.take(slots)
        fits = (words | 1) == (words_of(positions, self._ring.capacity, WHOLE) | 1)
        found = fits.all(1) & (starts >= 0)
        if self._end is not None and self._length > 1:
            found &= ~self._end.between(slots[:, :-1], slots[:, 1:]).any(1)
        return found

    def _all(self) -> Slots:
        """Returns all starts that fit, by one look at all words and flags."""
        ring, length = self._ring, self._length
        head = ring.numbers.head
        positions = np.arange(max(head - ring.capacity, 0), head)
        if len(positions) < length:
            return np.empty(0, np.int64)
        slots = positions % ring.capacity
        words: Any = ring.words.take(slots)
        broken = np.concatenate([[0], np.cumsum((words | 1) != (words_of(positions, ring.capacity, WHOLE) | 1))])
        fits = broken[length:] == broken[:-length]
        if self._end is not None and length > 1:
            ends = np.concatenate([[0], np.cumsum(self._end.between(slots[:-1], slots[1:]))])
            fits &= ends[length - 1 :] == ends[: len(ends) - length + 1]
        return positions[: len(fits)][fits]

    def never(self, rows: int) -> str | None:
        """Says why a slice never fits. The same slice may come more than once, so only its length counts."""
        if self._length <= self._ring.capacity:
            return None
        return f"a slice of {self._length:,} rows never fits: take shorter slices"

    def wants(self, rows: int) -> str:
        where = "" if self._end is None else " of one episode"
        return f"it has no {self._length:,} rows{where} that follow each other: add more, or take shorter slices"


class EpisodeEnds:
    """Finder of the ends of episodes: flags of last rows, or numbers that change from one episode to the next."""

    def __init__(self, bits: NDArray[Any], dtype: str) -> None:
        self._bits: Any = np.reshape(bits, (len(bits), -1))
        self._are_numbers = dtype in ("int16", "int32", "int64", "uint16", "uint32", "uint64")
        self._are_floats = "float" in dtype

    def between(self, slots: Any, following: Any) -> Bools:
        """Returns whether an episode ends between a row and the one behind it."""
        bits = self._bits[slots]
        if self._are_numbers:
            return (bits != self._bits[following]).any(-1)
        if self._are_floats:
            bits = bits << 1  # -0.0 is 0 too
        return (bits != 0).any(-1)


# --- Rows that are handed out once -----------------------------------------------------------------------------------


_WORDS_AT_ONCE = 4  # times as many words are looked at as rows are wanted


class ConsumingPicker(Picker):
    """Picks rows that wait to be handed out, and takes them.

    The word of a row says whether it was handed out. The cursor, or the top, says where to look.
    """

    def __init__(self, ring: Ring, *, newest: bool) -> None:
        super().__init__(ring)
        self._newest = newest

    def never(self, rows: int) -> str | None:
        if rows <= self._ring.capacity:
            return None
        return f"{rows:,} rows never wait in it to be handed out: sample fewer at a time"

    def wants(self, rows: int) -> str:
        return f"no {rows:,} rows wait to be handed out" if rows > 1 else "no row waits to be handed out"

    # --- pick ---------------------------------------------------------------------------------------------------------

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        """Picks rows. Returns None if fewer wait, or if it seems so without the mutex."""
        ring = self._ring
        late = self._late(locked=locked)[:rows] if ring.numbers.late else np.empty(0, np.int64)
        found = late if len(late) == rows else np.concatenate([late, self._search(rows - len(late))])
        if len(found) < rows:
            return None
        return PickedSlots(found % ring.capacity, words_of(found, ring.capacity, WHOLE))

    def _late(self, *, locked: bool) -> Slots:
        """Returns the positions of rows that were published after the ring had passed over them."""
        ring = self._ring
        words: Any = np.array(ring.words)
        slots = np.flatnonzero(words & STATE == WHOLE)
        positions: Slots = positions_of(words[slots], slots, ring.capacity)
        late = np.sort(positions[positions < ring.numbers.head - ring.capacity])
        if locked and not len(late):
            ring.numbers.late = False
        return late[::-1] if self._newest else late

    def _search(self, rows: int) -> Slots:
        """Finds rows from the cursor up, or from the top down. It looks at one part of the words after the other."""
        ring, numbers = self._ring, self._ring.numbers
        head = numbers.head
        low, high = max(head - ring.capacity, 0), head
        if self._newest:
            high = min(head, numbers.top)
        else:
            low = max(low, numbers.cursor)
        found, width = np.empty(0, np.int64), max(_WORDS_AT_ONCE * rows, 64)
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

    def _waiting(self, positions: Slots) -> Slots:
        ring = self._ring
        words: Any = ring.words.take(positions % ring.capacity)
        return positions[words == words_of(positions, ring.capacity, WHOLE)]

    # --- take ---------------------------------------------------------------------------------------------------------

    def take(self, picked: PickedSlots) -> bool:
        """Takes rows, under the mutex. Returns False if one of them doesn't wait any more; then it takes none."""
        ring = self._ring
        if not np.array_equal(ring.words.take(picked.slots), picked.words):
            return False
        ring.words[picked.slots] = picked.words | 1
        # The cursor, or the top, moves behind them, but over no row that waits: some may be published there meanwhile.
        positions = positions_of(picked.words, picked.slots, ring.capacity)
        lowest, highest, numbers = int(positions.min()), int(positions.max()), ring.numbers
        oldest = max(numbers.head - ring.capacity, 0)
        if self._newest:
            waiting = self._waiting(np.arange(max(lowest, oldest), min(numbers.top, numbers.head)))
            numbers.top = min(numbers.top, int(waiting[-1]) + 1 if len(waiting) else lowest)
        else:
            waiting = self._waiting(np.arange(max(numbers.cursor, oldest), highest))
            numbers.cursor = max(numbers.cursor, int(waiting[0]) if len(waiting) else highest + 1)
        return True
