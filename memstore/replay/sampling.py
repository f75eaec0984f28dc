"""Sampling: rows are picked, copied without a lock, and looked at again; or handed out once; or read by their age.

`sample` fills tensors with rows for the samplers that take nothing. `hand_out` does so for "fifo" and "lifo", which
give each row once to all processes together; `put_back` undoes that. `picker_for` chooses the picker of an opener.
`look_at_rows`, `rows_by_age` and `copy_rows_at` read rows without a sampler. The rules: docs/decisions/015.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memstore import structure
from memstore._arguments import flag
from memstore._threads import ABANDONED, is_abandoned
from memstore.engine import SAMPLES, Path, RingNumbers, Root, deadline_after, open_mutable, resource_errors
from memstore.errors import ReadOnlyError, StoreTimeoutError
from memstore.replay.entry import capacity_of
from memstore.replay.picking import Dice, EachOnce, PickedSlots, Picker, Prioritized, Uniform
from memstore.replay.ring import READABLE, STATE, WHOLE, Ring, are_same, positions_of, words_of
from memstore.replay.waiting import LimiterWait, pause, wait_for
from memstore.rows import copy_rows
from memstore.structure import modes

# --- Samples that take nothing ---------------------------------------------------------------------------------------


Numbers = NDArray[np.int64]
Targets = list[torch.Tensor]

_ROUNDS = 16  # before the rest is copied under the mutex
_NONE = np.empty(0, np.int64)
LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")  # elsewhere all is copied under the mutex


def new_targets(ring: Ring, rows: int) -> Targets:
    """Makes a tensor for each leaf, of its bits as integers: copies have no kernels for some dtypes."""
    return [torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in ring.tensors]


def sample(ring: Ring, picker: Picker, rows: int, targets: Targets, deadline: float) -> PickedSlots:
    """Fills targets with rows, and returns which rows they are. It changes nothing but the rate limiter's count.

    Raises StoreTimeoutError: there are no rows, or the rate limiter doesn't permit it.
    """
    # 1. Pick slots, and load their words.
    picked = picker.pick(rows, locked=False) if ring.limiter is None else None
    if picked is None:
        picked = wait_for_rows(ring, picker, rows, deadline, count=True)
    # 2. Copy the rows, without a lock.
    # 3. Load the words again: rows that were overwritten meanwhile are wrong.
    wrong = copy_picked(ring, picked, targets) if LOADS_IN_ORDER else np.arange(rows)
    # 4. Replace them by others, which are picked, copied and checked likewise. After some rounds that is done under the
    #    mutex, where nothing can be claimed: so a sample always makes progress.
    rounds = 0
    while len(wrong):
        if picker.together > 1:  # all rows of a slice, if one of them is wrong
            wrong = (
                np.unique(wrong // picker.together)[:, None] * picker.together + np.arange(picker.together)
            ).ravel()
        if time.monotonic() > deadline:
            raise StoreTimeoutError(
                f"{ring.key!r}: rows were written over faster than they could be copied", key=ring.key
            )
        rounds += 1
        locked = ring.entry.writable and (rounds > _ROUNDS or not LOADS_IN_ORDER)
        again = partial(_pick_again, ring, picker, picked, wrong, targets, locked=locked)
        left = ring.run(again, deadline) if locked else again()
        if left is None:
            left = _replace(ring, picked, wrong, targets, wait_for_rows(ring, picker, len(wrong), deadline))
        wrong = left
    return picked


def copy_picked(ring: Ring, picked: PickedSlots, targets: Targets) -> Numbers:
    """Copies rows. Returns the numbers of the rows that were overwritten meanwhile."""
    rows = torch.as_tensor(picked.slots)
    for tensor, target in zip(ring.tensors, targets, strict=True):
        copy_rows(tensor, rows, target, is_mapped=True)
    same = are_same(picked.words, ring.words.take(picked.slots))
    return _NONE if same.all() else np.flatnonzero(~same)


def _pick_again(
    ring: Ring, picker: Picker, picked: PickedSlots, wrong: Numbers, targets: Targets, *, locked: bool
) -> Numbers | None:
    """Replaces wrong rows by others that it picks. Returns the numbers of rows that are wrong again.

    The result is None if the picker finds too few.
    """
    others = picker.pick(len(wrong), locked=locked)
    return None if others is None else _replace(ring, picked, wrong, targets, others)


def _replace(ring: Ring, picked: PickedSlots, wrong: Numbers, targets: Targets, others: PickedSlots) -> Numbers:
    """Copies other rows in the place of wrong ones. Returns the numbers of rows that are wrong again."""
    copies = new_targets(ring, len(wrong))
    still = wrong[copy_picked(ring, others, copies)]
    places = torch.as_tensor(wrong)
    for target, copy in zip(targets, copies, strict=True):
        target[places] = copy
    picked.slots[wrong], picked.words[wrong] = others.slots, others.words
    if picked.odds is not None and others.odds is not None:
        picked.odds[wrong] = others.odds
    return still


def wait_for_rows(ring: Ring, picker: Picker, rows: int, deadline: float, *, count: bool = False) -> PickedSlots:
    """Picks rows as soon as there are some, and the rate limiter permits it. Raises StoreTimeoutError.

    Args:
        count: whether the rate limiter counts them. It doesn't where some rows of a sample are replaced, and then it
            stops nobody either.
    """
    if not ring.entry.writable:
        return pause(partial(picker.pick, rows, locked=False), ring, deadline, partial(picker.wants, rows))
    wait = LimiterWait(ring, SAMPLES, rows)
    look = partial(_look_for_rows, ring, picker, rows, wait if count else None)
    picked, sleeps = wait_for(ring, look, deadline, partial(_reason, picker, rows, wait), wait)
    if sleeps:
        ring.page.wake()
    return picked


def _look_for_rows(ring: Ring, picker: Picker, rows: int, wait: LimiterWait | None) -> tuple[PickedSlots, bool] | None:
    """Picks rows under the mutex. Also returns whether somebody is to be woken after it."""
    if wait is not None:
        if not wait.may_go():
            return None
        wait.leave()
    picked = picker.pick(rows, locked=True)
    if picked is None or wait is None or ring.limiter is None:
        return None if picked is None else (picked, False)
    ring.numbers.sampled += rows
    return picked, ring.page.ring()


def _reason(picker: Picker, rows: int, wait: LimiterWait) -> str:
    """Says why there is nothing, for an error."""
    return wait.reason() or picker.wants(rows)


# --- Rows that are handed out once -----------------------------------------------------------------------------------
# Each row is handed out once, to all openers together, the oldest first or the newest. See docs/decisions/015.


Positions = NDArray[np.int64]
_HAND_OUT_ROUNDS = 3
_WORDS_AT_ONCE = 4  # times as many words are looked at as rows are wanted


class ConsumingPicker:
    """Picks rows that wait to be handed out, and takes them.

    The word of a row says whether it was handed out. The cursor, or the top, says where to look.
    """

    together = 1

    def __init__(self, ring: Ring, *, newest: bool) -> None:
        self._ring, self._newest = ring, newest

    def never(self, rows: int) -> str | None:
        if rows <= self._ring.capacity:
            return None
        return f"{rows:,} rows never wait in it to be handed out: sample fewer at a time"

    def wants(self, rows: int) -> str:
        return f"no {rows:,} rows wait to be handed out" if rows > 1 else "no row waits to be handed out"

    # --- pick ---------------------------------------------------------------------------------------------------------

    def pick(self, rows: int, *, locked: bool) -> PickedSlots | None:
        """Picks rows. Returns None if fewer wait, or if it seems so without the mutex."""
        ring = self._ring
        late = self._late(locked=locked)[:rows] if ring.numbers.late else np.empty(0, np.int64)
        found = late if len(late) == rows else np.concatenate([late, self._search(rows - len(late))])
        if len(found) < rows:
            return None
        return PickedSlots(found % ring.capacity, words_of(found, ring.capacity, WHOLE))

    def _late(self, *, locked: bool) -> Positions:
        """Returns the positions of rows that were published after the ring had passed over them."""
        ring = self._ring
        words: Any = np.array(ring.words)
        slots = np.flatnonzero(words & STATE == WHOLE)
        positions: Positions = positions_of(words[slots], slots, ring.capacity)
        late = np.sort(positions[positions < ring.numbers.head - ring.capacity])
        if locked and not len(late):
            ring.numbers.late = False
        return late[::-1] if self._newest else late

    def _search(self, rows: int) -> Positions:
        """Finds rows from the cursor up, or from the top down. It looks at one part of the words after the other."""
        ring, numbers = self._ring, self._ring.numbers
        head = numbers.head
        low, high = max(head - ring.capacity, 0), head
        if self._newest:
            high = min(head, numbers.top)
        else:
            low = max(low, numbers.cursor)
        found, width = np.empty(0, np.int64), max(_WORDS_AT_ONCE * rows, 64)
        while len(found) < rows and low < high:
            if self._newest:
                part = np.arange(max(high - width, low), high)[::-1]
                high -= len(part)
            else:
                part = np.arange(low, min(low + width, high))
                low += len(part)
            found = np.concatenate([found, self._waiting(part)[: rows - len(found)]])
            width *= 2
        return found

    def _waiting(self, positions: Positions) -> Positions:
        ring = self._ring
        words: Any = ring.words.take(positions % ring.capacity)
        return positions[words == words_of(positions, ring.capacity, WHOLE)]

    # --- take ---------------------------------------------------------------------------------------------------------

    def take(self, picked: PickedSlots) -> bool:
        """Takes rows, under the mutex. Returns False if one of them doesn't wait any more; then it takes none."""
        ring = self._ring
        if not np.array_equal(ring.words.take(picked.slots), picked.words):
            return False
        ring.words[picked.slots] = picked.words | 1
        # The cursor, or the top, moves behind them, but over no row that waits: some may be published there meanwhile.
        positions = positions_of(picked.words, picked.slots, ring.capacity)
        lowest, highest, numbers = int(positions.min()), int(positions.max()), ring.numbers
        oldest = max(numbers.head - ring.capacity, 0)
        if self._newest:
            waiting = self._waiting(np.arange(max(lowest, oldest), min(numbers.top, numbers.head)))
            numbers.top = min(numbers.top, int(waiting[-1]) + 1 if len(waiting) else lowest)
        else:
            waiting = self._waiting(np.arange(max(numbers.cursor, oldest), highest))
            numbers.cursor = max(numbers.cursor, int(waiting[0]) if len(waiting) else highest + 1)
        return True


def hand_out(ring: Ring, picker: ConsumingPicker, rows: int, targets: Targets, deadline: float) -> PickedSlots:
    """Fills targets with rows, and takes them. Raises StoreTimeoutError: too few wait, or a limiter doesn't permit it.

    A consumer that dies, or whose rows are overwritten, has taken only rows that it has got.
    """
    wait = LimiterWait(ring, SAMPLES, rows)
    for _ in range(_HAND_OUT_ROUNDS if LOADS_IN_ORDER else 0):
        # 1. Pick rows that wait, and copy them, without the mutex. Killed up to here, it has taken nothing.
        picked = picker.pick(rows, locked=False) if ring.limiter is None else None
        if picked is None:
            picked = wait_for_rows(ring, picker, rows, deadline)
        copy_picked(ring, picked, targets)
        # 2. Take them, under the mutex, if they wait still. Otherwise another consumer was faster: begin anew.
        taken, sleeps = ring.run(partial(_take, ring, picker, picked, wait), deadline)
        if sleeps:
            ring.page.wake()
        if taken:
            return picked
    # 3. After some rounds, do all of it under the mutex.
    look = partial(_pick_and_take, ring, picker, rows, targets, wait)
    picked, sleeps = wait_for(ring, look, deadline, partial(_reason, picker, rows, wait), wait)
    if sleeps:
        ring.page.wake()
    return picked


def _take(ring: Ring, picker: ConsumingPicker, picked: PickedSlots, wait: LimiterWait) -> tuple[bool, bool]:
    """Takes rows under the mutex. Returns whether they were taken, and whether somebody is to be woken after it."""
    if ABANDONED and is_abandoned():  # they would be taken for nobody; `wait_for` raises
        wait.leave()
        return False, wait.has_left() and ring.page.ring()
    if not wait.may_go() or not picker.take(picked):
        return False, False
    wait.leave()
    if ring.limiter is None:
        return True, False
    ring.numbers.sampled += len(picked.slots)
    return True, ring.page.ring()


def _pick_and_take(
    ring: Ring, picker: ConsumingPicker, rows: int, targets: Targets, wait: LimiterWait
) -> tuple[PickedSlots, bool] | None:
    """Picks, copies and takes rows, under the mutex. Also returns whether somebody is to be woken after it."""
    picked = picker.pick(rows, locked=True)
    if picked is None:
        wait.leave()
        return None
    copy_picked(ring, picked, targets)
    taken, sleeps = _take(ring, picker, picked, wait)
    return (picked, sleeps) if taken else None


def put_back(ring: Ring, picked: PickedSlots, deadline: float, *, are_taken: bool) -> None:
    """Undoes a sample that its caller doesn't get: its rows wait again, and the rate limiter doesn't count them.

    Args:
        are_taken: whether the sample took rows; else it was only counted.
    """
    if not len(picked.slots) or not (are_taken or ring.limiter is not None):
        return
    if ring.run(partial(_put_back, ring, picked, are_taken=are_taken), deadline):
        ring.page.wake()


def _put_back(ring: Ring, picked: PickedSlots, *, are_taken: bool) -> bool:
    """Puts rows back under the mutex. Returns whether somebody is to be woken after it.

    Killed in between, it leaves rows that are handed out, and a cursor before them, where no row waits.
    """
    numbers = ring.numbers
    if are_taken:
        still: Any = ring.words.take(picked.slots) == picked.words | 1
        slots, words = picked.slots[still], picked.words[still]
        if len(slots):
            # 1. Cursor, top and late: consumers look there again.
            positions = positions_of(words, slots, ring.capacity)
            numbers.count_published(int(positions.min()), int(positions.max()) + 1, numbers.added, ring.capacity)
            # 2. The rows wait, unless the ring has overwritten them.
            ring.words[slots] = words
    if ring.limiter is not None:
        numbers.sampled = max(numbers.sampled - len(picked.slots), 0)
    return ring.page.ring()


# --- The sampler of an opener ----------------------------------------------------------------------------------------


Sampler = Literal["uniform", "fifo", "lifo", "prioritized"]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The choices of an opener. Raises ValueError, TypeError: there is no such sampler."""

    sampler: Sampler
    replacement: bool
    beta: float

    def __post_init__(self) -> None:
        if self.sampler not in ("uniform", "fifo", "lifo", "prioritized"):
            raise ValueError(f"sampler is 'uniform', 'fifo', 'lifo' or 'prioritized', and not {self.sampler!r}")
        flag("replacement", self.replacement)
        if self.sampler == "prioritized" and not self.replacement:
            raise ValueError("replacement=False: rows that are drawn by priorities may come again; use 'uniform'")
        given: Any = self.beta
        if isinstance(given, str) or not hasattr(given, "__float__"):
            raise TypeError(f"beta is a number, 0 at least, and not {given!r:.100}")
        if not math.isfinite(self.beta) or self.beta < 0:
            raise ValueError(f"beta is a number, 0 at least, and not {self.beta!r}")


def picker_for(ring: Ring, options: SamplerOptions, dice: Dice) -> Picker:
    """Chooses the picker of an opener. Raises ReadOnlyError where samples are to be noted, and can't be."""
    if not ring.entry.writable and (options.sampler in ("fifo", "lifo") or ring.limiter is not None):
        what = "a rate limiter that counts them" if ring.limiter is not None else f"sampler={options.sampler!r}"
        raise ReadOnlyError(f"{ring.key!r}: samples with {what} are notes, and the store was opened with mode 'r'")
    if options.sampler in ("fifo", "lifo"):
        return ConsumingPicker(ring, newest=options.sampler == "lifo")
    if options.sampler == "prioritized" and ring.priorities is not None:
        return Prioritized(ring, ring.priorities, dice)
    return Uniform(ring, dice) if options.replacement else EachOnce(ring, dice)


# --- Rows without a sampler ------------------------------------------------------------------------------------------


class BufferRows(NamedTuple):
    """The slots of a buffer that rows were written to.

    Attributes:
        rows: how many rows can be sampled.
        capacity: how many slots there are.
        tensors: for each leaf the slots that were written, over the shared memory. Some may be half written, by a
            writer that goes on or has died.
    """

    rows: int
    capacity: int
    tensors: dict[Path, torch.Tensor]


@modes.put_aside()
def look_at_rows(root: Root, key: str, timeout: float) -> BufferRows:
    """Returns all slots where they lie. Raises KeyNotFoundError, MutableEntryError, CorruptionError."""
    with resource_errors(root.path, key, root), torch.inference_mode(False):
        entry = open_mutable(root, key, "buffer", capacity_of, deadline_after(timeout), writable=False)
        record, mapping = entry.record, entry.mapping
        plan = structure.plan_of_rows(record.description, record.nbytes)
        numbers = RingNumbers.in_page(mapping.address + record.start)
        capacity = capacity_of(record)
        written = min(numbers.head, capacity)
        memory = np.asarray(mapping)[record.start : record.start + record.nbytes]
        tensors = {leaf.name: structure.leaf_tensor(leaf, memory)[:written] for leaf in plan.leaves}
        return BufferRows(min(numbers.rows, capacity), capacity, tensors)


def rows_by_age(ring: Ring) -> Positions:
    """Returns the positions of all whole rows, in their order, also of those that were handed out."""
    words: Any = np.array(ring.words)
    slots = np.flatnonzero(words & READABLE)
    found: Positions = positions_of(words[slots], slots, ring.capacity)
    found.sort()
    return found


def copy_rows_at(ring: Ring, positions: Positions, deadline: float) -> tuple[Targets, PickedSlots]:
    """Copies rows, without those that were overwritten. Raises StoreTimeoutError where it takes the mutex.

    A row is copied as a sample's is: its word is loaded again after the copy.
    """
    picked = PickedSlots(positions % ring.capacity, words_of(positions, ring.capacity, WHOLE))
    targets = new_targets(ring, len(positions))
    if LOADS_IN_ORDER or not ring.entry.writable:
        gone = copy_picked(ring, picked, targets)
    else:
        gone = ring.run(partial(copy_picked, ring, picked, targets), deadline)
    if len(gone):
        left = np.delete(np.arange(len(positions)), gone)
        targets = [target[torch.as_tensor(left)] for target in targets]
        picked = PickedSlots(picked.slots[left], picked.words[left])
    return targets, picked
