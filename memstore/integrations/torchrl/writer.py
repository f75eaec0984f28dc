"""MemstoreWriter: a TorchRL writer. All processes share its cursor, count and generations."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from memstore._wording import an
from memstore.integrations.torchrl.storage import MemstoreStorage


class MemstoreWriter(RoundRobinWriter):
    """Writes to the slots of a MemstoreStorage in turn. Any number of processes may do so, also after a restart.

    A writer chooses its slots and writes them under the entry's own mutex. So two writers never get the same slot, and
    rows become visible only after they were written. The writer has no state of its own: cursor and count are in the
    store.

    Args:
        track_generations: as in TorchRL: samples get `index_generation`, which says how often a slot was overwritten.
            It counts the writes of all processes.
    """

    _storage: MemstoreStorage

    def __init__(self, *, track_generations: bool = False) -> None:
        self._storage = None  # type: ignore[assignment]  # until a buffer registers one
        self._compilable = False
        self._track_generations = track_generations

    def register_storage(self, storage: Any) -> None:
        """Sets the storage. Raises TypeError unless it is a MemstoreStorage."""
        if not isinstance(storage, MemstoreStorage):
            raise TypeError(f"MemstoreWriter writes to a MemstoreStorage, and not to {an(type(storage))}")
        self._storage = storage

    def add(self, data: Any) -> int | torch.Tensor:
        return self._written(int(self._storage.append(self._storage.batch_of_one(data))))

    def extend(self, data: Any) -> torch.Tensor:
        """Writes rows. Raises RuntimeError if there are none, as in TorchRL."""
        return self._written(self._storage.append(data))

    def write_at(self, index: int | torch.Tensor, data: Any) -> int | torch.Tensor:
        """Writes to the given slots. The cursor stays."""
        self._storage.set(index, data, set_cursor=False)
        return self._written(index)

    def _written(self, index: Any) -> Any:
        index = self._replicate_index(index)
        self._mark_update_entities(index)
        return index

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns generations as in TorchRL: int64, in the shape of `index`; -1 where nothing was written."""
        if isinstance(index, tuple):
            index = index[0]
        index = torch.as_tensor(index, dtype=torch.long)
        if self._storage.ndim > 1 and index.ndim >= 2 and index.shape[-1] == self._storage.ndim:
            index = index[..., 0]
        if not self._track_generations or not self._storage.initialized:
            return torch.full_like(index, -1)
        return self._storage.rows.generations(index)

    # --- what the storage has -----------------------------------------------------------------------------------------

    @property
    def _cursor(self) -> int:
        storage = self._storage
        return storage.rows.journal.cursor if storage is not None and storage.initialized else 0

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        journal = self._storage.rows.journal
        self._storage.rows.hold(lambda: journal.set_counts(int(value), journal.written))

    @property
    def _write_count(self) -> int:
        storage = self._storage
        return storage.rows.journal.written if storage is not None and storage.initialized else 0

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        journal = self._storage.rows.journal
        self._storage.rows.hold(lambda: journal.set_counts(journal.cursor, int(value)))

    def _empty(self, empty_write_count: bool = True) -> None:
        if self._storage.initialized:
            journal = self._storage.rows.journal
            self._storage.rows.hold(lambda: journal.set_counts(0, 0 if empty_write_count else journal.written))

    def dumps(self, path: Any) -> None:
        """Does nothing: cursor and count are saved with the rows."""

    def loads(self, path: Any) -> None:
        """Does nothing: see `dumps`."""

    def state_dict(self) -> dict[str, Any]:
        """Does nothing: see `dumps`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: see `dumps`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
