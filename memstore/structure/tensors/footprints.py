"""The bytes that tensors reach over in memory, and whether their storages still have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.structure.tensors import traits
from memstore.structure.tensors.gaps import has_gaps

_storage = torch.Tensor.untyped_storage
_storage_size = torch.UntypedStorage.nbytes
_offset: Any = torch.Tensor.storage_offset  # an int, or in a trace a symbol


class Locations(NamedTuple):
    """Where tensors lie in memory."""

    addresses: list[int]
    sizes: list[int]  # of their storages, in bytes
    offsets: list[int]  # in these, in elements


def locate_tensors(tensors: Sequence[torch.Tensor], addresses: list[int]) -> Locations:
    """Takes 0.12 µs a tensor."""
    return Locations(addresses, list(map(_storage_size, map(_storage, tensors))), list(map(_offset, tensors)))


class Footprints:
    """The bytes that the tensors of one structure reach over.

    Attributes:
        spans: bytes from the first to the last element of each, gaps included.
        gaps: for each, whether some of its span is none of its elements.
    """

    __slots__ = ("_itemsizes", "_whole", "gaps", "spans")

    def __init__(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]]
    ) -> None:
        reaches = list(map(traits.reach, shapes, strides))
        self._whole = [reach * dtype.itemsize for reach, dtype in zip(reaches, dtypes, strict=True)]
        self._itemsizes = np.array([dtype.itemsize for dtype in dtypes], np.int64)
        self.spans = np.array(self._whole, np.int64)
        self.gaps = list(map(has_gaps, shapes, strides))

    def missing(self, locations: Locations) -> list[int]:
        """The tensors whose storages lack some of their bytes.

        A storage can be shrunk under its tensors: FSDP frees parameters by `resize_(0)`. Their shapes stay, and a copy
        would read whatever lies at the address that is left.
        """
        addresses, sizes, offsets = locations
        if sizes == self._whole and not any(offsets) and 0 not in addresses:
            return []
        starts = np.array(offsets, np.int64) * self._itemsizes
        short = starts + self.spans > np.array(sizes, np.int64)
        nowhere = np.array(addresses, np.int64) <= starts  # of a storage without memory: torch adds the offset to 0
        return np.flatnonzero((short | nowhere) & (self.spans > 0)).tolist()
