"""Waiting for a rate limiter, in the order in which callers came: by a model of its queue, and with real processes.

The model: writers and samplers of different batches, killed or stopped anywhere. The rules are those of
docs/decisions/015-mutable-entries.md. Each look is one step, under the mutex. The place of a process that was killed or
stopped becomes empty at any time later, by a step of its own; the others may count on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import memstore
from memstore import RateLimiter
from memstore.engine import QUEUE_SIZE, SAMPLES
from tests.children import Child, Wire
from tests.replay.rows import SPEC, ring_of, rows
from tests.support.explore import Fault, explore, is_bad_luck

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


# --- scenes and processes ---------------------------------------------------------------------------------------------


# -- the model ---------------------------------------------------------------------------------------------------------

LARGE = RateLimiter(1.0, 2, 4.0)
TIGHT = RateLimiter(1.0, 1, 2.0)  # batches of three are larger than it is to be with them
SCENES = {
    "a large sample among small ones": State(
        (Process(INSERT, 1, 8), Process(SAMPLE, 4), Process(SAMPLE, 1, 2)), LARGE, kills=1
    ),
    "a large insert among small ones": State(
        (Process(INSERT, 4), Process(INSERT, 1, 4), Process(SAMPLE, 1, 4)), LARGE, kills=1
    ),
    "batches that are too large": State(
        (Process(INSERT, 3, 2), Process(SAMPLE, 3), Process(SAMPLE, 1, 3)), TIGHT, kills=1
    ),
    "one that never fits": State((Process(INSERT, 1, 4), Process(SAMPLE, 5), Process(SAMPLE, 1, 2)), TIGHT, kills=1),
}


def look(scene: str, *mutations: str) -> None:
    explore(SCENES[scene], Model(*mutations).successors, lambda _: None, is_end=is_end, is_bad_luck=is_bad_luck)


@pytest.mark.parametrize("scene", SCENES)
def test_nobody_is_passed_and_all_get_on(scene: str) -> None:
    look(scene)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_model_finds_what_is_wrong(mutation: str) -> None:
    found: list[str] = []
    for scene in SCENES:
        try:
            look(scene, mutation)
        except Fault as fault:
            found.append(fault.what)
    assert found


# -- processes ---------------------------------------------------------------------------------------------------------


def limited(store: memstore.Store, tolerance: float = 8.0) -> memstore.ReplayBuffer:
    limiter = RateLimiter(1.0, 1, tolerance)
    return memstore.ReplayBuffer(store, "replay", SPEC, capacity=64, rate_limiter=limiter)


def _sample(wire: Wire, root: str, count: int) -> None:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay")
    wire.send()
    buffer.sample(count, timeout=60.0)


def test_a_large_sample_is_not_passed_by_small_ones(root: str) -> None:
    with memstore.open(root) as store:
        buffer = limited(store)
        buffer.extend(rows(0, 1))
        buffer.sample(6)  # two more may be sampled
        with Child(_sample, root, 6) as child:
            child.receive()
            child.wait_until_it_sleeps_on_a_futex()
            with pytest.raises(memstore.StoreTimeoutError, match="others came first, and wait for its rate limiter"):
                buffer.sample(1, timeout=0.02)
            buffer.extend(rows(1, 4))
            child.receive()
        with pytest.raises(memstore.StoreTimeoutError, match="lets nobody sample 1 rows"):
            buffer.sample(1, timeout=0)


def test_a_batch_that_never_fits_is_refused_at_once(store: memstore.Store) -> None:
    limiter = RateLimiter(4.0, 1, 8.0)
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=64, rate_limiter=limiter)
    with pytest.raises(ValueError, match="lets 4 rows through at once, and never 5: extend it in parts"):
        buffer.extend(rows(0, 5))
    with pytest.raises(memstore.StoreTimeoutError, match="no 4 rows in at once at the beginning.*extend it in parts"):
        buffer.extend(rows(0, 4), timeout=0)
    buffer.extend(rows(0, 3))
    with pytest.raises(ValueError, match="lets 16 rows through at once, and never 17: sample fewer at a time"):
        buffer.sample(17)
    assert buffer.sample(8).batch_size == (8,)
    buffer.extend(rows(3, 2))
    ring = buffer._ring
    assert not ring.page._dirty[0], "a refusal makes nobody recover"


def test_a_waiter_that_was_killed_stops_nobody(root: str) -> None:
    with memstore.open(root) as store:
        buffer = limited(store)
        buffer.extend(rows(0, 1))
        buffer.sample(6)
        with Child(_sample, root, 6) as child:
            child.receive()
            child.wait_until_it_sleeps_on_a_futex()
            child.kill()
            child.process.join()
        buffer.sample(1, timeout=0)


def test_a_waiter_whose_time_is_over_wakes_the_next(store: memstore.Store) -> None:
    buffer = limited(store)
    buffer.extend(rows(0, 1))
    buffer.sample(6)
    late: list[Any] = []

    def wait() -> None:
        with pytest.raises(memstore.StoreTimeoutError):
            buffer.sample(6, timeout=0.6)
        late.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    while not ring_of(buffer).queue.waiting(SAMPLES):
        time.sleep(0.001)
    buffer.sample(1, timeout=60.0)
    passed = time.monotonic()
    thread.join()
    assert passed - late[0] < 0.5, "it was not woken, and looked by itself a second later"


def test_there_are_more_waiters_than_places(store: memstore.Store) -> None:
    buffer = limited(store)
    buffer.extend(rows(0, 8))
    waiting = [threading.Thread(target=buffer.extend, args=(rows(8, 2),)) for _ in range(QUEUE_SIZE + 4)]
    for thread in waiting:
        thread.start()
    for _ in range(2 * len(waiting)):
        buffer.sample(1, timeout=60.0)
    for thread in waiting:
        thread.join()
    assert buffer.cursor == 8 + 2 * len(waiting)
