"""Ranks are killed at random times, again and again, while others put, read and sweep: no version is torn or mixed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import memstore
from tests.crash.leftovers import headers_not_live, left_after_gc
from tests.crash.shards_at_random import (
    KEYS,
    PLAIN,
    WORLD,
    be_a_rank,
    read_on,
    stamp_of,
    value_of,
    write_plainly,
)
from tests.crash.test_kill_at_steps import KILLED
from tests.support.fork_server import ForkServer, Worker

TOLD = {"PartialCommitError", "StoreTimeoutError"}


class Ranks:
    """The processes that are the ranks. Who dies is started anew, in the attempt that it died in or in the next."""

    def __init__(self, store: memstore.Store, server: ForkServer, chance: random.Random, stack: ExitStack) -> None:
        self._store, self._server, self._chance, self._stack = store, server, chance, stack
        self._workers: list[Worker] = [self._start(rank) for rank in range(WORLD)]
        self.kills = 0

    def _start(self, rank: int) -> Worker:
        seed = self._chance.getrandbits(32)
        worker = self._server.start(be_a_rank, self._store.root, rank, seed)
        return self._stack.enter_context(worker)

    def put(self, key: str, stamp: int) -> list[int | str]:
        """What the ranks that live say of an attempt."""
        chance = self._chance
        sizes = chance.choice([512, 700, 20_000])
        for worker in chance.sample(self._workers, WORLD):
            worker.send((key, stamp, sizes))
        victims = [rank for rank in range(WORLD) if chance.random() < 0.15]
        if victims:
            time.sleep(chance.uniform(0, 0.01))
        for rank in victims:
            self._workers[rank].kill()
            assert self._workers[rank].wait() == KILLED
            self._workers[rank].close()
            self._workers[rank] = self._start(rank)
            self.kills += 1
            if chance.random() < 0.7:  # its launcher puts it into the same attempt
                self._workers[rank].send((key, stamp, sizes))
                victims = [other for other in victims if other != rank]
        return list(self._answers(victims, stamp))

    def _answers(self, dead: list[int], stamp: int) -> Iterator[int | str]:
        for rank, worker in enumerate(self._workers):
            if rank not in dead:
                said, found = worker.recv()
                assert said == stamp
                yield found


@pytest.mark.parametrize("attempts", [25, pytest.param(3000, marks=[pytest.mark.full, pytest.mark.timeout(2400)])])
def test_kill_ranks_at_random(attempts: int, store: memstore.Store, server: ForkServer, chance: random.Random) -> None:
    published = ended = unknown = 0
    last = dict.fromkeys(KEYS, 0)
    with ExitStack() as stack:
        others = [
            stack.enter_context(server.start(function, store.root, number))
            for number, function in enumerate((read_on, read_on, write_plainly))
        ]
        ranks = Ranks(store, server, chance, stack)
        for stamp in range(1, attempts + 1):
            key = chance.choice(KEYS)
            found = ranks.put(key, stamp)
            versions = {one for one in found if isinstance(one, int)}
            errors = {one for one in found if isinstance(one, str)}
            assert len(versions) <= 1, f"one attempt, two versions: {found}"
            assert not (versions and errors), f"ranks were told different things: {found}"
            assert errors <= {*TOLD, "UnknownOutcomeError"}, found
            published, ended = published + bool(versions), ended + bool(errors)
            unknown += "UnknownOutcomeError" in errors
            for version in versions:
                assert version > last[key], "versions grow"
                last[key] = version
        for other in others:
            other.send("end")
        counts = [other.recv() for other in others]
    print(f"{attempts} attempts, {ranks.kills} kills: {published} published, {ended} ended, {unknown} unknown", counts)
    assert min(published, ended, ranks.kills) > attempts // 12 and min(counts) > attempts, "this tests little"
    _check_the_end(store, attempts)


def _check_the_end(store: memstore.Store, stamp: int) -> None:
    for one in store.pending():
        store.abort(one.key, one.attempt)
    for key in KEYS:
        value = store.get(key, None)
        assert value is None or stamp_of(value) <= stamp or stamp_of(value) > PLAIN
        del value
        for rank in range(WORLD):
            value = value_of(rank, stamp + 1, 700)
            store.put_sharded(key, value, attempt="the last", rank=rank, world_size=WORLD, wait=False)
        assert stamp_of(store.get(key)) == stamp + 1
    assert store.verify().ok
    assert left_after_gc(store) == []
    assert headers_not_live(store) == []
