"""Rows in memory that processes share: which ones an index means, how they are read and written, and their entry.

`put_entry` puts a new mutable entry: a dataset, or a replay buffer. `reduce` and `opened` pickle one as a reference,
and open it again. The rules: docs/decisions/015. The control page, the mutex and the states are the engine's.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Generator
from typing import Any, Literal, cast

import numpy as np
import torch

from memstore import structure
from memstore._threads import call_late
from memstore.datasets.spec import NUMPY_SAME_SIZE, Array, Batch
from memstore.engine import (
    CONTROL_SIZE,
    Content,
    Creation,
    Draft,
    Header,
    MutableDescription,
    MutableEntry,
    Record,
    Root,
    Span,
    WritableMemory,
    close_root,
    deadline_after,
    elsewhere_of,
    encode_mutable,
    index,
    is_fellow,
    need_mutable,
    new_page,
    open_mutable,
    open_root,
    put,
    resource_errors,
)
from memstore.errors import AlreadyExistsError, CrossHostError, VersionConflictError, VersionGoneError
from memstore.listing import open_elsewhere
from memstore.rows import RowIndex
from memstore.structure import DTYPES, Plan

# --- Indices ---------------------------------------------------------------------------------------------------------


_BOOLEAN = (torch.bool, np.dtype(np.bool_))


class NoLeafError(KeyError):
    """A KeyError whose message is printed as it is, without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_name(index: Any) -> tuple[str, ...] | None:
    """Returns the names that lead to a leaf or a part of the spec, if the index is a str or a tuple of them."""
    if isinstance(index, str):
        return (index,)
    return index if isinstance(index, tuple) and index and all(isinstance(name, str) for name in index) else None  # type: ignore[reportUnknownVariableType]


def as_row(index: Any) -> int | None:
    """Returns the number of one row, if the index is one: a Python integer, numpy's, or a tensor without dimensions.

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
    """Returns the number of a row from 0 on. Raises IndexError."""
    if not -length <= row < length:
        if not length:
            raise IndexError(f"row {row:,} of {key!r}, which has no rows yet")
        allowed = f"from {-length:,} to {length - 1:,}"
        raise IndexError(f"row {row:,} of {key!r}, which has {length:,} by now: rows are {allowed}")
    return row + length if row < 0 else row


def places_of(index: Any, length: int, key: str) -> tuple[slice | np.ndarray[Any, Any], int]:
    """Returns the rows that are to be written, as numpy takes them, and how many they are.

    Raises IndexError, TypeError, ValueError.
    """
    if not isinstance(index, slice):
        rows = RowIndex(index).rows(length, repr(key)).numpy()
        return rows, len(rows)
    start, stop, step = index.indices(length)
    count = len(range(start, stop, step))
    if not count:  # a start or stop of -1, before the first row, would be taken for the last one
        return slice(0, 0), 0
    return slice(start, None if stop < 0 else stop, step), count


# --- Rows of an open entry -------------------------------------------------------------------------------------------


def arrays_over(plan: Plan, memory: Array) -> tuple[Array, ...]:
    """Returns for each leaf the bits of all rows, over the data section."""
    arrays: list[Array] = []
    for leaf in plan.leaves:
        kind = NUMPY_SAME_SIZE[DTYPES[leaf.dtype].itemsize]
        arrays.append(np.ndarray(leaf.shape, kind, memory, leaf.offset))
    return tuple(arrays)


def dataset_capacity(record: Record) -> int:
    """Raises CorruptionError."""
    return structure.capacity_of(record.description, record.nbytes)


class Rows:
    """Rows of an open entry: all that there is room for, whole ones and others.

    Attributes:
        plan: of all of them.
        arrays: for each leaf the bits of them.
        value: the same as tensors, in the structure of a row. Users get no part of these: see `shared`.
    """

    def __init__(self, entry: MutableEntry) -> None:
        record = entry.record
        self._entry = entry
        self.plan = structure.plan_of_rows(record.description, record.nbytes)
        self._memory = np.asarray(entry.mapping)[record.start : record.start + record.nbytes]
        self.arrays = arrays_over(self.plan, self._memory)
        self.value: Any = structure.rebuild(self.plan, b"", self._memory, entry.mapping)

    def shared(self, index: int | slice, value: Any = None) -> Any:
        """Returns rows of the part `value`, or of all, as tensors over the memory that the processes share.

        Each has a storage of its own: `share_memory_` moves a storage elsewhere, with all tensors over it, and torch
        saves it whole.
        """

        def own(view: torch.Tensor) -> torch.Tensor:
            return structure.in_own_storage(view, self._memory, self._entry.mapping)

        with torch.inference_mode(False):
            rows = (self.value if value is None else value)[index]
            return own(rows) if isinstance(rows, torch.Tensor) else rows.apply(own)

    def column(self, names: tuple[str, ...], length: int) -> Any:
        """Returns so many rows of a leaf or a part of the spec, as `shared` does.

        Raises KeyError, which lists the leaves.
        """
        found = self.value
        for name in names:
            found = None if isinstance(found, torch.Tensor) else found.get(name, None)
            if found is None:
                asked = names[0] if len(names) == 1 else names
                leaves = [tuple(map(str, leaf.name)) for leaf in self.plan.leaves]
                there = ", ".join(repr(name[0] if len(name) == 1 else name) for name in leaves if name)
                there = there or "rows of one tensor: dataset[:] is all of them"
                raise NoLeafError(f"{self._entry.key!r} has no leaf {asked!r}, but {there}")
        return self.shared(slice(length), found)

    def store(self, batch: Batch, index: Any) -> None:
        """Copies a batch to its rows, by this thread alone: no helper of torch's stores on when its caller is dead."""
        for array, source in zip(self.arrays, batch.arrays, strict=True):
            array[index] = source


# --- Create an entry -------------------------------------------------------------------------------------------------


_OPENED_BY = {
    "dataset": "open it with store.open_dataset({key!r}), or delete it",
    "buffer": "it is a replay buffer, which memstore.ReplayBuffer(store, {key!r}) opens: do that, or delete it",
}
_A_VALUE = "it is an ordinary value: delete it, or take another key"


def control_of(size: int) -> Span:
    """Returns the first tensor of a mutable entry's segment: what the processes share beside the rows."""
    return Span(("__control__",), "uint8", 1, (size,), size)


def check_absent(root: Root, key: str, deadline: float) -> None:
    """Raises AlreadyExistsError before room is reserved: beside a large dataset there may be none for another."""
    record = index.find(root, key.encode(), max(deadline - time.monotonic(), 0))
    if record is not None:
        advice = _OPENED_BY[record.mutable_kind].format(key=key) if record.is_mutable else _A_VALUE
        raise AlreadyExistsError(f"{key!r} is there already, at version {record.version}: {advice}", key=key)


def put_entry(
    root: Root,
    key: str,
    mutable: MutableDescription,
    plan: Plan,
    entries: bytes,
    deadline: float,
    length: int = 0,
    batch: Batch | None = None,
) -> int:
    """Puts a new mutable entry. Returns the version.

    Args:
        plan, entries: of all rows, with `control_of`; the entries of the header.
        length: how many rows are whole from the beginning. They are zeros, or those of a `batch`.

    Raises:
        AlreadyExistsError, StoreFullError: as `Store.create_dataset`.
    """
    need_mutable(root, deadline)
    description = encode_mutable(mutable)
    header = Header(key, root.settings.store, description, b"", entries)
    content = Content(description, b"", plan.nbytes)

    def fill(memory: WritableMemory) -> None:
        data = np.asarray(memory)  # zeros
        data[:CONTROL_SIZE] = np.frombuffer(new_page(length), np.uint8)
        if batch is not None:
            for array, source in zip(arrays_over(plan, data), batch.arrays, strict=True):
                array[:length] = source

    try:
        (version,) = put(root, [Draft(key.encode(), content, 0, header, fill)], deadline)
    except VersionConflictError as error:
        found = error.found
    else:
        return version
    check_absent(root, key, deadline)
    raise AlreadyExistsError(f"{key!r} was there, at version {found}, and was deleted meanwhile: try again", key=key)


# --- References in pickles -------------------------------------------------------------------------------------------


EntryReference = tuple[str, str, str, int, str]  # path, store id, key, put id, mode


def reduce(module: str, restore: str, entry: MutableEntry, *arguments: Any) -> tuple[Any, ...]:
    """Pickles an entry: the function `restore` of a module is called with a reference, and with the arguments."""
    mode = "r+" if entry.writable else "r"
    reference = (entry.root.path, entry.root.settings.store, entry.key, entry.record.put_id, mode)
    return call_late, (module, restore, reference, *arguments)


@contextlib.contextmanager
def opened(
    reference: EntryReference, kind: Literal["dataset", "buffer"], capacity_of: Callable[[Record], int], timeout: float
) -> Generator[MutableEntry]:
    """Opens the entry that a reference names.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted or sealed, or another store is there.
        CrossHostError: this is another host of its store.
    """
    path, store, key, put_id, mode = reference
    with resource_errors(path):
        use = open_root(path, "r" if mode == "r" else "r+", Creation(), timeout)
    root = use.root
    root.connect = open_elsewhere
    try:
        if is_fellow(root, store):
            host = elsewhere_of(root).name_of(bytes.fromhex(store))
            raise CrossHostError(
                f"the {kind} {key!r} is on {host}, and its rows are written in place: use it there; rows that other "
                "hosts are to have must be put, or the dataset sealed",
                key=key,
            )
        if root.settings.store != store:
            raise VersionGoneError(f"the {kind} {key!r} is gone: {path} is another store now", key=key)
        with resource_errors(path, key, root):
            deadline, writable = deadline_after(timeout), mode != "r"
            yield open_mutable(root, key, kind, capacity_of, deadline, writable=writable, put_id=put_id)
    finally:
        close_root(use)
