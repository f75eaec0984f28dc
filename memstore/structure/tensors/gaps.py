"""Tensors whose elements don't lie side by side in memory, and the strides that they have once the gaps are left out.

A column of a matrix has gaps. So has a column that is expanded: its few elements stand for many indices, but what lies
between them in memory is still not the tensor's. So whether there are gaps doesn't follow from the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memstore.structure.tensors import traits


class Packing(NamedTuple):
    """How a tensor is stored without gaps, each element once.

    Attributes:
        shape, stride: of a view that has each element of the tensor once; it is copied to contiguous memory.
        kept: the strides over this memory with which the tensor has its own shape again.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def elements(self) -> int:
        return traits.count(self.shape)


def has_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether memory between the first and the last element is none of the tensor's.

    Dimensions taken by ascending strides, each copies what the ones before it cover, one stride further. So a stride
    beyond what they cover leaves a gap, which no larger stride can fill.
    """
    covered = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if step > covered:
                return 0 not in shape
            covered += (size - 1) * step
    return False


def pack(shape: Sequence[int], stride: Sequence[int]) -> Packing:
    """Of a tensor with elements. One that repeats none is packed to be contiguous."""
    runs = _runs(shape, stride)
    if runs is not None and traits.count(runs.shape) < traits.count(shape):
        return runs
    once = tuple(size if step else 1 for size, step in zip(shape, stride, strict=True))
    kept = zip(traits.contiguous_stride(once), stride, shape, strict=True)
    return Packing(once, tuple(stride), tuple(new if old or size == 1 else 0 for new, old, size in kept))


def _runs(shape: Sequence[int], stride: Sequence[int]) -> Packing | None:
    """The elements as runs of runs without overlaps: each is as many copies of the one before, at a larger stride.

    None where dimensions overlap so that they are no such runs, as strides 4 and 6 over pairs do.
    """
    counts, steps = [1], [1]  # of the runs, the innermost first
    inner = 1  # the packed stride of the outermost run
    reach = 1  # elements from the first to the last one so far, gaps included
    kept = list(stride)
    for dim in sorted(range(len(shape)), key=lambda dim: stride[dim]):
        step, size = stride[dim], shape[dim]
        if size == 1 or not step:
            continue
        if step % steps[-1] == 0 and step // steps[-1] <= counts[-1]:  # it goes on with this run, or overlaps it
            counts[-1] += (size - 1) * (step // steps[-1])
            kept[dim] = step // steps[-1] * inner
        elif step >= reach:
            kept[dim] = inner = inner * counts[-1]
            counts.append(size)
            steps.append(step)
        else:
            return None
        reach += (size - 1) * step
    return Packing(tuple(counts[::-1]), tuple(steps[::-1]), tuple(kept))
