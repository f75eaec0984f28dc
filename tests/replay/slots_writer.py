"""The model's writers: they claim slots, copy their rows without the mutex, and publish. See `slots_model.py`."""

from __future__ import annotations

from tests.replay.slots_state import (
    CELLS,
    CLAIMED,
    CLAIMING,
    DEAD,
    EMPTY,
    FREE,
    NOBODY,
    PUBLISHING,
    WHOLE,
    WRITING,
    Scene,
    State,
    Steps,
    with_cell,
    with_claim,
    with_word,
    written_by,
)
from tests.support.explore import Fault


def writer_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    at = scene.process.at
    if at == "start":
        yield scene.step("begin", at="lock: claim") if scene.process.batches else scene.finish("end")
    elif at in ("claim", "mark", "move the head"):
        yield from _claim(scene, broken)
    elif at == "copy":
        yield from _copy(scene, broken)
    elif at in ("publish", "make whole", "count", "free"):
        yield from _publish(scene, broken)
    elif at == "abandon":
        yield from _abandon(scene)
    elif at == "acknowledge":
        state = scene.state._replace(acknowledged=scene.state.acknowledged | {*scene.process.batch})
        yield scene.step(
            "acknowledge", state, at="start", batches=scene.process.batches - 1, claim=-1, batch=(), cell=0
        )
    else:
        yield scene.finish("raise")


# --- rule 1: a claim --------------------------------------------------------------------------------------------------


def _claim(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "claim":
        yield from _plan(scene, broken)
    elif process.at == "mark":
        following = _marked(state, process.claim, process.batch[process.cell], broken)
        at = "move the head" if process.cell + 1 == process.rows else "mark"
        yield scene.step("claim: mark a word", following, at=at, cell=process.cell + 1)
    else:
        is_held = process.small and "small rows without the mutex" not in broken
        at = "copy" if is_held else "release: copy"
        yield scene.step("claim: move the head", _claimed(state, process.claim), at=at, cell=0)


def _plan(scene: Scene, broken: frozenset[str]) -> Steps:
    """The next slots in the ring's order, but those that others write who live."""
    state, process = scene.state, scene.process
    chosen, met, position = list[int](), set[int](), state.head
    while len(chosen) < process.rows and position < state.head + state.capacity:
        slot = state.slot_of(position)
        if slot.state == WRITING and "take what the living write" not in broken:
            met.add(slot.claim)
        else:
            chosen.append(position)
        position += 1
    dead = [claim for claim, found in enumerate(state.claims) if found.is_of_the_dead]
    free = [claim for claim, found in enumerate(state.claims) if found.holder < 0 and found.stage == FREE]
    in_the_way = [claim for claim in dead if claim in met or not free]
    if in_the_way and "leave what the dead claimed" not in broken:
        yield scene.step("claim: give back what the dead claimed", _give_back(state, in_the_way[0], broken))
    elif len(chosen) < process.rows or not free:
        if not any(found.holder >= 0 for found in state.claims):
            raise Fault("a writer finds no slot, and nobody who lives has one")
        yield scene.step("claim: no room", at="release: raise")
    else:
        stage = FREE if "claim without a note" in broken else CLAIMING
        holder = NOBODY if process.small else scene.index
        entry = {"holder": holder, "stage": stage, "first": state.head, "end": position, "rows": process.rows}
        following = with_claim(state, free[0], **entry)
        following = following._replace(batches=(*state.batches, tuple(chosen)))
        yield scene.step("claim: note it", following, at="mark", claim=free[0], batch=tuple(chosen), cell=0)


def _marked(state: State, claim: int, position: int, broken: frozenset[str]) -> State:
    if "no word says that it is written" in broken:
        return state
    return with_word(state, position % state.capacity, WRITING, lap=position // state.capacity, claim=claim)


def _claimed(state: State, claim: int) -> State:
    return with_claim(state, claim, stage=CLAIMED)._replace(head=state.claims[claim].end)


def _give_back(state: State, claim: int, broken: frozenset[str]) -> State:
    """One word, or at last the claim."""
    slots = written_by(state, claim)
    if slots and "free a claim before its words" not in broken:
        return with_word(state, slots[0], EMPTY)
    return with_claim(state, claim, stage=FREE, holder=NOBODY)


# --- between the holds ------------------------------------------------------------------------------------------------


def _copy(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    is_last = process.cell + 1 == CELLS * process.rows
    copied = with_cell(state, process.batch[process.cell // CELLS], process.cell % CELLS)
    is_early = "publish before the last cell" in broken and process.cell + 2 == CELLS * process.rows
    following = "publish" if process.owner else "lock: publish"
    yield scene.step("copy a cell", copied, at=following if is_last or is_early else "copy", cell=process.cell + 1)
    if state.interrupts and not process.owner:
        yield _interrupted(scene, "the copy")


def _interrupted(scene: Scene, where: str) -> tuple[str, State]:
    state = scene.state._replace(interrupts=scene.state.interrupts - 1)
    name, state = scene.step(f"interrupted in {where}", state, at="lock: abandon")
    return f"({name})", state


# --- rule 2: a publication --------------------------------------------------------------------------------------------


def _publish(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    claim = process.claim
    if state.claims[claim].holder != (NOBODY if process.small else scene.index):
        raise Fault("a claim of a thread that lives was given to another")
    if process.at == "publish":
        stage = CLAIMED if "publish without a note" in broken else PUBLISHING
        following = with_claim(state, claim, stage=stage, before=state.added)
        following = following._replace(published=state.published | {*process.batch})
        yield scene.step("publish: note it", following, at="make whole", cell=0)
    elif process.at == "make whole":
        position = process.batch[process.cell]
        following = with_word(state, position % state.capacity, WHOLE, lap=position // state.capacity)
        at = "count" if process.cell + 1 == process.rows else "make whole"
        yield scene.step("publish: a word is whole", following, at=at, cell=process.cell + 1)
    elif process.at == "count":
        yield scene.step("publish: count", counted(state, claim, broken), at="free")
    else:
        following = with_claim(state, claim, stage=FREE, holder=NOBODY)
        yield scene.step("publish: free the claim", following, at="release: acknowledge")


def counted(state: State, claim: int, broken: frozenset[str]) -> State:
    """Done twice, it is as done once."""
    found = state.claims[claim]
    is_late = found.first < state.head - state.capacity and "nobody looks for late rows" not in broken
    cursor = state.cursor if "the cursor stays" in broken else min(state.cursor, found.first)
    return state._replace(added=found.before + found.rows, cursor=cursor, late=state.late or is_late)


def _abandon(scene: Scene) -> Steps:
    """After an error. If the thread doesn't hold the claim's mutex any more, it is not its own: it was published."""
    state, process = scene.state, scene.process
    found = state.claims[process.claim]
    if found.holder != scene.index:
        yield scene.step("abandon: it is free already", at="release: raise")
    elif found.stage == FREE:
        state = with_claim(state, process.claim, holder=NOBODY)
        yield scene.step("abandon: it was published", state, at="release: raise")
    elif written_by(state, process.claim):
        yield scene.step("abandon: a word", _give_back(state, process.claim, frozenset()))
    else:
        yield scene.step("abandon: free the claim", _give_back(state, process.claim, frozenset()), at="release: raise")


# --- rule 3: what the next owner of the mutex does --------------------------------------------------------------------


def recover(scene: Scene, broken: frozenset[str]) -> Steps:
    """One thing after the other, until nothing is left to do: so a recovery that dies is begun anew."""
    state = scene.state
    for claim, found in enumerate(state.claims):
        if found.stage == CLAIMING and "recovery leaves a claim" not in broken:
            left = [p for p in range(found.first, found.end) if state.slot_of(p).state != WRITING]
            following = _marked(state, claim, left[0], broken) if left else _claimed(state, claim)
            yield scene.step("recover: go on with a claim", following)
            return
        if found.stage == PUBLISHING and "recovery leaves a publication" not in broken:
            slots = written_by(state, claim)
            if slots:
                following = with_word(state, slots[0], WHOLE)
            else:
                holder = NOBODY if found.holder == DEAD else found.holder
                following = with_claim(counted(state, claim, broken), claim, stage=FREE, holder=holder)
            yield scene.step("recover: go on with a publication", following)
            return
    yield scene.step("recover: done", state._replace(dirty=False), recovers=False)
