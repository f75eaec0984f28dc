"""BoxIndex: which boxes of many meet another one. Pure arithmetic."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from memstore.sharding.box import Box, Interval


class _Level(NamedTuple):
    """Boxes that are alike in all dimensions before one, by their intervals there: sorted, and each once.

    Attributes:
        intervals: of this dimension.
        furthest: for each interval the largest stop up to it: those before the first that reaches into a box don't.
        below: for each interval the boxes that have it: by the next dimension; after the last, their indices.
    """

    intervals: list[Interval]
    furthest: list[int]
    below: list[_Level | list[int]]


class BoxIndex:
    """Finds the boxes that meet a box without a look at the others, as long as they form something like a grid.

    Args:
        boxes: all of the same number of dimensions. They may overlap, or be empty.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = tuple(boxes)
        self._top = _level(self._boxes, [index for index, box in enumerate(boxes) if not box.is_empty], 0)

    def meeting(self, wanted: Box) -> list[tuple[int, Box]]:
        """The indices of the boxes that share elements with `wanted`, and these elements, by rising offsets."""
        found: list[int] = []
        if not wanted.is_empty:
            _find(self._top, wanted.intervals, 0, found)
        meets = [(index, wanted.meet(self._boxes[index])) for index in found]
        return [(index, meet) for index, meet in meets if meet is not None]


def _level(boxes: Sequence[Box], indices: list[int], dim: int) -> _Level | list[int]:
    if not indices or dim == len(boxes[indices[0]].shape):
        return indices
    alike: dict[Interval, list[int]] = {}
    for index in indices:
        start = boxes[index].offsets[dim]
        alike.setdefault((start, start + boxes[index].shape[dim]), []).append(index)
    intervals = sorted(alike)
    furthest = list(itertools.accumulate((stop for _, stop in intervals), max))
    return _Level(intervals, furthest, [_level(boxes, alike[interval], dim + 1) for interval in intervals])


def _find(level: _Level | list[int], wanted: Sequence[Interval], dim: int, found: list[int]) -> None:
    if isinstance(level, list):
        found.extend(level)
        return
    start, stop = wanted[dim]
    first, last = bisect_right(level.furthest, start), bisect_left(level.intervals, (stop, 0))
    for place in range(first, last):
        if level.intervals[place][1] > start:
            _find(level.below[place], wanted, dim + 1, found)
