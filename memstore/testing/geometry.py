"""Where the elements of tensors and arrays lie: strides, how far they reach, and which tensors overlap.

Made for `equality` alone, and on purpose not with what the library has for it: a mistake there must show here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def shares_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor can have the array's strides, and memstore stores it as one."""
    return (
        array.dtype.char in "efdFDbBhHiIlLqQ?"
        and array.dtype.isnative
        and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    )


def steps_of(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The strides in elements."""
    return tuple(step // array.itemsize for step in array.strides) if array.itemsize else array.strides


def c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()


def significant(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    """Without the strides of dimensions of one element, which mean nothing."""
    return tuple(step for size, step in zip(shape, steps, strict=True) if size > 1)


def reach(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """The elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


def has_gaps(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether memory between the first and the last element is none of the elements."""
    if 0 in shape or significant(shape, steps) == significant(shape, c_order(shape)):
        return False
    return _places(shape, steps) < reach(shape, steps)


def is_packed(shape: tuple[int, ...], steps: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether elements have several indices each, as if expanded, and `packed` are their strides without gaps."""
    places = _places(shape, steps)
    return places < math.prod(shape) and reach(shape, packed) == places == _places(shape, packed)


def _places(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """How many elements in memory there are."""
    seen = np.zeros(1, np.int64)
    for size, step in zip(shape, steps, strict=True):
        if size > 1 and step:
            seen = np.unique(seen[:, None] + np.arange(size) * step)
    return len(seen)


def span(tensor: torch.Tensor) -> int:
    return reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def tied(tensors: list[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """The leaves that stay tied, as tuples of their numbers: those whose memory overlaps.

    A leaf with gaps only if others without gaps cover it, or with leaves of the very same elements.
    """
    ranges = sorted((str(t.device), t.data_ptr(), t.data_ptr() + span(t), i) for i, t in enumerate(tensors))
    gaps = {i for i, t in enumerate(tensors) if has_gaps(t.shape, t.stride())}
    clusters: list[tuple[str, int, int, list[int]]] = []
    for device, start, stop, i in ranges:
        if i in gaps:
            continue
        if clusters and device == clusters[-1][0] and start < clusters[-1][2]:
            _, first, end, members = clusters.pop()
            clusters.append((device, first, max(end, stop), [*members, i]))
        else:
            clusters.append((device, start, stop, [i]))
    alike: dict[Any, list[int]] = {}
    for device, start, stop, i in ranges:
        if i in gaps:
            covers = [
                members for where, first, end, members in clusters if where == device and first <= start < stop <= end
            ]
            look = (device, start, tensors[i].dtype, tensors[i].shape, tensors[i].stride())
            (covers[0] if covers else alike.setdefault(look, [])).append(i)
    for members in [*(members for *_, members in clusters), *alike.values()]:
        yield tuple(sorted(members))
