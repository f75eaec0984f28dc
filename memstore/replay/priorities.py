"""Priorities of a buffer's slots: a sum tree in the memory that the processes share, and how a draw reads it unlocked.

`SumTree` draws slots with probabilities that are proportional to their priorities. `Priorities` adds a number that says
when the tree changes: a draw takes no lock, it loads the number, draws, and loads it again. All changes are made under
the buffer's mutex. A leaf is 0 where the slot isn't whole. The rules: docs/decisions/015.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memstore._wording import count_of
from memstore.engine import RingNumbers

# --- The sum tree ----------------------------------------------------------------------------------------------------
# Draws slots with probabilities that are proportional to their priorities, out of memory that processes may share.
#
# The priorities are the lowest of some levels; each node of a level above is the sum of two below, and the top level
# has 2,048 nodes at most. A draw adds up the top level, finds its nodes by one binary search, and goes down from
# there, all draws at once. So 1,000,000 slots have nine levels of pairs under the top, and not twenty: a draw of 256
# takes 50 us, and it takes 20 us to change 256 priorities. (Wider nodes take fewer steps, of more bytes each: see
# docs/decisions/015-mutable-entries.md.)
#
# Nothing here locks. Changes are made one at a time; a draw during a change, or after one that was cut off, gives some
# slot or other, and the caller looks whether it may have it. `rebuild` makes the sums anew from the priorities.


_MOST_AT_TOP = 2048  # nodes: to add them up takes 5 us
_MANY = 16  # a change of more than 1/16 of the priorities adds up everything anew

LARGEST = 2.0**900  # of a priority: the sum of as many as there may be is no infinity

Slots = NDArray[np.int64]
Floats = NDArray[np.float64]


def _sizes(capacity: int) -> list[int]:
    """Returns the number of nodes of each level, from the top down. The last level has a place for each slot."""
    depth = max(-(-capacity // _MOST_AT_TOP) - 1, 0).bit_length()
    top = -(-capacity >> depth) if depth else capacity
    return [top << level for level in range(depth + 1)]


class SumTree:
    """Priorities of the slots from 0 to `capacity`, with sums of them.

    Its callers have checked slots and priorities: these are finite, 0 at least, and `LARGEST` at most.

    Example:
        >>> import numpy as np
        >>> tree = SumTree(np.zeros(SumTree.nodes(4)), 4)
        >>> tree.set(np.array([1, 2]), np.array([1.0, 3.0]))
        >>> tree.sums()
        array([0., 1., 4., 4.])
        >>> tree.draw(4, np.random.default_rng(0))
        array([1, 2, 2, 2])
    """

    __slots__ = ("_levels", "_up", "capacity", "priorities")

    def __init__(self, memory: Floats, capacity: int) -> None:
        """Takes the sums that stand there: zeros are those of priorities of 0.

        Args:
            memory: float64 [nodes(capacity)], contiguous. It is changed in place, and kept alive.
            capacity: how many slots there are, 1 at least.
        """
        sizes = _sizes(capacity)
        ends = itertools.accumulate(sizes)
        self._levels = levels = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.capacity = capacity
        self.priorities: Floats = levels[-1][:capacity]
        above = zip(levels[-2::-1], levels[:0:-1], strict=True)
        self._up = [(level, np.reshape(below, (-1, 2))) for level, below in above]  # each level, and the pairs below

    @staticmethod
    def nodes(capacity: int) -> int:
        """Returns how many numbers a tree of so many slots takes: about two a slot."""
        return sum(_sizes(capacity))

    def set(self, slots: Slots, priorities: Floats | float) -> None:
        """Changes the priorities of slots: one for all, or one for each. Of a slot that comes twice, the last stays."""
        self.priorities[slots] = priorities
        if len(slots) > self.capacity // _MANY:
            self.rebuild()
            return
        nodes = slots
        for level, pairs in self._up:
            nodes = nodes >> 1
            both = pairs.take(nodes, 0)
            level[nodes] = both[:, 0] + both[:, 1]

    def set_one(self, slot: int, priority: float) -> None:
        """Changes the priority of one slot, in a tenth of the time that `set` takes."""
        self.priorities[slot] = priority
        for level, pairs in self._up:
            slot >>= 1
            level[slot] = pairs.item(slot, 0) + pairs.item(slot, 1)

    def rebuild(self) -> None:
        """Adds up everything anew: after a change that was cut off."""
        for level, pairs in self._up:
            np.add(pairs[:, 0], pairs[:, 1], out=level)

    def sums(self) -> Floats:
        """Returns the running sums of the top level. The last one is the sum of all priorities."""
        return self._levels[0].cumsum()

    def draw(self, count: int, generator: np.random.Generator, sums: Floats | None = None) -> Slots:
        """Draws slots with probabilities proportional to their priorities.

        It draws one of each of `count` equal shares of the sum, which is more even than independent draws (Schaul et
        al., "Prioritized Experience Replay", 2016, appendix B.2.1): a slot with half of all priorities is drawn as
        often as not, give or take one. A slot may be drawn more than once.

        Args:
            count: how many slots.
            generator: of numpy's.
            sums: the `sums` of just now, if they are known.

        Returns:
            int64 [count], in growing order. By rounding, or where another process changes priorities meanwhile, a slot
            of priority 0 may be among them: look.

        Raises:
            ValueError: all priorities are 0.
        """
        sums = self.sums() if sums is None else sums
        if not sums[-1] > 0:
            raise ValueError("all priorities are 0: there is nothing to draw")
        shares = generator.random(count)
        shares += np.arange(count)
        shares *= sums[-1] / max(count, 1)
        return self.find(shares, sums)

    def find(self, places: Floats, sums: Floats) -> Slots:
        """Finds the slots at some places of the sum, as if all priorities lay one behind the other.

        Args:
            places: floats [n], each from 0 to the sum of all priorities, exclusive.
            sums: the `sums` of just now.

        Returns:
            int64 [n].
        """
        nodes = sums.searchsorted(places, "right")
        np.minimum(nodes, len(sums) - 1, out=nodes)
        rest = places - sums.take(nodes)
        rest += self._levels[0].take(nodes)
        for level in self._levels[1:]:
            nodes <<= 1
            left = level.take(nodes)
            is_right = rest >= left
            left *= is_right
            rest -= left
            nodes += is_right
        return np.minimum(nodes, self.capacity - 1, out=nodes)


# --- The priorities of one buffer ------------------------------------------------------------------------------------


class Priorities:
    """The priorities of one buffer.

    Attributes:
        tree: the sums. Its leaves are priorities raised to `alpha`.
        alpha: the exponent.
    """

    def __init__(self, tree: SumTree, numbers: RingNumbers, alpha: float) -> None:
        self.tree, self.alpha = tree, alpha
        self._numbers = numbers

    # --- under the mutex ----------------------------------------------------------------------------------------------

    def set(self, slots: Any, leaves: Any) -> None:
        """Changes the leaf of a slot, or those of an array of slots: to one number for all, or to one for each."""
        numbers = self._numbers
        sequence = numbers.sequence | 1  # odd already, where a change was cut off
        numbers.sequence = sequence
        if isinstance(slots, int):
            self.tree.set_one(slots, leaves)
        else:
            self.tree.set(slots, leaves)
        numbers.sequence = sequence + 1

    def note_largest(self, priority: float) -> None:
        """Notes a priority that was given, if it is the largest."""
        if priority > self._numbers.largest:
            self._numbers.given = priority

    @property
    def of_new_rows(self) -> float:
        """The leaf of a row that got no priority of its own."""
        return float(self._numbers.largest**self.alpha)

    def recover(self, readable: NDArray[np.bool_]) -> None:
        """Makes the sums anew, of leaves that may be of any kind, where the disk has lost some."""
        numbers, leaves = self._numbers, self.tree.priorities
        numbers.sequence |= 1
        if not 0 < numbers.largest <= LARGEST:
            numbers.given = 1.0
        wrong = ~((leaves >= 0) & (leaves <= LARGEST))
        leaves[wrong] = self.of_new_rows
        leaves[~readable] = 0.0
        self.tree.rebuild()
        numbers.sequence += 1

    # --- without it ---------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """A number that says whether the tree changed: it didn't, as long as the number is the same, and even."""
        return self._numbers.sequence


def plain_numbers(value: Any) -> Any:
    """Converts a caller's numbers for numpy: a loss may be on a device, have a graph, or be of bfloat16."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu()
    return (plain.double() if plain.is_floating_point() else plain).numpy()


class GivenPriorities:
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
