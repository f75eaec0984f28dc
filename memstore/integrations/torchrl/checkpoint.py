"""What `dumps` and `loads` of a replay buffer do with the rows of a MemstoreStorage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from tensordict import TensorDict, is_tensor_collection
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer
from torchrl.data.replay_buffers.storages import LazyTensorStorage, TensorStorage

from memstore.errors import CorruptionError, StructureMismatchError
from memstore.integrations.torchrl.entry import StorageOfEntry
from memstore.undecodable import UNDECODABLE

Found = TypeVar("Found")

_COUNTS, _REFERENCE = "memstore_counts.json", "memstore_reference.json"


class CopyCheckpointer(TensorStorageCheckpointer):
    """The default: copies rows into TorchRL's own format. TorchRL's storages can load it, and it loads theirs.

    Writers wait while rows are copied, so that no row is torn.
    """

    def dumps(self, storage: StorageOfEntry, path: Any) -> None:
        """Writes all slots. Raises RuntimeError if the storage has no rows, as TorchRL does."""
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")

        def copy() -> None:
            TensorStorageCheckpointer.dumps(self, storage, path)
            journal = storage.rows.journal
            counts = _Counts(journal.cursor, journal.written, journal.last)
            (Path(path) / _COUNTS).write_bytes(msgspec.json.encode(counts))

        storage.rows.hold(copy)

    def loads(self, storage: StorageOfEntry, path: Any) -> None:
        """Replaces all rows by the saved ones; creates the entry if it doesn't exist."""
        saved = _read(Path(path) / "storage_metadata.json", _Saved)
        in_memory = saved.is_pytree or self._load_hooks
        found = self._loaded(storage, path) if in_memory else TensorDict.load_memmap(path)
        storage.load_rows(found, saved.len)
        if (Path(path) / _COUNTS).exists():
            counts = _read(Path(path) / _COUNTS, _Counts)
            storage.load_counts(counts.cursor, counts.written, counts.last)

    def _loaded(self, storage: StorageOfEntry, path: Any) -> Any:
        """What hooks make of the files, or a single tensor: loaded by TorchRL into the memory of this process."""
        if storage.initialized and not is_tensor_collection(storage.rows.value):
            into = TensorStorage(torch.empty_like(storage.rows.value))
        else:
            into = LazyTensorStorage(storage.max_size, ndim=storage.ndim)
        TensorStorageCheckpointer.loads(self, into, path)
        return into.get(slice(None))


class InPlaceCheckpointer(StorageCheckpointerBase):
    """For buffers that are too large to copy: `dumps` writes a reference to the rows, and flushes them to the disk.

    After `loads`, rows, length and cursor are those of the present, and not those at the time of `dumps`.
    """

    def dumps(self, storage: StorageOfEntry, path: Any) -> None:
        """Raises RuntimeError if the storage has no rows."""
        Path(path).mkdir(exist_ok=True)
        storage.flush()
        note = _Reference(storage.store.root, storage.key, storage.rows.put_id)
        (Path(path) / _REFERENCE).write_bytes(msgspec.json.encode(note))

    def loads(self, storage: StorageOfEntry, path: Any) -> None:
        """Checks that the storage has the rows that the checkpoint refers to.

        Raises:
            StructureMismatchError: it has other rows.
            FileNotFoundError: there is no checkpoint of this class.
        """
        note = _read(Path(path) / _REFERENCE, _Reference)
        here = (storage.store.root, storage.rows.put_id) if storage.initialized else None
        if here != (note.store, note.put):
            raise StructureMismatchError(
                f"{path} refers to the rows under the key {note.key!r} of {note.store}, and this storage "
                f"has those of {storage.key!r} of {storage.store.root}: make it of that store and key. If they were "
                "deleted, they are lost: CopyCheckpointer keeps copies",
                key=storage.key,
            )


class _Saved(msgspec.Struct):
    """TorchRL's `storage_metadata.json`, as far as it is needed."""

    is_pytree: bool
    len: Annotated[int, msgspec.Meta(ge=0)]


class _Counts(msgspec.Struct):
    """What the processes share beside the rows: see `journal`."""

    cursor: Annotated[int, msgspec.Meta(ge=0)]
    written: Annotated[int, msgspec.Meta(ge=0)]
    last: Annotated[int, msgspec.Meta(ge=0)] | None


class _Reference(msgspec.Struct):
    store: str
    key: str
    put: int


def _read(path: Path, kind: type[Found]) -> Found:
    """Raises FileNotFoundError, CorruptionError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        detail = f"no checkpoint of a storage: {error}"
        raise CorruptionError(path=str(path), detail=detail) from None
