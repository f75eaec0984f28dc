"""Boxes: n-dimensional parts of a tensor, in elements. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[int, int]  # of one dimension: from, up to


class Box(NamedTuple):
    """The elements from `offsets` on, as many as `shape` says, of a tensor of as many dimensions."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def meet(self, other: Box) -> Box | None:
        """The elements that both have; None if there are none."""
        offsets: list[int] = []
        shape: list[int] = []
        for start, size, other_start, other_size in zip(
            self.offsets, self.shape, other.offsets, other.shape, strict=True
        ):
            first = max(start, other_start)
            sizes = min(start + size, other_start + other_size) - first
            if sizes <= 0:
                return None
            offsets.append(first)
            shape.append(sizes)
        return Box(tuple(offsets), tuple(shape))

    def within(self, other: Box) -> Box:
        """The same elements, counted from the first one of `other`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The same box, by dimension."""
        return tuple((start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


def box_of(intervals: Sequence[Interval]) -> Box:
    """The box that has these intervals."""
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))
