"""Writing rows into a replay buffer: claim slots, copy, publish. The rules: docs/decisions/015.

1. *Convert*: `Intake.take` turns what the caller gives into arrays of bits.
2. *Claim*, under the mutex, for a whole batch: the next slots in the ring's order, without those that living writers
   fill. Claims of the dead are given back first (`BufferWriter._claim`).
3. *Copy*, without the mutex, by plain stores of this thread alone (`BufferWriter._copy`).
4. *Publish*, under the mutex (`BufferWriter._publish`). After an error the slots are given back instead.

A small batch takes steps 2 to 4 in one hold of the mutex, and its claim needs no mutex of its own. One plain row takes
a shorter way yet (`RowWriter`).

Killed in between, the claim's mutex tells the others. What an exception at an unlucky moment left, the thread gives
back at its next call.
"""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from memstore._threads import ABANDONED, check_abandoned
from memstore._wording import count_of
from memstore.datasets import Batch, take_batch
from memstore.engine import CLAIMED, FREE, INSERTS, deadline_after, syscalls
from memstore.errors import ContentionError, StoreFullError, StoreTimeoutError
from memstore.replay.priorities import GivenPriorities
from memstore.replay.ring import (
    READABLE,
    STATE,
    WHOLE,
    WRITING,
    Ring,
    claims_of,
    count_publication,
    give_back,
    give_back_the_dead,
    positions_of,
    words_of,
)
from memstore.replay.waiting import LimiterWait, rows_under_way, wait_for
from memstore.structure import DTYPES, is_readable, modes

# --- Convert ---------------------------------------------------------------------------------------------------------
# Rows as a caller gives them, made ready to be copied: the plain ones by a short way, all others by that of datasets.
#
# The short way takes plain CPU tensors in dicts and TensorDicts, and 1 us a leaf; the other compares all that may be
# wrong, and says it, in some ten.


Level = dict[str, "Level | int"]  # the names of a level, with the numbers of their leaves


class Intake:
    """Takes rows of one buffer."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._level: Level | int = {}
        for number, leaf in enumerate(ring.plan.leaves):
            names = [str(name) for name in leaf.name]
            if not names:
                self._level = number
                break
            at: Any = self._level
            for name in names[:-1]:
                at = at.setdefault(name, {})
            at[names[-1]] = number
        self._dtypes = [DTYPES[leaf.dtype] for leaf in ring.plan.leaves]
        self._shapes = [torch.Size(leaf.shape[1:]) for leaf in ring.plan.leaves]
        self._bits = [array.dtype for array in ring.arrays]
        self._has_numpy = [_has_numpy(dtype) for dtype in self._dtypes]

    def take(self, value: Any, *, single: bool) -> Batch:
        """Raises as `take_batch`."""
        if modes.are_active():
            with modes.put_aside():
                return take_batch(self._ring.key, self._ring.plan, value, single=single)
        arrays: list[Any] = [None] * len(self._dtypes)
        count = self._collect(self._level, value, arrays, 1 if single else -1, single)
        if count < 0:
            return take_batch(self._ring.key, self._ring.plan, value, single=single)
        return Batch(count, tuple(arrays))

    def _collect(self, level: Any, value: Any, arrays: list[Any], count: int, single: bool) -> int:
        """Fills `arrays`, and returns how many rows there are; -1: something is not plain."""
        if type(level) is int:
            return self._leaf(level, value, arrays, count, single)
        kind: type[Any] = type(value)
        if kind is TensorDict:
            value = value._tensordict
            kind = type(value)
        if kind is not dict or len(value) != len(level):
            return -1
        for name, inner in level.items():
            found: Any = value.get(name)
            count = self._collect(inner, found, arrays, count, single)
            if count < 0:
                return -1
        return count

    def _leaf(self, number: int, tensor: Any, arrays: list[Any], count: int, single: bool) -> int:
        if type(tensor) is not torch.Tensor or tensor.dtype is not self._dtypes[number] or not tensor.is_cpu:
            return -1
        shape = tensor.shape
        if single:
            is_fit, rows = shape == self._shapes[number], 1
        else:
            is_fit, rows = len(shape) > 0 and shape[1:] == self._shapes[number], shape[0] if shape else 0
        if not is_fit or (count >= 0 and rows != count) or tensor.layout is not torch.strided or tensor.is_nested:
            return -1
        if not is_readable(tensor):
            return -1
        plain = tensor.detach() if tensor.requires_grad else tensor
        array: Any = plain.numpy() if self._has_numpy[number] else plain.view(self._ring.tensors[number].dtype).numpy()
        array = array.view(self._bits[number])
        arrays[number] = array[None] if single else array
        return rows


def _has_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


# --- Write a batch ---------------------------------------------------------------------------------------------------


BatchPositions = Any  # of a batch: a range, as a rule; an array of int64 where it passed over slots

_CLEANUP = 1.0  # seconds to wait for the mutex after an error
_SMALL = 16 << 10  # bytes of a batch; the copy takes 1 or 2 us, a second hold of the mutex 10


class Claimed(NamedTuple):
    number: int  # of the claim
    end: int
    positions: BatchPositions
    slots: Any  # to index with, as `places_of` gives them
    places: Any


class BufferWriter:
    """Writes rows into one ring.

    Attributes:
        small_batch: how many rows are written in one hold of the mutex, at most.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._rows = RowWriter(ring)
        self._is_plain = ring.priorities is None and ring.limiter is None
        self._inside: dict[int, bool] = {}  # thread ids that are at it
        self.small_batch = _SMALL // max(1, sum(array.nbytes for array in ring.arrays) // ring.capacity)

    def write(self, batch: Batch, given: GivenPriorities | None, deadline: float) -> BatchPositions:
        """Returns the positions of the rows, which are there now. Raises what `ReplayBuffer.extend` does.

        Args:
            given: their priorities; None: those of new rows.
        """
        ring, me = self._ring, syscalls.thread_id()
        ring.entry.check_in_place()
        if batch.count > ring.capacity:
            raise StoreFullError(
                f"{ring.key!r} has {ring.capacity:,} slots, and a batch of {batch.count:,} rows never fits: "
                "extend it in parts",
                key=ring.key,
            )
        if me in self._inside:
            raise ContentionError(
                f"{ring.key!r}: this thread is in the middle of a write already: a signal handler or finalizer "
                "must not make another one",
                key=ring.key,
            )
        if batch.count == 1 and self._is_plain and self.small_batch:
            position = self._rows.write(batch.arrays, deadline)
            if position >= 0:
                return range(position, position + 1)
        self._inside[me] = True
        try:
            turn = None if ring.limiter is None else LimiterWait(ring, INSERTS, batch.count)
            reason = partial(self._reason, batch.count, turn)
            if batch.count <= self.small_batch:
                write = partial(self._write_at_once, batch, given, turn)
                positions, is_awaited = wait_for(ring, write, deadline, reason, turn)
            else:
                claim = partial(self._claim, batch.count, turn, ring.claims.take)
                claimed = wait_for(ring, claim, deadline, reason, turn)
                self._copy(batch, claimed, self._check_mine)
                publish = partial(self._publish, claimed, given, self._check_mine)
                positions, is_awaited = claimed.positions, ring.run(publish, deadline)
            if is_awaited:
                ring.page.wake()
            return positions
        except BaseException:
            self._abandon(deadline)
            raise
        finally:
            self._inside.pop(me, None)

    def _write_at_once(
        self, batch: Batch, given: GivenPriorities | None, turn: LimiterWait | None
    ) -> tuple[BatchPositions, bool] | None:
        """Under the mutex. Killed in here, it leaves a claim whose mutex nobody holds: one of the dead."""
        claimed = self._claim(batch.count, turn, self._ring.claims.find_free)
        if claimed is None:
            return None
        self._copy(batch, claimed, self._check_held)
        return claimed.positions, self._publish(claimed, given, self._check_held)

    # --- claim --------------------------------------------------------------------------------------------------------

    def _claim(self, rows: int, turn: LimiterWait | None, take: Callable[[], int | None]) -> Claimed | None:
        """Under the mutex. None: there is no room by now. `take` gives the number of a claim that was free."""
        ring = self._ring
        ring.entry.check_open()
        self._release_left_over()
        while True:
            positions, end = None, 0
            if turn is None or turn.has_come():
                if turn is not None:
                    turn.leave()  # also if there is no room: that others may have
                positions, end = self._plan(rows)
            number = None if positions is None else take()
            if number is not None:
                return self._mark(Claimed(number, end, positions, *places_of(positions, ring.capacity)))
            if not give_back_the_dead(ring):
                return None

    def _plan(self, rows: int) -> tuple[BatchPositions, int]:
        """The next slots in the ring's order, and where they end. None: there are not so many."""
        ring, head = self._ring, self._ring.numbers.head
        if rows == 1 and int(ring.words[head % ring.capacity]) & STATE != WRITING:
            return range(head, head + 1), head + 1
        widths = [ring.capacity, min(rows + rows_under_way(ring), ring.capacity), rows]
        while widths:
            width = widths.pop()
            positions = np.arange(head, head + width)
            words: Any = ring.words.take(positions % ring.capacity)
            written = words & STATE == WRITING
            if width == rows and not written.any():
                return range(head, head + rows), head + rows
            found = positions[~written][:rows]
            if len(found) == rows:
                end = int(found[-1]) + 1
                return range(head, end) if end - head == rows else found, end
            in_the_way = set(claims_of(words[written]).tolist()).intersection(ring.claims.of_the_dead())
            for claim in in_the_way:
                give_back(ring, claim)
            if in_the_way:
                widths.append(width)
        return None, 0

    def _mark(self, claimed: Claimed) -> Claimed:
        ring, (number, end, positions, slots, places) = self._ring, claimed
        first = ring.numbers.head
        ring.claims.note(number, first, end, len(positions))
        covered = ring.words[slots] & READABLE
        if ring.priorities is not None:
            ring.priorities.set(np.atleast_1d(slots), 0.0)
        ring.words[slots] = words_of(places, ring.capacity, WRITING, number)
        ring.numbers.hand_out(end, int(np.count_nonzero(covered)) if len(positions) > 1 else int(covered != 0))
        ring.claims.set_stage(number, CLAIMED)
        return claimed

    def _reason(self, rows: int, turn: LimiterWait | None) -> str:
        writers = self._ring.claims.writers()
        why = None if turn is None else turn.reason()
        return why or f"no room for {count_of(rows, 'row', 'rows')}, while its slots or claims are held by {writers}"

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _copy(self, batch: Batch, claimed: Claimed, check: Callable[[int], None]) -> None:
        runs = runs_of(claimed.positions, self._ring.capacity)
        for array, source in zip(self._ring.arrays, batch.arrays, strict=True):
            check(claimed.number)
            for slot, start, stop in runs:
                array[slot : slot + stop - start] = source[start:stop]
        if ABANDONED:
            check_abandoned()

    def _check_mine(self, claim: int) -> None:
        """A forked child must not go on with what its parent claimed."""
        if not self._ring.claims.is_mine(claim):
            raise ContentionError(
                f"{self._ring.key!r}: this process was forked in the middle of a write, which its parent goes on with",
                key=self._ring.key,
            )

    def _check_held(self, claim: int) -> None:
        """The same, for one that is the mutex's owner throughout."""
        self._ring.entry.check_held()

    # --- publish ------------------------------------------------------------------------------------------------------

    def _publish(self, claimed: Claimed, given: GivenPriorities | None, check: Callable[[int], None]) -> bool:
        """Under the mutex. Whether somebody is to be woken after it."""
        ring, (number, _, positions, slots, places) = self._ring, claimed
        ring.entry.check_open()
        check(number)
        before = ring.numbers.added
        ring.claims.note_publication(number, before)
        if ring.priorities is not None:
            if given is not None:
                ring.priorities.note_largest(given.largest)
            leaves = ring.priorities.of_new_rows if given is None else given.leaves
            ring.priorities.set(np.atleast_1d(slots), leaves)
        ring.words[slots] = words_of(places, ring.capacity, WHOLE)
        count_publication(ring, ring.claims.read(number))
        ring.numbers.rows += len(positions)
        ring.claims.set_stage(number, FREE)
        if ring.claims.is_mine(number):
            ring.claims.release(number)
        return ring.page.ring()

    # --- after an error -----------------------------------------------------------------------------------------------

    def _abandon(self, deadline: float) -> None:
        """Gives back what this thread has claimed, if it has."""
        ring = self._ring
        if ring.claims.left_over() is None:
            return
        with contextlib.suppress(StoreTimeoutError):  # its next call does it
            if ring.run(self._release_left_over, max(deadline, deadline_after(_CLEANUP))):
                ring.page.wake()

    def _release_left_over(self) -> bool:
        """Under the mutex. Whether somebody is to be woken after it."""
        ring = self._ring
        number = ring.claims.left_over()
        if number is None:
            return False
        if ring.claims.stage(number) != FREE:
            give_back(ring, number)
        ring.claims.release_left_over(number)
        return ring.page.ring()


def places_of(positions: BatchPositions, capacity: int) -> tuple[Any, Any]:
    """Slots and positions, to index with: numbers for one row, which takes a tenth of the time, else arrays."""
    if len(positions) == 1:
        place = int(positions[0])
        return place % capacity, place
    places = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
    return places % capacity, places


def runs_of(positions: BatchPositions, capacity: int) -> list[tuple[int, int, int]]:
    """Positions as runs of slots that follow each other: (first slot, start, stop), the latter counted in the batch."""
    rows = len(positions)
    if isinstance(positions, range):
        slot = positions.start % capacity
        whole = min(rows, capacity - slot)
        return [(slot, 0, rows)] if whole == rows else [(slot, 0, whole), (0, whole, rows)]
    slots = positions % capacity
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), rows]
    return [(int(slots[start]), start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


# --- Write one plain row ---------------------------------------------------------------------------------------------
# One small row at a time, into a buffer that has no priorities and no rate limiter: by a short way.
#
# The steps are those of a small batch, in the same order, with half of its calls: they take longer than
# the row. Whatever is not as it mostly is, is left to that way.


_NOT_SO = -1, False  # nothing was done


@modes.uncompiled_methods
class RowWriter:
    """Writes single rows into one ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def write(self, arrays: Sequence[Any], deadline: float) -> int:
        """Returns the row's position; -1: it can't be done so. Raises what `ReplayBuffer.add` does.

        Args:
            arrays: for each leaf [1, ...], as `Batch` has them.
        """
        ring = self._ring
        position, is_awaited = ring.run(partial(self._write, arrays), deadline)
        if is_awaited:
            ring.page.wake()
        return position

    def _write(self, arrays: Sequence[Any]) -> tuple[int, bool]:
        """Under the mutex. Also whether somebody is to be woken after it."""
        ring = self._ring
        numbers, claims, words, entry = ring.numbers, ring.claims, ring.words, ring.entry
        entry.check_open()
        if ABANDONED:
            check_abandoned()
        position = numbers.head
        slot = position % ring.capacity
        before = words.item(slot)
        number = claims.find_free()
        if before & STATE == WRITING or number is None or claims.left_over() is not None:
            return _NOT_SO
        claims.note(number, position, position + 1, 1)
        words[slot] = words_of(position, ring.capacity, WRITING, number)
        numbers.hand_out(position + 1, 1 if before & READABLE else 0)
        claims.set_stage(number, CLAIMED)
        for array, source in zip(ring.arrays, arrays, strict=True):
            entry.check_held()
            array[slot] = source[0]
        entry.check_held()
        claims.note_publication(number, numbers.added)
        words[slot] = words_of(position, ring.capacity, WHOLE)
        numbers.publish(position, position + 1, numbers.added + 1, ring.capacity)
        numbers.rows += 1
        claims.set_stage(number, FREE)
        return position, ring.page.ring()


# --- Change priorities -----------------------------------------------------------------------------------------------


Positions = NDArray[np.int64]


def update_priorities(ring: Ring, index: NDArray[Any], given: GivenPriorities, deadline: float) -> int:
    """Returns how many were changed: others lie there by now, or nothing. Raises TypeError, ValueError."""
    if index.dtype.kind not in "iu" and index.size:
        raise TypeError(f"an index is of integers, and not of {index.dtype}")
    if index.ndim > 1:
        raise ValueError(f"an index has one dimension, and not {index.ndim}")
    positions = np.atleast_1d(index).astype(np.int64, copy=False)
    if not positions.size:
        return 0
    ring.entry.check_in_place()
    leaves = np.broadcast_to(given.leaves, positions.shape)
    return ring.run(partial(_update_priorities, ring, positions, leaves, given.largest), deadline)


def _update_priorities(ring: Ring, positions: Positions, leaves: Any, largest: float) -> int:
    """Under the mutex."""
    priorities = ring.priorities
    if priorities is None:
        return 0
    ring.entry.check_open()
    slots = positions % ring.capacity
    words: Any = ring.words.take(slots)
    there = (positions_of(words, slots, ring.capacity) == positions) & (words & READABLE != 0)
    priorities.note_largest(largest)
    if not there.all():
        slots, leaves = slots[there], leaves[there]
    if len(slots):
        priorities.set(slots, leaves)
    return len(slots)
