"""What is wanted of a stored box: which runs of its file have it. Of a column these are its rows, and not all between.

Runs that lie near each other are read as one, with the gaps between them: a read of its own costs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch

from memstore.sharding import Box
from memstore.snapshot.storage import FilePart
from memstore.structure import over, traits

_JOINED = 64 << 10  # bytes of a gap: to read them takes as long as what Python does for a run of its own


class _Runs(NamedTuple):
    """Where the elements of a part lie in its file: as many runs as the first dimensions have indices.

    Attributes:
        dims: how many dimensions count the runs; the others lie within each.
        length: of a run, in elements, with the gaps in it.
        is_dense: whether there are no gaps in it.
    """

    dims: int
    length: int
    is_dense: bool


class BoxPart:
    """A part of a stored box, and the tensor that it goes to.

    Args:
        file, offset, shape: of the box: its file, where it starts there in bytes, its shape.
        inner: which part of it.
        target: a tensor that has just these elements.
    """

    def __init__(self, file: int, offset: int, shape: tuple[int, ...], inner: Box, target: torch.Tensor) -> None:
        self.file, self.offset, self.shape, self.inner, self.target = file, offset, shape, inner, target

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        return traits.contiguous_stride(self.shape)

    @cached_property
    def _runs(self) -> _Runs:
        shape, steps, item = self.inner.shape, self._steps, self.target.itemsize
        dims, length, elements = len(shape), 1, 1
        while dims and (shape[dims - 1] == 1 or (steps[dims - 1] - length) * item <= _JOINED):
            dims -= 1
            length += (shape[dims] - 1) * steps[dims]
            elements *= shape[dims]
        return _Runs(dims, length, length == elements)

    @cached_property
    def start(self) -> int:
        """Of its first element in the file."""
        first = sum(at * step for at, step in zip(self.inner.offsets, self._steps, strict=True))
        return self.offset + first * self.target.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Of the memory that all its runs take."""
        dims, length, _ = self._runs
        return traits.count(self.inner.shape[:dims]) * length * self.target.itemsize

    # --- straight into the target -------------------------------------------------------------------------------------

    @property
    def is_direct(self) -> bool:
        """Whether the elements of each run lie in the target as in the file."""
        target, (dims, _, is_dense) = self.target, self._runs
        return is_dense and target.is_cpu and traits.is_c_ordered(target.shape[dims:], target.stride()[dims:])

    def into_target(self) -> Iterator[FilePart]:
        """For `is_direct`."""
        target = self.target
        nbytes = traits.reach(target.shape, target.stride()) * target.itemsize
        start = int(target.storage_offset()) * target.itemsize
        flat = over(target.untyped_storage(), torch.uint8, start, (nbytes,), (1,))
        return self._parts(flat.numpy(), target.stride())

    # --- through memory -----------------------------------------------------------------------------------------------

    def into_memory(self, memory: Any) -> Iterator[FilePart]:
        """Args: memory: of `nbytes`."""
        return self._parts(memory, self._memory_stride())

    def copy_from(self, memory: Any) -> None:
        """What was read into memory, into the target."""
        target = self.target
        storage = torch.from_numpy(memory).untyped_storage()
        source = over(storage, target.dtype, 0, self.inner.shape, self._memory_stride())
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            traits.copyable(target).copy_(traits.copyable(source))

    def pieces(self, budget: int) -> Iterator[BoxPart]:
        """Halves, along the first dimension that can be halved, until each takes no more memory."""
        inner = self.inner
        if self.nbytes <= budget or max(inner.shape, default=1) == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(inner.shape) if size > 1)
        half = inner.shape[dim] // 2
        for start, size in ((0, half), (half, inner.shape[dim] - half)):
            offsets = tuple(at + start * (i == dim) for i, at in enumerate(inner.offsets))
            shape = tuple(size if i == dim else length for i, length in enumerate(inner.shape))
            target = self.target.narrow(dim, start, size)
            yield from BoxPart(self.file, self.offset, self.shape, Box(offsets, shape), target).pieces(budget)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _memory_stride(self) -> tuple[int, ...]:
        """In which runs lie one behind the other."""
        dims, length, _ = self._runs
        outer = traits.contiguous_stride(self.inner.shape[:dims])
        return (*(step * length for step in outer), *self._steps[dims:])

    def _parts(self, memory: Any, stride: Sequence[int]) -> Iterator[FilePart]:
        dims, length, _ = self._runs
        item, start = self.target.itemsize, self.start
        for index in product(*map(range, self.inner.shape[:dims])):
            there = sum(at * step for at, step in zip(index, self._steps, strict=False)) * item
            here = sum(at * step for at, step in zip(index, stride, strict=False)) * item
            yield FilePart(start + there, memory[here : here + length * item])
