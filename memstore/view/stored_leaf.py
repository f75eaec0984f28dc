"""StoredLeaf: what lazy leaves read. Every read of a stored leaf passes here.

A box is asked for by a tensor that has its dtype, shape and strides, and whose offset counts from the first element
that the leaf's lazy tensors can show. The memory of that tensor is not looked at.

    LeafBytes    a leaf that lies whole in one mapping: it is looked at where it lies
    LeafBoxes    a leaf in boxes that lie apart: those that are needed are put together
"""

from __future__ import annotations

import torch

from memstore.structure import has_gaps, pack, traits
from memstore.view.source import Source


class StoredLeaf:
    """The elements of one stored leaf.

    Attributes:
        source: the version that it is a part of.
        place: the device that values go to when they are read; None: the CPU.
        wrapped: the device of its lazy tensors, if they have no memory; None: they lie over the leaf's.
    """

    __slots__ = ("place", "source", "wrapped")

    source: Source
    place: torch.device | None
    wrapped: torch.device | None

    def read(self, box: torch.Tensor) -> torch.Tensor:
        """The values of a box, on their device: checked, counted, and on a disk asked for all at once.

        Not to be written, nor to be given to a user.
        """
        raise NotImplementedError

    def copy_to(self, target: torch.Tensor, box: torch.Tensor) -> None:
        """Reads a box into memory that the caller has, of the same shape and dtype."""
        raise NotImplementedError

    def prefetch(self, box: torch.Tensor, rows: torch.Tensor) -> None:
        """Starts to read rows of a box from a disk, and doesn't wait."""
        raise NotImplementedError

    def is_cold(self, box: torch.Tensor, rows: torch.Tensor) -> bool:
        """Whether some of the rows are to come from a disk."""
        raise NotImplementedError


def nbytes_of(values: torch.Tensor) -> int:
    """Of the elements; those that several indices share count once."""
    shape, stride = values.shape, values.stride()
    count = pack(shape, stride).elements if has_gaps(shape, stride) else traits.reach(shape, stride)
    return count * values.dtype.itemsize
