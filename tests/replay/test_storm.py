"""Writers, samplers, consumers and learners of one buffer, killed and stopped at random all the time.

No row is torn, no acknowledged row is lost before the ring comes to it, no slot is stuck.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

import memstore
from tests.replay.rows import SPEC, check_whole, numbers_of, rows, there
from tests.replay.workers import work
from tests.support.fork_server import ForkServer, Worker

CAPACITY = 64
ROLES: list[tuple[str, Any]] = [
    ("write", "uniform"),
    ("write", "prioritized"),
    ("sample", "uniform"),
    ("sample", "prioritized"),
    ("sample", "fifo"),
    ("slices", "uniform"),
]


@pytest.mark.parametrize(
    "seconds", [0.7, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(300)])], ids=["short", "long"]
)
def test_kills_and_stops_at_random(fork_server: ForkServer, root: str, seconds: float) -> None:
    chance = random.Random(seconds)
    with memstore.open(root, timeout=60.0) as store:
        buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=CAPACITY, sampler="prioritized")
        buffer.extend(rows(0, CAPACITY))
        sampler = memstore.ReplayBuffer(store, "replay")
        workers = [_start(fork_server, root, role, chance) for role in ROLES]
        over, kills = time.monotonic() + seconds, 0
        while time.monotonic() < over or kills < 3 or buffer.cursor <= 10 * CAPACITY:
            which = chance.randrange(len(workers))
            worker = workers[which]
            for each in workers:
                _drain(each, most=100)  # it writes on meanwhile
            if chance.random() < 0.5:
                worker.kill(signal.SIGSTOP)
                numbers_of(sampler.sample(8))  # takes no mutex, which the stopped one may hold
                worker.kill(signal.SIGCONT)
            else:
                worker.kill()
                assert worker.wait() == -signal.SIGKILL, "it ended by itself: see what it raised"
                kills += 1
                workers[which] = _start(fork_server, root, ROLES[which], chance)
        _check_end(store, buffer, workers)
        print(f"{kills} kills, {buffer.cursor:,} rows")


def _start(fork_server: ForkServer, root: str, role: tuple[str, Any], chance: random.Random) -> Worker:
    worker = fork_server.start(work, root, *role, chance.randrange(1 << 30))
    assert worker.recv(60.0) == "ready"
    return worker


def _drain(worker: Worker, most: int = 1 << 30) -> list[tuple[list[int], int]]:
    found: list[tuple[list[int], int]] = []
    while len(found) < most and worker.channel.poll():
        found.append(worker.recv())
    return found


def _check_end(store: memstore.Store, buffer: memstore.ReplayBuffer, workers: list[Worker]) -> None:
    """All are stopped: what the last writers had acknowledged lies there, unless the ring came to it again."""
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    acknowledged = {
        position: first + offset
        for worker in workers
        for index, first in _drain(worker)
        for offset, position in enumerate(index)
    }
    for worker in workers:
        worker.kill()
        worker.wait()
    found = there(store, "replay")  # completes the claims that were being made, and so moves the head
    head = buffer.cursor
    for position, number in acknowledged.items():
        assert position < head - CAPACITY or found[position] == number, "an acknowledged row is lost"
    check_whole(store, buffer)
