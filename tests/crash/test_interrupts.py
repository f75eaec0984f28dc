"""Signals from outside, at random times: an interrupted call was done wholly or not at all, and holds no lock."""

from __future__ import annotations

import random
import signal
import time

import pytest

import memstore
from tests.crash import workers
from tests.crash.leftovers import held_locks
from tests.crash.operations import OPERATIONS
from tests.crash.test_failures_at_steps import CAN_FAIL
from tests.crash.test_kill_at_steps import KILLED, check_goes_on
from tests.crash.values import INLINE, SMALL, stamped
from tests.support import faults
from tests.support.fork_server import ForkServer, Worker

CAN_BE_INTERRUPTED = CAN_FAIL | {"mutex_recovered"}
QUICK = {"put-small", "put-many"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in OPERATIONS]
)
def test_storm_of_signals(name: str, store: memstore.Store, server: ForkServer, chance: random.Random) -> None:
    signals = 250 if name in QUICK else 3000
    with server.start(workers.be_interrupted, store.root, name, signals // 50) as worker:
        assert worker.recv() == "ready"
        storm(worker, signal.SIGINT, signals, chance)
        outcomes, left = worker.recv()
        worker.join()
    assert left == []
    print(f"{signals} signals, {sum(outcomes.values())} interrupts: {outcomes}")
    check_goes_on(store, min(OPERATIONS[name].keys), name)


def storm(worker: Worker, number: int, signals: int, chance: random.Random) -> None:
    """So many signals; and on a busy machine, which makes one of several, more until the worker has had enough."""
    deadline = time.monotonic() + 60
    while signals > 0 or not worker.channel.poll():
        assert time.monotonic() < deadline, "few signals fell into the operation: this tests nothing"
        worker.kill(number)
        time.sleep(chance.uniform(0, 0.002))
        signals -= 1
    assert worker.recv() == "enough"
    worker.send("end")


@pytest.mark.parametrize("nbytes", [INLINE, SMALL])
def test_signal_handler_uses_the_store(
    nbytes: int, store: memstore.Store, server: ForkServer, chance: random.Random
) -> None:
    """A handler runs in the middle of whatever its thread does: it may read, and is told where it may not write."""
    signals = 250
    with server.start(workers.use_in_handler, store.root, nbytes) as worker:
        assert worker.recv() == "ready"
        storm(worker, signal.SIGUSR1, signals, chance)
        counts, left = worker.recv()
        worker.join()
    assert left == []
    print(f"{signals} signals: {counts}")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupt_while_taking_over_from_a_dead_owner(after: bool, store: memstore.Store, server: ForkServer) -> None:
    """The mutex of a dead owner must be declared consistent before it is let go, or nobody ever gets it again."""
    operation = OPERATIONS["overwrite-small"]
    operation.reset(store)
    with server.start(workers.steps_of, store.root, "overwrite-small") as worker:
        steps = worker.recv()
    last = len(steps) - steps[::-1].index(faults.COMMIT)  # it sweeps, under the mutex

    def die() -> None:
        operation.reset(store)
        with server.start(workers.die_at, store.root, "overwrite-small", last, False) as worker:
            assert worker.wait() == KILLED

    def take_over() -> None:
        store.put("other", stamped(7, SMALL))

    names = CAN_BE_INTERRUPTED
    die()
    taken_over = faults.record(take_over, names=names)
    assert "mutex_recovered" in taken_over
    for number, step in enumerate(taken_over, 1):
        what = f"interrupted {'after' if after else 'before'} step {number} of {taken_over}: {step}"
        die()
        interrupt = faults.raising(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt), faults.at_step(number, interrupt, after=after, names=names):
            take_over()
        assert held_locks(store) == [], what
        check_goes_on(store, "a", what)
