"""A model of a dataset: rows are appended, overwritten and read while it is sealed or deleted, and processes killed.

The rules are those of docs/decisions/015-mutable-entries.md.

    EXTENDER  look, store the cells, store the length: all under the dataset's mutex
    WRITER    look | store the cells | fence, look again. Without the mutex, but where it finds that a seal goes on
    SEALER    say "sealing", fence, copy, commit, say "sealed": all under the mutex
    DELETER   commit, say "gone"
    READER    load the length | copy the last row

Two that write to one row at once are their own affair; here nobody does. A cell has the number of the call that stored
it. A process's plain stores wait in its buffer, in their order, and reach memory at any later time, or when it takes or
gives up a mutex, or at a fence, as on x86-64; loads look there first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.support.explore import Fault

OPEN, SEALING, SEALED, DELETED = "open", "sealing", "sealed", "deleted"  # the state word; it never says "deleted"
MUTABLE, IMMUTABLE, GONE = "mutable", "immutable", "gone"  # what the catalog has
CELLS = 2  # a row
LENGTH, WORD = "length", "word"  # places beside the cells


class Process(NamedTuple):
    role: str  # extender, writer, sealer, deleter, reader
    at: str = "start"
    owner: bool = False  # of the dataset's mutex
    recovers: bool = False
    row: int = 0
    cell: int = 0
    copy: tuple[int, ...] = ()
    buffer: tuple[tuple[int | str, int | str], ...] = ()  # stores that memory doesn't have yet: place, value


DONE = Process("", at="done")


class State(NamedTuple):
    processes: tuple[Process, ...]
    cells: tuple[int, ...]
    length: int = 1  # a row of zeros is there
    word: str = OPEN
    gone: bool = False  # the other word
    catalog: str = MUTABLE
    sealed: tuple[int, ...] = ()  # the cells of the sealed copy
    dirty: bool = False
    # what was seen
    acknowledged: tuple[tuple[int, int], ...] = ()  # rows, and the calls that stored them
    told: bool = False  # somebody has deleted it, and the call has returned
    # what may still come
    kills: int = 0
    failures: int = 0

    @classmethod
    def of(cls, *processes: Process, rows: int = 2, **limits: int) -> State:
        """A dataset with room for so many rows."""
        return cls(processes, (0,) * (rows * CELLS), **limits)


Steps = Iterator[tuple[str, State]]


def is_end(state: State) -> bool:
    return all(process == DONE for process in state.processes)


def stored(state: State, place: int | str, value: int | str) -> State:
    """A store reaches memory."""
    if isinstance(place, str):
        return state._replace(**{place: value})
    return state._replace(cells=(*state.cells[:place], int(value), *state.cells[place + 1 :]))


def after_all_stores(state: State) -> State:
    """As memory will be, if nobody stores any more."""
    for process in state.processes:
        for place, value in process.buffer:
            state = stored(state, place, value)
    return state


class Scene:
    """One process and the state that it finds."""

    def __init__(self, state: State, index: int) -> None:
        self.state, self.index, self.process = state, index, state.processes[index]

    @property
    def call(self) -> int:
        """What it stores: its own number, and nobody else's."""
        return self.index + 1

    def step(self, name: str, state: State | None = None, **changes: object) -> tuple[str, State]:
        """`changes` are of the process."""
        state = self.state if state is None else state
        process = self.process._replace(**changes)
        processes = (*state.processes[: self.index], process, *state.processes[self.index + 1 :])
        return f"{self.process.role}: {name}", state._replace(processes=processes)

    def finish(self, name: str, state: State | None = None) -> tuple[str, State]:
        """The call is over; what it stored may still not be in memory."""
        return self.step(name, state, **DONE._replace(buffer=self.process.buffer)._asdict())

    def fence(self, name: str, at: str, **changes: object) -> Steps:
        """A step that waits until memory has all that was stored."""
        if not self.process.buffer:
            yield self.step(name, None, at=at, **changes)

    def store(self, name: str, place: int | str, value: int | str, **changes: object) -> tuple[str, State]:
        return self.step(name, None, buffer=(*self.process.buffer, (place, value)), **changes)

    def drained(self) -> Steps:
        """The oldest store reaches memory."""
        if self.process.buffer:
            (place, value), *rest = self.process.buffer
            yield self.step("memory gets a store", stored(self.state, place, value), buffer=tuple(rest))

    def killed(self) -> tuple[str, State]:
        """What was stored before reaches memory all the same."""
        state = self.state
        for place, value in self.process.buffer:
            state = stored(state, place, value)
        state = state._replace(kills=state.kills - 1, dirty=state.dirty or self.process.owner)
        name, state = self.step("killed", state, **DONE._asdict())
        return f"({name})", state


# --- the steps --------------------------------------------------------------------------------------------------------


MUTATIONS = {
    "the length first": "an append moves the length before its row is there",
    "extend without the mutex": "rows are appended without the mutex",
    "look once": "who overwrites rows doesn't look again whether the dataset was sealed meanwhile",
    "no fence": "the second look is made before memory has the rows",
    "no fence of the sealer": "a seal copies rows before memory has its word",
    "seal without the mutex": "a seal lets others append",
    "leave it sealing": "the next owner of the mutex leaves a dead sealer's word",
    "open it whatever was committed": "the next owner opens a dataset whose sealer died, without a look at the catalog",
    "one word for both": "a deletion is said by the word that a seal uses too",
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
            yield from scene.drained()
            if process.at == DONE.at:
                continue
            yield from self._steps(scene)
            if state.kills and process.at != "start":
                yield scene.killed()

    def _steps(self, scene: Scene) -> Steps:
        at = scene.process.at
        if scene.process.recovers:
            yield _recover(scene, self._broken)
        elif at.startswith("lock: "):
            if not any(other.owner for other in scene.state.processes):
                changes = {"owner": True, "recovers": scene.state.dirty}
                yield from scene.fence("lock the mutex", at=at.removeprefix("lock: "), **changes)
        elif at.startswith("release: "):
            yield from scene.fence("unlock the mutex", at=at.removeprefix("release: "), owner=False)
        elif at == "raise":
            yield scene.finish("raise")
        elif at == "acknowledge":
            acknowledged = (*scene.state.acknowledged, (scene.process.row, scene.call))
            yield scene.finish("acknowledge", scene.state._replace(acknowledged=tuple(sorted(acknowledged))))
        else:
            yield from _ROLES[scene.process.role](scene, self._broken)


def _look(scene: Scene) -> str:
    """What the two words say."""
    if scene.state.gone or scene.state.word == DELETED:
        return GONE
    if scene.process.at == "start" and scene.state.told and scene.state.word == OPEN:
        raise Fault("a write begins in a dataset that was deleted")
    return scene.state.word


def _recover(scene: Scene, broken: frozenset[str]) -> tuple[str, State]:
    state = scene.state
    word = state.word
    if word == SEALING and "leave it sealing" not in broken:
        is_sealed = state.catalog == IMMUTABLE and "open it whatever was committed" not in broken
        word = SEALED if is_sealed else OPEN
    return scene.step("recover", state._replace(word=word, dirty=False), recovers=False)


# -- who writes --------------------------------------------------------------------------------------------------------


def _extender(scene: Scene, broken: frozenset[str]) -> Steps:
    process, is_length_first = scene.process, "the length first" in broken
    if process.at == "start":
        yield scene.step("begin", at="look" if "extend without the mutex" in broken else "lock: look")
    elif process.at == "look":
        if _look(scene) != OPEN:
            yield scene.step("append: not open", at="release: raise")
        else:
            yield scene.step("append: look", at="length" if is_length_first else "store", row=scene.state.length)
    elif process.at == "store":
        last = "release: acknowledge" if is_length_first else "length"
        yield from _store(scene, last)
    else:
        at = "store" if is_length_first else "release: acknowledge"
        yield scene.store("append: move the length", LENGTH, process.row + 1, at=at)


def _store(scene: Scene, last: str) -> Steps:
    process = scene.process
    place = process.row * CELLS + process.cell
    at = last if process.cell + 1 == CELLS else "store"
    yield scene.store("store a cell", place, scene.call, at=at, cell=process.cell + 1)


def _writer(scene: Scene, broken: frozenset[str]) -> Steps:
    """Overwrites row 0."""
    process, state = scene.process, scene.state
    if process.at in ("start", "decide"):
        found = _look(scene)
        if found == SEALING and process.owner:
            raise Fault("a dead sealer's word stays for ever")
        if found == SEALING:
            yield scene.step("look: ask under the mutex", at="lock: decide")
        elif found != OPEN:
            yield scene.step("look: not open", at="release: raise")
        else:
            yield scene.step("look", at="release: store" if process.owner else "store")
    elif process.at == "store":
        yield from _store(scene, "acknowledge" if "look once" in broken else "fence")
    elif process.at == "fence":
        if "no fence" in broken:
            yield scene.step("fence", at="look again")
        else:
            yield from scene.fence("fence", at="look again")
    elif state.word == SEALING and not process.owner:
        yield scene.step("look again: ask under the mutex", at="lock: look again")
    elif state.word == OPEN and not state.gone:
        yield scene.step("look again", at="release: acknowledge" if process.owner else "acknowledge")
    else:
        yield scene.step("look again: not open", at="release: raise")


# -- who seals, deletes, reads -----------------------------------------------------------------------------------------


def _sealer(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "start":
        yield scene.step("begin", at="look" if "seal without the mutex" in broken else "lock: look")
    elif process.at == "look":
        if _look(scene) != OPEN:
            yield scene.step("seal: not open", at="release: raise")
        else:
            at = "copy" if "no fence of the sealer" in broken else "fence"
            yield scene.store("seal: say sealing", WORD, SEALING, at=at)
    elif process.at == "fence":
        yield from scene.fence("seal: fence", at="copy")
    elif process.at == "copy":
        if len(process.copy) == state.length * CELLS:
            yield scene.step("seal: all is copied", at="commit")
        else:
            yield scene.step("seal: copy a cell", copy=(*process.copy, state.cells[len(process.copy)]))
        if state.failures:
            name, failed = scene.step("seal: the store is full", state._replace(failures=0), at="open again")
            yield f"({name})", failed
    elif process.at == "commit":
        if state.catalog != MUTABLE:
            yield scene.step("seal: it was deleted", at="open again")
        else:
            committed = state._replace(catalog=IMMUTABLE, sealed=process.copy)
            yield scene.step("seal: commit", committed, at="say sealed")
    elif process.at == "say sealed":
        yield scene.store("seal: say sealed", WORD, SEALED, at="release: raise")
    else:
        yield scene.store("seal: open it again", WORD, OPEN, at="release: raise")


def _deleter(scene: Scene, broken: frozenset[str]) -> Steps:
    state = scene.state
    if scene.process.at == "start":
        yield scene.step("delete: commit", state._replace(catalog=GONE), at="say gone")
    elif scene.process.at == "say gone":
        said = state._replace(word=DELETED) if "one word for both" in broken else state._replace(gone=True)
        yield scene.step("delete: say gone", said, at="return")
    else:
        yield scene.finish("return", state._replace(told=True))


def _reader(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "start":
        yield scene.step("load the length", at="copy", row=state.length - 1)
    elif process.at == "copy":
        cell = state.cells[process.row * CELLS + len(process.copy)]
        at = "copy" if len(process.copy) + 1 < CELLS else "return"
        yield scene.step("copy a cell", at=at, copy=(*process.copy, cell))
    else:
        if process.row and (len({*process.copy}) > 1 or 0 in process.copy):
            raise Fault("a row is seen before it is whole")
        yield scene.finish("return")


_ROLES = {"extender": _extender, "writer": _writer, "sealer": _sealer, "deleter": _deleter, "reader": _reader}


# -- what must hold ----------------------------------------------------------------------------------------------------


def check(state: State) -> None:
    for row, call in state.acknowledged:
        rows = after_all_stores(state).cells if state.catalog == MUTABLE else state.sealed
        if state.catalog != GONE and rows[row * CELLS : (row + 1) * CELLS] != (call,) * CELLS:
            raise Fault(f"an acknowledged row is not in the {state.catalog} entry")
    if state.dirty or any(process.owner for process in state.processes):
        return
    if state.catalog == IMMUTABLE and state.word != SEALED:
        raise Fault("a dataset was sealed, and says that it is open")
