"""Ranges of bytes: sorted, apart, and none of them empty. Which are wanted, and which are there already. Pure.

They are arrays, since a slice of columns has a range for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NONE: Numbers = np.zeros(0, np.int64)


class Ranges(NamedTuple):
    """Attributes:
    starts, stops: the first byte of each range, and the one behind its last.
    """

    starts: Numbers
    stops: Numbers

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    @property
    def sizes(self) -> Numbers:
        return self.stops - self.starts

    def meets(self, others: Ranges) -> bool:
        """Whether a byte lies in both."""
        if not self or not others:
            return False
        at = np.searchsorted(others.stops, self.starts, side="right")  # the first that ends behind the start
        found = at < len(others.stops)
        return bool(np.any(others.starts[at[found]] < self.stops[found]))

    def cut(self, first: int, last: int) -> Ranges:
        """What of them lies in one range."""
        starts, stops = np.maximum(self.starts, first), np.minimum(self.stops, last)
        kept = starts < stops
        return Ranges(starts[kept], stops[kept])

    def split(self, nbytes: int) -> tuple[Ranges, Ranges]:
        """The first so many bytes of them, and the others."""
        ends = np.cumsum(self.sizes)
        at = int(np.searchsorted(ends, nbytes))
        if at >= len(ends):
            return self, NO_RANGES
        middle = int(self.stops[at]) - (int(ends[at]) - nbytes)
        last = self.stops[-1:].tolist()[0]
        return self.cut(int(self.starts[0]), middle), self.cut(middle, last)

    def batches(self, count: int) -> Iterator[Ranges]:
        """So many at a time."""
        for first in range(0, len(self.starts), count):
            yield Ranges(self.starts[first : first + count], self.stops[first : first + count])

    def without(self, others: Ranges) -> Ranges:
        """What of them lies in none of the others."""
        if not self or not others:
            return self
        edges = np.unique(np.concatenate([*self, *others]))
        starts, stops = edges[:-1], edges[1:]
        kept = _cover(self, starts) & ~_cover(others, starts)
        return merged(starts[kept], stops[kept])


NO_RANGES = Ranges(_NONE, _NONE)


def one_range(start: int, stop: int) -> Ranges:
    return Ranges(np.array([start], np.int64), np.array([stop], np.int64)) if start < stop else NO_RANGES


def merged(starts: Numbers, stops: Numbers, gap: int = 0) -> Ranges:
    """Any ranges, sorted and joined where they touch, overlap, or have no more than `gap` bytes between them."""
    kept = starts < stops
    starts, stops = starts[kept], stops[kept]
    if not len(starts):
        return NO_RANGES
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(stops[order])
    new = np.empty(len(starts), bool)
    new[0] = True
    np.greater(starts[1:], reached[:-1] + gap, out=new[1:])
    return Ranges(starts[new], reached[np.append(new[1:], True)])


def together(found: Sequence[Ranges], gap: int = 0) -> Ranges:
    """All of them, `merged`."""
    if not found:
        return NO_RANGES
    return merged(np.concatenate([one.starts for one in found]), np.concatenate([one.stops for one in found]), gap)


def _cover(ranges: Ranges, places: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Of each place, whether it lies in one of the ranges."""
    at = np.searchsorted(ranges.starts, places, side="right") - 1
    return (at >= 0) & (places < ranges.stops[np.maximum(at, 0)])
