"""A batch as DataLoader takes it: a list with an object a row, which its default collate function makes whole again.

What `__getitems__` returns is collated: as torch has it, a list of rows that are then stacked, one small tensor by
another. A stored batch is read whole, so its rows only say which batch they are of. `default_collate` has a table of
functions by type, for others to extend; there `Row` finds `collate_rows`, which returns the batch as it was read.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from memstore.dataloader.lending import begin_batch
from memstore.dataloader.rows_of_value import row_of
from memstore.rows import read_rows, read_rows_to


class Batch:
    """What was read, and perhaps transformed, at once."""

    __slots__ = ("count", "value")

    def __init__(self, value: Any, count: int) -> None:
        self.value, self.count = value, count


def read_batch(source: Any, index: Any) -> Any:
    """As `read_rows`; in a worker of a DataLoader into memory that it shares with its parent."""
    return read_rows(source, index) if get_worker_info() is None else read_rows_to(begin_batch(), source, index)


def as_rows(value: Any, count: int) -> list[Row]:
    """A batch of `count` rows, as `__getitems__` of a data set returns it."""
    batch = Batch(value, count)
    return [Row(batch, place) for place in range(count)]


class Row:
    """One row of a batch, taken out of it only when somebody asks: a collate function of a user.

    Attributes:
        batch: the batch that the row is of.
        place: where in it.
    """

    __slots__ = ("batch", "place")

    def __init__(self, batch: Batch, place: int) -> None:
        self.batch, self.place = batch, place

    @property
    def value(self) -> Any:
        """The row: the stored containers, with tensors without the dimension of rows."""
        return row_of(self.batch.value, self.place)

    def __getitem__(self, key: Any) -> Any:
        """`row.value[key]`, so that most collate functions work as they are."""
        return self.value[key]

    def __repr__(self) -> str:
        return f"<row {self.place} of a batch of {self.batch.count}; .value takes it out>"


def collate_rows(rows: Sequence[Row], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """The batch, if these are its rows in their order; else they are stacked."""
    batch = rows[0].batch
    if len(rows) == batch.count and all(row.batch is batch and row.place == i for i, row in enumerate(rows)):
        return batch.value
    return collate([row.value for row in rows], collate_fn_map=collate_fn_map)


default_collate_fn_map[Row] = collate_rows
