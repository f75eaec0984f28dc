"""The states of the model of datasets: rows that are appended and overwritten, a seal, a deletion.

A cell has the number of the call that stored it. A process's plain stores wait in its buffer, in their order, and reach
memory at any later time, or when it takes or gives up a mutex, or at a fence, as on x86-64; loads look there first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
