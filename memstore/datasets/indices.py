"""What the index of a dataset means: a leaf by its name, one row, or places of rows."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import torch

from memstore.rows import Index

_BOOLEAN = (torch.bool, np.dtype(np.bool_))


class NoLeafError(KeyError):
    """A KeyError whose message is printed as it is, without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_name(index: Any) -> tuple[str, ...] | None:
    """The names that lead to a leaf, or to a part of the spec, if the index is those: a str, or a tuple of them."""
    if isinstance(index, str):
        return (index,)
    return index if isinstance(index, tuple) and index and all(isinstance(name, str) for name in index) else None  # type: ignore[reportUnknownVariableType]


def as_row(index: Any) -> int | None:
    """The number of one row, if the index is one: a Python integer, numpy's, or a tensor without dimensions.

    Raises TypeError for a tuple: `dataset[3, 0]` is the first element of a row elsewhere, and means nothing here.
    """
    if isinstance(index, tuple):
        parts = cast("tuple[Any, ...]", index)
        column = next((one for one in parts if isinstance(one, str)), None)
        first = "the rows first, as in dataset[3][0], or give a list of rows"
        instead = first if column is None else f"one after the other, as in dataset[{column!r}][0:2]"
        raise TypeError(
            f"{index!r:.100} is a tuple, and a dataset is indexed by rows, or by the name of a column: take {instead}"
        )
    if type(index) is bool or getattr(index, "dtype", None) in _BOOLEAN or getattr(index, "ndim", 0):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def in_range(row: int, length: int, key: str) -> int:
    """From 0 on. Raises IndexError."""
    if not -length <= row < length:
        if not length:
            raise IndexError(f"row {row:,} of {key!r}, which has no rows yet")
        allowed = f"from {-length:,} to {length - 1:,}"
        raise IndexError(f"row {row:,} of {key!r}, which has {length:,} by now: rows are {allowed}")
    return row + length if row < 0 else row


def places_of(index: Any, length: int, key: str) -> tuple[slice | np.ndarray[Any, Any], int]:
    """The rows that are to be written, as numpy takes them, and how many they are.

    Raises IndexError, TypeError, ValueError.
    """
    if not isinstance(index, slice):
        rows = Index(index).rows(length, repr(key)).numpy()
        return rows, len(rows)
    start, stop, step = index.indices(length)
    count = len(range(start, stop, step))
    if not count:  # a start or stop of -1, before the first row, would be taken for the last one
        return slice(0, 0), 0
    return slice(start, None if stop < 0 else stop, step), count
