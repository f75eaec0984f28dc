"""Where the elements of an n-d box lie: contiguous runs, and the pages that cover many of them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Offsets = np.ndarray[Any, np.dtype[np.int64]]


def runs(shape: Sequence[int], stride: Sequence[int], limit: int) -> tuple[Offsets, int]:
    """The contiguous runs of a box with these strides: their offsets, in elements from its first, and their length.

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
    """The fewest ranges of whole units that cover `length` from each of `starts`, sorted: their starts and stops."""
    if not len(starts) or not length:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = np.unique(starts) // unit * unit
    last = -(-(np.unique(starts) + length) // unit) * unit
    new = np.empty(len(first), bool)
    new[0] = True
    np.greater(first[1:], last[:-1], out=new[1:])
    return first[new], last[np.append(new[1:], True)]
