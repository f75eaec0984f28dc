"""MemstoreStorage: what TorchRL's replay buffers call a storage, with its rows in a store.

CopyCheckpointer, InPlaceCheckpointer  what `dumps` and `loads` of a replay buffer do with the rows
row_numbers, cells_of                  which slots an index means, and which elements of them, where elements have
                                       several dimensions
MemstoreStorage                        the entry, found or made; its reads and writes; and what its processes share,
                                       under the names that TorchRL looks for
MemstoreWriter                         the writer, whose cursor all processes share
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import msgspec
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer
from torchrl.data.replay_buffers.storages import LazyTensorStorage, Storage, TensorStorage
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from memstore._compat import inner_tensordict
from memstore._parsing import UNDECODABLE
from memstore._wording import an
from memstore.datasets import Dataset
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    ReadOnlyError,
    StructureMismatchError,
    UnsupportedValueError,
)
from memstore.integrations.torchrl.rows import WholeRows, Words, create_rows
from memstore.rows import RowIndex
from memstore.store.store import Store
from memstore.structure import modes

# --- Checkpoints -----------------------------------------------------------------------------------------------------


_DocumentT = TypeVar("_DocumentT")

_COUNTS, _REFERENCE = "memstore_counts.json", "memstore_reference.json"


class CopyCheckpointer(TensorStorageCheckpointer):
    """The default: copies rows into TorchRL's own format. TorchRL's storages can load it, and it loads theirs.

    Writers wait while rows are copied, so that no row is torn.
    """

    def dumps(self, storage: MemstoreStorage, path: Any) -> None:
        """Writes all slots. Raises RuntimeError if the storage has no rows, as TorchRL does."""
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")

        def copy() -> None:
            TensorStorageCheckpointer.dumps(self, storage, path)
            journal = storage.rows.journal
            counts = _SavedCounts(journal.state.cursor, journal.state.written, journal.last)
            (Path(path) / _COUNTS).write_bytes(msgspec.json.encode(counts))

        storage.rows.hold(copy)

    def loads(self, storage: MemstoreStorage, path: Any) -> None:
        """Replaces all rows by the saved ones; creates the entry if it doesn't exist."""
        saved = _read_document(Path(path) / "storage_metadata.json", _SavedStorage)
        in_memory = saved.is_pytree or self._load_hooks
        found = self._loaded(storage, path) if in_memory else TensorDict.load_memmap(path)
        storage.load_rows(found, saved.len)
        if (Path(path) / _COUNTS).exists():
            counts = _read_document(Path(path) / _COUNTS, _SavedCounts)
            storage.load_counts(counts.cursor, counts.written, counts.last)

    def _loaded(self, storage: MemstoreStorage, path: Any) -> Any:
        """Loads what hooks make of the files, or a single tensor, by TorchRL, into the memory of this process."""
        if storage.initialized and not is_tensor_collection(storage.rows.value):
            into = TensorStorage(torch.empty_like(storage.rows.value))
        else:
            into = LazyTensorStorage(storage.max_size, ndim=storage.ndim)
        TensorStorageCheckpointer.loads(self, into, path)
        return into.get(slice(None))


class InPlaceCheckpointer(StorageCheckpointerBase):
    """Checkpointer of buffers that are too large to copy. `dumps` writes a reference to the rows, and flushes them.

    After `loads`, rows, length and cursor are those of the present, and not those at the time of `dumps`.
    """

    def dumps(self, storage: MemstoreStorage, path: Any) -> None:
        """Raises RuntimeError if the storage has no rows."""
        Path(path).mkdir(exist_ok=True)
        storage.flush()
        note = _SavedReference(storage.store.root, storage.key, storage.rows.put_id)
        (Path(path) / _REFERENCE).write_bytes(msgspec.json.encode(note))

    def loads(self, storage: MemstoreStorage, path: Any) -> None:
        """Checks that the storage has the rows that the checkpoint refers to.

        Raises:
            StructureMismatchError: it has other rows.
            FileNotFoundError: there is no checkpoint of this class.
        """
        note = _read_document(Path(path) / _REFERENCE, _SavedReference)
        here = (storage.store.root, storage.rows.put_id) if storage.initialized else None
        if here != (note.store, note.put):
            raise StructureMismatchError(
                f"{path} refers to the rows under the key {note.key!r} of {note.store}, and this storage "
                f"has those of {storage.key!r} of {storage.store.root}: make it of that store and key. If they were "
                "deleted, they are lost: CopyCheckpointer keeps copies",
                key=storage.key,
            )


class _SavedStorage(msgspec.Struct):
    """TorchRL's `storage_metadata.json`, as far as it is needed."""

    is_pytree: bool
    len: Annotated[int, msgspec.Meta(ge=0)]


class _SavedCounts(msgspec.Struct):
    """Counts that the processes share beside the rows: see `journal`."""

    cursor: Annotated[int, msgspec.Meta(ge=0)]
    written: Annotated[int, msgspec.Meta(ge=0)]
    last: Annotated[int, msgspec.Meta(ge=0)] | None


class _SavedReference(msgspec.Struct):
    store: str
    key: str
    put: int


def _read_document(path: Path, kind: type[_DocumentT]) -> _DocumentT:
    """Raises FileNotFoundError, CorruptionError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        detail = f"no checkpoint of a storage: {error}"
        raise CorruptionError(path=str(path), detail=detail) from None


# --- Indices ---------------------------------------------------------------------------------------------------------


def row_numbers(index: Any, count: int, key: str) -> Words:
    """Returns the slots of an index along the first dimension: a slice, list, range, mask, or integers of any shape.

    Raises IndexError.
    """
    if isinstance(index, torch.Tensor) and index.dtype != torch.bool:
        index = index.cpu().flatten()
    return RowIndex(index).rows(count, repr(key)).numpy()


@dataclass(frozen=True, slots=True)
class Cells:
    """Elements of rows: `rows`, each once, and where in a copy of these rows the elements are."""

    rows: Words
    index: tuple[Any, ...]

    def put(self, rows: Any, value: Any) -> None:
        rows[self.index] = value


def cells_of(index: tuple[Any, ...], count: int) -> Cells:
    """Returns the cells of an index whose first part is integers, an int or a slice. Raises IndexError, TypeError."""
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


# --- The storage -----------------------------------------------------------------------------------------------------


_OF_THIS_PROCESS = ("_mutation_revision_value", "_last_cursor_index_value", "_rows")
P = ParamSpec("P")
R = TypeVar("R")


def _eager(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method that is neither compiled nor reached by modes of torch: rows are real memory."""
    return cast("Callable[P, R]", torch.compiler.disable(modes.unaffected(method)))


class MemstoreStorage(TensorStorage):
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
        """The slots, in the shared memory. TorchRL's samplers and checkpointers read this attribute."""
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
        rows.hold(rows.journal.set_length, -(-value // self._total_shape_value[1:].numel()))

    @property
    def _mutation_revision(self) -> int:
        rows = self._attach()
        return 0 if rows is None else rows.journal.state.revision

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
        """Does nothing: a write notes the last slot by itself."""

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

        def load() -> None:
            journal.set_counts(cursor, written)
            journal.state.last = 0 if last is None else last % journal.slots + 1

        self.rows.hold(load)

    # --- as a reference -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}
        data = None if self._rows is None else self._rows.data
        return {**state, "_rng": None, "data__reference": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state.pop("data__reference")
        Storage.__setstate__(self, state)
        self._rows = None if data is None else WholeRows(data)

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
            cells = cells_of(cast("tuple[Any, ...]", cursor), len(self.rows))
            self.rows.change(cells.rows, lambda rows: cells.put(rows, data))
        else:
            slots = row_numbers([int(cursor)] if is_one else cursor, self.rows.journal.slots, self.key)
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

    def _set_rows(self, slots: Words, data: Any, *, corrects: bool) -> None:
        """Writes rows. Those that are there may be corrected by some of their entries."""
        rows = self.rows
        are_there = len(set(slots.tolist())) == len(slots) and bool((slots < len(rows)).all())
        if corrects and are_there and rows.lacks_entries(data):
            rows.change(slots, lambda found: found.update_(data.select(*rows.names, strict=False)))
        else:
            rows.write(data, slots, corrects=corrects)

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
            return rows.read_whole(np.unique(numbers.numpy()), lambda: live[index].clone())
        if isinstance(index, torch.Tensor) and index.ndim != 1 and index.dtype != torch.bool:
            found = rows.read(index.flatten())
            return found.reshape(*index.shape, *found.shape[1:])
        return rows.read(index)

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
                "_cursor": journal.state.cursor,
                "_written": journal.state.written,
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
    """Makes one value of a batch: it stacks a list of rows.

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
    value = inner_tensordict(value, value) if is_tensorclass(value) else value
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
    """Returns whether tensors give a part of themselves for it, and no copy."""
    parts = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice, str)) for part in parts)


# --- The writer ------------------------------------------------------------------------------------------------------


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
        return storage.rows.journal.state.cursor if storage is not None and storage.initialized else 0

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        journal = self._storage.rows.journal
        self._storage.rows.hold(lambda: journal.set_counts(int(value), journal.state.written))

    @property
    def _write_count(self) -> int:
        storage = self._storage
        return storage.rows.journal.state.written if storage is not None and storage.initialized else 0

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        journal = self._storage.rows.journal
        self._storage.rows.hold(lambda: journal.set_counts(journal.state.cursor, int(value)))

    def _empty(self, empty_write_count: bool = True) -> None:
        if self._storage.initialized:
            journal = self._storage.rows.journal
            self._storage.rows.hold(lambda: journal.set_counts(0, 0 if empty_write_count else journal.state.written))

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
