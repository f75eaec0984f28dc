"""Boxes: n-dimensional parts of tensors, in elements. Arithmetic, and views; nothing here reads or writes a tensor.

Box                  a box; what it shares with another one
BoxIndex             which of many boxes meet a box
cover_of             whether boxes make up a tensor; `uncovered` and `overlap` are its halves
slabs                a tensor, cut into boxes of limited size
copies               which parts of stored boxes fill the boxes that are wanted
runs, cover          where the elements of a strided box lie in memory: contiguous runs, and the pages that cover them
StoredBox            where the bytes of a box lie in a stored value

`uncovered` and `overlap` cut the first dimension at every start and stop of a box, and look at the slabs between the
cuts in turn, each as a tensor of one dimension less. In a grid of n boxes a box is in one slab, and the slabs look
alike: so n boxes cost about n steps a dimension, and not n * n.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

# --- Boxes -----------------------------------------------------------------------------------------------------------


Interval = tuple[int, int]  # of one dimension: from, up to


class Box(NamedTuple):
    """The elements from `offsets` on, as many as `shape` says, of a tensor of as many dimensions."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def meet(self, other: Box) -> Box | None:
        """Returns the elements that both have; None if there are none."""
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
        """Returns the same elements, counted from the first one of `other`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.shape)

    def moved(self, by: Sequence[int]) -> Box:
        """Returns the box that starts so many elements further on in each dimension: the reverse of `within`."""
        return Box(tuple(map(sum, zip(self.offsets, by, strict=True))), self.shape)

    def narrow(self, dim: int, start: int, size: int) -> Box:
        """Returns a part of it, as `torch.narrow` does: `start` is counted from its own first element."""
        offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether it lies within a tensor of this shape, which has as many dimensions."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            start >= 0 <= size <= total - start
            for start, size, total in zip(self.offsets, self.shape, shape, strict=True)
        )

    def run_in(self, shape: Sequence[int]) -> int | None:
        """Returns the number of its first element in a contiguous tensor of this shape, if it is one run there.

        None where other elements lie between its own.
        """
        outer = 0  # the dimension below which it has all of the tensor
        while outer < len(shape) and self.shape[outer] == 1:
            outer += 1
        if self.shape[outer + 1 :] != tuple(shape[outer + 1 :]):
            return None
        first = 0
        for start, size in zip(self.offsets, shape, strict=True):
            first = first * size + start
        return first

    def cut(self, ranges: Sequence[range]) -> RangesCut | None:
        """Returns what it has of a product of ranges, none of them empty; None if that is nothing."""
        places: list[slice] = []
        inside: list[slice] = []
        for one, start, size in zip(ranges, self.offsets, self.shape, strict=True):
            first = max(-(-(start - one.start) // one.step), 0)
            stop = min(-(-(start + size - one.start) // one.step), len(one))
            if first >= stop:
                return None
            places.append(slice(first, stop))
            inside.append(slice(one[first] - start, one[stop - 1] - start + 1, one.step))
        return RangesCut(tuple(places), tuple(inside))

    @property
    def text(self) -> str:
        """Returns the box as slices, for keys and messages: "0:4, 0:8"."""
        return ", ".join(f"{start}:{start + size}" for start, size in zip(self.offsets, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Returns where it starts and stops in each dimension."""
        return tuple((start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


class RangesCut(NamedTuple):
    """The elements that a box and a product of ranges both have: by their places in the ranges, and in the box."""

    places: tuple[slice, ...]
    inside: tuple[slice, ...]


def box_of(intervals: Sequence[Interval]) -> Box:
    """Returns the box that has these intervals."""
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def slabs(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cuts a tensor into boxes of up to `most` elements, but one at least, that follow each other in C order."""
    dim, inner = len(shape), 1
    while dim and inner * shape[dim - 1] <= most:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield whole(shape)
        return
    dim -= 1
    step = max(most // inner, 1)
    for outer in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            sizes = (1,) * dim + (min(step, shape[dim] - start), *shape[dim + 1 :])
            yield Box((*outer, start, *(0,) * (len(shape) - dim - 1)), sizes)


# --- Which boxes meet a box ------------------------------------------------------------------------------------------


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
        """Returns the indices of boxes that share elements with `wanted`, and these elements, by rising offsets."""
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


# --- Coverage and overlaps -------------------------------------------------------------------------------------------


Sides = tuple[Interval, ...]  # a box, by dimension


class NumberedSides(NamedTuple):
    """A box, without the dimensions that were cut already, and its place in the list."""

    sides: Sides
    number: int


def uncovered(wanted: Box, boxes: Iterable[Box]) -> list[Box]:
    """Returns the parts of `wanted` that no box has: as boxes that don't overlap, in the order of their offsets.

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
    """Returns the indices of two boxes that share elements, the smaller one first; None if no two do."""
    pair = _overlap([NumberedSides(box.intervals, number) for number, box in enumerate(boxes) if not box.is_empty])
    return None if pair is None else (min(pair), max(pair))


class Cover(NamedTuple):
    """The way in which boxes cover a tensor.

    Attributes:
        pair: the indices of two boxes that overlap, if any do.
        missing: the parts that no box has.
        outside: the index of a box that doesn't lie within the tensor, or has other dimensions, if one does. Then
            nobody has looked for the other two.
    """

    pair: tuple[int, int] | None
    missing: list[Box]
    outside: int | None

    @property
    def is_exact(self) -> bool:
        """Returns whether each element lies in one box, and nothing else does."""
        return self.pair is None and not self.missing and self.outside is None


def cover_of(shape: Sequence[int], boxes: Sequence[Box]) -> Cover:
    """Returns how these boxes cover a tensor of this shape."""
    outside = next((number for number, box in enumerate(boxes) if not box.fits(shape)), None)
    if outside is not None:
        return Cover(None, [], outside)
    return Cover(overlap(boxes), uncovered(whole(shape), boxes), None)


def _gaps(wanted: Sides, boxes: list[Sides]) -> list[Sides]:
    """Returns what the boxes, which lie within `wanted`, leave of it."""
    if not boxes:
        return [wanted]
    if not wanted:
        return []
    (first, last), rest = wanted[0], wanted[1:]
    if not rest:
        return _gaps_of_line(first, last, sorted(sides[0] for sides in boxes))
    seen: dict[frozenset[Sides], list[Sides]] = {}
    found: list[tuple[int, int, list[Sides]]] = []
    for start, stop, inside in _slabs(first, last, [NumberedSides(sides, 0) for sides in boxes]):
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


def _overlap(boxes: list[NumberedSides]) -> tuple[int, int] | None:
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


def _overlap_on_line(boxes: list[NumberedSides]) -> tuple[int, int] | None:
    """Finds two that overlap among boxes of one dimension, in the order of their starts: neighbours, if any do."""
    for (((_, stop),), number), (((start, _),), other) in zip(boxes, boxes[1:], strict=False):
        if start < stop:
            return number, other
    return None


def _slabs(first: int, last: int, boxes: Sequence[NumberedSides]) -> Iterator[tuple[int, int, list[NumberedSides]]]:
    """Cuts the first dimension. Gives each slab, and the boxes in it without that dimension."""
    waiting = sorted(boxes, reverse=True)
    inside: list[NumberedSides] = []
    cuts = sorted({first, last, *(place for box in boxes for place in box.sides[0])})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        inside = [box for box in inside if box.sides[0][1] > start]
        while waiting and waiting[-1].sides[0][0] <= start:
            inside.append(waiting.pop())
        yield start, stop, [NumberedSides(box.sides[1:], box.number) for box in inside]


# --- Copies from stored boxes to wanted ones -------------------------------------------------------------------------


_FEW_BOXES = 256  # boxes of one tensor


class BoxCopies(NamedTuple):
    """The copies that fill tensors that are wanted.

    Attributes:
        pairs: views of the same shape: into the first, from the second. Each element is there once, unless stored
            boxes overlap without being equal in what is wanted of them.
        missing: what nothing stored has, of all that is wanted.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    missing: list[Box]


def copies(wanted: Sequence[tuple[Box, torch.Tensor]], stored: Sequence[tuple[Box, torch.Tensor]]) -> BoxCopies:
    """Finds which parts of which tensors are to be copied where, so that all that is wanted is filled.

    Nothing is read or written. Where several stored boxes have an element, it is taken from the first of those that
    have the same part of a wanted box.

    Args:
        wanted: boxes of a tensor, each with a tensor of its shape to write to. Without autograd history: the views
            could not be written to otherwise.
        stored: boxes of the same tensor, each with a tensor of its shape.

    Example:
        >>> rows, columns = torch.arange(4).view(2, 2), torch.zeros(2, 1, dtype=torch.int64)
        >>> plan = copies([(Box((0, 1), (2, 1)), columns)], [(Box((0, 0), (2, 2)), rows)])
        >>> for into, source in plan.pairs:
        ...     _ = into.copy_(source)
        >>> columns.tolist(), plan.missing
        ([[1], [3]], [])
    """
    match = _match_again if len(wanted) + len(stored) <= _FEW_BOXES else _match
    meets, missing = match(tuple(box for box, _ in wanted), tuple(box for box, _ in stored))
    pairs = [
        (narrow_to(wanted[want][1], into), narrow_to(stored[have][1], source)) for want, into, have, source in meets
    ]
    return BoxCopies(pairs, list(missing))


class _Meet(NamedTuple):
    """The common part of the boxes `want` and `have`: `into` of the former, `source` of the latter."""

    want: int
    into: Box
    have: int
    source: Box


def _match(wanted: tuple[Box, ...], stored: tuple[Box, ...]) -> tuple[tuple[_Meet, ...], tuple[Box, ...]]:
    """Returns the parts that meet, and what is missing."""
    index = BoxIndex(stored)
    meets: list[_Meet] = []
    missing: list[Box] = []
    for want, box in enumerate(wanted):
        sources: dict[Box, int] = {}
        for have, meet in index.meeting(box):
            sources[meet] = min(have, sources.get(meet, have))
        meets += [_Meet(want, meet.within(box), have, meet.within(stored[have])) for meet, have in sources.items()]
        if box not in sources:
            missing += uncovered(box, sources)
    return tuple(meets), tuple(missing)


_match_again = functools.lru_cache(maxsize=1024)(_match)  # the layers of a model are alike, and got again and again


def narrow_to(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns a view of a box of a tensor, or the tensor itself if that is all of it."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


# --- Contiguous runs in memory ---------------------------------------------------------------------------------------


Offsets = np.ndarray[Any, np.dtype[np.int64]]


def runs(shape: Sequence[int], stride: Sequence[int], limit: int) -> tuple[Offsets, int]:
    """Finds the contiguous runs of a box with these strides: offsets, in elements from its first, and their length.

    Where there are more than `limit`, runs are joined across the gaps between them, the innermost first.
    """
    if 0 in shape:
        return np.zeros(0, np.int64), 0
    sides = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1 and step > 0)
    length, outer = 1, list(sides)
    count = 1
    for _, size in sides:
        count *= size
    while outer and (outer[0][0] <= length or count > limit):
        step, size = outer.pop(0)
        length += (size - 1) * step
        count //= size
    offsets = np.zeros(1, np.int64)
    for step, size in reversed(outer):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return offsets, length


def cover(starts: Offsets, length: int, unit: int) -> tuple[Offsets, Offsets]:
    """Returns the fewest ranges of whole units that cover `length` from each of `starts`, sorted: starts and stops."""
    if not len(starts) or not length:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = np.unique(starts) // unit * unit
    last = -(-(np.unique(starts) + length) // unit) * unit
    new = np.empty(len(first), bool)
    new[0] = True
    np.greater(first[1:], last[:-1], out=new[1:])
    return first[new], last[np.append(new[1:], True)]


# --- Stored boxes ----------------------------------------------------------------------------------------------------


class StoredBox(NamedTuple):
    """A box of a stored tensor. Its bytes are contiguous.

    Attributes:
        place: of its first byte, in the data section.
        rank: who put it.
        checksum: xxh3-64 of its bytes; None where the store has none.
    """

    box: Box
    place: int
    rank: int
    checksum: bytes | None


Boxes = Mapping[int, tuple[StoredBox, ...]]  # by leaf; leaves that are not in it lie whole at their offset
NO_BOXES: Boxes = MappingProxyType({})
MOST_DIMENSIONS = 64  # of a tensor in boxes, as in torch's own operators
