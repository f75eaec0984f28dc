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
    """The default: copies rows into TorchRL's own format, which its other storages load too, and this loads theirs.

    Writers wait while rows are copied, so that no row is torn.
    """

    def dumps(self, storage: StorageOfEntry, path: Any) -> None:
        """Writes all slots. Raises RuntimeError for a storage without rows, as TorchRL does."""
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")

        def copy() -> None:
            TensorStorageCheckpointer.dumps(self, storage, path)
            journal = storage.rows.journal
            counts = _Counts(journal.cursor, journal.written, journal.last)
            (Path(path) / _COUNTS).write_bytes(msgspec.json.encode(counts))

        storage.rows.hold(copy)

    def loads(self, storage: StorageOfEntry, path: Any) -> None:
        """Replaces all rows by those that were saved; creates the entry if it isn't there."""
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
    """For buffers too large to copy: `dumps` notes where the rows are, and brings them to the disk, if there is one.

    Rows, length and cursor are as they stand when `loads` is called, and not as they were.
    """

    def dumps(self, storage: StorageOfEntry, path: Any) -> None:
        """Raises RuntimeError for a storage without rows."""
        Path(path).mkdir(exist_ok=True)
        storage.flush()
        note = _Reference(storage.store.root, storage.key, storage.rows.put_id)
        (Path(path) / _REFERENCE).write_bytes(msgspec.json.encode(note))

    def loads(self, storage: StorageOfEntry, path: Any) -> None:
        """Looks whether the storage has the rows that were meant.

        Raises:
            StructureMismatchError: it has others.
            FileNotFoundError: no checkpoint of this class.
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
