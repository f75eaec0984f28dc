"""What survives a crash of the host: rows that `flush` has brought to the disk, and noted.

Words and rows reach a disk in any order, so that neither tells of the other. A note has the word of a slot and the hash
of its row; in another boot a slot is whole if both fit. The rules: docs/decisions/015.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from memstore.engine import sync_rows
from memstore.replay.ring import Ring
from memstore.replay.words import READABLE, are_same, emptied, positions_of

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
