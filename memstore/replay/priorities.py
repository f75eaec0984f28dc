"""The priorities of a buffer's slots: a sum tree that the processes share, with a number that says when it changes.

A draw takes no lock: it loads the number, draws, and loads it again. All changes are made under the buffer's mutex.
A leaf is 0 where the slot isn't whole. The rules: docs/decisions/015.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memstore.engine import RingNumbers
from memstore.replay.sum_tree import LARGEST, SumTree
from memstore.wording import count_of

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]


class Priorities:
    """Those of one buffer.

    Attributes:
        tree: the sums. Its leaves are priorities raised to `alpha`.
        alpha: the exponent.
    """

    def __init__(self, tree: SumTree, numbers: RingNumbers, alpha: float) -> None:
        self.tree, self.alpha = tree, alpha
        self._numbers = numbers

    # --- under the mutex ----------------------------------------------------------------------------------------------

    def set(self, slots: Any, leaves: Any) -> None:
        """Changes leaves: one number for all, or one for each."""
        numbers = self._numbers
        numbers.sequence |= 1  # odd already, where a change was cut off
        self.tree.set(slots, leaves)
        numbers.sequence += 1

    def note_largest(self, priority: float) -> None:
        """Says that this one was given."""
        if priority > self._numbers.largest:
            self._numbers.largest = priority

    @property
    def of_new_rows(self) -> float:
        """The leaf of a row that got no priority of its own."""
        return float(self._numbers.largest**self.alpha)

    def recover(self, readable: NDArray[np.bool_]) -> None:
        """Makes the sums anew, of leaves that may be of any kind, where the disk has lost some."""
        numbers, leaves = self._numbers, self.tree.priorities
        numbers.sequence |= 1
        if not 0 < numbers.largest <= LARGEST:
            numbers.largest = 1.0
        wrong = ~((leaves >= 0) & (leaves <= LARGEST))
        leaves[wrong] = self.of_new_rows
        leaves[~readable] = 0.0
        self.tree.rebuild()
        numbers.sequence += 1

    # --- without it ---------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """As long as it is the same, and even, nothing has changed."""
        return self._numbers.sequence


def plain_numbers(value: Any) -> Any:
    """What numpy can take of numbers that a caller has: a loss may be on a device, have a graph, or be of bfloat16."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu()
    return (plain.double() if plain.is_floating_point() else plain).numpy()


class Given:
    """Priorities that a caller gives, checked.

    Attributes:
        leaves: what the tree gets: float64 [n], or of one for all rows [].
        largest: of the priorities themselves.
    """

    __slots__ = ("largest", "leaves")

    def __init__(self, priority: Any, rows: int, alpha: float) -> None:
        """Raises ValueError, TypeError: no priorities of so many rows."""
        try:
            found = np.asarray(plain_numbers(priority), np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"priorities are numbers, and not {priority!r:.100}") from None
        if found.shape not in ((), (rows,)):
            of = count_of(rows, "row", "rows")
            raise ValueError(f"priorities of shape {list(found.shape)} for {of}: one for each, or one for all")
        with np.errstate(over="ignore", invalid="ignore"):
            self.leaves: Floats = found**alpha
        wrong = ~((found >= 0) & (found <= LARGEST) & (self.leaves <= LARGEST))  # nan is neither
        if wrong.any():
            raise ValueError(
                f"a priority of {float(found[wrong][0])}: they are finite, 0 at least, and {LARGEST:g} at most, also "
                f"raised to alpha, {alpha:g}"
            )
        self.largest = float(found.max()) if found.size else 0.0
