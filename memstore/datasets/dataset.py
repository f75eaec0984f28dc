"""Dataset: rows that every process of the host reads and writes in place; how a Store creates and opens one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from memstore import contents, structure
from memstore._threads import ABANDONED, check_abandoned
from memstore._wording import count_of, shown, size, table_html, table_text
from memstore.dataloader import BatchRow, as_rows, read_batch
from memstore.datasets.rows import (
    Batch,
    EntryReference,
    Rows,
    Spec,
    as_name,
    as_row,
    check_absent,
    control_of,
    dataset_capacity,
    in_range,
    naming,
    opened,
    places_of,
    put_entry,
    reduce,
    rows_of_spec,
    spec_of,
    spec_of_batch,
    take_batch,
)
from memstore.engine import (
    CONTROL_SIZE,
    CatalogCrowded,
    MappedEntry,
    MutableDescription,
    MutableEntry,
    Root,
    deadline_after,
    index,
    open_mutable,
    put,
    resource_errors,
    sync_rows,
)
from memstore.errors import (
    ReadOnlyError,
    StoreFullError,
    StructureMismatchError,
    VersionConflictError,
    VersionGoneError,
)
from memstore.rows import of_key, read_rows
from memstore.structure import Plan, modes

# --- The dataset -----------------------------------------------------------------------------------------------------


if TYPE_CHECKING:  # a DataLoader takes it as it is
    _RowsForLoaders = torch.utils.data.Dataset[Any]
else:
    _RowsForLoaders = object


@modes.uncompiled_methods
class Dataset(_RowsForLoaders):
    """A dataset that is open. Made by `Store.create_dataset`, `Store.create_dataset_from` and `Store.open_dataset`.

    Thread-safe; usable in forked children; pickled by reference, so it may be sent to any process of the host, which
    then has the same rows. `copy.copy` and `copy.deepcopy` copy no rows.

    Rows are read and written without a lock. If two processes write to one row at the same time, or one reads it
    meanwhile, they may see a mix of both. `extend` makes rows visible when they are complete.

    Attributes:
        key: its key in the store.
        capacity: the most rows that it can have.
        spec: what a row is: nested dicts of `(shape, dtype)`, or one such pair.
    """

    def __init__(self, entry: MutableEntry, timeout: float) -> None:
        given: Any = entry
        if not isinstance(given, MutableEntry):
            key = repr(timeout) if isinstance(timeout, str) else "key"
            raise TypeError(f"store.open_dataset({key}) opens a dataset, and not Dataset({given!r:.100}, ...)")
        self._entry, self._timeout = entry, timeout
        self._rows = Rows(entry)
        plan = self._rows.plan
        self.key, self.capacity = entry.key, plan.leaves[0].shape[0]
        self.spec: Any = spec_of(plan)

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of a slice of all rows that are there by now."""
        value = self._rows.value
        return torch.Size((len(self), *getattr(value, "batch_size", (0,))[1:]))

    def __len__(self) -> int:
        """Returns the number of complete rows. It grows with every `extend` of any process."""
        return self._entry.length

    # --- read ---------------------------------------------------------------------------------------------------------

    @modes.unaffected
    def __getitem__(self, index: Any) -> Any:
        """Returns rows, in the structure of the spec: a TensorDict, or a tensor. Or a column: one leaf of all rows.

        Args:
            index: an int, or a slice that steps forward, gives tensors over the shared memory: they show what others
                write there later, and others see what you write to them. So does the name of a leaf, or a tuple of
                names: `dataset["obs"]`, `dataset["next", "reward"]`, with the rows that are there by now. Any other
                index of `read_rows`, except tuples, gives a copy.

        Raises:
            IndexError: a row that isn't there.
            KeyError: the spec has no such leaf.
            TypeError, ValueError: `index` doesn't select rows.
            NotAStoreError: the store was removed, or replaced by another one.
        """
        self._entry.check_in_place()
        rows, length = self._rows, len(self)
        if isinstance(index, slice):
            start, stop, step = cast("slice[Any, Any, Any]", index).indices(length)
            if step > 0:
                return rows.shared(slice(start, max(start, stop), step))
        if isinstance(index, (str, tuple)) and (names := as_name(index)) is not None:
            return rows.column(names, length)
        row = as_row(index)
        if row is None:
            try:
                return read_rows(rows.value[:length], index)
            except IndexError as error:
                raise of_key(error, self.key) from None
        return rows.shared(in_range(row, length, self.key))

    def _ipython_key_completions_(self) -> list[str]:
        """Lists what notebooks offer behind `dataset["`: the columns; of nested leaves the first part of the name."""
        return list(dict.fromkeys(str(leaf.name[0]) for leaf in self._rows.plan.leaves if leaf.name))

    @modes.unaffected
    def __getitems__(self, index: Sequence[int]) -> list[BatchRow]:
        """Copies the rows of one batch for torch's DataLoader, whose default collate function makes them whole.

        In a worker it is made in memory that the worker shares with its parent, as of a `StoreDataset`.
        """
        self._entry.check_in_place()
        return as_rows(read_batch(self._rows.value[: len(self)], index), len(index))

    @modes.unaffected
    def read_rows(
        self, index: Any, *, out: Any = None, device: torch.device | str | None = None, cast: bool = False
    ) -> Any:
        """Copies rows. Arguments and errors are those of `memstore.read_rows`.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     data = store.create_dataset_from("numbers", torch.arange(10))
            ...     data.read_rows([7, 0, -1])
            tensor([7, 0, 9])
        """
        self._entry.check_in_place()
        try:
            return read_rows(self._rows.value[: len(self)], index, out=out, device=device, cast=cast)
        except IndexError as error:
            raise of_key(error, self.key) from None

    # --- write --------------------------------------------------------------------------------------------------------

    @modes.unaffected
    def __setitem__(self, index: Any, batch: Any) -> None:
        """Overwrites existing rows in place. Takes no lock: see the class.

        Args:
            index: as in `__getitem__`.
            batch: as many rows, in the structure of the spec: TensorDicts, dicts, tensors and numpy arrays; for an int
                one row, without the first dimension.

        Raises:
            StructureMismatchError: other leaves, shapes, dtypes or another number of rows; or `index` is the name of a
                column, whose tensor can be written. Nothing was written.
            IndexError: a row that isn't there: `extend` adds rows.
            MutableEntryError: it was sealed, or deleted. If that happened meanwhile, the rows may or may not be in the
                sealed version.
            StoreTimeoutError: a seal is in progress for longer than the store's timeout. The rows may or may not be in
                the sealed version.
            ReadOnlyError: it was opened with mode "r".
        """
        self._check_writable()
        if (names := as_name(index)) is not None:
            column = ", ".join(map(repr, names))
            instead = f"write a column's tensor, as in dataset[{column}][:] = values"
            raise StructureMismatchError(f"{self.key!r}: rows are written whole: {instead}", key=self.key)
        row, length = as_row(index), len(self)
        found = take_batch(self.key, self._rows.plan, batch, single=row is not None)
        if row is not None:
            row = in_range(row, length, self.key)
            index = slice(row, row + 1)
        places, count = places_of(index, length, self.key)
        if count != found.rows:
            rows, places = count_of(found.rows, "row", "rows"), count_of(count, "place", "places")
            advice = ": extend adds rows" if found.rows > count else ""
            raise ValueError(f"{self.key!r}: {rows} for {places}; it has {length:,} by now{advice}")
        deadline = deadline_after(self._timeout)
        self._entry.check_before_write(deadline)
        self._rows.store(found, places)
        self._entry.check_written(deadline)

    @modes.unaffected
    def extend(self, batch: Any, *, timeout: float | None = None) -> range:
        """Adds rows at the end. They become visible when all of their bytes are there, or never.

        Args:
            batch: rows, in the structure of the spec, as for `__setitem__`.
            timeout: seconds to wait for others that extend or seal it; None: the store's.

        Returns:
            Where the rows are.

        Raises:
            StructureMismatchError: other leaves, shapes or dtypes. Nothing was written.
            StoreFullError: they don't fit the capacity. Nothing was written.
            MutableEntryError: it was sealed, or deleted.
            StoreTimeoutError: another process is in the middle of an `extend` or `seal`; the message names it.
            ReadOnlyError: it was opened with mode "r".
        """
        self._check_writable()
        found = take_batch(self.key, self._rows.plan, batch)
        deadline = deadline_after(self._timeout if timeout is None else timeout)
        self._entry.check_in_place()
        return self._entry.run(functools.partial(self._append, found), deadline)

    def _append(self, batch: Batch) -> range:
        """Adds rows under the mutex.

        A kill before the length is stored leaves rows behind it, which are written over.
        """
        entry = self._entry
        page = entry.page
        entry.check_open()
        start = page.length
        stop = start + batch.rows
        if batch.rows > self.capacity:
            raise StoreFullError(
                f"{self.key!r} takes {self.capacity:,} rows at most, and this batch has {batch.rows:,}: make "
                "a dataset with a larger capacity=, under another key",
                key=self.key,
            )
        if stop > self.capacity:
            raise StoreFullError(
                f"{self.key!r} has {start:,} of at most {self.capacity:,} rows, and {batch.rows:,} more don't fit: "
                "seal it, and go on in another",
                key=self.key,
            )
        self._rows.store(batch, slice(start, stop))
        if ABANDONED:
            check_abandoned()
        entry.check_held()
        page.length = stop  # the moment of publication
        return range(start, stop)

    @modes.unaffected
    def flush(self, rows: slice | None = None) -> None:
        """Writes rows to the disk: afterwards they survive a crash of the host, unless they are overwritten.

        After a crash the dataset has the flushed rows, from the first one on without a gap. In memory (tmpfs) nothing
        survives a crash. Rows that `extend` has acknowledged survive the death of all processes without a flush.

        Args:
            rows: a slice of step 1; None: all rows.
        """
        self._check_writable()
        rows = slice(None) if rows is None else rows
        if not isinstance(rows, slice):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"rows are a slice, and not {rows!r:.100}")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows are flushed in slices of step 1, and not {step}")
        entry = self._entry
        entry.check_in_place()
        if start >= stop:
            return
        for leaf in self._rows.plan.leaves:
            row = leaf.nbytes // leaf.shape[0]
            sync_rows(entry, leaf.offset + start * row, leaf.offset + stop * row)
        entry.run(functools.partial(self._note_flushed, start, stop), deadline_after(self._timeout))
        sync_rows(entry, 0, CONTROL_SIZE)

    def _note_flushed(self, start: int, stop: int) -> None:
        page = self._entry.page
        if start <= page.flushed < stop:
            page.flushed = stop

    @modes.unaffected
    def seal(self, *, timeout: float | None = None) -> int:
        """Makes an ordinary, immutable entry of the rows, with checksums if the store has them, under the same key.

        The entry is a copy: the rows take their space twice until nobody has the dataset open. A process that writes to
        the dataset afterwards gets a MutableEntryError; a process that reads it keeps its rows as they were.

        Args:
            timeout: seconds to wait for others that extend it, and for the store's lock; None: the store's.

        Returns:
            The version.

        Raises:
            MutableEntryError: it was sealed already, or deleted.
            StoreFullError: no room for the copy. It is open as before.
            HomeUnavailableError: in a store on several hosts, the one that has the key did not answer. It is open as
                before.
            UnknownOutcomeError: that host was asked, and gave no answer. A process that writes rows asks it again, and
                gets a HomeUnavailableError as long as it isn't known whether they are sealed.
            StoreTimeoutError, ReadOnlyError: as `extend`.
        """
        self._check_writable()
        deadline = deadline_after(self._timeout if timeout is None else timeout)
        self._entry.check_in_place()
        return self._entry.seal(functools.partial(self._put_rows, deadline), deadline)

    def _put_rows(self, deadline: float, length: int) -> int:
        root, record = self._entry.root, self._entry.record
        limit = contents.inline_limit(root)
        while True:
            flat = contents.flatten(self.key, self._rows.value[:length], root, limit=limit, allow_pickle=False)
            draft = contents.draft(root, self.key.encode(), flat, limit, self._entry.version_to_seal(deadline))
            try:
                (version,) = put(root, [msgspec.structs.replace(draft, sealed_put_id=record.put_id)], deadline)
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
                continue
            except VersionConflictError:  # its host was served meanwhile, and the entry has another version since
                continue
            return version

    def _check_writable(self) -> None:
        if not self._entry.writable:
            raise ReadOnlyError(f"{self.key!r} was opened with mode 'r': open it with 'r+' to write", key=self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce(__name__, receive.__name__, self._entry, self._timeout)

    def __copy__(self) -> Dataset:
        return self

    def __deepcopy__(self, memo: object) -> Dataset:
        return self

    def __str__(self) -> str:
        return rows_text(self._rows.plan, self._title())

    def _repr_html_(self) -> str:
        return rows_html(self._rows.plan, self._title())

    def _title(self) -> str:
        state = self._entry.ended_as
        return f"memstore.Dataset {self.key!r}{f' ({state})' * bool(state)}: {len(self):,} of {self.capacity:,} rows"

    def __repr__(self) -> str:
        return f"<{self._title()} of {self.spec}>"


@modes.unaffected
def receive(reference: EntryReference, timeout: float) -> Dataset:
    """Unpickles a dataset. Raises as `opened`."""
    with opened(reference, "dataset", dataset_capacity, timeout) as entry:
        return Dataset(entry, timeout)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The open parts of a dataset, for classes that build on datasets. Calls wait `timeout` seconds for locks."""

    entry: MutableEntry
    rows: Rows
    timeout: float


def shared_rows(data: Dataset) -> SharedRows:
    return SharedRows(data._entry, data._rows, data._timeout)  # pyright: ignore[reportPrivateUsage]


# --- Create and open -------------------------------------------------------------------------------------------------


_CONTROL = control_of(CONTROL_SIZE)


@modes.unaffected
def create_dataset(
    root: Root, key: str, spec: Spec, capacity: int, length: int, timeout: float, deadline: float
) -> Dataset:
    """Creates a dataset of zeros until `deadline`. Its calls have `timeout`."""
    with resource_errors(root.path, key, root):
        check_absent(root, key, deadline)
        if type(length) is not int or length < 0:
            kind = ValueError if type(length) is int else TypeError
            raise kind(f"length is a number of rows, 0 or more, and not {length!r:.100}")
        with naming(key):
            value = rows_of_spec(spec, capacity)
            if length > capacity:
                raise ValueError(f"length is {length:,} rows, and capacity {capacity:,}")
            plan, entries = structure.plan_dense(value, _CONTROL)
        return _create(root, key, plan, entries, length, None, timeout, deadline)


@modes.unaffected
def create_dataset_from(
    root: Root, key: str, value: Any, capacity: int | None, timeout: float, deadline: float
) -> Dataset:
    """Creates a dataset with the rows of a batch. Timeouts as of `create_dataset`."""
    with resource_errors(root.path, key, root):
        check_absent(root, key, deadline)
        with naming(key):
            spec = spec_of_batch(value)
            one, _ = structure.plan_dense(rows_of_spec(spec, 1), _CONTROL)
            batch = take_batch(key, one, value)
            room = batch.rows if capacity is None else capacity
            if capacity is None and not batch.rows:
                raise ValueError("value has no rows: say a capacity")
            plan, entries = structure.plan_dense(rows_of_spec(spec, room), _CONTROL)
            if batch.rows > room:
                raise ValueError(f"value has {count_of(batch.rows, 'row', 'rows')}, and capacity is {room:,}")
        return _create(root, key, plan, entries, batch.rows, batch, timeout, deadline)


def _create(
    root: Root, key: str, plan: Plan, entries: bytes, rows: int, batch: Batch | None, timeout: float, deadline: float
) -> Dataset:
    """Puts the entry, and opens it, and not one that somebody has made in its place since."""
    mutable = MutableDescription("dataset", plan.description)
    version = put_entry(root, key, mutable, plan, entries, deadline, rows, batch)
    record = index.find(root, key.encode(), timeout)
    if record is None or record.version != version:
        raise VersionGoneError(f"{key!r} was created, and at once deleted or sealed by somebody else", key=key)
    return Dataset(_open_entry(root, key, timeout, writable=True, put_id=record.put_id), timeout)


@modes.unaffected
def open_dataset(root: Root, key: str, timeout: float, *, writable: bool = True) -> Dataset:
    with resource_errors(root.path, key, root):
        return Dataset(_open_entry(root, key, timeout, writable=writable), timeout)


@modes.unaffected
def hold_rows(root: Root, key: str, timeout: float) -> MappedEntry:
    """Returns the rows that a view of a dataset shows: an ordinary entry of those that are there by now.

    It is of the same file, while that is mapped.
    """
    with resource_errors(root.path, key, root):
        entry = _open_entry(root, key, timeout, writable=False)
        rows, length = Rows(entry), entry.length
        plan = structure.plan_at(rows.value[:length], [leaf.offset for leaf in rows.plan.leaves])
        record = msgspec.structs.replace(entry.record, description=plan.description, nbytes=plan.nbytes)
        return MappedEntry(record, entry.mapping)


def _open_entry(root: Root, key: str, timeout: float, *, writable: bool, put_id: int = 0) -> MutableEntry:
    deadline = deadline_after(timeout)
    return open_mutable(root, key, "dataset", dataset_capacity, deadline, writable=writable, put_id=put_id)


# --- Tables of leaves ------------------------------------------------------------------------------------------------


_COLUMNS = ("leaf", "dtype", "shape of a row", "size of a row")


def rows_text(plan: Plan, title: str) -> str:
    return table_text(_COLUMNS, _cells(plan), f"{title}{_in_all(plan)}")


def rows_html(plan: Plan, title: str) -> str:
    return table_html(_COLUMNS, _cells(plan), f"{title}{_in_all(plan)}; {shown(len(plan.leaves), 'leaf', 'leaves')}")


def _cells(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for leaf in plan.leaves:
        count, *shape = leaf.shape
        yield ".".join(map(str, leaf.name)), leaf.dtype, str(shape), size(leaf.nbytes // count)


def _in_all(plan: Plan) -> str:
    """Returns the bytes of all rows that there is room for."""
    return f", {size(sum(leaf.nbytes for leaf in plan.leaves))}"
