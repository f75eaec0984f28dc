"""Ring: an open replay buffer, as the memory that the processes share; and its recovery after a death or a crash.

The functions at the top read and make the words of slots. `Ring` maps the parts of one buffer, and `Ring.run` calls a
function under the buffer's mutex. `flush` notes which rows are on the disk, and `restore` finds them after a crash of
the host. The next owner of the mutex calls `_recover` when the last one died or failed in the middle of a change.
`BufferWait` is the wait of one call for rows, for room, or for the rate limiter. The rules: docs/decisions/015.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from memstore import structure
from memstore._telling import tell
from memstore._threads import ABANDONED, AbandonedError, is_abandoned
from memstore._wording import count_of
from memstore.datasets import arrays_over
from memstore.engine import (
    CLAIMED,
    CLAIMING,
    FREE,
    INSERTS,
    PUBLISHING,
    SAMPLES,
    Claim,
    ClaimTable,
    LimiterQueue,
    MutableEntry,
    Refusal,
    RingNumbers,
    reopen_root,
    sync_rows,
)
from memstore.errors import CorruptionError, MemstoreError, StoreTimeoutError
from memstore.replay.entry import RateLimiter, capacity_of, layout_of, options_of
from memstore.replay.priorities import Priorities, SumTree

# --- The word of a slot ----------------------------------------------------------------------------------------------
# A slot's word: state, the claim that writes it, and the lap of its row. The rules: docs/decisions/015.
#
# A row has a *position*: how many were handed out before it. Its slot is the rest by the capacity, its *lap* what
# remains.
#
#     bits 0 and 1    state; bit 1 is set where a row can be sampled
#     bits 2 to 15    the number of the claim that writes it
#     from bit 16     lap + 1; 0: never used


EMPTY, WRITING, WHOLE, TAKEN = range(4)
STATE, READABLE = 3, 2  # masks: the state, and the bit that whole and taken rows have
_CLAIM_AT, _LAP_AT = 2, 16
_CLAIM = (1 << _LAP_AT - _CLAIM_AT) - 1

Words = NDArray[np.int64]
Slots = NDArray[np.int64]
Notes = NDArray[np.uint64]


def words_of(positions: Any, capacity: int, state: int, claim: int = 0) -> Any:
    """Returns the words of positions: an int for an int, an array for an array."""
    return ((positions // capacity + 1) << _LAP_AT) | claim << _CLAIM_AT | state


def positions_of(words: Any, slots: Any, capacity: int) -> Any:
    """Returns the positions of the rows that lie in slots; negative where there was never one."""
    return ((words >> _LAP_AT) - 1) * capacity + slots


def emptied(words: Any) -> Any:
    """Returns words of the same laps, with nothing there."""
    return words >> _LAP_AT << _LAP_AT


def claims_of(words: Any) -> Any:
    """Returns the numbers of the claims that write there."""
    return words >> _CLAIM_AT & _CLAIM


def are_same(before: Words, after: Words) -> NDArray[np.bool_]:
    """Returns whether rows that could be read lie there still. They may have been taken meanwhile."""
    return (before | 1) == (after | 1)


# --- The ring --------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class NeverFitsError(Refusal):
    """A batch is one that the rate limiter never lets through. Nothing was changed."""


class Ring:
    """The parts of a buffer, mapped.

    Attributes:
        key, entry, page: as the engine has them.
        capacity: how many slots there are.
        options, limiter: what is fixed since the buffer was made.
        plan: of all rows.
        arrays: for each leaf the bits of all rows, [capacity, ...], as integers.
        tensors: the same for torch.
        numbers, claims, words, queue: what the processes share beside the rows.
        priorities: of the rows, if the buffer has any.
        notes: what `flush` notes, [capacity, 2]: the hash of a row, and its word. In memory there are none.
    """

    def __init__(self, entry: MutableEntry) -> None:
        """Raises CorruptionError where the parts don't fit each other."""
        record = entry.record
        self.key, self.entry, self.page = entry.key, entry, entry.page
        self.capacity = capacity = capacity_of(record)
        self.options = options_of(record)
        self.limiter = self.options.rate_limiter
        self.plan = structure.plan_of_rows(record.description, record.nbytes)
        layout = layout_of(self.options, capacity)
        memory = np.asarray(entry.mapping)[record.start : record.start + record.nbytes]
        address = entry.mapping.address + record.start
        self.arrays = arrays_over(self.plan, memory)
        with torch.inference_mode(False):
            self.tensors = tuple(torch.as_tensor(array, device="cpu") for array in self.arrays)
        self.words: Words = np.ndarray(capacity, np.int64, memory, layout.words)
        self.claims = ClaimTable(address + layout.claims, entry.mapping)
        self.numbers = RingNumbers.in_page(address)
        self.queue = LimiterQueue(address, entry.mapping)
        self.priorities: Priorities | None = None
        if self.options.alpha is not None:
            nodes: Any = np.ndarray(SumTree.nodes(capacity), np.float64, memory, layout.tree)
            self.priorities = Priorities(SumTree(nodes, capacity), self.numbers, self.options.alpha)
        self.notes: Notes | None = None
        if self.options.is_noted:
            self.notes = np.ndarray((capacity, 2), np.uint64, memory, layout.notes)
        self.layout = layout
        self.numbers.check(capacity)

    def run(self, action: Callable[..., T], deadline: float, *arguments: Any, **options: Any) -> T:
        """Calls `action` under the buffer's mutex, and wakes whom it rang for.

        It doesn't look for an unfinished seal, as `MutableEntry.run` does: a buffer is never sealed.

        Raises:
            StoreTimeoutError: the deadline has passed.
            ValueError: for a NeverFitsError.
        """
        entry, page = self.entry, self.page
        try:
            if page.forks and entry.root.catalog.is_released:
                reopen_root(entry.root, deadline)
            return page.run(action, deadline, *arguments, **options)
        except NeverFitsError as error:
            raise ValueError(str(error)) from None
        except Exception:
            with entry.errors:  # here, and not around the call: a hold takes 2 us, and that 0.4
                raise
        finally:
            if page.owes_wake:
                page.wake()


# --- Flush and restore -----------------------------------------------------------------------------------------------
# What survives a crash of the host: rows that `flush` has brought to the disk, and noted.
#
# Words and rows reach a disk in any order, so that neither tells of the other. A note has the word of a slot and the
# hash of its row; in another boot a slot is whole if both fit. The rules: docs/decisions/015.


_A_HOLD = 1 << 16  # notes that are written in one hold of the mutex
_HASH, _WORD = 0, 1


def flush(ring: Ring, deadline: float) -> None:
    """Brings whole rows to the disk, and notes them. In memory there is nothing to do.

    Killed in between, or after a crash of the host, it leaves rows whose notes don't fit: they count as not flushed.
    """
    if ring.notes is None:
        return
    # 1. Find the whole rows that weren't noted before.
    words: Any = np.array(ring.words)
    slots: Slots = np.flatnonzero(words & READABLE)
    slots = slots[~are_same(words[slots], ring.notes[slots, _WORD].astype(np.int64))]
    words = words[slots]
    # 2. Bring the rows to the disk.
    for leaf in ring.plan.leaves:
        sync_rows(ring.entry, leaf.offset, leaf.offset + leaf.nbytes)
    # 3. Note word and hash of each, and bring the notes to the disk.
    hashes = _hashes(ring, slots)
    for start in range(0, len(slots), _A_HOLD):
        part = slice(start, start + _A_HOLD)
        ring.run(_note, deadline, ring, ring.notes, slots[part], words[part], hashes[part])
    sync_rows(ring.entry, 0, ring.layout.size)


def _note(ring: Ring, notes: Notes, slots: Slots, words: Slots, hashes: Notes) -> None:
    """Notes rows that lie there still. The mutex is held, so that no later note is written over."""
    there = are_same(words, ring.words[slots])
    chosen = slots[there]
    notes[chosen, _WORD] = 0  # a note that is cut off fits nothing
    notes[chosen, _HASH] = hashes[there]
    notes[chosen, _WORD] = words[there].astype(np.uint64)


def _hashes(ring: Ring, slots: Slots) -> Notes:
    """Returns the hashes of rows: xxh3-64 over the leaves of a row, each with the hash before it as its seed."""
    arrays: list[Any] = [array for array in ring.arrays if array.size]
    views = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
    found = np.zeros(len(slots), np.uint64)
    for number, slot in enumerate(slots.tolist()):
        value = 0
        for view in views:
            value = xxhash.xxh3_64_intdigest(view[slot], value)
        found[number] = value
    return found


def restore(ring: Ring) -> None:
    """Finds in another boot which rows are whole: those whose notes fit. Without notes, nothing is changed."""
    if ring.notes is None:
        return
    words, numbers = ring.words, ring.numbers
    slots = np.flatnonzero(words & READABLE)
    fits = are_same(words[slots], ring.notes[slots, _WORD].astype(np.int64))
    noted = slots[fits]
    whole = noted[_hashes(ring, noted) == ring.notes[noted, _HASH]]
    is_lost = np.ones(len(words), np.bool_)
    is_lost[whole] = False
    lost = np.flatnonzero(is_lost)
    words[lost] = emptied(words[lost])
    if len(whole):
        last = int(positions_of(words[whole], whole, ring.capacity).max()) + 1
        numbers.head, numbers.top = max(numbers.head, last), max(numbers.top, last)
        numbers.added = max(numbers.added, len(whole))
    numbers.cursor, numbers.late = 0, True  # what was taken says so in its word


# --- Recovery --------------------------------------------------------------------------------------------------------
# What the next owner of a buffer's mutex does when the last one died or failed in the middle of a change.
#
# Each step can be repeated: the next owner does, after one that died in here. The rules: docs/decisions/015.


def keep_whole(ring: Ring, deadline: float) -> None:
    """Recovers the buffer now, and from now on whenever this process is the next owner of the mutex."""
    ring.page.recover = partial(_recover, weakref.ref(ring))  # weak: the page, of the ring, refers to this function
    ring.run(lambda: None, deadline)


def _recover(place: weakref.ref[Ring]) -> None:
    """Makes the buffer whole, under the mutex. Raises CorruptionError where a claim can't be right."""
    ring = place()
    if ring is None:
        return
    words, numbers, claims, capacity = ring.words, ring.numbers, ring.claims, ring.capacity
    numbers.check(capacity)
    # 1. After a reboot, or in a copy: nobody uses the buffer, so no claim is under way.
    if ring.page.is_new:
        written = np.flatnonzero(words & STATE == WRITING)
        words[written] = emptied(words[written])
        claims.create()
        if numbers.other_boot:
            restore(ring)
            numbers.other_boot = False
    # 2. Complete what was cut off in the claims: so each batch is whole or absent.
    for number in claims.in_use():
        claim = checked_claim(ring, number)
        if claim.stage == CLAIMING:
            positions = np.arange(claim.first, claim.end)
            left = positions[words[positions % capacity] & STATE != WRITING]
            words[left % capacity] = words_of(left, capacity, WRITING, number)
            numbers.head = claim.end
            claim.stage = CLAIMED
        elif claim.stage == PUBLISHING:  # its thread, if it lives, unlocks the claim's mutex by itself
            slots = slots_of_claim(ring, number, claim)
            if ring.priorities is not None:
                leaves = ring.priorities.tree.priorities
                leaves[slots[leaves[slots] == 0]] = ring.priorities.of_new_rows  # which ones were given is lost
            words[slots] = emptied(words[slots]) | WHOLE
            numbers.count_published(claim.first, claim.end, claim.before + claim.rows, capacity)
            claim.stage = FREE
    # 3. Count the rows, and add up their priorities.
    readable = words & READABLE != 0
    numbers.rows = int(np.count_nonzero(readable))
    if ring.priorities is not None:
        ring.priorities.recover(readable)


# --- claims -----------------------------------------------------------------------------------------------------------


def checked_claim(ring: Ring, number: int) -> Claim:
    """Returns a claim. Raises CorruptionError if it can't be right."""
    claim = ring.claims.claims[number]
    if claim.stage > PUBLISHING or not 0 <= claim.rows <= claim.end - claim.first <= ring.capacity:
        raise CorruptionError(
            f"{ring.key!r}: its claim {number} is damaged: {claim}: run memstore.repair", key=ring.key
        )
    return claim


def slots_of_claim(ring: Ring, number: int, claim: Claim) -> Any:
    """Returns the slots whose words name a claim."""
    slots = np.arange(claim.first, claim.end) % ring.capacity
    words = ring.words[slots]
    return slots[(words & STATE == WRITING) & (claims_of(words) == number)]


def give_back(ring: Ring, number: int) -> None:
    """Frees a claim that will never be published, under the mutex. Its slots are empty then."""
    claim = checked_claim(ring, number)
    slots = slots_of_claim(ring, number, claim)
    ring.words[slots] = emptied(ring.words[slots])
    claim.stage = FREE


def give_back_the_dead(ring: Ring) -> bool:
    """Frees the claims of dead threads, under the mutex. Returns whether there were any."""
    dead = ring.claims.of_the_dead()
    for number in dead:
        give_back(ring, number)
    return bool(dead)


# --- Waiting ---------------------------------------------------------------------------------------------------------
# A caller looks under the mutex, and sleeps until another process changes something.
#
# Before the rate limiter callers wait in a queue; inserts and samples have one each. The first that came goes first, so
# that small batches don't pass a large one for ever. If the first of a queue can't go, and somebody in the other can't
# either, nobody would ever go on. Then any caller that can go may pass. That doesn't happen where the limiter's
# tolerance is as large as it is to be.


_TO_LEAVE = 1.0  # seconds


def rows_under_way(ring: Ring) -> int:
    """Returns the number of rows of all claims."""
    return sum(checked_claim(ring, number).rows for number in ring.claims.in_use())


def is_permitted(ring: Ring, side: int, rows: int) -> bool:
    """Returns whether the rate limiter lets so many rows through, whoever waits. The mutex is held."""
    numbers, limiter = ring.numbers, ring.limiter
    if limiter is None:
        return True
    if side == INSERTS:
        return limiter.may_insert(numbers.added + rows_under_way(ring), numbers.sampled, rows)
    return limiter.may_sample(numbers.added, numbers.sampled, rows)


class BufferWait:
    """The wait of one call: until there are rows or room for it, and the rate limiter lets it through.

    `until` calls a function under the mutex, which asks whether it `goes_on`.
    """

    __slots__ = ("_deadline", "_is_behind", "_ring", "_rows", "_seen", "_side", "_ticket", "_wants")

    def __init__(self, ring: Ring, side: int, rows: int, deadline: float, wants: Callable[[int], str]) -> None:
        """Begins the wait of a call on a side, INSERTS or SAMPLES.

        Args:
            wants: says what so many rows wait for, for an error, where it isn't the rate limiter.
        """
        self._ring, self._side, self._rows, self._deadline, self._wants = ring, side, rows, deadline, wants
        self._ticket = 0
        self._is_behind = False  # others
        self._seen: int | None = None  # the bell's word; None: the call was cancelled

    def until(self, look: Callable[..., T | None], *arguments: Any) -> T:
        """Calls `look` under the mutex until it returns something, and returns that.

        Raises:
            StoreTimeoutError: the deadline has passed.
            NotAStoreError: the store was removed meanwhile.
            AbandonedError: whoever awaited the call was cancelled. `look` isn't called any more.
        """
        ring, deadline, began = self._ring, self._deadline, 0.0
        root, page = ring.entry.root, ring.page
        while True:
            now = time.monotonic()
            if now > root.look_again:  # as `Root.glance`
                try:
                    root.check_in_place()
                except MemstoreError:  # it was moved, and others may go on in it
                    with contextlib.suppress(MemstoreError):  # otherwise the place is empty after some seconds
                        ring.run(self.leave, now + _TO_LEAVE)
                    raise
            found = ring.run(self._look, deadline, look, arguments, is_last := now >= deadline)
            if found is not None:
                if began:
                    tell("replay wait", root.path, (ring.key,), 0, began)
                return found
            if self._seen is None:
                raise AbandonedError("whoever awaited this was cancelled")
            if is_last:
                raise StoreTimeoutError(f"{ring.key!r}: {self._reason() or self._wants(self._rows)}", key=ring.key)
            began = began or time.perf_counter()
            page.sleep(self._seen, deadline)

    def _look(self, look: Callable[..., T | None], arguments: tuple[Any, ...], is_last: bool) -> T | None:
        if ABANDONED and is_abandoned():
            self.leave()
            self._seen = None
            return None
        found = look(*arguments)
        if found is None:
            if is_last:
                self.leave()
            self._seen = 0 if is_last else self._ring.page.listen()
        return found

    def may_go(self) -> bool:
        """Returns whether the limiter permits it, and nobody came first. If so, `leave`; if not, it queues now.

        Raises NeverFitsError: so many rows never fit between the limiter's bounds.
        """
        ring, side, rows = self._ring, self._side, self._rows
        if ring.limiter is None:
            return True
        waiting = ring.queue.waiting(side)
        is_first = not waiting or waiting[0].ticket == self._ticket
        if is_permitted(ring, side, rows) and (is_first or self._may_pass(waiting[0].rows)):
            return True
        self._is_behind = not is_first
        if ring.limiter.may_ever_go(rows, is_insert=side == INSERTS):
            self._ticket = ring.queue.keep(side, self._ticket, rows)
        elif side == SAMPLES or not ring.limiter.may_insert(ring.numbers.added, ring.numbers.sampled, rows):
            raise NeverFitsError(self._never(ring.limiter))  # also if the rows under way are given back
        return False

    def _may_pass(self, rows_of_first: int) -> bool:
        """Returns whether the queues block each other: neither the first of this one, nor one of the other, can go."""
        ring, other = self._ring, SAMPLES if self._side == INSERTS else INSERTS
        if is_permitted(ring, self._side, rows_of_first):
            return False
        return any(not is_permitted(ring, other, place.rows) for place in ring.queue.waiting(other))

    def goes_on(self) -> bool:
        """Leaves the queue if it may go. Returns whether it may."""
        may_go = self.may_go()
        if may_go:
            self.leave()
        return may_go

    def leave(self) -> None:
        """Leaves the queue, under the mutex. The next one in it is woken after the hold."""
        if self._ticket:
            self._ring.queue.leave(self._side, self._ticket)
            self._ticket = 0
            self._ring.page.ring()

    def _never(self, limiter: RateLimiter) -> str:
        is_insert = self._side == INSERTS
        most = count_of(limiter.most_at_once(is_insert=is_insert), "row", "rows")
        advice = "extend it in parts" if is_insert else "sample fewer at a time"
        after = f" beyond the first {limiter.min_size:,}" if is_insert and limiter.min_size > 1 else ""
        return f"{self._ring.key!r}: {limiter} lets {most} through at once{after}, and never {self._rows:,}: {advice}"

    def _reason(self) -> str | None:
        """Says why the limiter lets it not through, for an error; None if it does."""
        ring, rows = self._ring, self._rows
        counts = f"{ring.limiter}, {ring.numbers.added:,} rows added, {ring.numbers.sampled:,} sampled"
        if is_permitted(ring, self._side, rows):
            return f"others came first, and wait for its rate limiter: {counts}" if self._is_behind else None
        if self._side == INSERTS and ring.limiter is not None and ring.numbers.added < ring.limiter.min_size:
            return f"its rate limiter lets no {rows:,} rows in at once at the beginning: {counts}; extend it in parts"
        if self._side == INSERTS:
            return f"its rate limiter lets no {rows:,} rows in until others are sampled: {counts}"
        return f"its rate limiter lets nobody sample {rows:,} rows until more are added: {counts}"
