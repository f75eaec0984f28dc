"""What the next owner of a buffer's mutex does when the last one died or failed in the middle of a change.

Claims that were being made, and publications that had begun, are completed: so a batch is whole or absent. Each step
may be made again, by who comes after one that died in here. The rules: docs/decisions/015.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

from memstore.engine import CLAIMED, CLAIMING, FREE, PUBLISHING, Claim
from memstore.errors import CorruptionError
from memstore.replay.flushing import restore
from memstore.replay.ring import Ring
from memstore.replay.words import READABLE, STATE, WHOLE, WRITING, claims_of, emptied, words_of


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
    count(ring, claim)
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


def count(ring: Ring, claim: Claim) -> None:
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
