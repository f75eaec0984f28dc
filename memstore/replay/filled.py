"""The part of ReplayBuffer that writes: rows, priorities, and to the disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.engine import deadline_after, resource_errors
from memstore.errors import ReadOnlyError, StructureMismatchError
from memstore.replay.flushing import flush
from memstore.replay.intake import Intake
from memstore.replay.priorities import Given, plain_numbers
from memstore.replay.ring import Ring
from memstore.replay.updating import update
from memstore.replay.writing import Positions, Writer
from memstore.structure import modes
from memstore.wording import an


class Filled:
    """What `ReplayBuffer` inherits."""

    def __init__(self, ring: Ring, timeout: float) -> None:
        self.key, self.capacity = ring.key, ring.capacity
        self._ring, self._timeout = ring, timeout
        self._intake, self._writer = Intake(ring), Writer(ring)

    def __len__(self) -> int:
        """The number of rows. Those that were handed out count until they are overwritten."""
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
        """Adds one row: as `extend`, of leaves without the dimension that counts rows.

        Returns:
            Its index.

        Example:
            >>> import memstore, tempfile, torch
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> buffer = memstore.ReplayBuffer(store, "replay", {"x": ((2,), torch.float32)}, capacity=10)
            >>> buffer.add({"x": torch.ones(2)}), buffer.add({"x": torch.ones(2)})
            (0, 1)
        """
        return self._write(row, priority, timeout, single=True)[0]

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
        positions = self._write(batch, priority, timeout, single=False)
        if isinstance(positions, range):
            positions = np.arange(positions.start, positions.stop)
        if modes.are_active():
            with modes.put_aside():
                return torch.as_tensor(positions)
        return torch.as_tensor(positions)

    def _write(self, value: Any, priority: Any, timeout: float | None, *, single: bool) -> Positions:
        self._check_writable()
        batch = self._intake.take(value, single=single)
        given = None if priority is None else self._given(priority, batch.count)
        if not batch.count:
            return range(0)
        return self._writer.write(batch, given, self._deadline(timeout))

    def _given(self, priority: Any, rows: int) -> Given:
        priorities = self._ring.priorities
        if priorities is None:
            raise StructureMismatchError(
                f"{self.key!r} was made without priorities: make it with sampler='prioritized'", key=self.key
            )
        return Given(priority, rows, priorities.alpha)

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
        with modes.put_aside():
            _refuse_mapping(index)
            positions = np.asarray(plain_numbers(index))
            given = self._given(priority, positions.size)
        return update(self._ring, positions, given, self._deadline(None))

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
        with resource_errors(self._ring.entry.root.path, self.key):
            flush(self._ring, self._deadline(None))

    def _check_writable(self) -> None:
        if not self._ring.entry.writable:
            raise ReadOnlyError(f"{self.key!r}: the store was opened with mode 'r': it can't be written", key=self.key)

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(self._timeout if timeout is None else timeout)


def _refuse_mapping(index: object) -> None:
    """A sample itself, where its "index" is meant."""
    if hasattr(index, "keys"):
        raise TypeError(f"index is integers, as batch['index'] of a sample, and not {an(type(index))}")
