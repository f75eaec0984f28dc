"""A model of the slots of a replay buffer: writers, samplers and consumers, killed, stopped or interrupted anywhere.

The rules are those of docs/decisions/015-mutable-entries.md. What the kernel does for a thread that dies is done: the
mutexes that it held pass on, the buffer's and that of its claim, with word of its death.

    WRITER    claim: note it, mark each word, move the head | copy cell by cell
              publish: note it, make each word whole, count, free the claim; small batches: all in one hold
    SAMPLER   pick | copy cell by cell | look again; after some tries the same under the mutex
    CONSUMER  pick | copy cell by cell | look again, and take: mark the word, move the cursor
              if nobody gets the row after all, put it back: move the cursor back, mark the word
    RECOVERY  claims that were being made, and publications that had begun, are completed

Stores are plain, and become visible in their order, as x86-64 has it; loads are made in theirs. A store that is
delayed is a step that is taken later: nobody looks, between stores of their own, at what somebody else has stored, but
under the mutex. So it is enough to interleave whole steps.

A process may be stopped for good: the others have to reach their ends. It may wake up at any time later.
"""

from __future__ import annotations

from tests.replay.slots_state import (
    CELLS,
    CLAIMED,
    DEAD,
    DONE,
    FREE,
    READABLE,
    TAKEN,
    WHOLE,
    WRITING,
    Scene,
    Slot,
    State,
    Steps,
    with_word,
)
from tests.replay.slots_writer import recover, writer_steps
from tests.support.explore import Fault

MUTATIONS = {
    "take what the living write": "a claim takes the slots of a writer that is only stopped",
    "leave what the dead claimed": "slots of a dead writer are given to nobody",
    "free a claim before its words": "the claim of a dead writer is freed before its slots are",
    "no word says that it is written": "a claim leaves the words as they are",
    "claim without a note": "words are marked before the claim says that it is being made",
    "publish without a note": "words become whole, and the claim doesn't say that it is being published",
    "small rows without the mutex": "a small batch, whose claim has no mutex of its own, is copied between two holds",
    "publish before the last cell": "a row is published before it is whole",
    "recovery leaves a claim": "the next owner leaves a claim as it is that was being made",
    "recovery leaves a publication": "the next owner leaves a publication half done",
    "no look again": "a sampler takes what it copied",
    "look at the state alone": "a sampler doesn't compare the laps",
    "the cursor stays": "rows that are published behind the cursor are handed out to nobody",
    "nobody looks for late rows": "rows that the ring passed over before they were published are handed out to nobody",
    "the cursor alone": "what is handed out is not marked, and the cursor may go back",
    "the cursor skips rows": "the cursor moves behind what is taken, and over what was published before it meanwhile",
    "take without the mutex": "a consumer takes a row without the mutex",
    "put back behind the cursor": "the cursor stays where it is when a row is put back",
    "put back what is written over": "a row is put back without a look whether it lies there still",
}


class Model:
    """The steps that each process may take."""

    def __init__(self, *mutations: str) -> None:
        assert set(mutations) <= set(MUTATIONS)
        self._broken = frozenset(mutations)

    def successors(self, state: State) -> Steps:
        for index, process in enumerate(state.processes):
            if process == DONE:
                continue
            scene = Scene(state, index)
            if process.stopped:
                yield scene.step("wakes up", stopped=False)
                continue
            yield from self._steps(scene)
            yield from _bad_luck(scene)

    def _steps(self, scene: Scene) -> Steps:
        process = scene.process
        if process.recovers:
            yield from recover(scene, self._broken)
        elif process.at.startswith("lock: "):
            if not any(other.owner for other in scene.state.processes):
                at = process.at.removeprefix("lock: ")
                yield scene.step("lock the mutex", at=at, owner=True, recovers=scene.state.dirty)
        elif process.at.startswith("release: "):
            yield scene.step("unlock the mutex", at=process.at.removeprefix("release: "), owner=False)
        elif process.role == "writer":
            yield from writer_steps(scene, self._broken)
        elif process.role == "sampler":
            yield from _sampler(scene, self._broken)
        else:
            yield from _consumer(scene, self._broken)


def _bad_luck(scene: Scene) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "start":
        return
    if state.kills:
        claims = tuple(one._replace(holder=DEAD) if one.holder == scene.index else one for one in state.claims)
        killed = state._replace(kills=state.kills - 1, claims=claims, dirty=state.dirty or process.owner)
        name, killed = scene.step("killed", killed, **DONE._asdict())
        yield f"({name})", killed
    if state.stops and not process.owner:  # its owner is named to those that wait for the mutex, and they raise
        name, stopped = scene.step("stopped", state._replace(stops=state.stops - 1), stopped=True)
        yield f"({name})", stopped
    if (
        state.interrupts
        and process.owner
        and process.role == "writer"
        and process.claim >= 0
        and process.at != "abandon"
    ):
        left = state._replace(interrupts=state.interrupts - 1, dirty=True)
        name, left = scene.step("interrupted in a hold", left, at="lock: abandon", owner=False, recovers=False)
        yield f"({name})", left


# --- who samples ------------------------------------------------------------------------------------------------------


def _sampler(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at in ("start", "sample"):
        if not process.rows:
            yield scene.finish("end")
            return
        slots = [slot for slot in range(min(state.head, state.capacity)) if state.slots[slot].state in READABLE]
        for slot in slots:
            yield scene.step("pick", at="copy", seen=(slot, state.slots[slot]), copy=())
        if not slots:
            yield scene.step("nothing is whole", at="release: raise") if process.owner else scene.finish("raise")
    elif process.at == "copy":
        yield _copy(scene)
    elif process.at == "look":
        slot, word = process.seen
        found = state.slots[slot]
        is_same = found.state in READABLE and (found.lap == word.lap or "look at the state alone" in broken)
        if is_same or "no look again" in broken:
            yield scene.step("look again: the same", at="release: return" if process.owner else "return")
        elif process.owner:
            raise Fault("a row went while the mutex was held")
        else:
            at = "start" if process.tries else "lock: sample"
            yield scene.step("look again: another", at=at, tries=max(process.tries - 1, 0))
    elif process.at == "return":
        yield scene.returned()
    else:
        yield scene.finish("raise")


def _copy(scene: Scene, following: str = "look") -> tuple[str, State]:
    process = scene.process
    cell = scene.state.slots[process.seen[0]].cells[len(process.copy)]
    at = following if len(process.copy) + 1 == CELLS else "copy"
    return scene.step("copy a cell", at=at, copy=(*process.copy, cell))


# --- who takes each row once ------------------------------------------------------------------------------------------


def _consumer(scene: Scene, broken: frozenset[str]) -> Steps:
    process = scene.process
    if process.at == "start":
        if not process.rows:
            yield scene.finish("end")
        else:
            yield scene.step("begin", at="pick" if process.tries else "lock: pick")
    elif process.at == "pick":
        yield _pick_waiting(scene)
    elif process.at == "copy":
        is_held = process.owner or "take without the mutex" in broken
        yield _copy(scene, "take" if is_held else "lock: take")
    elif process.at in ("take", "mark", "move the cursor"):
        yield _take(scene, broken)
    elif process.at == "return":
        yield scene.returned()
        if scene.state.cancels:
            cancelled = scene.state._replace(cancels=scene.state.cancels - 1)
            yield scene.step("cancelled", cancelled, at="lock: put back")
    elif process.at in ("put back", "wait again"):
        yield _put_back(scene, broken)
    elif process.at == "begin anew":
        yield scene.step("begin anew", at="start", copy=(), tries=1, seen=(-1, Slot()))
    else:
        yield scene.finish("raise")


def _put_back(scene: Scene, broken: frozenset[str]) -> tuple[str, State]:
    """Under the mutex: the cursor first, so that a row that waits is always looked for."""
    state, process = scene.state, scene.process
    slot, word = process.seen
    position = word.lap * state.capacity + slot
    if process.at == "wait again":
        marked = with_word(state, slot, WHOLE)
        return scene.step("put back: mark", marked._replace(handed=state.handed - {position}), at="release: begin anew")
    found = state.slots[slot]
    if (found.state, found.lap) != (TAKEN, word.lap) and "put back what is written over" not in broken:
        return scene.step("put back: it is written over", at="release: begin anew")
    if "put back behind the cursor" not in broken:
        is_late = position < state.head - state.capacity
        state = state._replace(cursor=min(state.cursor, position), late=state.late or is_late)
    return scene.step("put back: move the cursor", state, at="wait again")


def _pick_waiting(scene: Scene) -> tuple[str, State]:
    """Late rows first; then on from the cursor. Without the mutex, unless there is nothing, or it went too often."""
    state, process = scene.state, scene.process
    positions = [
        state.position(index)
        for index, slot in enumerate(state.slots)
        if state.late and slot.state == WHOLE and state.position(index) < state.head - state.capacity
    ]
    positions += [
        position
        for position in range(max(state.cursor, state.head - state.capacity), state.head)
        if state.slot_of(position).state == WHOLE and state.has(position)
    ]
    if positions:
        at = "release: copy" if process.owner and process.tries else "copy"
        seen = (positions[0] % state.capacity, state.slot_of(positions[0]))
        return scene.step("pick a row that waits", at=at, seen=seen, copy=())
    if not process.owner:
        return scene.step("nothing waits, it seems", at="lock: pick")
    if state.late:
        return scene.step("no row is late", state._replace(late=False))
    return scene.step("nothing waits", at="release: raise")


def _take(scene: Scene, broken: frozenset[str]) -> tuple[str, State]:
    """Under the mutex, after the copy: so what a consumer has not got is never lost with it."""
    state, process = scene.state, scene.process
    slot, word = process.seen
    position = word.lap * state.capacity + slot
    if process.at == "take":
        found = state.slots[slot]
        if (found.state == WHOLE and found.lap == word.lap) or "no look again" in broken:
            return scene.step("take: the same", at="mark")
        if process.owner and not process.tries:
            raise Fault("a row went while the mutex was held")
        return scene.step("take: another", at="release: start" if process.owner else "start", tries=0, copy=())
    if process.at == "mark":
        if position in state.handed:
            raise Fault("a row is handed out twice")
        marked = state if "the cursor alone" in broken else with_word(state, slot, TAKEN)
        return scene.step("take: mark", marked._replace(handed=state.handed | {position}), at="move the cursor")
    moved = state._replace(cursor=_cursor_behind(state, position, broken))
    return scene.step("take: move the cursor", moved, at="release: return" if process.owner else "return")


def _cursor_behind(state: State, position: int, broken: frozenset[str]) -> int:
    """Behind what was taken, unless something waits before that."""
    if position < state.cursor:  # a late row, or the cursor has gone on
        return state.cursor
    if "the cursor skips rows" not in broken:
        for before in range(max(state.cursor, state.head - state.capacity), position):
            if state.slot_of(before).state == WHOLE and state.has(before):
                return before
    return position + 1


# --- what must hold ---------------------------------------------------------------------------------------------------


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
