"""The entry of a storage: found, or made; and what its processes share, under the names that TorchRL looks for."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from memstore.datasets import Dataset
from memstore.errors import AlreadyExistsError, KeyNotFoundError, ReadOnlyError, StructureMismatchError
from memstore.integrations.torchrl.rows import WholeRows, create_rows
from memstore.store.store import Store

_OF_THIS_PROCESS = ("_mutation_revision_value", "_last_cursor_index_value", "_rows")


class StorageOfEntry(TensorStorage):
    """What `MemstoreStorage` is but for its reads and writes: see there. Pickled by reference."""

    def __init__(self, max_size: int, *, store: Store, key: str, ndim: int = 1) -> None:
        Storage.__init__(self, max_size)  # not TensorStorage's: its length and tensors are those of one process
        self.store, self.key, self.ndim = store, key, ndim
        self.device = torch.device("cpu")
        self._rows: WholeRows | None = None
        self._attach()

    # --- the entry ----------------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Whether the entry exists by now."""
        return self._attach() is not None

    @property
    def rows(self) -> WholeRows:
        """Raises RuntimeError as TorchRL's storages do, before the first batch."""
        rows = self._attach()
        if rows is None:
            raise RuntimeError(f"Cannot get elements out of a non-initialized storage: {self.key!r} isn't there yet.")
        return rows

    def _attach(self) -> WholeRows | None:
        if self._rows is None:
            try:
                self._take(WholeRows(self._open()))
            except KeyNotFoundError:
                return None
        return self._rows

    def _open(self) -> Dataset:
        try:
            return self.store.open_dataset(self.key)
        except ReadOnlyError:
            return self.store.open_dataset(self.key, "r")

    def _take(self, rows: WholeRows) -> None:
        shape = torch.Size(rows.value.shape[: self.ndim])
        slots = self._slots_for(shape[1:])
        if rows.journal.slots != slots:
            raise StructureMismatchError(
                f"{self.key!r} has {rows.journal.slots:,} slots, and max_size {self.max_size:,} makes {slots:,}: "
                f"open it with max_size {shape.numel():,}, or take another key",
                key=self.key,
            )
        self._rows, self._total_shape_value = rows, shape
        self.max_size = shape.numel()

    def _slots_for(self, inner: Sequence[int]) -> int:
        return -(-self.max_size // torch.Size(inner).numel())

    def _init(self, data: Any) -> None:
        """Creates the entry. `data`: a row of it."""
        slots = self._slots_for(data.shape[: self.ndim - 1])
        try:
            made = create_rows(self.store, self.key, data, slots)
        except AlreadyExistsError:  # another process was first
            made = self._open()
        self._take(WholeRows(made))

    @property
    def _storage(self) -> Any:
        """All slots, in the shared memory. TorchRL's samplers and checkpointers read this attribute."""
        rows = self._attach()
        return None if rows is None else rows.value

    @property
    def _total_shape(self) -> torch.Size | None:
        return None if self._attach() is None else self._total_shape_value

    # --- what all processes share -------------------------------------------------------------------------------------

    @property
    def _len(self) -> int:
        rows = self._attach()
        return 0 if rows is None else len(rows) * self._total_shape_value[1:].numel()

    @_len.setter
    def _len(self, value: int) -> None:
        rows = self.rows
        rows.hold(lambda: rows.journal.set_length(-(-value // self._total_shape_value[1:].numel())))

    @property
    def _mutation_revision(self) -> int:
        rows = self._attach()
        return 0 if rows is None else rows.journal.revision

    def _bump_mutation_revision(self) -> None:
        rows = self._attach()
        if rows is not None:
            rows.hold(rows.journal.bump)

    @property
    def _last_cursor_index(self) -> int | None:
        rows = self._attach()
        return None if rows is None else rows.journal.last

    _last_cursor = _last_cursor_index

    def _set_last_cursor(self, cursor: Any) -> None:
        """Nothing: a write notes the last slot by itself."""

    # --- as a whole ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes the rows to the disk, as `Dataset.flush` does, so that they survive a crash of the host."""
        self.rows.flush()

    def load_rows(self, value: Any, length: int) -> None:
        """Replaces all rows by the first of another storage's tensors, and goes on behind. `length`: of elements."""
        if not self.initialized:
            self._init(value[0])
        rows = self.rows
        rows.empty()
        count = -(-length // self._total_shape_value[1:].numel())
        if count:
            rows.write(value[:count], np.arange(count))
        self.load_counts(count % rows.journal.slots, count, rows.journal.last)

    def load_counts(self, cursor: int, written: int, last: int | None) -> None:
        journal = self.rows.journal

        def act() -> None:
            journal.set_counts(cursor, written)
            journal.set_last(last)

        self.rows.hold(act)

    # --- as a reference -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}
        data = None if self._rows is None else self._rows.data
        return {**state, "_rng": None, "data__reference": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state.pop("data__reference")
        Storage.__setstate__(self, state)
        self._rows = None if data is None else WholeRows(data)
