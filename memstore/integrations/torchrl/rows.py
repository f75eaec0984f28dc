"""Rows of a storage, as processes read and write them: whole ones, whatever others write or who dies. No torchrl here.

WholeRows    reads and writes batches of rows of any number
Journal      writes rows over in place: a batch is whole or absent, and no reader takes a row that is half written

A TorchRL sampler draws a slot, and wants what stands there. So a slot must never be empty, or hold half a row, because
its writer died: there is nothing to draw instead. That is why a storage isn't a ring of memstore's (`memstore/replay`),
whose slots a dead writer leaves empty, and which chooses the slots by itself. Instead, a batch is written twice.

The entry is a dataset of `{"rows": ..., "word": int64}`. It has *slots*, and behind them some rows more, where batches
are *staged*. A slot's word is twice the number of times that it was written, and odd while it is; negative: written
before the storage was emptied. The word of a staged row is its slot. The *state* stands in the control page: the
length, and the words below. Writing, under the entry's mutex:

1. Copy rows and slots to the staging rows (`Journal.stage`). Killed here: the batch is absent.
2. Note what cursor, count and last slot will be, and how many rows are staged: **the moment of publication**.
3. Make the words of the slots odd, copy the rows, make the words even, move the length and the other state, stage none
   (`Journal._store`). Killed here: whoever holds the mutex next finds staged rows, and does 3 again (`recover`).

Reading takes no lock (`WholeRows.read`): load the words, copy the rows, load the words again; take what is even and
the same. This rests on x86-64's order of stores and loads, as docs/decisions/015 says; elsewhere rows are read under
the mutex. A reader that finds a row written again and again reads it under the mutex too.

A batch of more rows than can be staged is several, one after the other.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from memstore.datasets import Batch, Dataset, SharedRows, rows_of_spec, shared_rows, take_batch
from memstore.engine import SPARE_AT, deadline_after, syscalls
from memstore.errors import CorruptionError, ReadOnlyError, StoreTimeoutError, StructureMismatchError
from memstore.rows import RowIndex, read_rows
from memstore.store.store import Store

# --- Reads and writes ------------------------------------------------------------------------------------------------


_ResultT = TypeVar("_ResultT")

_ROUNDS = 4  # then under the mutex
_PAUSE = 0.001  # seconds: who may not take it looks again


def create_rows(store: Store, key: str, row: Any, slots: int) -> Dataset:
    """Creates the entry of a storage. `row`: an example of one. Errors as `Store.create_dataset`."""
    spec = TensorDict({"rows": row, "word": torch.zeros((), dtype=torch.int64)}, [])
    one = rows_of_spec(spec, 1)
    leaves = one.values(include_nested=True, leaves_only=True)
    row_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return store.create_dataset(key, spec, capacity=slots + staging_rows(slots, row_bytes))


class WholeRows:
    """The rows of a storage, open. Its callers put torch's modes aside.

    Attributes:
        data: the dataset that holds them.
        journal: its slots and state.
        value: the slots in the shared memory: a TensorDict, a tensorclass or a tensor.
        names: its entries, if it isn't a tensor.
    """

    def __init__(self, data: Dataset) -> None:
        """Raises StructureMismatchError if the dataset isn't one of a storage."""
        shared = shared_rows(data)
        names = {leaf.name for leaf in shared.rows.plan.leaves}
        words = data.spec.get("word") if isinstance(data.spec, dict) else None
        if words != ((), torch.int64) or {name[0] for name in names} != {"rows", "word"} or len(data.spec) != 2:
            raise StructureMismatchError(
                f"{data.key!r} is a dataset of {data.spec}, and none that MemstoreStorage made: take another key",
                key=data.key,
            )
        self.data, self._shared = data, shared
        self._entry = shared.entry
        self.journal = Journal(shared)
        self.value: Any = shared.rows.value["rows"][: self.journal.slots]
        self.names: list[Any] = []
        if is_tensor_collection(self.value):
            self.names = list(self.value.keys(include_nested=True, leaves_only=True))

    def __len__(self) -> int:
        return self.journal.length

    @property
    def put_id(self) -> int:
        """Names the entry, among all that the store ever had."""
        return self._entry.record.put_id

    def live(self) -> Any:
        """Returns the rows that are there, in the shared memory."""
        return self.value[: len(self)]

    def hold(self, action: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
        """Calls `action` under the mutex, where nobody else writes. Raises StoreTimeoutError, MutableEntryError."""
        self._check_writable()
        self._entry.check_in_place()
        return self._entry.run(functools.partial(self._held, action, arguments), deadline_after(self._shared.timeout))

    def _held(self, action: Callable[..., _ResultT], arguments: tuple[Any, ...]) -> _ResultT:
        self._entry.check_open()
        self.journal.recover()
        return action(*arguments)

    def _check_writable(self) -> None:
        if not self._entry.writable:
            raise ReadOnlyError(f"the store of {self.data.key!r} was opened with mode 'r'", key=self.data.key)

    def lacks_entries(self, rows: Any) -> bool:
        """Returns whether it is a TensorDict that has not all entries of a row."""
        if not isinstance(rows, TensorDictBase):
            return False
        return not set(self.names) <= set(rows.keys(include_nested=True, leaves_only=True))

    # --- write --------------------------------------------------------------------------------------------------------

    def write(self, rows: Any, slots: Words, *, corrects: bool = False) -> None:
        """Writes a batch to slots. Errors as `Dataset.extend`; ValueError for another number of rows.

        Args:
            corrects: the last of them is not where the newest rows end.
        """
        batch = self._batch(rows)
        if batch.rows != len(slots):
            raise ValueError(f"{self.data.key!r}: {batch.rows:,} rows for {len(slots):,} slots")
        for part in self._parts(batch):
            self.hold(self.journal.stage, batch, part, slots[part], Moves.NOTHING if corrects else Moves.LAST)

    def append(self, rows: Any) -> torch.Tensor:
        """Writes a batch to the next slots, where no other process writes. Returns them.

        Rows with an entry "index" get their slots there, as from TorchRL's TensorDictRoundRobinWriter.
        """
        index: torch.Tensor | None = None
        if "index" in self.names and isinstance(rows, TensorDictBase):
            index = torch.empty((len(rows), *self.value["index"].shape[1:]), dtype=torch.int64)
            rows = rows.copy().set("index", index)
        batch = self._batch(rows)
        found = [self.hold(self._append, batch, part, index) for part in self._parts(batch)]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *found]))

    def _append(self, batch: Batch, part: slice, index: torch.Tensor | None) -> Words:
        journal, count = self.journal, part.stop - part.start
        slots: Words = (np.arange(count, dtype=np.int64) + journal.state.cursor) % journal.slots
        if index is not None:
            index[part] = torch.from_numpy(slots).view(-1, *[1] * (index.ndim - 1))
        journal.stage(batch, part, slots, Moves.CURSOR)
        return slots

    def change(self, slots: Words, change: Callable[[Any], None]) -> None:
        """Calls `change` with a copy of rows of different slots, and writes them back, while nobody else writes."""

        def write() -> None:
            rows = read_rows(self.live(), slots)
            change(rows)
            batch = self._batch(rows)
            for part in self._parts(batch):
                self.journal.stage(batch, part, slots[part], Moves.NOTHING)

        self.hold(write)

    def _batch(self, rows: Any) -> Batch:
        """Leaves out what the entry doesn't have, as TorchRL does it for shared storages."""
        self._check_writable()
        if isinstance(rows, TensorDictBase) and is_tensor_collection(self.value):
            rows = rows.select(*self.names, strict=False)
        leaves = rows.values(include_nested=True, leaves_only=True) if is_tensor_collection(rows) else [rows]
        count = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
        words = torch.zeros(count, dtype=torch.int64)
        return take_batch(self.data.key, self._shared.rows.plan, {"rows": rows, WORD[0]: words})

    def _parts(self, batch: Batch) -> list[slice]:
        """Returns the parts of a batch, each of as many rows as can be staged."""
        room = self.journal.room
        return [slice(start, min(start + room, batch.rows)) for start in range(0, batch.rows, room)]

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(self, index: Any) -> Any:
        """Copies rows, each as one write has left it. `index` is what `memstore.read_rows` takes.

        Raises IndexError, and StoreTimeoutError, which names who is in the middle of a write.
        """
        live, words = self.live(), self.journal.words
        rows = RowIndex(index).rows(len(live), repr(self.data.key))
        numbers = rows.numpy()
        if not READS_ARE_ORDERED:
            return self.read_whole(numbers, lambda: read_rows(live, rows))
        before = words[numbers]
        found = read_rows(live, rows)
        (again,) = np.nonzero(self._changed(before, numbers))
        for _ in range(_ROUNDS):  # what was written meanwhile, and that alone
            if not again.size:
                return found
            some = numbers[again]
            before = words[some]
            found[torch.from_numpy(again)] = read_rows(live, some)
            again = again[self._changed(before, some)]
        if again.size:
            some = numbers[again]
            found[torch.from_numpy(again)] = self.read_whole(some, lambda: read_rows(live, some))
        return found

    def read_whole(self, numbers: Words, gather: Callable[[], Any]) -> Any:
        """Returns what `gather` copies, as if nobody had written meanwhile to the slots `numbers`."""
        deadline = deadline_after(self._shared.timeout)
        while True:
            for _ in range(_ROUNDS if READS_ARE_ORDERED else 0):
                before = self.journal.words[numbers]
                found = gather()
                if not self._changed(before, numbers).any():
                    return found
            if self._entry.writable:
                return self.hold(gather)
            if not READS_ARE_ORDERED:
                return gather()
            if time.monotonic() > deadline:
                owner = self._entry.page.owner()
                text = f"{self.data.key!r}: rows are in the middle of a write, by pid {owner} if it lives"
                raise StoreTimeoutError(text, key=self.data.key)
            time.sleep(_PAUSE)

    def _changed(self, before: Words, numbers: Words) -> Any:
        return (self.journal.words[numbers] != before) | (before & 1 != 0)

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns how often each slot was written again since its first time; -1 if never, or for no slot."""
        words = torch.from_numpy(self.journal.words)
        is_there = (slots >= 0) & (slots < len(words))
        found = words[slots.clamp(0, len(words) - 1)].abs() // 2 - 1
        return torch.where(is_there, found, -1)

    # --- as a whole ---------------------------------------------------------------------------------------------------

    def empty(self) -> None:
        self.hold(self.journal.empty)

    def flush(self) -> None:
        """Flushes, as `Dataset.flush` does, all slots that were written, and the state."""
        self.hold(lambda: None)
        self.data.flush()


# --- The journal -----------------------------------------------------------------------------------------------------


Words = np.ndarray[Any, np.dtype[np.int64]]

READS_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")
WORD = ("word",)
_STAGED_BYTES, _STAGED_ROWS = 8 << 20, 4096
_WORDS_AT_ONCE = 4096


class JournalState(syscalls.Structure):
    """The state of a storage, in its control page.

    Attributes:
        staged: how many rows are staged, and not stored yet.
        cursor: the slot that `append` takes first.
        written: rows ever written.
        last: one more than the slot that was written last; 0: none was.
        revision: changes with the rows.
        following: cursor, written and last, once the staged rows are stored.
    """

    staged: int
    cursor: int
    written: int
    last: int
    revision: int
    following: Any
    _fields_ = (
        *((name, syscalls.Uint64) for name in ("staged", "cursor", "written", "last", "revision")),
        ("following", syscalls.Uint64 * 3),
    )


class Moves(Enum):
    """Kind of write, by what it moves besides: nothing, the last slot, or the cursor with it."""

    NOTHING = 0
    LAST = 1
    CURSOR = 2


class Journal:
    """The slots of an open storage, and the state that its processes share. See the module.

    Attributes:
        slots: how many there are.
        room: how many rows can be staged at once.
        words: those of the slots.
        state: in the control page. To change it, hold the mutex.
    """

    def __init__(self, shared: SharedRows) -> None:
        entry, plan = shared.entry, shared.rows.plan
        self._page, self._key = entry.page, entry.key
        capacity = plan.leaves[0].shape[0]
        word = next(number for number, leaf in enumerate(plan.leaves) if leaf.name == WORD)
        row = sum(leaf.nbytes // capacity for leaf in plan.leaves)
        self.slots = slots_of(capacity, row)
        self.room = capacity - self.slots
        rows = [array for number, array in enumerate(shared.rows.arrays) if number != word]
        self._rows = [(array[: self.slots], array[self.slots :]) for array in rows]
        self._word = word
        words: Words = shared.rows.arrays[word]
        self.words, self._staged_slots = words[: self.slots], words[self.slots :]
        self.state = JournalState.from_address(entry.mapping.address + entry.record.start + SPARE_AT)
        self._mapping = entry.mapping  # it stays mapped

    @property
    def length(self) -> int:
        """The slots that were written, from the first on."""
        return min(self._page.length, self.slots)

    @property
    def last(self) -> int | None:
        """The slot that was written last, by a write that isn't a correction."""
        return self.state.last - 1 if self.state.last else None

    # --- under the mutex ----------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Completes what the last owner had published, first in every hold. Raises CorruptionError.

        The slot behind the length was never written, unless the host crashed: then the length is as it was flushed, and
        what is behind it isn't known to be whole.
        """
        if self.state.staged:
            self._store()
        elif self.length < self.slots and self.words[self.length] > 0:
            self._forget_from(self.length)

    def stage(self, batch: Batch, part: slice, slots: Words, moves: Moves) -> None:
        """Writes a part of the rows of a batch to slots."""
        count, state = len(slots), self.state
        sources = [array for number, array in enumerate(batch.arrays) if number != self._word]
        for (_, staged), source in zip(self._rows, sources, strict=True):
            staged[:count] = source[part]
        self._staged_slots[:count] = slots
        last = int(slots[-1]) + 1
        cursor = last % self.slots if moves is Moves.CURSOR else state.cursor
        state.following[:] = (cursor, state.written + count, state.last if moves is Moves.NOTHING else last)
        state.staged = count  # the moment of publication
        self._store()

    def _store(self) -> None:
        """Takes step 3, from wherever it stopped."""
        state, words = self.state, self.words
        count = state.staged
        slots = self._staged_slots[:count].copy()
        if not 0 < count <= self.room or slots.min() < 0 or slots.max() >= self.slots:
            detail = f"{count} rows are staged, of at most {self.room}, or they are for slots that aren't there"
            raise CorruptionError(f"{self._key!r}: {detail}", key=self._key, detail=detail)
        words[slots] = np.abs(words[slots]) | 1
        start, stop = int(slots[0]), int(slots[0]) + count
        is_run = stop <= self.slots and np.array_equal(slots, np.arange(start, stop))
        for target, staged in self._rows:
            target[slice(start, stop) if is_run else slots] = staged[:count]
        words[slots] += 1
        self._page.length = self._first_unwritten(self.length)
        state.cursor, state.written, state.last = state.following
        state.revision += 1
        state.staged = 0

    def _first_unwritten(self, length: int) -> int:
        while length < self.slots:
            window = self.words[length : length + _WORDS_AT_ONCE]
            unwritten = np.flatnonzero(window <= 0)
            if unwritten.size:
                return length + int(unwritten[0])
            length += len(window)
        return length

    def bump(self) -> None:
        self.state.revision += 1

    def set_length(self, length: int) -> None:
        """Says which slots count as written, whether they were or not."""
        if not 0 <= length <= self.slots:
            raise ValueError(f"{self._key!r}: a length is from 0 to {self.slots:,}, and not {length:,}")
        self._page.length = min(length, self.length)
        self._forget_from(length)
        self._page.length = length
        self.state.revision += 1

    def _forget_from(self, slot: int) -> None:
        """Lets slots count as not written, until they are."""
        behind = self.words[slot:]
        behind[:] = -np.abs(behind)

    def set_counts(self, cursor: int, written: int) -> None:
        if not (0 <= cursor < self.slots and written >= 0):
            raise ValueError(f"{self._key!r}: cursor {cursor} of {self.slots} slots, or {written} rows written")
        self.state.cursor, self.state.written = cursor, written

    def empty(self) -> None:
        """Empties every slot, and notes it: so what was sampled of one is out of date."""
        words = self.words
        words[:] = np.where(words == 0, 0, -(np.abs(words) + 2))
        self.set_length(0)


def staging_rows(slots: int, row_bytes: int) -> int:
    """Returns how many rows are staged at once, in a storage of so many slots."""
    return max(1, min(slots, _STAGED_ROWS, _STAGED_BYTES // max(row_bytes, 1)))


def slots_of(capacity: int, row_bytes: int) -> int:
    """Returns the slots of a dataset with that many rows, which `staging_rows` has made larger than its slots."""
    largest = staging_rows(capacity, row_bytes)
    return capacity - largest if capacity >= 2 * largest else capacity // 2
