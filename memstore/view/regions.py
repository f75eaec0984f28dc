"""Regions: which elements of a tensor a strided view of it looks at. Pure arithmetic.

A view that was made by slicing, selecting, transposing, expanding or unfolding looks at a range of each dimension. One
that joins dimensions (`flatten`), or runs across them (`diagonal`), doesn't: then the region is the fewest rows that
have all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from memstore.structure import contiguous_stride


class Region(NamedTuple):
    """A product of ranges, none of them empty; and where the view lies in it.

    Attributes:
        ranges: one for each dimension of the tensor.
        dims: for each dimension of the view, the one of the tensor that it runs along, and how many steps of its range
            it takes at once; None where it doesn't move. None for rows: the view lies in them as they lie in memory.
        stride, offset: of the view, in a contiguous tensor that has just the region.
    """

    ranges: tuple[range, ...]
    dims: tuple[tuple[int, int] | None, ...] | None
    stride: tuple[int, ...]
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def is_pickable(self) -> bool:
        """Whether no two dimensions of the view run along the same one of the tensor."""
        along = [found[0] for found in self.dims or () if found is not None]
        return self.dims is not None and len(set(along)) == len(along)


def region_of(whole: Sequence[int], shape: Sequence[int], stride: Sequence[int], offset: int) -> Region:
    """Of a view with these strides, in elements, that is not empty and lies in a contiguous tensor of shape `whole`."""
    steps = contiguous_stride(whole)
    starts = _coordinates(steps, offset)
    along: list[list[tuple[int, int, int]]] = [[] for _ in whole]  # for each dimension: view's, its size, its step
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        if size == 1 or step == 0:
            continue
        on = next((d for d, unit in enumerate(steps) if whole[d] > 1 and unit <= step), len(whole) - 1)
        if step % steps[on]:
            return _rows(whole, steps, shape, stride, offset)
        along[on].append((dim, size, step // steps[on]))
    ranges: list[range] = []
    dims: list[tuple[int, int] | None] = [None] * len(shape)
    for on, (start, found) in enumerate(zip(starts, along, strict=True)):
        stop = start + sum((size - 1) * step for _, size, step in found) + 1
        if stop > whole[on]:
            return _rows(whole, steps, shape, stride, offset)
        unit = gcd(*(step for _, _, step in found)) or 1
        ranges.append(range(start, stop, unit))
        for dim, _, step in found:
            dims[dim] = on, step // unit
    inner = contiguous_stride([len(one) for one in ranges])
    moved = tuple(
        step if found is None else inner[found[0]] * found[1] for step, found in zip(stride, dims, strict=True)
    )
    return Region(tuple(ranges), tuple(dims), moved, 0)


def _rows(
    whole: Sequence[int], steps: Sequence[int], shape: Sequence[int], stride: Sequence[int], offset: int
) -> Region:
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    first_at, last_at = _coordinates(steps, offset), _coordinates(steps, last)
    ranges: list[range] = []
    differs = False
    start = 0
    for one, other, size, step in zip(first_at, last_at, whole, steps, strict=True):
        ranges.append(range(size) if differs else range(one, other + 1))
        start += 0 if differs else one * step
        differs = differs or one != other
    return Region(tuple(ranges), None, tuple(stride), offset - start)


def _coordinates(steps: Sequence[int], offset: int) -> list[int]:
    found: list[int] = []
    for step in steps:
        at, offset = divmod(offset, step)
        found.append(at)
    return found


def all_of(whole: Sequence[int], stride: Sequence[int], offset: int) -> Region:
    """The region of a view that is read as a part of all."""
    return Region(tuple(map(range, whole)), None, tuple(stride), offset)


def common(ranges: Sequence[range], offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...] | None:
    """Which members of each range lie in a box, by their places in the range. None if there is none."""
    found: list[slice] = []
    for one, start, size in zip(ranges, offsets, shape, strict=True):
        first = max(-(-(start - one.start) // one.step), 0)
        stop = min(-(-(start + size - one.start) // one.step), len(one))
        if first >= stop:
            return None
        found.append(slice(first, stop))
    return tuple(found)


def within(ranges: Sequence[range], places: Sequence[slice], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Those members, as slices of a box that has them."""
    return tuple(
        slice(one[at.start] - start, one[at.stop - 1] - start + 1, one.step)
        for one, at, start in zip(ranges, places, offsets, strict=True)
    )
