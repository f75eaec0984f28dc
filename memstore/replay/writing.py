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
    BufferWait,
    Ring,
    claims_of,
    give_back,
    give_back_the_dead,
    rows_under_way,
    words_of,
)
from memstore.structure import DTYPES, is_readable, modes

# --- Convert ---------------------------------------------------------------------------------------------------------
# Plain CPU tensors in dicts and TensorDicts take a short way, of 1 us a leaf. Everything else takes that of datasets,
# which compares all that may be wrong, and says it, in some ten.


Level = dict[str, "Level | int"]  # the names of a level, with the numbers of their leaves


class _Leaf(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    viewed: torch.dtype | None  # how it is viewed for numpy, which has no such dtype
    bits: Any  # as what numpy views it, to have the dtype of the ring's array; None: it has it


class Intake:
    """Takes rows of one buffer."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._is_bare = not ring.plan.leaves[0].name  # a row is one tensor
        self._level: Level = {}
        self._leaves: list[_Leaf] = []
        for number, (leaf, array, tensor) in enumerate(zip(ring.plan.leaves, ring.arrays, ring.tensors, strict=True)):
            dtype = DTYPES[leaf.dtype]
            viewed, bits = None, array.dtype
            try:
                if torch.empty(0, dtype=dtype).numpy().dtype == bits:
                    bits = None
            except TypeError:
                viewed, bits = tensor.dtype, None
            self._leaves.append(_Leaf(dtype, tuple(leaf.shape[1:]), viewed, bits))
            *above, last = tuple(map(str, leaf.name)) or ("",)
            at: Any = self._level
            for name in above:
                at = at.setdefault(name, {})
            at[last] = number

    def take(self, value: Any, *, single: bool) -> Batch:
        """Converts a batch, or one row if it is `single`. Raises as `take_batch`."""
        ring = self._ring
        if modes.are_active():
            with modes.put_aside():
                return take_batch(ring.key, ring.plan, value, single=single)
        arrays: list[Any] = [None] * len(self._leaves)
        count = self._collect(self._level, {"": value} if self._is_bare else value, arrays, -1, single)
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
            dtype, shape, viewed, bits = self._leaves[inner]
            if type(tensor) is not torch.Tensor or tensor.dtype is not dtype:
                return -1
            try:
                plain = tensor.detach() if tensor.requires_grad else tensor
                array: Any = (plain if viewed is None else plain.view(viewed)).numpy()
            except (RuntimeError, TypeError):  # elsewhere, of another layout, conjugated, or of a transform
                return -1
            if not _has_bytes(tensor):  # for which numpy doesn't look
                return -1
            found = array.shape
            rows = 1 if single else found[0] if found else -1
            if (found if single else found[1:]) != shape or rows < 0 or (count >= 0 and rows != count):
                return -1
            count = rows
            array = array if bits is None else array.view(bits)
            arrays[inner] = array[None] if single else array
        return count


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether the storage of a tensor, which numpy takes, has its bytes: it may have been freed since."""
    if tensor.is_contiguous() and tensor.data_ptr():
        end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        if end <= tensor.untyped_storage().nbytes():
            return True
    return is_readable(tensor)


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
        wait = BufferWait(ring, INSERTS, rows, deadline, self._wants)
        if rows <= self.small_batch:
            return wait.until(self._write_small, batch, given, wait)
        me = syscalls.thread_id()
        self._large[me] = True
        try:
            # 1. Claim. Killed from here on, it leaves a claim of a dead thread, whose slots others get.
            claimed = wait.until(self._claim, rows, wait)
            # 2. Copy. Stopped here for long, it keeps its slots: the ring passes over them.
            self._copy(batch, claimed)
            # 3. Publish. Killed in there, its rows are completed by the next owner of the mutex.
            ring.run(self._publish, deadline, claimed, given)
        except BaseException:
            self._abandon(deadline)
            raise
        finally:
            self._large.pop(me, None)
        return claimed

    def _write_small(self, batch: Batch, given: GivenPriorities | None, wait: BufferWait) -> Claimed | None:
        """Takes all steps under the mutex. Killed in here, it leaves a claim that nobody holds: one of the dead."""
        claimed = self._claim(batch.rows, wait, is_small=True)
        if claimed is not None:
            self._copy(batch, claimed)
            self._publish(claimed, given, is_small=True)
        return claimed

    def _claim(self, rows: int, wait: BufferWait, *, is_small: bool = False) -> Claimed | None:
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
            if ring.limiter is None or wait.goes_on():  # also if there is no room, which others may have
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
                ring.priorities.set(words, 0.0)
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

    def _publish(self, claimed: Claimed, given: GivenPriorities | None, *, is_small: bool = False) -> None:
        """Publishes a batch, under the mutex.

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
                if np.ndim(leaves):
                    leaves = leaves[start] if stop - start == 1 else leaves[start:stop]
                priorities.set(words, leaves)
            ring.words[words] = words_of(position, ring.capacity, WHOLE)
        # 3. They are counted, and may be handed out.
        numbers.count_published(claim.first, claim.end, claim.before + claim.rows, ring.capacity)
        numbers.rows += claim.rows
        # 4. The claim is free.
        claim.stage = FREE
        if not is_small:
            ring.claims.release(number)
        ring.page.ring()

    def _wants(self, rows: int) -> str:
        """Says what a write waits for, for an error."""
        writers = self._ring.claims.writers()
        return f"no room for {count_of(rows, 'row', 'rows')}, while its slots or claims are held by {writers}"

    # --- after an error -----------------------------------------------------------------------------------------------

    def _abandon(self, deadline: float) -> None:
        """Gives back what this thread has claimed, if it has."""
        if self._ring.claims.left_over() is not None:
            with contextlib.suppress(StoreTimeoutError):  # its next call does it
                self._ring.run(self._release_left_over, max(deadline, deadline_after(_CLEANUP)))

    def _release_left_over(self) -> None:
        """Frees the claim that this thread still holds, under the mutex."""
        claims = self._ring.claims
        number = claims.left_over()
        if number is None:
            return
        if claims.claims[number].stage != FREE:
            give_back(self._ring, number)
        claims.release(number, is_left_over=True)
        self._ring.page.ring()


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
