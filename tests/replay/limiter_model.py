"""A model of the queue before a rate limiter: writers and samplers of different batches, killed or stopped anywhere.

The rules are those of docs/decisions/015-mutable-entries.md. Each look is one step, under the mutex. The place of a
process that was killed or stopped becomes empty at any time later, by a step of its own; the others may count on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memstore import RateLimiter
from tests.support.explore import Fault

INSERT, SAMPLE = "insert", "sample"
OTHER = {INSERT: SAMPLE, SAMPLE: INSERT}
MUTATIONS = {
    "no queue": "a process that the limiter lets through goes, whoever waits",
    "places of the dead stay": "nobody looks whether a process that has a place is there still",
    "nobody passes": "the first of a queue is never passed",
}


class Process(NamedTuple):
    side: str
    rows: int
    batches: int = 1
    ticket: int = 0
    is_gone: bool = False  # killed, or stopped for good


class State(NamedTuple):
    processes: tuple[Process, ...]
    limiter: RateLimiter
    next: int = 1
    inserted: int = 0
    sampled: int = 0
    emptied: frozenset[int] = frozenset()  # tickets
    kills: int = 0


Steps = Iterator[tuple[str, State]]


def is_end(state: State) -> bool:
    """Nobody is left on one side, for whom the other could wait; or the limiter itself lets nobody through."""
    active = [one for one in state.processes if one.batches and not one.is_gone]
    return len({one.side for one in active}) < 2 or not any(_may_go(state, one) for one in active)


def _may_go(state: State, process: Process) -> bool:
    may = state.limiter.may_insert if process.side == INSERT else state.limiter.may_sample
    return may(state.inserted, state.sampled, process.rows)


class Model:
    """The steps that each process may take."""

    def __init__(self, *mutations: str) -> None:
        assert set(mutations) <= set(MUTATIONS)
        self._broken = frozenset(mutations)

    def successors(self, state: State) -> Steps:
        for index, process in enumerate(state.processes):
            if process.is_gone:
                if (
                    process.ticket
                    and process.ticket not in state.emptied
                    and "places of the dead stay" not in self._broken
                ):
                    yield f"{index}: its place is empty", state._replace(emptied=state.emptied | {process.ticket})
            elif process.batches:
                yield from self._look(state, index)
                if state.kills:
                    gone = _with(state, index, process._replace(is_gone=True))
                    yield f"({index}: killed)", gone._replace(kills=state.kills - 1)

    def _look(self, state: State, index: int) -> Steps:
        process = state.processes[index]
        queue, others = self._queue(state, process.side), self._queue(state, OTHER[process.side])
        is_first = not queue or queue[0].ticket == process.ticket or "no queue" in self._broken
        is_stuck = not is_first and not _may_go(state, queue[0]) and any(not _may_go(state, one) for one in others)
        if _may_go(state, process) and (is_first or (is_stuck and "nobody passes" not in self._broken)):
            first = [
                one for one in queue if one.ticket != process.ticket and one.ticket < (process.ticket or state.next)
            ]
            if first and not is_stuck:
                raise Fault(f"{process} passes {first[0]}")
            name = f"{index}: {process.side} {process.rows}"
            yield name, self._go(state, index)
        elif not process.ticket and state.limiter.may_ever_go(process.rows, is_insert=process.side == INSERT):
            waits = _with(state, index, process._replace(ticket=state.next))
            yield f"{index}: take a place", waits._replace(next=state.next + 1)

    @staticmethod
    def _go(state: State, index: int) -> State:
        process = state.processes[index]
        state = _with(state, index, process._replace(batches=process.batches - 1, ticket=0))
        if process.side == INSERT:
            return state._replace(inserted=state.inserted + process.rows)
        return state._replace(sampled=state.sampled + process.rows)

    def _queue(self, state: State, side: str) -> list[Process]:
        found = [one for one in state.processes if one.side == side and one.ticket and one.ticket not in state.emptied]
        return sorted(found, key=lambda one: one.ticket)


def _with(state: State, index: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:index], process, *state.processes[index + 1 :]))
