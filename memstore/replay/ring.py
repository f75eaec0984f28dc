"""Ring: an open replay buffer, as the memory that the processes share; and its recovery after a death or a crash.

The functions at the top read and make the words of slots. `Ring` maps the parts of one buffer, and `Ring.run` calls a
function under the buffer's mutex. `flush` notes which rows are on the disk, and `restore` finds them after a crash of
the host. `recover` is called by the next owner of the mutex when the last one died or failed in the middle of a change.
The rules: docs/decisions/015.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from memstore import structure
from memstore.datasets import arrays_over
from memstore.engine import (
    CLAIMED,
    CLAIMING,
    FREE,
    PUBLISHING,
    Claim,
    ClaimTable,
    LimiterQueue,
    MutableEntry,
    Refusal,
    RingNumbers,
    sync_rows,
)
from memstore.errors import CorruptionError
from memstore.replay.entry import capacity_of, layout_of, options_of
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


def words_of(positions: Any, capacity: int, state: int, claim: int = 0) -> Any:
    """The words of positions: of an int an int, of an array an array."""
    return ((positions // capacity + 1) << _LAP_AT) | claim << _CLAIM_AT | state


def positions_of(words: Any, slots: Any, capacity: int) -> Any:
    """The positions of the rows that lie in slots; negative where there was never one."""
    return ((words >> _LAP_AT) - 1) * capacity + slots


def emptied(words: Any) -> Any:
    """The same laps, and nothing there."""
    return words >> _LAP_AT << _LAP_AT


def claims_of(words: Any) -> Any:
    """The numbers of the claims that write there."""
    return words >> _CLAIM_AT & _CLAIM


def are_same(before: Words, after: Words) -> NDArray[np.bool_]:
    """Second look: whether what could be read lies there still. It may have been taken meanwhile."""
    return (before | 1) == (after | 1)


# --- The ring --------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class NeverFitsError(Refusal):
    """A batch that a rate limiter never lets through, found under the mutex before anything was changed."""


class Ring:
    """The parts of a buffer, mapped.

    Attributes:
        key, entry, page: as the engine has them.
        capacity: how many slots there are.
        options, limiter: what is fixed since it was made.
        plan: of all rows.
        arrays: for each leaf the bits of all rows, [capacity, ...], as integers.
        tensors: the same for torch.
        numbers, claims, words, seats: what the processes share beside the rows.
        priorities: None: it has none.
        notes: what `flush` notes, [capacity, 2]: the hash of a row, and its word. None in memory.
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
        self.numbers = RingNumbers(address, entry.mapping)
        self.seats = LimiterQueue(address, entry.mapping)
        self.priorities: Priorities | None = None
        if self.options.alpha is not None:
            nodes: Any = np.ndarray(SumTree.nodes(capacity), np.float64, memory, layout.tree)
            self.priorities = Priorities(SumTree(nodes, capacity), self.numbers, self.options.alpha)
        self.notes: NDArray[np.uint64] | None = None
        if self.options.is_noted:
            self.notes = np.ndarray((capacity, 2), np.uint64, memory, layout.notes)
        self.layout = layout
        self.numbers.check(capacity)

    def run(self, action: Callable[[], T], deadline: float) -> T:
        """Calls `action` under the buffer's mutex. Raises StoreTimeoutError; ValueError for a NeverFitsError."""
        try:
            return self.entry.run(action, deadline)
        except NeverFitsError as error:
            raise ValueError(str(error)) from None


# --- Flush and restore -----------------------------------------------------------------------------------------------
# What survives a crash of the host: rows that `flush` has brought to the disk, and noted.
#
# Words and rows reach a disk in any order, so that neither tells of the other. A note has the word of a slot and the
# hash of its row; in another boot a slot is whole if both fit. The rules: docs/decisions/015.


Slots = NDArray[np.int64]
_A_HOLD = 1 << 16  # notes that are written in one hold of the mutex
_HASH, _WORD = 0, 1


def flush(ring: Ring, deadline: float) -> None:
    """Brings whole rows to the disk, and notes them. In memory there is nothing to do."""
    if ring.notes is None:
        return
    words: Any = np.array(ring.words)
    slots: Slots = np.flatnonzero(words & READABLE)
    slots = slots[~are_same(words[slots], ring.notes[slots, _WORD].astype(np.int64))]  # the others were noted before
    words = words[slots]
    for leaf in ring.plan.leaves:
        sync_rows(ring.entry, leaf.offset, leaf.offset + leaf.nbytes)
    hashes = _hashes(ring, slots)
    for start in range(0, len(slots), _A_HOLD):
        part = slice(start, start + _A_HOLD)
        ring.run(partial(_note, ring, slots[part], words[part], hashes[part]), deadline)
    sync_rows(ring.entry, 0, ring.layout.size)


def _note(ring: Ring, slots: Slots, words: Slots, hashes: NDArray[np.uint64]) -> None:
    """Under the mutex, so that no later note is written over."""
    notes = ring.notes
    if notes is None:
        return
    there = are_same(words, ring.words[slots])
    chosen = slots[there]
    notes[chosen, _WORD] = 0  # a note that is cut off fits nothing
    notes[chosen, _HASH] = hashes[there]
    notes[chosen, _WORD] = words[there].astype(np.uint64)


def _hashes(ring: Ring, slots: Slots) -> NDArray[np.uint64]:
    """Of rows: xxh3-64 over their leaves, one after the other, each with the one before as its seed."""
    views: list[Any] = [bytes_of_rows(array) for array in ring.arrays if array.size]
    found = np.zeros(len(slots), np.uint64)
    for number, slot in enumerate(slots.tolist()):
        value = 0
        for view in views:
            value = xxhash.xxh3_64_intdigest(view[slot], value)
        found[number] = value
    return found


def bytes_of_rows(array: Any) -> Any:
    return array.reshape(len(array), -1).view(np.uint8)


def restore(ring: Ring) -> None:
    """In another boot: slots whose note fits are whole, the others empty. Without notes, all stands as it is."""
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
# Claims that were being made, and publications that had begun, are completed: so a batch is whole or absent. Each step
# may be made again, by who comes after one that died in here. The rules: docs/decisions/015.


def keep_whole(ring: Ring, deadline: float) -> None:
    """This process recovers the buffer, where it is the next owner of the mutex: from now on, and now."""
    ring.page.recover = partial(_recover, weakref.ref(ring))
    ring.run(_nothing, deadline)


def _recover(place: weakref.ref[Ring]) -> None:
    ring = place()  # its page refers to this function
    if ring is not None:
        recover(ring)


def _nothing() -> None:
    pass


def recover(ring: Ring) -> None:
    """Under the mutex. Raises CorruptionError where a claim can't be right."""
    ring.numbers.check(ring.capacity)
    if ring.page.is_new:
        _begin(ring)
    for number in ring.claims.in_use():
        claim = checked_claim(ring, number)
        if claim.stage == CLAIMING:
            _complete_claim(ring, number, claim)
        elif claim.stage == PUBLISHING:
            _complete_publication(ring, number, claim)
    readable = ring.words & READABLE != 0
    ring.numbers.rows = int(np.count_nonzero(readable))
    if ring.priorities is not None:
        ring.priorities.recover(readable)


def _begin(ring: Ring) -> None:
    """Nobody uses the buffer, and its mutexes are of another boot or file: no claim is left of that."""
    words = ring.words
    written = np.flatnonzero(words & STATE == WRITING)
    words[written] = emptied(words[written])
    ring.claims.create()
    if ring.numbers.other_boot:
        restore(ring)
        ring.numbers.other_boot = False


def _complete_claim(ring: Ring, number: int, claim: Claim) -> None:
    positions = np.arange(claim.first, claim.end)
    words = ring.words[positions % ring.capacity]
    left = positions[words & STATE != WRITING]
    ring.words[left % ring.capacity] = words_of(left, ring.capacity, WRITING, number)
    ring.numbers.head = claim.end
    ring.claims.set_stage(number, CLAIMED)


def _complete_publication(ring: Ring, number: int, claim: Claim) -> None:
    """Its thread, if it lives, lets go of the claim's mutex by itself."""
    slots = slots_of_claim(ring, number, claim)
    if ring.priorities is not None:
        leaves = ring.priorities.tree.priorities
        leaves[slots[leaves[slots] == 0]] = ring.priorities.of_new_rows  # what it was to be is not known
    ring.words[slots] = emptied(ring.words[slots]) | WHOLE
    count_publication(ring, claim)
    ring.claims.set_stage(number, FREE)


# --- of a claim -------------------------------------------------------------------------------------------------------


def checked_claim(ring: Ring, number: int) -> Claim:
    """What a claim says. Raises CorruptionError."""
    claim = ring.claims.read(number)
    if claim.stage > PUBLISHING or not 0 <= claim.rows <= claim.end - claim.first <= ring.capacity:
        raise CorruptionError(
            f"{ring.key!r}: its claim {number} is damaged: {claim}: run memstore.repair", key=ring.key
        )
    return claim


def slots_of_claim(ring: Ring, number: int, claim: Claim) -> Any:
    """The slots whose words name it."""
    slots = np.arange(claim.first, claim.end) % ring.capacity
    words = ring.words[slots]
    return slots[(words & STATE == WRITING) & (claims_of(words) == number)]


def count_publication(ring: Ring, claim: Claim) -> None:
    """Of a publication. Made twice, it is as made once."""
    ring.numbers.publish(claim.first, claim.end, claim.before + claim.rows, ring.capacity)


def give_back(ring: Ring, number: int) -> None:
    """Under the mutex: the slots of a claim that will never be published are empty, and the claim is free."""
    slots = slots_of_claim(ring, number, checked_claim(ring, number))
    ring.words[slots] = emptied(ring.words[slots])
    ring.claims.set_stage(number, FREE)


def give_back_the_dead(ring: Ring) -> bool:
    """Under the mutex. Whether there were any."""
    dead = ring.claims.of_the_dead()
    for number in dead:
        give_back(ring, number)
    return bool(dead)
