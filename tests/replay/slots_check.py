"""What must hold in every state of the model of slots. Steps raise faults too."""

from __future__ import annotations

from tests.replay.slots_state import CELLS, CLAIMED, FREE, READABLE, WHOLE, WRITING, State
from tests.support.explore import Fault


def check(state: State) -> None:
    if state.dirty or any(process.owner for process in state.processes):
        return
    _check_slots(state)
    for position in state.acknowledged:
        if not state.has(position) and not _is_overwritten(state, position):
            raise Fault("an acknowledged row is gone before the ring came to it again")
    for batch in state.batches:
        left = [position for position in batch if not _is_overwritten(state, position)]
        if any(map(state.has, left)) and not all(map(state.has, left)):
            raise Fault("a part of a batch was published")
    if state.added != len(state.published):
        raise Fault("rows are counted wrong")


def _is_overwritten(state: State, position: int) -> bool:
    """A later claim has had its slot."""
    again = range(position + state.capacity, state.head, state.capacity)
    return any(later in batch for later in again for batch in state.batches)


def _check_slots(state: State) -> None:
    for index, slot in enumerate(state.slots):
        position = state.position(index)
        if slot.state in READABLE and slot.cells != (position,) * CELLS:
            raise Fault("a word says that a row is whole which isn't")
        is_sought = position >= state.cursor if position >= state.head - state.capacity else state.late
        if slot.state == WHOLE and not is_sought and position not in state.handed:
            raise Fault("a row waits to be handed out, and nobody looks for it")
        if slot.state == WRITING:
            claim = state.claims[slot.claim]
            if claim.stage != CLAIMED or not claim.first <= position < claim.end:
                raise Fault("a word names a claim that isn't its own: it would be stuck")
    for claim in state.claims:
        if claim.stage not in (FREE, CLAIMED):
            raise Fault("a claim is in the middle of a change, and nobody makes it")
