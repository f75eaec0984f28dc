"""Tensors whose bytes lie in files: in one place, or in several boxes. How they are read in pieces of bounded size.

A value that is being converted is an ordinary one, of tensors over mapped files. A tensor that lies in several boxes is
a *stand-in* there: it has address, dtype and shape, and no memory; `Found` knows its boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore import structure
from memstore.engine import map_file
from memstore.sharding import Box, BoxIndex, whole
from memstore.structure import contiguous_stride, memory_of

PIECE = 4 << 20  # bytes that are put together at a time, where a tensor doesn't lie in order

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Boxes = tuple[tuple[Box, torch.Tensor], ...]


class Piece(NamedTuple):
    """Some bytes of a tensor in C order, from `start` on."""

    start: int
    nbytes: int
    box: Box | None  # None: they lie side by side in memory


class Leaf:
    """A tensor, and where its elements are.

    Args:
        boxes: they cover it, each element once.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], boxes: Boxes) -> None:
        self.dtype, self.shape, self.boxes = dtype, tuple(shape), boxes
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self._index: BoxIndex | None = None

    @property
    def lies_in_order(self) -> bool:
        """Whether its bytes are side by side in memory, in C order."""
        return not self.nbytes or (len(self.boxes) == 1 and self.boxes[0][1].is_contiguous())

    def cut(self) -> Boxes:
        """Its boxes, of which each lies in order, or takes little memory when it is put in order."""
        found: list[tuple[Box, torch.Tensor]] = []
        for box, tensor in self.boxes:
            if tensor.is_contiguous() or tensor.numel() * self.dtype.itemsize <= PIECE:
                found.append((box, tensor))
                continue
            for slab in slabs(box.shape, self.dtype.itemsize):
                offsets = tuple(map(sum, zip(box.offsets, slab.offsets, strict=True)))
                found.append((Box(offsets, slab.shape), tensor[slab.slices]))
        return tuple(found)

    def pieces(self, most: int = PIECE) -> Iterator[Piece]:
        """All of its bytes, in order."""
        if self.lies_in_order:
            for start in range(0, self.nbytes, most):
                yield Piece(start, min(most, self.nbytes - start), None)
            return
        at = 0
        for box in slabs(self.shape, self.dtype.itemsize):
            nbytes = math.prod(box.shape) * self.dtype.itemsize
            yield Piece(at, nbytes, box)
            at += nbytes

    def read(self, piece: Piece) -> Bytes:
        """The bytes of a piece: those in memory, or a copy that is put together."""
        if piece.box is None:
            return memory_of(self.boxes[0][1])[piece.start : piece.start + piece.nbytes]
        # Not by malloc, which keeps tens of megabytes a thread for such pieces, since other threads free them.
        memory: Bytes = np.asarray(map_file(None, piece.nbytes))
        flat = torch.from_numpy(memory)  # pyright: ignore[reportUnknownMemberType]
        made = flat.view(*piece.box.shape, self.dtype.itemsize)
        if self._index is None:
            self._index = BoxIndex([box for box, _ in self.boxes])
        for number, meet in self._index.meeting(piece.box):
            box, tensor = self.boxes[number]
            made[meet.within(piece.box).slices].copy_(as_bytes(tensor)[meet.within(box).slices])
        return memory

    def whole(self) -> torch.Tensor:
        """The tensor itself, in memory if it doesn't lie in order."""
        if len(self.boxes) == 1:
            return self.boxes[0][1]
        made = torch.empty(self.shape, dtype=self.dtype)
        memory = memory_of(made)
        for piece in self.pieces():
            memory[piece.start : piece.start + piece.nbytes] = self.read(piece)
        return made


def slabs(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes of up to PIECE bytes, whose elements follow each other in C order. Of one element at least."""
    dim, inner = len(shape), itemsize
    while dim and inner * shape[dim - 1] <= PIECE:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield whole(shape)
        return
    dim -= 1
    step = max(PIECE // inner, 1)
    for outer in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            sizes = (1,) * dim + (min(step, shape[dim] - start), *shape[dim + 1 :])
            yield Box((*outer, start, *(0,) * (len(shape) - dim - 1)), sizes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with a last dimension of the bytes of an element: so every dtype can be copied."""
    size = tensor.itemsize
    return structure.over(
        tensor.untyped_storage(),
        torch.uint8,
        int(tensor.storage_offset()) * size,
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
    )


def stand_in(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of zeros that takes no memory as long as nobody looks at it. It has elements."""
    mapping = map_file(None, math.prod(shape) * dtype.itemsize)
    memory: Bytes = np.asarray(mapping)
    storage = torch.from_numpy(memory).untyped_storage()  # pyright: ignore[reportUnknownMemberType]
    storage._memstore_mapping = mapping  # pyright: ignore[reportAttributeAccessIssue] - which keeps it mapped
    return structure.over(storage, dtype, 0, shape, contiguous_stride(shape))


class Found:
    """What was found in a source.

    Args:
        value: as a load of the source would give it, its tensors over mapped files, or stand-ins.
        boxes: of the stand-ins, by their addresses.
        metadata: texts that files have beside their tensors (`__metadata__` of safetensors), by the files' paths.
    """

    def __init__(
        self,
        value: Any,
        boxes: Mapping[int, Boxes] | None = None,
        metadata: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.value = value
        self.metadata: Mapping[str, Mapping[str, str]] = metadata or {}
        self._boxes: Mapping[int, Boxes] = boxes or {}

    def leaf(self, tensor: torch.Tensor) -> Leaf:
        """Where a tensor of the value has its bytes."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        boxes = self._boxes.get(plain.data_ptr()) if plain.numel() else None
        if boxes is None:
            boxes = ((whole(plain.shape), plain),)
        return Leaf(plain.dtype, plain.shape, boxes)

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.numel()) and tensor.data_ptr() in self._boxes

    def with_value(self, value: Any) -> Found:
        """Another value of the same tensors."""
        return Found(value, self._boxes)


class Assembly:
    """Makes the tensors of a value of boxes in files, and remembers the boxes of those that need a stand-in."""

    def __init__(self) -> None:
        self.boxes: dict[int, Boxes] = {}

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], boxes: Boxes) -> torch.Tensor:
        """A tensor of these boxes, which cover it."""
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        if len(boxes) == 1:
            return boxes[0][1]
        made = stand_in(dtype, shape)
        self.boxes[made.data_ptr()] = boxes
        return made
