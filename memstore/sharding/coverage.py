"""Coverage: what of a tensor no box of a list has, and whether two of them share elements. Pure arithmetic.

Both cut the first dimension at every start and stop of a box, and look at the slabs between the cuts in turn, each as a
tensor of one dimension less. In a grid of n boxes a box is in one slab, and the slabs look alike: so n boxes cost about
n steps a dimension, and not n * n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memstore.sharding.box import Box, Interval, box_of

Sides = tuple[Interval, ...]  # a box, by dimension


class Named(NamedTuple):
    """A box, without the dimensions that were cut already, and its place in the list."""

    sides: Sides
    number: int


def uncovered(wanted: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of `wanted` that no box has: as boxes, of which no two overlap, in the order of their offsets.

    Args:
        boxes: of as many dimensions as `wanted`, in any order. They may overlap, be empty, and reach beyond it.

    Example:
        >>> uncovered(Box((0, 0), (4, 4)), [Box((0, 0), (4, 2)), Box((0, 2), (3, 2))])
        [Box(offsets=(3, 2), shape=(1, 2))]
    """
    if wanted.is_empty:
        return []
    inside = [meet for box in boxes if (meet := wanted.meet(box)) is not None]
    return [box_of(sides) for sides in _gaps(wanted.intervals, [box.intervals for box in inside])]


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The indices of two boxes that share elements, the smaller one first; None if no two do."""
    pair = _overlap([Named(box.intervals, number) for number, box in enumerate(boxes) if not box.is_empty])
    return None if pair is None else (min(pair), max(pair))


def _gaps(wanted: Sides, boxes: list[Sides]) -> list[Sides]:
    """What the boxes, which lie within `wanted`, leave of it."""
    if not boxes:
        return [wanted]
    if not wanted:
        return []
    (first, last), rest = wanted[0], wanted[1:]
    if not rest:
        return _gaps_of_line(first, last, sorted(sides[0] for sides in boxes))
    seen: dict[frozenset[Sides], list[Sides]] = {}
    found: list[tuple[int, int, list[Sides]]] = []
    for start, stop, inside in _slabs(first, last, [Named(sides, 0) for sides in boxes]):
        tails = frozenset(box.sides for box in inside)
        gaps = seen.get(tails)
        if gaps is None:
            gaps = seen[tails] = _gaps(rest, list(tails))
        if found and found[-1][2] == gaps:
            found[-1] = (found[-1][0], stop, gaps)
        else:
            found.append((start, stop, gaps))
    return [((start, stop), *gap) for start, stop, gaps in found for gap in gaps]


def _gaps_of_line(first: int, last: int, intervals: list[Interval]) -> list[Sides]:
    gaps: list[Sides] = []
    for start, stop in [*intervals, (last, last)]:
        if start > first:
            gaps.append(((first, start),))
        first = max(first, stop)
    return gaps


def _overlap(boxes: list[Named]) -> tuple[int, int] | None:
    if len(boxes) < 2:
        return None
    if not boxes[0].sides:
        return boxes[0].number, boxes[1].number
    if len(boxes[0].sides) == 1:
        return _overlap_on_line(sorted(boxes))
    seen: set[frozenset[Sides]] = set()
    first = min(box.sides[0][0] for box in boxes)
    last = max(box.sides[0][1] for box in boxes)
    for _, _, inside in _slabs(first, last, boxes):
        tails = frozenset(box.sides for box in inside)
        if len(tails) < len(inside) or tails not in seen:
            seen.add(tails)
            pair = _overlap(inside)
            if pair is not None:
                return pair
    return None


def _overlap_on_line(boxes: list[Named]) -> tuple[int, int] | None:
    """Of boxes of one dimension, in the order of their starts: none before the first two that overlap do."""
    for (((_, stop),), number), (((start, _),), other) in zip(boxes, boxes[1:], strict=False):
        if start < stop:
            return number, other
    return None


def _slabs(first: int, last: int, boxes: Sequence[Named]) -> Iterator[tuple[int, int, list[Named]]]:
    """The slabs between the cuts of the first dimension, and the boxes in each, without that dimension."""
    waiting = sorted(boxes, reverse=True)
    inside: list[Named] = []
    cuts = sorted({first, last, *(place for box in boxes for place in box.sides[0])})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        inside = [box for box in inside if box.sides[0][1] > start]
        while waiting and waiting[-1].sides[0][0] <= start:
            inside.append(waiting.pop())
        yield start, stop, [Named(box.sides[1:], box.number) for box in inside]
