"""The states of the model of slots: a ring's words, rows and claims, and the processes that use them.

A row is two cells, and what is stored in a cell is the position of the row that it belongs to: so a torn row shows. A
position is how many were handed out before; its slot is its rest by the capacity, its lap what remains.
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
