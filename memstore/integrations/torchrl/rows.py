"""The rows of a storage, as processes read and write them: whole ones, whatever others write or who dies."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from memstore.datasets import Batch, Dataset, rows_of_spec, shared_rows, take_batch
from memstore.engine import deadline_after
from memstore.errors import ReadOnlyError, StoreTimeoutError, StructureMismatchError
from memstore.integrations.torchrl.journal import READS_ARE_ORDERED, WORD, Journal, Moves, Words, staging_rows
from memstore.rows import Index, read_rows
from memstore.store.store import Store

Result = TypeVar("Result")

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
        """The rows that are there, in the shared memory."""
        return self.value[: len(self)]

    def hold(self, action: Callable[[], Result]) -> Result:
        """Calls `action` under the mutex, where nobody else writes. Raises StoreTimeoutError, MutableEntryError."""
        self._check_writable()
        self._entry.check_in_place()
        return self._entry.run(functools.partial(self._held, action), self._deadline())

    def _held(self, action: Callable[[], Result]) -> Result:
        self._entry.check_open()
        self.journal.recover()
        return action()

    def _deadline(self) -> float:
        return deadline_after(self._shared.timeout)

    def _check_writable(self) -> None:
        if not self._entry.writable:
            raise ReadOnlyError(f"the store of {self.data.key!r} was opened with mode 'r'", key=self.data.key)

    def lacks_entries(self, rows: Any) -> bool:
        """Whether it is a TensorDict that has not all entries of a row."""
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
        if batch.count != len(slots):
            raise ValueError(f"{self.data.key!r}: {batch.count:,} rows for {len(slots):,} slots")
        self._in_parts(batch, lambda start, stop: slots[start:stop], Moves.NOTHING if corrects else Moves.LAST)

    def append(self, rows: Any) -> torch.Tensor:
        """Writes a batch to the next slots, where no other process writes. Returns them.

        Rows with an entry "index" get their slots there, as from TorchRL's TensorDictRoundRobinWriter.
        """
        index: torch.Tensor | None = None
        if "index" in self.names and isinstance(rows, TensorDictBase):
            index = torch.empty((len(rows), *self.value["index"].shape[1:]), dtype=torch.int64)
            rows = rows.copy().set("index", index)

        def choose(start: int, stop: int) -> Words:
            slots = self.journal.next_slots(stop - start)
            if index is not None:
                index[start:stop] = torch.from_numpy(slots).view(-1, *[1] * (index.ndim - 1))
            return slots

        return self._in_parts(self._batch(rows), choose, Moves.CURSOR)

    def _in_parts(self, batch: Batch, choose: Callable[[int, int], Words], moves: Moves) -> torch.Tensor:
        """One hold for as many rows as can be staged."""

        def write(start: int, stop: int) -> Words:
            slots = choose(start, stop)
            self.journal.stage(batch, start, stop, slots, moves)
            return slots

        room = self.journal.room
        parts = [(start, min(start + room, batch.count)) for start in range(0, batch.count, room)]
        found = [self.hold(functools.partial(write, *part)) for part in parts]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *found]))

    def change(self, slots: Words, change: Callable[[Any], None]) -> None:
        """Calls `change` with a copy of rows of different slots, and writes them back, while nobody else writes."""

        def write() -> None:
            rows = read_rows(self.live(), slots)
            change(rows)
            batch, room = self._batch(rows), self.journal.room
            for start in range(0, batch.count, room):
                stop = min(start + room, batch.count)
                self.journal.stage(batch, start, stop, slots[start:stop], Moves.NOTHING)

        self.hold(write)

    def _batch(self, rows: Any) -> Batch:
        """What the entry doesn't have is left out, as TorchRL does it for shared storages."""
        self._check_writable()
        if isinstance(rows, TensorDictBase) and is_tensor_collection(self.value):
            rows = rows.select(*self.names, strict=False)
        leaves = rows.values(include_nested=True, leaves_only=True) if is_tensor_collection(rows) else [rows]
        count = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
        words = torch.zeros(count, dtype=torch.int64)
        return take_batch(self.data.key, self._shared.rows.plan, {"rows": rows, WORD[0]: words})

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(self, index: Any) -> Any:
        """A copy of rows, each as one write has left it. `index`: what `memstore.read_rows` takes.

        Raises IndexError, and StoreTimeoutError, which names who is in the middle of a write.
        """
        live = self.live()
        numbers = Index(index).rows(len(live), repr(self.data.key))
        return self._read(numbers.numpy(), lambda some: read_rows(live, numbers if some is None else some))

    def read_whole(self, numbers: Words, gather: Callable[[], Any]) -> Any:
        """What `gather` copies, as if nobody had written meanwhile to the slots `numbers`."""
        deadline = self._deadline()
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
            self._pause(deadline)

    def _read(self, numbers: Words, gather: Callable[[Words | None], Any]) -> Any:
        """Reads again what was written meanwhile, and that alone."""
        if not READS_ARE_ORDERED:
            return self.read_whole(numbers, functools.partial(gather, None))
        before = self.journal.words[numbers]
        found = gather(None)
        (again,) = np.nonzero(self._changed(before, numbers))
        for _ in range(_ROUNDS):
            if not again.size:
                return found
            some = numbers[again]
            before = self.journal.words[some]
            found[torch.from_numpy(again)] = gather(some)
            again = again[self._changed(before, some)]
        if again.size:
            some = numbers[again]
            found[torch.from_numpy(again)] = self.read_whole(some, functools.partial(gather, some))
        return found

    def _changed(self, before: Words, numbers: Words) -> Any:
        return (self.journal.words[numbers] != before) | (before & 1 != 0)

    def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            text = (
                f"{self.data.key!r}: rows are in the middle of a write, by pid {self._entry.page.owner()} if it lives"
            )
            raise StoreTimeoutError(text, key=self.data.key)
        time.sleep(_PAUSE)

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """How often each slot was written again since its first time; -1: never, or there is no such slot."""
        words = torch.from_numpy(self.journal.words)
        is_there = (slots >= 0) & (slots < len(words))
        found = words[slots.clamp(0, len(words) - 1)].abs() // 2 - 1
        return torch.where(is_there, found, -1)

    # --- as a whole ---------------------------------------------------------------------------------------------------

    def empty(self) -> None:
        def act() -> None:
            self.journal.advance()
            self.journal.set_length(0)

        self.hold(act)

    def flush(self) -> None:
        """As `Dataset.flush`, of all slots that were written and of the state."""
        self.hold(lambda: None)
        self.data.flush()
