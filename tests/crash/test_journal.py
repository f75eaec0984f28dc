"""Writers and readers under load are killed at random: what was acknowledged is there, what wasn't is whole or absent.

And no repair is needed: others go on meanwhile, a gc leaves no file of nobody, and nothing grows.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import memstore
from tests.crash import journal
from tests.crash.journal import SLOTS, Journal
from tests.crash.leftovers import end_leases, headers_not_live, leftovers, open_fds
from tests.crash.test_kill_at_steps import KILLED
from tests.crash.values import SMALL, stamp_at, stamp_of, stamped
from tests.leaks import mapped_files
from tests.support.fork_server import ForkServer, Worker

WRITERS, READERS = 3, 2
KILLS_A_ROUND = 25
LOAD = 0.02  # seconds between kills, at most; some operations take one


@dataclass
class Killing:
    """The workers, and what their journals say. `killed` counts how many died in an operation, and how many not."""

    store: memstore.Store
    server: ForkServer
    chance: random.Random
    journals: list[Journal]

    def __post_init__(self) -> None:
        self.keys = ["shared", "counter", *(key for one in self.journals for key in one.stamps)]
        self.killed = {True: 0, False: 0}
        self.workers: list[Worker] = []

    def start(self, number: int) -> Worker:
        seed = self.chance.getrandbits(32)
        if number >= WRITERS:
            return self.server.start(journal.read, self.store.root, self.keys, seed)
        own = self.journals[number]
        return self.server.start(journal.write, self.store.root, own.slot, own.number, own.path, seed)

    def kill_one(self) -> None:
        time.sleep(self.chance.uniform(0, LOAD))
        number = self.chance.randrange(len(self.workers))
        with self.workers[number] as worker:
            worker.kill()
            assert worker.wait() == KILLED, worker.recv()  # which raises what it raised
        if number < WRITERS:
            own = self.journals[number]
            self.store.delete("nothing", missing_ok=True)  # a commit that was cut short is seen after the next one
            self.killed[own.close({key: stamp_at(self.store, key) for key in own.stamps})] += 1
        self.check_shared()
        self.workers[number] = self.start(number)

    def check_shared(self) -> None:
        for one in self.journals:
            one.read()
        acknowledged = max(one.shared for one in self.journals)
        assert self.store.version("shared") >= acknowledged
        stamp = stamp_at(self.store, "shared")
        assert stamp is not None
        for one in self.journals:
            one.read()
        assert stamp == 0 or stamp // SLOTS <= self.journals[stamp % SLOTS].number, "nobody has put this"

    def rest(self) -> None:
        """All let go, and stop: nothing is left of the dead, nor of the living."""
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):  # it raised, and says so when it is asked
                worker.send("rest")
        for worker in self.workers:
            fds, mapped = worker.recv()
            assert fds < 20 and mapped == [], "what is open or mapped grows"
        for one in self.journals:
            one.read()
        counted, maybe = (sum(getattr(one, name) for one in self.journals) for name in ("counted", "maybe_counted"))
        found = stamp_at(self.store, "counter")
        assert found is not None and counted <= found <= counted + maybe, (counted, found, maybe)
        end_leases(self.store)
        self.store.gc()
        assert leftovers(self.store) == []
        assert headers_not_live(self.store) == []
        for worker in self.workers:
            worker.send("go on")


@pytest.mark.parametrize(
    "kills", [KILLS_A_ROUND, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_what_was_acknowledged_outlives_its_writer(
    kills: int, store: memstore.Store, server: ForkServer, chance: random.Random, tmp_path: Path
) -> None:
    store.put_many({"shared": stamped(0, SMALL), "counter": stamped(0, SMALL)})
    test = Killing(store, server, chance, [Journal(str(tmp_path / f"{slot}"), slot) for slot in range(WRITERS)])
    fds = len(open_fds())
    test.workers = [test.start(number) for number in range(WRITERS + READERS)]
    try:
        rounds = kills // KILLS_A_ROUND
        for number in range(4 * rounds):  # more than planned, if few of them fell into an operation
            if number >= rounds and test.killed[True] > kills / 8:
                break
            held = store.get_many(["shared", "counter"])
            stamps = {key: stamp_of(value) for key, value in held.items()}
            for _ in range(KILLS_A_ROUND):
                test.kill_one()
            assert {key: stamp_of(value) for key, value in held.items()} == stamps
            del held
            gc.collect()
            assert mapped_files(f"{store.root}/segments") == []
            test.rest()
    finally:
        for worker in test.workers:
            worker.close()
    print(f"{sum(test.killed.values())} writers killed, {test.killed[True]} of them in an operation")
    assert len(open_fds()) <= fds
    assert test.killed[True] > kills / 8, "few kills fell into an operation: this tests nothing"
