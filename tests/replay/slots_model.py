"""A model of the slots of a replay buffer: writers, samplers and consumers, killed, stopped or interrupted anywhere.

The rules are those of docs/decisions/015-mutable-entries.md. What the kernel does for a thread that dies is done: the
mutexes that it held pass on, the buffer's and that of its claim, with word of its death.

    WRITER    claim: note it, mark each word, move the head | copy cell by cell
              publish: note it, make each word whole, count, free the claim
    SAMPLER   pick | copy cell by cell | look again; after some tries the same under the mutex
    CONSUMER  take: mark a word, move the cursor | copy cell by cell | look again
    RECOVERY  claims that were being made, and publications that had begun, are completed

Stores are plain, and become visible in their order, as x86-64 has it; loads are made in theirs. A store that is
delayed is a step that is taken later: nobody looks, between stores of their own, at what somebody else has stored, but
under the mutex. So it is enough to interleave whole steps.

A process may be stopped for good: the others have to reach their ends. It may wake up at any time later.
"""

from __future__ import annotations

from memstore.testing.explore import Fault
from tests.replay.slots_state import (
    CELLS,
    DEAD,
    DONE,
    READABLE,
    TAKEN,
    WHOLE,
    Scene,
    State,
    Steps,
    with_word,
)
from tests.replay.slots_writer import recover, writer_steps

MUTATIONS = {
    "take what the living write": "a claim takes the slots of a writer that is only stopped",
    "leave what the dead claimed": "slots of a dead writer are given to nobody",
    "free a claim before its words": "the claim of a dead writer is freed before its slots are",
    "no word says that it is written": "a claim leaves the words as they are",
    "claim without a note": "words are marked before the claim says that it is being made",
    "publish without a note": "words become whole, and the claim doesn't say that it is being published",
    "publish before the last cell": "a row is published before it is whole",
    "recovery leaves a claim": "the next owner leaves a claim as it is that was being made",
    "recovery leaves a publication": "the next owner leaves a publication half done",
    "no look again": "a sampler takes what it copied",
    "look at the state alone": "a sampler doesn't compare the laps",
    "the cursor stays": "rows that are published behind the cursor are handed out to nobody",
    "nobody looks for late rows": "rows that the ring passed over before they were published are handed out to nobody",
    "the cursor alone": "what is handed out is not marked, and the cursor may go back",
    "take without the mutex": "a consumer takes a row without the mutex",
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


def _copy(scene: Scene) -> tuple[str, State]:
    process = scene.process
    cell = scene.state.slots[process.seen[0]].cells[len(process.copy)]
    at = "look" if len(process.copy) + 1 == CELLS else "copy"
    return scene.step("copy a cell", at=at, copy=(*process.copy, cell))


# --- who takes each row once ------------------------------------------------------------------------------------------


def _consumer(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "start":
        if not process.rows:
            yield scene.finish("end")
        else:
            yield scene.step("begin", at="take" if "take without the mutex" in broken else "lock: take")
    elif process.at == "take":
        yield _take(scene)
    elif process.at == "mark":
        slot, word = process.seen
        marked = state if "the cursor alone" in broken else with_word(state, slot, TAKEN)
        position = word.lap * state.capacity + slot
        if position in state.handed:
            raise Fault("a row is handed out twice")
        yield scene.step("take: mark", marked._replace(handed=state.handed | {position}), at="move the cursor")
    elif process.at == "move the cursor":
        slot, word = process.seen
        position = word.lap * state.capacity + slot
        moved = state if position < state.head - state.capacity else state._replace(cursor=position + 1)
        yield scene.step("take: move the cursor", moved, at="release: copy" if process.owner else "copy")
    elif process.at == "copy":
        yield _copy(scene)
    elif process.at == "look":
        slot, word = process.seen
        is_same = state.slots[slot].state in READABLE and state.slots[slot].lap == word.lap
        if is_same or "no look again" in broken:
            yield scene.step("look again: the same", at="return")
        else:
            yield scene.step("look again: another", at="start")
    elif process.at == "return":
        yield scene.returned()
    else:
        yield scene.finish("raise")


def _take(scene: Scene) -> tuple[str, State]:
    """Late rows first; then on from the cursor."""
    state = scene.state
    if state.late:
        for index, slot in enumerate(state.slots):
            if slot.state == WHOLE and state.position(index) < state.head - state.capacity:
                return scene.step("take: pick a late row", at="mark", seen=(index, slot), copy=())
        return scene.step("take: no row is late", state._replace(late=False))
    for position in range(max(state.cursor, state.head - state.capacity), state.head):
        slot = state.slot_of(position)
        if (slot.state, slot.lap) == (WHOLE, position // state.capacity):
            return scene.step("take: pick", at="mark", seen=(position % state.capacity, slot), copy=())
    return scene.step("take: nothing waits", at="release: raise" if scene.process.owner else "raise")
