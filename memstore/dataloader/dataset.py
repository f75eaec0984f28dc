"""StoreDataset: a stored value as the data set of a DataLoader."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from memstore.dataloader.batch import Row, as_rows, read_batch
from memstore.dataloader.rows_of_value import count_rows, row_of
from memstore.rows import of_key, prefetch_rows, read_rows
from memstore.structure import modes
from memstore.wording import check_store, count_of


class HasView(Protocol):
    """What is used of a Store. (Its module imports that of datasets, which imports this package.)"""

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
        if not hasattr(store, "view") or isinstance(store, (str, os.PathLike)) or hasattr(store, "blocking"):
            check_store(store, key)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is a function of a batch, and not {transform!r:.100}")
        view = store.view(key, device="cpu")
        self._set(key, view, count_rows(view, key), transform)

    def _set(self, key: str, view: Any, length: int, transform: Callable[[Any], Any] | None) -> None:
        self.key, self.transform = key, transform
        self._view, self._length = view, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """An integer: one row. What `read_rows` takes (a list, slice, mask, tensor): a batch.

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

    def __getitems__(self, index: Sequence[int]) -> list[Row]:
        """For DataLoader: the rows of one batch, which its default collate function makes whole again."""
        return as_rows(self[index], len(index))

    def prefetch(self, rows: Any) -> None:
        """Lets the disk read rows that will be asked for, and doesn't wait: see `prefetch_rows`."""
        prefetch_rows(self._view, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.key, self._view, self._length, self.transform)

    def __repr__(self) -> str:
        return f"<memstore.StoreDataset {self.key!r}, {count_of(self._length, 'row', 'rows')}>"


def _restore(cls: type[StoreDataset], *parts: Any) -> StoreDataset:
    data = cls.__new__(cls)
    data._set(*parts)  # pyright: ignore[reportPrivateUsage]
    return data
