"""A model of the slots of a replay buffer: writers, samplers and consumers, killed, stopped or interrupted anywhere.

The rules are those of docs/decisions/015-mutable-entries.md. What the kernel does for a thread that dies is done: the
mutexes that it held pass on, the buffer's and that of its claim, with word of its death.

    WRITER    claim: note it, mark each word, move the head | copy cell by cell
              publish: note it, make each word whole, count, free the claim; small batches: all in one hold
    SAMPLER   pick | copy cell by cell | look again; after some tries the same under the mutex
    CONSUMER  pick | copy cell by cell | look again, and take: mark the word, move the cursor
              if nobody gets the row after all, put it back: move the cursor back, mark the word
    RECOVERY  claims that were being made, and publications that had begun, are completed

A row is two cells, and what is stored in a cell is the position of the row that it belongs to: so a torn row shows. A
position is how many were handed out before; its slot is its rest by the capacity, its lap what remains.

Stores are plain, and become visible in their order, as x86-64 has it; loads are made in theirs. A store that is
delayed is a step that is taken later: nobody looks, between stores of their own, at what somebody else has stored, but
under the mutex. So it is enough to interleave whole steps.

A process may be stopped for good: the others have to reach their ends. It may wake up at any time later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from tests.support.explore import Fault

EMPTY, WRITING, WHOLE, TAKEN = "empty", "writing", "whole", "taken"  # the state in a slot's word
READABLE = (WHOLE, TAKEN)
FREE, CLAIMING, CLAIMED, PUBLISHING = "free", "claiming", "claimed", "publishing"  # the stages of a claim
NOBODY, DEAD = -1, -2  # who holds a claim's mutex; DEAD: the kernel says that its owner died
CELLS = 2
Item = TypeVar("Item")


class Slot(NamedTuple):
    """A slot's word, and the row that lies there."""

    lap: int = -1
    state: str = EMPTY
    claim: int = -1  # that writes it
    cells: tuple[int, ...] = (-1,) * CELLS


class Claim(NamedTuple):
    """An entry of the table of claims. Its slots are those from `first` to `end` whose words name it."""

    holder: int = NOBODY  # of its mutex
    stage: str = FREE
    first: int = 0
    end: int = 0
    rows: int = 0
    before: int = 0  # rows that were added before it

    @property
    def is_of_the_dead(self) -> bool:
        """Its mutex can be had, and it is not free."""
        return self.holder < 0 and self.stage != FREE


class Process(NamedTuple):
    role: str  # writer, sampler, consumer
    rows: int = 1  # a batch, or to be sampled
    batches: int = 1
    small: bool = False  # a writer's: all is done in one hold, and the claim's mutex is not taken
    at: str = "start"
    owner: bool = False  # of the buffer's mutex
    recovers: bool = False
    stopped: bool = False
    claim: int = -1
    batch: tuple[int, ...] = ()  # the positions that it claimed
    cell: int = 0  # how many were copied
    seen: tuple[int, Slot] = (-1, Slot())  # what is sampled: the slot, and its word when it was picked
    copy: tuple[int, ...] = ()
    tries: int = 1  # before a sampler takes the mutex


DONE = Process("", at="done")


class State(NamedTuple):
    processes: tuple[Process, ...]
    slots: tuple[Slot, ...]
    claims: tuple[Claim, ...]
    head: int = 0  # positions handed out
    added: int = 0  # rows ever published
    cursor: int = 0  # no row before it waits to be handed out, but for late ones
    late: bool = False  # rows may wait that were published when the ring had passed over them
    dirty: bool = False  # the mutex's dirty word
    # what was seen
    batches: tuple[tuple[int, ...], ...] = ()  # the positions of each claim
    published: frozenset[int] = frozenset()  # positions of claims that began to publish
    acknowledged: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()
    # what may still come
    kills: int = 0
    stops: int = 0
    interrupts: int = 0
    cancels: int = 0

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def slot_of(self, position: int) -> Slot:
        return self.slots[position % self.capacity]

    def has(self, position: int) -> bool:
        """Whether a sampler may find that row."""
        slot = self.slot_of(position)
        return slot.lap == position // self.capacity and slot.state in READABLE

    def position(self, slot: int) -> int:
        return self.slots[slot].lap * self.capacity + slot


def start(*processes: Process, capacity: int = 2, claims: int = 2, **limits: int) -> State:
    return State(processes, (Slot(),) * capacity, (Claim(),) * claims, **limits)


def is_end(state: State) -> bool:
    """Who is stopped for good needs no end: the others do."""
    return all(process == DONE or process.stopped for process in state.processes)


Steps = Iterator[tuple[str, State]]


def with_(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def with_word(state: State, index: int, word: str, *, lap: int | None = None, claim: int = -1) -> State:
    slot = state.slots[index]
    slot = slot._replace(state=word, claim=claim, lap=slot.lap if lap is None else lap)
    return state._replace(slots=with_(state.slots, index, slot))


def with_claim(state: State, index: int, **changes: object) -> State:
    return state._replace(claims=with_(state.claims, index, state.claims[index]._replace(**changes)))


def with_cell(state: State, position: int, cell: int) -> State:
    slot = state.slot_of(position)
    slot = slot._replace(cells=with_(slot.cells, cell, position))
    return state._replace(slots=with_(state.slots, position % state.capacity, slot))


def written_by(state: State, claim: int) -> list[int]:
    """The slots whose words name that claim, in the order of its positions."""
    found = state.claims[claim]
    slots = (position % state.capacity for position in range(found.first, found.end))
    return [slot for slot in slots if (state.slots[slot].state, state.slots[slot].claim) == (WRITING, claim)]


class Scene:
    """One process and the state that it finds."""

    def __init__(self, state: State, index: int) -> None:
        self.state, self.index, self.process = state, index, state.processes[index]

    def step(self, name: str, state: State | None = None, **changes: object) -> tuple[str, State]:
        """`changes` are of the process."""
        state = self.state if state is None else state
        process = self.process._replace(**changes)
        return f"{self.process.role}: {name}", state._replace(processes=with_(state.processes, self.index, process))

    def finish(self, name: str) -> tuple[str, State]:
        return self.step(name, **DONE._asdict())

    def returned(self) -> tuple[str, State]:
        """The caller gets the row that was copied."""
        slot, word = self.process.seen
        position = word.lap * self.state.capacity + slot
        if self.process.copy != (position,) * CELLS:
            raise Fault(f"a torn row: {self.process.copy} was returned for {position}")
        if position not in self.state.published:
            raise Fault("a row was returned that nobody has published")
        return self.step("return", rows=self.process.rows - 1, at="start", copy=(), tries=1, seen=(-1, Slot()))


# --- writers: they claim slots, copy their rows without the mutex, and publish ----------------------------------------


def writer_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    at = scene.process.at
    if at == "start":
        yield scene.step("begin", at="lock: claim") if scene.process.batches else scene.finish("end")
    elif at in ("claim", "mark", "move the head"):
        yield from _claim(scene, broken)
    elif at == "copy":
        yield from _copy_rows(scene, broken)
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


# -- rule 1: a claim ---------------------------------------------------------------------------------------------------


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


# -- between the holds -------------------------------------------------------------------------------------------------


def _copy_rows(scene: Scene, broken: frozenset[str]) -> Steps:
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


# -- rule 2: a publication ---------------------------------------------------------------------------------------------


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


# -- rule 3: what the next owner of the mutex does ---------------------------------------------------------------------


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


# --- samplers and consumers -------------------------------------------------------------------------------------------


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


# -- who samples -------------------------------------------------------------------------------------------------------


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


# -- who takes each row once -------------------------------------------------------------------------------------------


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


# -- what must hold ----------------------------------------------------------------------------------------------------


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
