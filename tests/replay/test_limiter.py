"""Waiting for a rate limiter, in the order in which callers came: by the model, and with real processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import memstore
from memstore import RateLimiter
from memstore.engine import QUEUE_SIZE, SAMPLES
from tests.children import Child, Wire
from tests.replay.limiter_model import INSERT, MUTATIONS, SAMPLE, Model, Process, State, is_end
from tests.replay.rows import SPEC, ring_of, rows
from tests.support.explore import Fault, explore, is_bad_luck

# --- the model --------------------------------------------------------------------------------------------------------

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


# --- processes --------------------------------------------------------------------------------------------------------


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
