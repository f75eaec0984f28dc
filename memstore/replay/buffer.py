"""ReplayBuffer: the methods that a user calls. The rules: docs/decisions/015.

`sample_rows` and `sample_slices` return a `Sampled`, whose rows can be put back if the caller doesn't get them.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from memstore import listing
from memstore._arguments import encode_key
from memstore._wording import an_instance, count_of, names_its_methods
from memstore.datasets import EntryReference, Spec, as_row, in_range, opened, reduce, rows_html, rows_text, spec_of
from memstore.engine import MutableEntry, deadline_after
from memstore.errors import MemstoreError, ReadOnlyError, StoreTimeoutError, StructureMismatchError
from memstore.replay.entry import RateLimiter, capacity_of, checked_alpha, open_or_create, options_for
from memstore.replay.picking import ConsumingPicker, Dice, PickedSlots, Picker, Slices
from memstore.replay.priorities import GivenPriorities, Priorities, plain_numbers
from memstore.replay.ring import READABLE, Ring, Slots, flush, keep_whole, positions_of
from memstore.replay.sampling import (
    INDEX,
    WEIGHT,
    Sampler,
    SamplerOptions,
    Samples,
    hand_out,
    new_targets,
    picker_for,
    put_back,
    rows_by_age,
    sample,
)
from memstore.replay.writing import BufferWriter, Claimed, Intake
from memstore.rows import RowIndex
from memstore.structure import modes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from memstore.store.store import Store


@modes.uncompiled_methods
@names_its_methods
class ReplayBuffer:
    """A ring of rows that any number of processes fill and sample at the same time.

    A sample takes no lock, and never shows a row that is being written. The rows of a batch become visible together, or
    not at all if the writer dies. The buffer is in the store: it survives the death of all processes, and a process
    that opens the key later continues with it. Thread-safe; usable in forked children; pickled by reference.

    Args:
        store: the store. Opened with mode "r" it gives a buffer that can be sampled, but not by "fifo" or "lifo".
        key: the buffer's key in it.
        spec: describes a row, as for `Store.create_dataset`; None: as created.
        capacity: how many rows the buffer holds; then the oldest are overwritten. None: as created.
        sampler: how `sample` of this object chooses rows. "uniform": any rows; "prioritized": by their priorities;
            "fifo" and "lifo": each row once, counted over all processes, the oldest or the newest first. A buffer has
            priorities if it was created with "prioritized"; it can then be opened with any sampler.
        replacement: whether "uniform" may return a row again before all others. False: this object samples in passes,
            each of which returns once each row that existed when it began; no row is twice in a batch either.
        alpha: the exponent of priorities, from 0 to 4. It belongs to the buffer, as capacity, spec and rate limiter do.
            0.6, the default, means as created; another value has to be the buffer's, with any sampler. It has no effect
            on a buffer without priorities.
        beta: the exponent of the weights that this object returns.
        rate_limiter: makes samplers and writers wait for each other; None: as created.
        seed: of this object's random numbers; None: different ones each time. Forked children and unpickled copies have
            different ones too.
        mode: "a" opens the buffer, and creates it if it doesn't exist; "r+": it must exist; "x": it must not.

    Attributes:
        key: the buffer's key in the store.
        capacity: how many rows it holds.
        spec: what a row is: nested dicts of `(shape, dtype)`, or one such pair.

    Raises:
        KeyNotFoundError: there is no such key, and no `spec` and `capacity` with which to create it.
        AlreadyExistsError: mode "x", and the key exists.
        StructureMismatchError: it was created with another spec, capacity, alpha or rate limiter, or without
            priorities. The message shows both.
        MutableEntryError: the key is that of another kind of entry.
        StoreFullError: no room for all of its rows. Nothing was changed.
        ReadOnlyError: the store was opened with mode "r", and the buffer has to be created, or its sampler hands out
            rows.
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> import memstore, tempfile, torch
        >>> store = memstore.open(tempfile.mkdtemp())
        >>> spec = {"state": ((4,), torch.float32), "reward": ((), torch.float32)}
        >>> buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=1000)
        >>> buffer.extend({"state": torch.rand(64, 4), "reward": torch.ones(64)}).shape
        torch.Size([64])
        >>> batch = buffer.sample(32)
        >>> batch["state"].shape, batch["reward"].sum(), batch["index"].max() < 64
        (torch.Size([32, 4]), tensor(32.), tensor(True))
    """

    def __init__(
        self,
        store: Store,
        key: str,
        spec: Spec = None,
        *,
        capacity: int | None = None,
        sampler: Sampler = "uniform",
        replacement: bool = True,
        alpha: float = 0.6,
        beta: float = 0.4,
        rate_limiter: RateLimiter | None = None,
        seed: int | None = None,
        mode: Literal["a", "r+", "x"] = "a",
    ) -> None:
        listing.check_store(store, key)
        encode_key(key)
        root, timeout, writable = listing.opened(store), listing.timeout_of(store), listing.may_write(store)
        own = SamplerOptions(sampler, replacement, beta)
        alpha = checked_alpha(alpha)
        options = options_for(root, alpha if sampler == "prioritized" else None, rate_limiter)
        dice = Dice(seed)  # before anything is made
        entry = open_or_create(root, key, spec, capacity, options, alpha, mode, timeout, writable=writable)
        self._set(entry, own, timeout, dice)

    @modes.unaffected
    def _set(self, entry: MutableEntry, own: SamplerOptions, timeout: float, dice: Dice) -> None:
        self._ring = ring = Ring(entry)
        self.key, self.capacity = ring.key, ring.capacity
        self.spec: Any = spec_of(ring.plan)
        self._own, self._timeout, self._dice = own, timeout, dice
        self._intake, self._writer = Intake(ring), BufferWriter(ring)
        self._picker, self._samples = picker_for(ring, own, dice), Samples(ring)
        if entry.writable:
            keep_whole(ring, deadline_after(timeout))

    def __len__(self) -> int:
        """Returns the number of rows. Rows that were handed out count until they are overwritten."""
        rows = self._ring.numbers.rows
        if rows > self.capacity:
            self._ring.numbers.check(self.capacity)
        return rows

    @property
    def cursor(self) -> int:
        """The index that the next row gets. Rows whose index is less by more than the capacity are gone.

        It counts all indices that were ever given out: those of rows that were added, of rows that are being added, of
        rows whose writer died, and of slots that the ring skipped because a writer was slow.
        """
        return self._ring.numbers.head

    # --- write --------------------------------------------------------------------------------------------------------

    def add(self, row: Any, *, priority: float | None = None, timeout: float | None = None) -> int:
        """Adds one row. It is like `extend`, with leaves that lack the dimension that counts rows.

        Returns:
            Its index.

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> buffer = memstore.ReplayBuffer(store, "replay", {"x": ((2,), torch.float32)}, capacity=10)
            >>> buffer.add({"x": torch.ones(2)}), buffer.add({"x": torch.ones(2)})
            (0, 1)
        """
        return self._write(row, priority, timeout, single=True).runs[0].position

    def extend(self, batch: Any, *, priority: Any = None, timeout: float | None = None) -> torch.Tensor:
        """Adds rows. They can be sampled when all of their bytes are there.

        Args:
            batch: rows, in the structure of the spec: TensorDicts, dicts, tensors and numpy arrays.
            priority: a number for each row, or one for all; None: the largest that was ever given.
            timeout: seconds to wait for room if a rate limiter or stopped writers block it; None: the store's.

        Returns:
            The index of each row, as int64 [n]. Indices grow for ever, so one says which row was meant even when its
            slot has another row by now.

        Raises:
            StructureMismatchError: other leaves, shapes or dtypes. Nothing was written.
            StoreFullError: more rows than the capacity.
            MutableEntryError: the buffer was deleted.
            StoreTimeoutError: no room in time; the message names who holds it.
            ReadOnlyError: the store was opened with mode "r".
            TypeError, ValueError: the priorities are invalid, as for `update_priority`.

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> buffer = memstore.ReplayBuffer(store, "replay", ((), torch.int64), capacity=10)
            >>> buffer.extend(torch.arange(3))
            tensor([0, 1, 2])
        """
        positions = self._write(batch, priority, timeout, single=False).positions()
        if modes.are_active():
            with modes.put_aside():
                return torch.from_numpy(positions)
        return torch.from_numpy(positions)

    def _write(self, value: Any, priority: Any, timeout: float | None, *, single: bool) -> Claimed:
        """Adds rows. Returns where they lie."""
        self._check_writable()
        batch = self._intake.take(value, single=single)
        given = None if priority is None else GivenPriorities(priority, batch.rows, self._priorities().alpha)
        if not batch.rows:
            return Claimed(-1, [], 0)
        return self._writer.write(batch, given, self._deadline(timeout))

    def _priorities(self) -> Priorities:
        priorities = self._ring.priorities
        if priorities is None:
            raise StructureMismatchError(
                f"{self.key!r} was made without priorities: make it with sampler='prioritized'", key=self.key
            )
        return priorities

    def update_priority(self, index: Any, priority: Any) -> int:
        """Changes the priorities of rows. It skips rows that were overwritten since.

        Args:
            index: integers [n], as a sample's "index" or as `extend` has returned them. If one comes twice, its last
                priority counts.
            priority: a number for each, or one for all: finite, at least 0. A row of priority 0 is not sampled.

        Returns:
            How many were changed.

        Raises:
            StructureMismatchError: the buffer has no priorities.
            TypeError, ValueError: an index or a priority is invalid. Nothing was changed.
            ReadOnlyError: the store was opened with mode "r".

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> spec = {"x": ((), torch.float32)}
            >>> buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=10, sampler="prioritized")
            >>> index = buffer.extend({"x": torch.arange(4.0)})
            >>> buffer.update_priority(index, [0.0, 0.0, 3.0, 0.0])
            4
            >>> buffer.sample(2)["x"]
            tensor([2., 2.])
        """
        self._check_writable()
        ring = self._ring
        with modes.put_aside():
            if hasattr(index, "keys"):  # a sample itself
                raise TypeError(f"index is integers, as batch['index'] of a sample, and not {an_instance(index)}")
            found, priorities = np.asarray(plain_numbers(index)), self._priorities()
            given = GivenPriorities(priority, found.size, priorities.alpha)
        if found.dtype.kind not in "iu" and found.size:
            raise TypeError(f"an index is of integers, and not of {found.dtype}")
        if found.ndim > 1:
            raise ValueError(f"an index has one dimension, and not {found.ndim}")
        positions = np.atleast_1d(found).astype(np.int64, copy=False)
        if not positions.size:
            return 0
        ring.entry.check_in_place()
        return ring.run(_change_priorities, self._deadline(None), ring, priorities, positions, given)

    def flush(self) -> None:
        """Writes all rows to the disk: afterwards they survive a crash of the host, unless they are overwritten.

        After a crash the buffer has only the rows that were flushed. In memory (tmpfs) nothing survives a crash. Every
        added row survives the death of all processes without a flush.

        Raises:
            StoreTimeoutError: others held the buffer.
            ReadOnlyError: the store was opened with mode "r".
        """
        self._check_writable()
        self._ring.entry.check_in_place()
        with self._ring.entry.errors:
            flush(self._ring, self._deadline(None))

    def _check_writable(self) -> None:
        if not self._ring.entry.writable:
            raise ReadOnlyError(f"{self.key!r}: the store was opened with mode 'r': it can't be written", key=self.key)

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(self._timeout if timeout is None else timeout)

    # --- sample -------------------------------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, *, out: Any = None, device: Any = None, timeout: float | None = None
    ) -> TensorDict:
        """Returns rows, in memory of their own.

        Args:
            batch_size: how many rows.
            out: an earlier sample of this size, to be filled; it may be on any device. None: new memory.
            device: the device of new memory; None: the CPU. Copies to CUDA are asynchronous, on the current stream.
            timeout: seconds to wait until there are rows, and the rate limiter permits it; None: the store's.

        Returns:
            A TensorDict [batch_size] with the leaves of the spec (that of one tensor is called "data"), and with the
            "index" of each row, int64. If the sampler is "prioritized", it also has the "weight" of each row, float32,
            which is `(rows * probability) ** -beta`, divided by the largest one of the batch.

        Raises:
            StoreTimeoutError: there were not enough rows in time; the message says why.
            StructureMismatchError: `out` doesn't fit, can't be filled, or has leaves that share memory. No row was
                handed out.
            ValueError: `batch_size` is negative; or the capacity is less, and "fifo", "lifo" and `replacement=False`
                give no row twice.
            TypeError: `batch_size` or `out` is invalid; or both `out` and `device` are given.
        """
        return sample_rows(self, batch_size, out=out, device=device, timeout=timeout).value

    def sample_slices(
        self, num_slices: int, slice_len: int, *, end_key: Any = "done", timeout: float | None = None
    ) -> TensorDict:
        """Returns slices of trajectories: rows that were added one after the other, from random places.

        If several writers add one row at a time, their rows are interleaved: add whole episodes, or number them.

        Args:
            num_slices: how many; one may come more than once.
            slice_len: rows of each.
            end_key: the leaf, by its name or a tuple of names, that says where episodes end, so that no slice runs over
                it. If it has bools, floats or integers of one byte, an episode ends with a row in which some element
                isn't 0. If it has larger integers, they are the number of the episode. None: slices ignore episodes.
            timeout: as for `sample`.

        Returns:
            A TensorDict [num_slices, slice_len], with "index".

        Raises:
            StoreTimeoutError: there were no such slices in time.
            KeyError: the spec has no such leaf.
            ValueError: a number is too small, or the capacity is less than `slice_len`.
            TypeError: a number is invalid, or the leaf can't mark the end of episodes.

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> spec = {"step": ((), torch.int64), "done": ((), torch.bool)}
            >>> buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=100)
            >>> episode = {"step": torch.arange(5), "done": torch.arange(5) == 4}
            >>> index = buffer.extend(episode), buffer.extend(episode)
            >>> steps = buffer.sample_slices(8, 3)["step"]
            >>> steps.shape, (steps.diff() == 1).all()
            (torch.Size([8, 3]), tensor(True))
        """
        return sample_slices(self, num_slices, slice_len, end_key=end_key, timeout=timeout).value

    def _sample(self, picker: Picker, shape: tuple[int, ...], out: Any, device: Any, deadline: float) -> Sampled:
        """Samples rows with a picker.

        Args:
            shape: the batch size of the result.
            out, device: as for `sample`.
        """
        if modes.are_active():
            with modes.put_aside():
                return self._sampled(picker, shape, out, device, deadline)
        return self._sampled(picker, shape, out, device, deadline)

    def _sampled(self, picker: Picker, shape: tuple[int, ...], out: Any, device: Any, deadline: float) -> Sampled:
        ring, samples, rows = self._ring, self._samples, math.prod(shape)
        # 1. Check that such a sample is possible, and that `out` can be filled, before rows are handed out.
        ring.entry.check_in_place()
        why = picker.never(rows) if rows else None
        if why is not None:
            raise ValueError(f"{self.key!r} has {count_of(self.capacity, 'slot', 'slots')}, and {why}")
        is_weighted = picker is self._picker and self._own.sampler == "prioritized"
        extra = (INDEX, WEIGHT) if is_weighted else (INDEX,)
        targets = new_targets(ring, rows) if out is None else samples.targets(out, rows, extra)
        # 2. Fill the targets with rows.
        is_taking = isinstance(picker, ConsumingPicker)
        if not rows:
            none = np.empty(0, np.int64)
            picked = PickedSlots(none, none, none.astype(np.float64))
        elif isinstance(picker, ConsumingPicker):
            picked = hand_out(ring, picker, rows, targets, deadline)
        else:
            picked = sample(ring, picker, rows, targets, deadline)
        # 3. Make the result. If that fails, of a device for example, the rows are put back.
        try:
            found = {INDEX: samples.index_of(picked, shape)}
            if is_weighted:
                found[WEIGHT] = samples.weights_of(picked, self._own.beta)
            if out is not None:
                value = samples.fill(out, targets, found)
            else:
                value = samples.build(targets, found, None if device is None else torch.device(device))
        except BaseException:
            with contextlib.suppress(MemstoreError):
                put_back(ring, picked, self._deadline(None), are_taken=is_taking)
            raise
        return Sampled(value, ring, picked, is_taking, self._timeout)

    # --- look at rows -------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Copies rows, counted from the oldest one, as `read_rows` does."""
        return self.read_rows(index)

    def read_rows(self, index: Any, *, timeout: float | None = None) -> Any:
        """Copies whole rows, which are counted from the oldest one on, from 0 to `len(buffer) - 1`.

        It takes nothing: rows that "fifo" and "lifo" have handed out are there until they are overwritten. Each call
        looks at the states of all slots. While others write, row 0 is soon another one: "index" says which row it is.

        Args:
            index: an int (a negative one counts from the newest row), a slice, integers, or a mask.
            timeout: seconds to wait for the rows, where others write them over all the time; None: the store's.

        Returns:
            A TensorDict [n], or [] for an int, in memory of its own, with the leaves of a sample and "index". Of a
            slice, rows are left out that were overwritten while they were copied. Otherwise the call begins anew.

        Raises:
            IndexError: a row that isn't there.
            StoreTimeoutError: rows were overwritten faster than they could be copied.
            TypeError, ValueError: `index` doesn't select rows.

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> buffer = memstore.ReplayBuffer(store, "replay", {"x": ((), torch.int64)}, capacity=4)
            >>> for number in range(6):
            ...     index = buffer.add({"x": torch.tensor(10 * number)})
            >>> buffer[:]["x"], buffer[-1]["x"], [int(row["index"]) for row in buffer]
            (tensor([20, 30, 40, 50]), tensor(50), [2, 3, 4, 5])
        """
        if isinstance(index, (str, tuple)):
            raise TypeError(
                f"{index!r:.100}: a buffer is indexed by rows alone: take the rows first, as in buffer[:]['obs']"
            )
        with modes.put_aside():
            deadline = self._deadline(timeout)
            while True:
                self._ring.entry.check_in_place()
                there = rows_by_age(self._ring)
                row = as_row(index)
                if row is not None:
                    places = np.array([in_range(row, len(there), self.key)])
                else:
                    places = RowIndex(index).rows(len(there), repr(self.key)).numpy()
                rows = copied_rows(self, there[places], deadline)
                if len(rows) == len(places) or isinstance(index, slice):
                    return rows if row is None else rows[0]
                if time.monotonic() > deadline:
                    raise StoreTimeoutError(
                        f"{self.key!r}: rows were written over faster than they could be copied", key=self.key
                    )

    def __iter__(self) -> Iterator[Any]:
        """Copies of the whole rows that are there now, from the oldest on, without those that are overwritten since."""
        for positions in parts_by_age(self):
            yield from copied_rows(self, positions, self._deadline(None)).unbind(0)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        own = (self._own.sampler, self._own.replacement, self._own.beta)
        return reduce(__name__, receive.__name__, self._ring.entry, own, self._timeout)

    def __str__(self) -> str:
        return rows_text(self._ring.plan, self._title())

    def _repr_html_(self) -> str:
        return rows_html(self._ring.plan, self._title())

    def _title(self) -> str:
        return f"{self._name()}, sampler {self._own.sampler!r}, {self.cursor:,} added"

    def __repr__(self) -> str:
        return f"<{self._name()} of {self.spec}>"

    def _name(self) -> str:
        state = self._ring.entry.ended_as
        return (
            f"memstore.ReplayBuffer {self.key!r}{f' ({state})' * bool(state)}: {len(self):,} of {self.capacity:,} rows"
        )


def _change_priorities(ring: Ring, priorities: Priorities, positions: Slots, given: GivenPriorities) -> int:
    """Changes the priorities of rows, under the mutex. Returns how many lie there still."""
    ring.entry.check_open()
    slots, leaves = positions % ring.capacity, np.broadcast_to(given.leaves, positions.shape)
    words: Any = ring.words.take(slots)
    there = (positions_of(words, slots, ring.capacity) == positions) & (words & READABLE != 0)
    priorities.note_largest(given.largest)
    if not there.all():
        slots, leaves = slots[there], leaves[there]
    if len(slots):
        priorities.set(slots, leaves)
    return len(slots)


class Sampled(NamedTuple):
    """A sample, with what it has taken from all others.

    Attributes:
        value: what the caller gets.
        picked: its rows.
        are_taken: whether they are handed out once.
        timeout: seconds to wait for the mutex to put them back.
    """

    value: Any
    ring: Ring
    picked: PickedSlots
    are_taken: bool
    timeout: float

    def put_back(self) -> None:
        """Undoes the sample, whose caller doesn't get it. Raises StoreTimeoutError."""
        put_back(self.ring, self.picked, deadline_after(self.timeout), are_taken=self.are_taken)


def sample_rows(
    buffer: ReplayBuffer, batch_size: int, *, out: Any = None, device: Any = None, timeout: float | None = None
) -> Sampled:
    """Samples as `buffer.sample` does. The rows can be put back."""
    rows = _count(batch_size, "batch_size")
    if out is not None and device is not None:
        raise TypeError("out= has a device of its own: leave device= out")
    return buffer._sample(buffer._picker, (rows,), out, device, buffer._deadline(timeout))


def sample_slices(
    buffer: ReplayBuffer, num_slices: int, slice_len: int, *, end_key: Any = "done", timeout: float | None = None
) -> Sampled:
    """Samples slices as `buffer.sample_slices` does. Their rows can be put back."""
    count, length = _count(num_slices, "num_slices"), _count(slice_len, "slice_len", least=1)
    end = None if end_key is None else buffer._samples.number_of_end(end_key)
    slices = Slices(buffer._ring, buffer._dice, length, end)
    return buffer._sample(slices, (count, length), None, None, buffer._deadline(timeout))


_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 1 << 20  # of an iteration


@modes.unaffected
def parts_by_age(buffer: ReplayBuffer) -> list[Any]:
    """Returns the positions of all rows that are whole now, in parts of about a MiB."""
    ring = buffer._ring
    ring.entry.check_in_place()
    row = sum(array.nbytes for array in ring.arrays) // ring.capacity
    there, most = rows_by_age(ring), max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(row, 1)))
    return [there[start : start + most] for start in range(0, len(there), most)]


@modes.unaffected
def copied_rows(buffer: ReplayBuffer, positions: Any, deadline: float) -> Any:
    """Copies the rows at positions, without those that were overwritten: a TensorDict [n] with "index"."""
    return buffer._samples.copied(positions, deadline)


def _count(number: Any, name: str, least: int = 0) -> int:
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is a number, and not {number!r}") from None
    if found < least:
        raise ValueError(f"{name} is {least} or more, and not {found}")
    return found


def receive(reference: EntryReference, own: tuple[Sampler, bool, float], timeout: float) -> ReplayBuffer:
    """Unpickles a buffer.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted, or another store is there.
    """
    with opened(reference, "buffer", capacity_of, timeout) as entry:
        buffer = ReplayBuffer.__new__(ReplayBuffer)
        buffer._set(entry, SamplerOptions(*own), timeout, Dice(None))
        return buffer
