"""Writing rows into a replay buffer: claim slots, copy, publish. The rules: docs/decisions/015.

`Intake` converts what the caller gives into arrays of bits. `BufferWriter.write` has the steps of a write:

1. *Claim* (`_claim`), under the mutex, for a whole batch: the next slots in the ring's order, without those that living
   writers fill. Claims of dead threads are given back first.
2. *Copy* (`_copy`), by plain stores of this thread alone.
3. *Publish* (`_publish`), under the mutex: the rows become visible together. After an error, the slots are given back.

A large batch is copied without the mutex, and its thread holds the claim's own mutex meanwhile. If the thread is
killed, that mutex tells the others. If an exception at an unlucky moment left a claim, the thread gives it back at its
next call. A small batch takes all steps in one hold of the buffer's mutex.
"""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from memstore._compat import entries_of
from memstore._threads import ABANDONED, check_abandoned
from memstore._wording import count_of
from memstore.datasets import Batch, take_batch
from memstore.engine import CLAIMED, CLAIMING, FREE, INSERTS, PUBLISHING, deadline_after, syscalls
from memstore.errors import ContentionError, StoreFullError, StoreTimeoutError
from memstore.replay.priorities import GivenPriorities
from memstore.replay.ring import (
    READABLE,
    STATE,
    WHOLE,
    WRITING,
    Ring,
    claims_of,
    give_back,
    give_back_the_dead,
    positions_of,
    words_of,
)
from memstore.replay.waiting import LimiterWait, rows_under_way, wait_for
from memstore.structure import DTYPES, is_readable, modes

# --- Convert ---------------------------------------------------------------------------------------------------------
# Plain CPU tensors in dicts and TensorDicts take a short way, of 1 us a leaf. Everything else takes that of datasets,
# which compares all that may be wrong, and says it, in some ten.


Level = dict[str, "Level | int"]  # the names of a level, with the numbers of their leaves


class _Leaf(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size  # of a row
    bits: Any  # numpy's dtype of the ring's array
    viewed: torch.dtype | None  # how it is viewed first, where numpy has no such dtype


class Intake:
    """Takes rows of one buffer."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._level: Level | int = {}
        self._leaves: list[_Leaf] = []
        for number, (leaf, array, tensor) in enumerate(zip(ring.plan.leaves, ring.arrays, ring.tensors, strict=True)):
            dtype = DTYPES[leaf.dtype]
            viewed = None
            try:
                torch.empty(0, dtype=dtype).numpy()
            except TypeError:
                viewed = tensor.dtype
            self._leaves.append(_Leaf(dtype, torch.Size(leaf.shape[1:]), array.dtype, viewed))
            at: Any = self._level
            if not leaf.name:
                self._level = number
            for name in leaf.name[:-1]:
                at = at.setdefault(str(name), {})
            at.update({str(name): number for name in leaf.name[-1:]})

    def take(self, value: Any, *, single: bool) -> Batch:
        """Converts a batch, or one row if it is `single`. Raises as `take_batch`."""
        ring = self._ring
        if modes.are_active():
            with modes.put_aside():
                return take_batch(ring.key, ring.plan, value, single=single)
        arrays: list[Any] = [None] * len(self._leaves)
        if type(self._level) is int:
            count = self._collect({"": 0}, {"": value}, arrays, -1, single)
        else:
            count = self._collect(self._level, value, arrays, -1, single)
        if count < 0:
            return take_batch(ring.key, ring.plan, value, single=single)
        return Batch(count, tuple(arrays))

    def _collect(self, level: Any, value: Any, arrays: list[Any], count: int, single: bool) -> int:
        """Fills `arrays`. Returns how many rows there are; -1 if something is not plain."""
        kind: type[Any] = type(value)
        if kind is TensorDict:
            value = entries_of(value)
            kind = type(value)
        if kind is not dict or len(value) != len(level):
            return -1
        for name, inner in level.items():
            tensor: Any = value.get(name)
            if type(inner) is not int:
                count = self._collect(inner, tensor, arrays, count, single)
                if count < 0:
                    return -1
                continue
            leaf = self._leaves[inner]
            if type(tensor) is not torch.Tensor or tensor.dtype is not leaf.dtype or not is_readable(tensor):
                return -1
            shape = tensor.shape
            if single:
                rows = 1 if shape == leaf.shape else -1
            else:
                rows = shape[0] if shape and shape[1:] == leaf.shape else -1
            if rows < 0 or (count >= 0 and rows != count):
                return -1
            count = rows
            plain = tensor.detach() if tensor.requires_grad else tensor
            array: Any = plain.numpy() if leaf.viewed is None else plain.view(leaf.viewed).numpy()
            array = array.view(leaf.bits)
            arrays[inner] = array[None] if single else array
        return count


# --- Write a batch ---------------------------------------------------------------------------------------------------


_CLEANUP = 1.0  # seconds to wait for the mutex after an error
_SMALL = 16 << 10  # bytes of a batch; the copy takes 1 or 2 us, a second hold of the mutex 10


class Run(NamedTuple):
    """A part of a batch whose slots follow each other in one lap, so that all of its words are the same.

    Attributes:
        position: of the first row.
        start, stop: its rows in the batch.
        slots: where the rows lie, as a slice.
        words: the same, to index words with. It is an int for one row, which takes a tenth of the time, else an array:
            numpy stores words by 8 bytes then, and by a slice with memcpy, which may tear them.
    """

    position: int
    start: int
    stop: int
    slots: slice
    words: Any


class Claimed(NamedTuple):
    """The slots that a batch gets.

    Attributes:
        number: of the claim.
        forks: of the control page at the claim.
    """

    number: int
    runs: list[Run]
    forks: int

    def positions(self) -> NDArray[np.int64]:
        """Returns the position of each row of the batch."""
        parts = [np.arange(run.position, run.position + run.stop - run.start) for run in self.runs]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


class BufferWriter:
    """Writes rows into one ring.

    Attributes:
        small_batch: how many rows are written in one hold of the mutex, at most.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._large: dict[int, bool] = {}  # thread ids that write a large batch
        self.small_batch = _SMALL // max(1, sum(array.nbytes for array in ring.arrays) // ring.capacity)

    def write(self, batch: Batch, given: GivenPriorities | None, deadline: float) -> Claimed:
        """Writes rows, which can be sampled then. Returns where. Raises what `ReplayBuffer.extend` does.

        Args:
            given: their priorities; None: those of new rows.
        """
        ring, rows = self._ring, batch.rows
        if rows > ring.capacity:
            raise StoreFullError(
                f"{ring.key!r} has {ring.capacity:,} slots, and a batch of {rows:,} rows never fits: "
                "extend it in parts",
                key=ring.key,
            )
        if self._large and syscalls.thread_id() in self._large:
            raise ContentionError(
                f"{ring.key!r}: this thread is in the middle of a write already: a signal handler or finalizer "
                "must not make another one",
                key=ring.key,
            )
        wait = None if ring.limiter is None else LimiterWait(ring, INSERTS, rows)
        reason = partial(self._reason, rows, wait)
        if rows <= self.small_batch:
            write = partial(self._write_small, batch, given, wait)
            claimed, sleeps = wait_for(ring, write, deadline, reason, wait)
        else:
            me = syscalls.thread_id()
            self._large[me] = True
            try:
                # 1. Claim. Killed from here on, it leaves a claim of a dead thread, whose slots others get.
                claim = partial(self._claim, rows, wait, is_small=False)
                claimed = wait_for(ring, claim, deadline, reason, wait)
                # 2. Copy. Stopped here for long, it keeps its slots: the ring passes over them.
                self._copy(batch, claimed)
                # 3. Publish. Killed in there, its rows are completed by the next owner of the mutex.
                sleeps = ring.run(partial(self._publish, claimed, given, is_small=False), deadline)
            except BaseException:
                self._abandon(deadline)
                raise
            finally:
                self._large.pop(me, None)
        if sleeps:
            ring.page.wake()
        return claimed

    def _write_small(
        self, batch: Batch, given: GivenPriorities | None, wait: LimiterWait | None
    ) -> tuple[Claimed, bool] | None:
        """Takes all steps under the mutex. Killed in here, it leaves a claim that nobody holds: one of the dead."""
        claimed = self._claim(batch.rows, wait, is_small=True)
        if claimed is None:
            return None
        self._copy(batch, claimed)
        return claimed, self._publish(claimed, given, is_small=True)

    def _claim(self, rows: int, wait: LimiterWait | None, *, is_small: bool) -> Claimed | None:
        """Claims slots, under the mutex. Returns None if there is no room by now.

        Args:
            is_small: the claim's own mutex isn't taken, since no other thread looks at claims during the hold.
        """
        ring, capacity, numbers, claims = self._ring, self._ring.capacity, self._ring.numbers, self._ring.claims
        if ring.page.has_ended:
            ring.entry.check_open()
        if claims.mine and claims.left_over() is not None:
            self._release_left_over()
        # 1. Find slots, and a free claim. The first look may find neither, until claims of the dead are given back.
        while True:
            runs = number = None
            if wait is None or wait.may_go():
                if wait is not None:
                    wait.leave()  # also if there is no room, which others may have
                runs = self._next_slots(rows)
            if runs is not None:
                number = claims.find_free() if is_small else claims.take()
            if runs is not None and number is not None:
                break
            if not give_back_the_dead(ring):
                return None
        # 2. Note what the claim takes. Killed from here on, the next owner completes the claim.
        claim, last = claims.claims[number], runs[-1]
        claim.first, claim.end, claim.rows = numbers.head, last.position + last.stop - last.start, rows
        claim.stage = CLAIMING
        # 3. Take the slots: nobody samples their rows from here on.
        covered = 0
        for position, start, stop, slots, words in runs:
            if stop - start == 1:
                covered += ring.words.item(words) & READABLE != 0
            else:
                covered += int(np.count_nonzero(ring.words[slots] & READABLE))
            if ring.priorities is not None:
                ring.priorities.set(np.atleast_1d(words), 0.0)
            ring.words[words] = words_of(position, capacity, WRITING, number)
        numbers.rows -= covered
        numbers.head = claim.end
        claim.stage = CLAIMED
        return Claimed(number, runs, ring.page.forks)

    def _next_slots(self, rows: int) -> list[Run] | None:
        """Finds the next slots in the ring's order that nobody writes. Returns None if there are not so many."""
        ring, capacity, head = self._ring, self._ring.capacity, self._ring.numbers.head
        slot = head % capacity
        # Nearly always the slots follow each other, and are free.
        if rows == 1:
            if ring.words.item(slot) & STATE != WRITING:
                return [Run(head, 0, 1, slice(slot, slot + 1), slot)]
        elif slot + rows <= capacity and not (ring.words[slot : slot + rows] & STATE == WRITING).any():
            return [Run(head, 0, rows, slice(slot, slot + rows), np.arange(slot, slot + rows))]
        # Otherwise look at so many more as claims have, and at last at all.
        widths = [ring.capacity, min(rows + rows_under_way(ring), ring.capacity), rows]
        while widths:
            width = widths.pop()
            positions = np.arange(head, head + width)
            words: Any = ring.words.take(positions % capacity)
            written = words & STATE == WRITING
            found = positions[~written][:rows]
            if len(found) == rows:
                return _runs_of(found, capacity)
            in_the_way = set(claims_of(words[written]).tolist()).intersection(ring.claims.of_the_dead())
            for number in in_the_way:
                give_back(ring, number)
            if in_the_way:
                widths.append(width)
        return None

    def _copy(self, batch: Batch, claimed: Claimed) -> None:
        """Copies a batch to its slots."""
        (_, runs, forks), page = claimed, self._ring.page
        for array, source in zip(self._ring.arrays, batch.arrays, strict=True):
            if page.forks != forks:
                raise self._forked()
            for _, start, stop, slots, _ in runs:
                array[slots] = source if len(runs) == 1 else source[start:stop]
        if ABANDONED:
            check_abandoned()

    def _forked(self) -> ContentionError:
        """Returns the error for a child that was forked in the middle of a write."""
        return ContentionError(
            f"{self._ring.key!r}: this process was forked in the middle of a write, which its parent goes on with",
            key=self._ring.key,
        )

    def _publish(self, claimed: Claimed, given: GivenPriorities | None, *, is_small: bool) -> bool:
        """Publishes a batch, under the mutex. Returns whether somebody is to be woken after it.

        Args:
            is_small: the claim was made in this hold, and its own mutex isn't held.
        """
        ring, (number, runs, forks) = self._ring, claimed
        numbers, priorities, claim = ring.numbers, ring.priorities, ring.claims.claims[number]
        if not is_small:
            ring.entry.check_open()
        if ring.page.forks != forks:
            raise self._forked()
        # 1. The moment of publication: killed from here on, the next owner completes the rest.
        claim.before = numbers.added
        claim.stage = PUBLISHING
        # 2. The rows have priorities, and can be sampled.
        if priorities is not None and given is not None:
            priorities.note_largest(given.largest)
        for position, start, stop, _, words in runs:
            if priorities is not None:
                leaves: Any = priorities.of_new_rows if given is None else given.leaves
                priorities.set(np.atleast_1d(words), leaves[start:stop] if np.ndim(leaves) else leaves)
            ring.words[words] = words_of(position, ring.capacity, WHOLE)
        # 3. They are counted, and may be handed out.
        numbers.count_published(claim.first, claim.end, claim.before + claim.rows, ring.capacity)
        numbers.rows += claim.rows
        # 4. The claim is free.
        claim.stage = FREE
        if not is_small:
            ring.claims.release(number)
        return ring.page.ring()

    def _reason(self, rows: int, wait: LimiterWait | None) -> str:
        """Says why a write waits, for an error."""
        writers = self._ring.claims.writers()
        why = None if wait is None else wait.reason()
        return why or f"no room for {count_of(rows, 'row', 'rows')}, while its slots or claims are held by {writers}"

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
        """Frees the claim that this thread still holds, under the mutex. Returns whether somebody is to be woken."""
        claims = self._ring.claims
        number = claims.left_over()
        if number is None:
            return False
        if claims.claims[number].stage != FREE:
            give_back(self._ring, number)
        claims.release(number, is_left_over=True)
        return self._ring.page.ring()


def _runs_of(positions: NDArray[np.int64], capacity: int) -> list[Run]:
    """Cuts positions, which are in their order, into runs."""
    slots = positions % capacity
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(positions)]
    runs: list[Run] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        slot = int(slots[start])
        where = slice(slot, slot + stop - start)
        runs.append(Run(int(positions[start]), start, stop, where, slots[start:stop] if stop - start > 1 else slot))
    return runs


# --- Change priorities -----------------------------------------------------------------------------------------------


Positions = NDArray[np.int64]


def update_priorities(ring: Ring, index: NDArray[Any], given: GivenPriorities, deadline: float) -> int:
    """Changes the priorities of the rows that lie there still. Returns how many. Raises TypeError, ValueError."""
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
    """Changes the priorities of rows under the mutex. Returns how many lie there still."""
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
