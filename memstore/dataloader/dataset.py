"""StoreDataset: a stored value as the data set of a DataLoader, and its batches as DataLoader takes them.

`count_rows` checks that a value has rows. `read_batch` reads rows, in a worker into shared memory (blocks.py). What
`__getitems__` returns is collated: as torch has it, a list of rows that are then stacked, one small tensor by another.
A stored batch is read whole, so its rows only say which batch they are of (`as_rows`). `default_collate` has a table of
functions by type, for others to extend; there `BatchRow` finds `collate_rows`, which returns the batch as it was read.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from memstore._compat import collate, collate_functions
from memstore._wording import an, count_of
from memstore.dataloader.blocks import begin_batch
from memstore.errors import UnsupportedValueError
from memstore.listing import check_store
from memstore.rows import of_key, prefetch_rows, read_rows, read_rows_to
from memstore.structure import modes, render_path

# --- The data set ----------------------------------------------------------------------------------------------------


class HasView(Protocol):
    """The part of a Store that is used here. (Its module imports that of datasets, which imports this package.)"""

    def view(self, key: str, *, device: torch.device | str | None = None) -> Any: ...


@modes.uncompiled_methods
class StoreDataset(Dataset[Any]):
    """The rows of a stored value, for torch's DataLoader.

    A batch is read by one `read_rows`, and has the containers that were put: TensorDict, tensorclass, dict, list,
    tuple, or one tensor. DataLoader needs no `collate_fn`. Its workers read into shared memory, so a batch isn't copied
    on its way to the training process. A data set stays at the version that it found; to see a later one, make another.

    It is pickled as a reference, so spawned workers receive some hundred bytes, and map the version themselves. (For
    this the store must be open for writing, because a reference takes a lease.)

    Args:
        store: the store.
        key: a value whose tensors all have the same number of rows, along their first dimension. They are read to the
            CPU.
        transform: called with each batch in the process that reads it; the DataLoader returns its result. For `data[3]`
            it is called with that row. It may write to its argument.

    Raises:
        KeyNotFoundError: the store has no such key.
        UnsupportedValueError: the value has a leaf without rows, or with another number of rows.

    Example:
        >>> import memstore, tempfile, torch
        >>> from torch.utils.data import DataLoader
        >>> store = memstore.open(tempfile.mkdtemp())
        >>> version = store.put("train", {"x": torch.arange(6.0).reshape(3, 2), "y": torch.arange(3)})
        >>> data = memstore.StoreDataset(store, "train")
        >>> [batch["y"] for batch in DataLoader(data, batch_size=2)]
        [tensor([0, 1]), tensor([2])]
    """

    def __init__(self, store: HasView, key: str, *, transform: Callable[[Any], Any] | None = None) -> None:
        found = getattr(store, "view", None)
        if found is None or isinstance(store, (str, os.PathLike)) or inspect.iscoroutinefunction(found):
            check_store(store, key)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is a function of a batch, and not {transform!r:.100}")
        self.key, self.transform = key, transform
        self._view = store.view(key, device="cpu")
        self._length = count_rows(self._view, key)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Returns one row for an integer, and a batch for a list, slice, mask or tensor, as `read_rows` takes them.

        Raises:
            IndexError: a row out of range; the message names the range.
            TypeError: no index of rows.
        """
        try:
            if isinstance(index, (int, np.integer)) or (
                isinstance(index, (torch.Tensor, np.ndarray)) and not index.ndim
            ):
                batch = read_rows(self._view, [operator.index(index)])
                with modes.put_aside():
                    found = row_of(batch, 0)
            else:
                found = read_batch(self._view, index)
        except IndexError as error:
            raise of_key(error, self.key) from None
        return found if self.transform is None else self.transform(found)

    def __getitems__(self, index: Sequence[int]) -> list[BatchRow]:
        """Reads the rows of one batch for DataLoader, whose default collate function makes them whole again."""
        return as_rows(self[index], len(index))

    def prefetch(self, rows: Any) -> None:
        """Lets the disk read rows that will be asked for, and doesn't wait: see `prefetch_rows`."""
        prefetch_rows(self._view, rows)

    def __repr__(self) -> str:
        return f"<memstore.StoreDataset {self.key!r}, {count_of(self._length, 'row', 'rows')}>"


# --- Batches, as DataLoader takes them -------------------------------------------------------------------------------


class ReadBatch:
    """Rows that were read, and perhaps transformed, at once."""

    __slots__ = ("count", "value")

    def __init__(self, value: Any, count: int) -> None:
        self.value, self.count = value, count


def read_batch(source: Any, index: Any) -> Any:
    """Reads rows as `read_rows` does; in a worker of a DataLoader into memory that it shares with its parent."""
    return read_rows(source, index) if get_worker_info() is None else read_rows_to(begin_batch(), source, index)


def as_rows(value: Any, count: int) -> list[BatchRow]:
    """Splits a batch of `count` rows, as `__getitems__` of a data set returns it."""
    batch = ReadBatch(value, count)
    return [BatchRow(batch, place) for place in range(count)]


class BatchRow:
    """One row of a batch, taken out of it only when somebody asks: a collate function of a user.

    Attributes:
        batch: the batch that the row is of.
        place: where in it.
    """

    __slots__ = ("batch", "place")

    def __init__(self, batch: ReadBatch, place: int) -> None:
        self.batch, self.place = batch, place

    @property
    def value(self) -> Any:
        """The row: the stored containers, with tensors without the dimension of rows."""
        return row_of(self.batch.value, self.place)

    def __getitem__(self, key: Any) -> Any:
        """Returns `row.value[key]`, so that most collate functions work as they are."""
        return self.value[key]

    def __repr__(self) -> str:
        return f"<row {self.place} of a batch of {self.batch.count}; .value takes it out>"


def collate_rows(rows: Sequence[BatchRow], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Returns the batch, if these are its rows in their order; else it stacks them."""
    batch = rows[0].batch
    if len(rows) == batch.count and all(row.batch is batch and row.place == i for i, row in enumerate(rows)):
        return batch.value
    return collate([row.value for row in rows], collate_fn_map=collate_fn_map)


collate_functions[BatchRow] = collate_rows


# --- A value as rows -------------------------------------------------------------------------------------------------


_Path = tuple[Any, ...]


def count_rows(value: Any, key: str) -> int:
    """Returns how many rows every tensor of a stored value has.

    Raises:
        UnsupportedValueError: something in the value has no rows, or another number of them.
    """
    counts = {render_path(path): _count(leaf, path, key) for path, leaf in _leaves(value, ())}
    if not counts:
        raise UnsupportedValueError(f"the value of {key!r} has no tensor, and so no rows", key=key)
    found = sorted(set(counts.values()))
    if len(found) > 1:
        one, other = (next(name for name, count in counts.items() if count == number) for number in found[:2])
        raise UnsupportedValueError(
            f"the tensors of {key!r} have different numbers of rows: {one} has {found[0]:,}, {other} has {found[1]:,}. "
            "Put tensors that don't belong to the rows under a key of their own",
            key=key,
        )
    return found[0]


def _count(leaf: Any, path: _Path, key: str) -> int:
    if not isinstance(leaf, torch.Tensor):
        why = f"is {an(type(leaf))}, and no tensor"
    elif leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        why = f"is a sparse, nested or quantized tensor ({leaf.layout})"
    elif not leaf.ndim:
        why = "has no dimension"
    else:
        return leaf.shape[0]
    raise UnsupportedValueError(
        f"{render_path(path)} of {key!r} {why}: a row is one element of the first dimension of each tensor. "
        "Put it under a key of its own, or as a tensor with a row for each",
        key=key,
    )


def row_of(batch: Any, place: int) -> Any:
    """Returns one row of a batch: the same containers, with the part of each tensor at `place`.

    Raises:
        UnsupportedValueError: something in the batch, which a transform may have made, has no rows.
    """
    if isinstance(batch, torch.Tensor) or _is_collection(batch):
        return batch[place]
    if isinstance(batch, dict):
        row = copy.copy(batch)
        row.update({key: row_of(value, place) for key, value in batch.items()})
        return row
    if isinstance(batch, (list, tuple)):
        values = [row_of(value, place) for value in batch]
        kind: Any = type(batch)
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    raise UnsupportedValueError(
        f"a batch has {an(type(batch))}, which has no rows. To take single rows, let transform= return "
        "tensors, and TensorDicts, dicts, lists and tuples of them"
    )


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    entries: Any = None
    if isinstance(value, dict) or _is_collection(value):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    if entries is None:
        yield path, value
        return
    for name, entry in entries:
        yield from _leaves(entry, (*path, name))


def _is_collection(value: Any) -> bool:
    """Returns whether it is a TensorDict or a tensorclass, and neither a lazy stack nor a value that is no tensor."""
    tensordict: Any = sys.modules.get("tensordict")
    if tensordict is None or not tensordict.is_tensor_collection(value):
        return False
    return not tensordict.is_non_tensor(value) and not isinstance(value, tensordict.LazyStackedTensorDict)
