"""Trajectories: rows of positions that follow each other, none but the last the end of an episode.

Positions and slots wrap together: so a slice may run over the ring's end, and never over its head. Starts are drawn at
random; if few of them fit, all that fit are found in one pass over the flags. The rules: docs/decisions/015.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.replay.picking import Dice, Picked
from memstore.replay.ring import Ring
from memstore.replay.words import WHOLE, positions_of, words_of

Bools = NDArray[np.bool_]
Positions = NDArray[np.int64]

_TRIES = 3  # of starts at random


class Slices:
    """Picks slices of one length. `pick` counts rows, so it is asked for multiples of that.

    Words are loaded before flags, and looked at again after the copy: so the flags were those of the same rows.
    """

    def __init__(self, ring: Ring, dice: Dice, length: int, end: int | None) -> None:
        """`end`: the number of the leaf that says where episodes end; None: nothing does."""
        self._ring, self._dice, self._length = ring, dice, length
        self.together = length
        self._end = None if end is None else Ends(ring.arrays[end], ring.plan.leaves[end].dtype)

    def pick(self, rows: int, *, locked: bool) -> Picked | None:
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
        return Picked(positions % ring.capacity, words_of(positions, ring.capacity, WHOLE))

    def _fit(self, starts: Positions) -> Bools:
        """Which of them begin a slice."""
        positions = starts[:, None] + np.arange(self._length)
        slots = positions % self._ring.capacity
        words: Any = self._ring.words.take(slots)
        fits = (words | 1) == (words_of(positions, self._ring.capacity, WHOLE) | 1)
        found = fits.all(1) & (starts >= 0)
        if self._end is not None and self._length > 1:
            found &= ~self._end.between(slots[:, :-1], slots[:, 1:]).any(1)
        return found

    def _all(self) -> Positions:
        """All starts that fit, by one look at all words and flags."""
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
        """The same slice may come more than once: only its length counts."""
        if self._length <= self._ring.capacity:
            return None
        return f"a slice of {self._length:,} rows never fits: take shorter slices"

    def wants(self, rows: int) -> str:
        where = "" if self._end is None else " of one episode"
        return f"it has no {self._length:,} rows{where} that follow each other: add more, or take shorter slices"


class Ends:
    """Where episodes end: flags of last rows, or numbers that change from one episode to the next."""

    def __init__(self, bits: NDArray[Any], dtype: str) -> None:
        self._bits: Any = np.reshape(bits, (len(bits), -1))
        self._are_numbers = dtype in ("int16", "int32", "int64", "uint16", "uint32", "uint64")
        self._are_floats = "float" in dtype

    def between(self, slots: Any, following: Any) -> Bools:
        """Whether an episode ends between a row and the one behind it."""
        bits = self._bits[slots]
        if self._are_numbers:
            return (bits != self._bits[following]).any(-1)
        if self._are_floats:
            bits = bits << 1  # -0.0 is 0 too
        return (bits != 0).any(-1)
