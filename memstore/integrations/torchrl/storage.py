"""MemstoreStorage: what TorchRL's replay buffers call a storage, with its rows in a store."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass

from memstore.errors import StructureMismatchError, UnsupportedValueError
from memstore.integrations.torchrl.checkpoint import CopyCheckpointer
from memstore.integrations.torchrl.coordinates import Cells, cells_of, row_numbers
from memstore.integrations.torchrl.entry import StorageOfEntry
from memstore.integrations.torchrl.journal import Words
from memstore.structure import modes

P = ParamSpec("P")
R = TypeVar("R")


def _eager(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which is neither compiled nor reached by modes of torch: rows are real memory."""
    return cast("Callable[P, R]", torch.compiler.disable(modes.unaffected(method)))


class MemstoreStorage(StorageOfEntry):
    """A storage of a TorchRL replay buffer, with its rows in a store. All processes that open the store share the rows.

    If the key doesn't exist, the first batch creates the entry with the structure of this batch, and space for all rows
    is reserved then. Rows are TensorDicts, tensorclasses or tensors. Later batches are stored without the entries that
    the first batch didn't have.

    A sampler gets copies of rows. Each row is complete, as one write has left it, even if a writer is killed; this
    needs no lock of TorchRL's. `storage[3]`, `storage[2:5]` and `storage[:]` are the shared memory itself, as with
    TorchRL's own storages, so they show writes of other processes while they happen.

    If several processes write, or continue what others have written, use `MemstoreWriter`: TorchRL's own writers begin
    at slot 0 in each process that didn't inherit them. A storage is pickled as a reference.

    Args:
        max_size: the largest number of rows; with `ndim` above 1, of elements, as in TorchRL. For an existing key it is
            the same as when the entry was created.
        store: an open store. With mode "r" the rows can only be read.
        key: the key of the entry, a dataset of `{"rows": ..., "word": ...}`. Write to it only by this class.
        ndim: how many dimensions count elements.

    Raises:
        MutableEntryError: the key has another kind of entry.
        StructureMismatchError: the key has a dataset of another structure or size.

    Example:
        ::

            storage = MemstoreStorage(100_000, store=memstore.open("/dev/shm/replay"), key="buffer")
            buffer = TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter(), batch_size=256)
    """

    _default_checkpointer = CopyCheckpointer

    # --- write --------------------------------------------------------------------------------------------------------

    @_eager
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows to slots; each batch is written completely or not at all.

        Raises the errors of `Dataset.extend`. Another dtype is refused, where TorchRL would cast; so are rows whose
        entries differ in their shapes.

        Args:
            cursor: an int for one row, or slots, as an index of the first dimension.
            data: as many rows as slots; a list of rows is stacked.
            set_cursor: whether these are the newest rows, so that no trajectory continues after them.
        """
        data = as_batch(self.key, data)
        if isinstance(cursor, tuple) and len(cast("tuple[Any, ...]", cursor)) == 1:
            (cursor,) = cast("tuple[Any]", cursor)
        is_one = isinstance(cursor, int) or (isinstance(cursor, (torch.Tensor, np.generic)) and not cursor.ndim)
        if not self.initialized:
            self._init(data if is_one else data[0])
        if isinstance(cursor, tuple):
            self._set_cells(cells_of(cast("tuple[Any, ...]", cursor), len(self.rows)), data)
        else:
            slots = self._slots([int(cursor)] if is_one else cursor)
            self._set_rows(slots, self.batch_of_one(data) if is_one else data, corrects=not set_cursor)

    @_eager
    def append(self, data: Any) -> torch.Tensor:
        """Writes rows to the next slots, and returns these. All processes share the cursor. See MemstoreWriter."""
        data = as_batch(self.key, data)
        if not len(data):
            raise RuntimeError(f"Expected at least one element in extend. Got {data=}")  # as TorchRL's writers
        if not self.initialized:
            self._init(data[0])
        return self.rows.append(data)

    def batch_of_one(self, row: Any) -> Any:
        check_row(self.key, row)
        return row[None]

    def _slots(self, index: Any) -> Words:
        return row_numbers(index, self.rows.journal.slots, self.key)

    def _set_rows(self, slots: Words, data: Any, *, corrects: bool) -> None:
        """Rows that are there may be corrected by some of their entries."""
        rows = self.rows
        are_there = len(set(slots.tolist())) == len(slots) and bool((slots < len(rows)).all())
        if corrects and are_there and rows.lacks_entries(data):
            rows.change(slots, lambda found: found.update_(data.select(*rows.names, strict=False)))
        else:
            rows.write(data, slots, corrects=corrects)

    def _set_cells(self, cells: Cells, data: Any) -> None:
        self.rows.change(cells.rows, lambda rows: cells.put(rows, data))

    @_eager
    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        coordinates = tuple(index.unbind(-1)) if index.ndim > 1 else (index,)
        cells = cells_of(coordinates, len(self.rows))

        def change(rows: Any) -> None:
            for name, value in patch.items():
                cells.put(rows.get(name), value)

        self.rows.change(cells.rows, change)

    def _empty(self) -> None:
        if self.initialized:
            self.rows.empty()

    # --- read ---------------------------------------------------------------------------------------------------------

    @_eager
    def get(self, index: Any) -> Any:
        """Returns rows: the shared memory for ints, slices and an entry's name; otherwise a copy of complete rows."""
        rows = self.rows
        if isinstance(index, tuple) and len(cast("tuple[Any, ...]", index)) == 1:
            (index,) = cast("tuple[Any]", index)
        live = rows.live()
        if _is_basic(index):
            return live[index]
        if self.ndim > 1 or isinstance(index, tuple):
            shape = live.shape[: max(self.ndim, 1)]
            numbers = torch.arange(len(live)).view(-1, *[1] * (len(shape) - 1)).expand(shape)[index]
            return rows.read_whole(np.unique(numbers.numpy()), lambda: _copied(live[index]))
        flat, shape = _flat(index)
        found = rows.read(flat)
        return found if shape is None else _unflattened(found, shape)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the rows, and of the cursor and counts that the processes share."""
        rows = self._attach()
        if rows is None:
            return {"_storage": {}, "initialized": False, "_len": 0}

        def copied() -> dict[str, Any]:
            value = rows.value.clone()
            journal = rows.journal
            return {
                "_storage": value.state_dict() if is_tensor_collection(value) else value,
                "initialized": True,
                "_len": self._len,
                "_cursor": journal.cursor,
                "_written": journal.written,
                "_last": journal.last,
            }

        return rows.hold(copied)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of this class or of TorchRL's tensor storages. Creates the entry if it doesn't exist."""
        if not state_dict["initialized"]:
            self._empty()
            return
        value = state_dict["_storage"]
        if not isinstance(value, torch.Tensor):
            value = TensorDict().load_state_dict(value, strict=False)
        length = state_dict["_len"]
        self.load_rows(value, length)
        if "_cursor" in state_dict:
            self.load_counts(state_dict["_cursor"], state_dict["_written"], state_dict["_last"])


def as_batch(key: str, data: Any) -> Any:
    """A batch as one value: a list of rows is stacked.

    Raises:
        UnsupportedValueError: a row is a dict, a tuple or another object.
        StructureMismatchError: an entry has different shapes in different rows: a slot has room for one.
    """
    if not isinstance(data, list):
        check_row(key, data)
        if is_tensor_collection(data):
            _check_lazy_stacks(key, data, ())
        return data
    rows = cast("list[Any]", data)
    if not rows:
        raise RuntimeError("Expected at least one element in extend. Got data=[]")  # as TorchRL's writers
    for number, row in enumerate(rows):
        check_row(key, row, f" (row {number} of a list)")
    _check_shapes(key, rows, ())
    return torch.stack(rows)


def check_row(key: str, row: Any, where: str = "") -> None:
    """Raises UnsupportedValueError. `where`: for the error."""
    if not is_tensor_collection(row) and not isinstance(row, torch.Tensor):
        kind = type(row).__qualname__
        raise UnsupportedValueError(
            f"{key!r}: rows are TensorDicts, tensorclasses or tensors, and not of type {kind}{where}: make a "
            "TensorDict of it",
            key=key,
        )


def _check_lazy_stacks(key: str, value: Any, path: tuple[str, ...]) -> None:
    value = getattr(value, "_tensordict", value) if is_tensorclass(value) else value
    if isinstance(value, LazyStackedTensorDict):
        _check_shapes(key, value.tensordicts, path)
        return
    for name, inner in value.items():
        if is_tensor_collection(inner) and not is_non_tensor(inner):
            _check_lazy_stacks(key, inner, (*path, name))


def _check_shapes(key: str, rows: Sequence[Any], path: tuple[str, ...]) -> None:
    """Raises StructureMismatchError for an entry that has not the same shape in all rows."""
    if len({type(row) for row in rows}) > 1 or not rows:
        return  # torch names what can't be stacked
    if isinstance(rows[0], torch.Tensor):
        shapes = list(dict.fromkeys(tuple(row.shape) for row in rows))
        if len(shapes) > 1:
            name = repr(path[0] if len(path) == 1 else path) if path else "a row"
            raise StructureMismatchError(
                f"{key!r}: {name} has shape {list(shapes[0])} in one row and {list(shapes[1])} in another, and a slot "
                "has room for one shape: pad the rows, and keep their lengths in another entry",
                key=key,
            )
        return
    common = set.intersection(*({*row.keys()} for row in rows))
    for name in list(rows[0].keys()):
        if name in common:
            inner = [row.get(name) for row in rows]
            if not any(map(is_non_tensor, inner)):
                _check_shapes(key, inner, (*path, name))


def _is_basic(index: Any) -> bool:
    """Whether tensors give a part of themselves for it, and no copy."""
    parts = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice, str)) for part in parts)


def _flat(index: Any) -> tuple[Any, torch.Size | None]:
    """An index of one dimension, and the shape that it had, if that was another."""
    if isinstance(index, torch.Tensor) and index.ndim != 1 and index.dtype != torch.bool:
        return index.flatten(), index.shape
    return index, None


def _unflattened(found: Any, shape: torch.Size) -> Any:
    return found.reshape(*shape, *found.shape[1:])


def _copied(value: Any) -> Any:
    """What an index of tensors gives is a copy by itself; one of slices is not."""
    return value.clone()
