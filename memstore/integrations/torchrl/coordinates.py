"""Which slots an index means, and which elements of them, where elements have several dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from memstore.integrations.torchrl.journal import Words
from memstore.rows import Index


def row_numbers(index: Any, count: int, key: str) -> Words:
    """The slots of an index along the first dimension: a slice, a list, a range, a mask, integers of any shape.

    Raises IndexError.
    """
    if isinstance(index, torch.Tensor) and index.dtype != torch.bool:
        index = index.cpu().flatten()
    return Index(index).rows(count, repr(key)).numpy()


@dataclass(frozen=True, slots=True)
class Cells:
    """Elements of rows: `rows`, each once, and where in a copy of these rows the elements are."""

    rows: Words
    index: tuple[Any, ...]

    def put(self, rows: Any, value: Any) -> None:
        rows[self.index] = value


def cells_of(index: tuple[Any, ...], count: int) -> Cells:
    """Of an index whose first part is integers, as a tensor, an int or a slice. Raises IndexError, TypeError."""
    first, *others = index
    if isinstance(first, slice):
        rows = np.arange(count, dtype=np.int64)[first]
        return Cells(rows, (slice(None), *others))
    first = torch.as_tensor(first)
    if first.dtype == torch.bool or first.is_floating_point():
        raise TypeError(f"elements are written by integers for each dimension, and not by {first.dtype}")
    if first.numel() and not -count <= int(first.min()) <= int(first.max()) < count:
        raise IndexError(f"rows {int(first.min()):,} to {int(first.max()):,} of a storage that has {count:,}")
    rows, places = torch.unique(torch.where(first < 0, first + count, first), return_inverse=True)
    return Cells(cast("Words", rows.numpy()), (places, *others))
