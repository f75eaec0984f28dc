"""A writer is killed in the middle of large puts, again and again, while others read."""

from __future__ import annotations

import random
import statistics
import time

import pytest

import memstore
from tests.crash import workers
from tests.crash.leftovers import headers_not_live, left_after_gc
from tests.crash.test_kill_at_steps import KILLED
from tests.crash.values import stamp_of, stamped
from tests.support.fork_server import ForkServer, Worker

READERS = 2


@pytest.mark.parametrize(
    ("kills", "nbytes"),
    [(8, 16 << 20), pytest.param(300, 64 << 20, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
)
def test_kill_writers_of_large_values(
    kills: int, nbytes: int, store: memstore.Store, server: ForkServer, chance: random.Random
) -> None:
    stamp = 1
    store.put("k", stamped(stamp, nbytes))
    readers = [server.start(workers.read_on, store.root, "k") for _ in range(READERS)]
    paces: list[float] = []  # seconds a put
    interrupted = published = 0
    try:
        for number in range(kills):
            with server.start(workers.write_on, store.root, "k", nbytes, stamp + 1) as writer:
                assert writer.recv() == ("begun", stamp + 1)
                if number % 4 == 0:  # killed in its second put
                    started = time.monotonic()
                    assert writer.recv() == ("done", stamp + 1)
                    paces.append(time.monotonic() - started)
                    assert writer.recv() == ("begun", stamp + 2)
                time.sleep(chance.uniform(0, 1.1 * statistics.median(paces)))
                writer.kill()
                assert writer.wait() == KILLED
                begun, done = _journal(writer, stamp + 1 + (number % 4 == 0), stamp + (number % 4 == 0))
            found = stamp_of(store.get("k"), every=4093)
            assert done <= found <= begun, f"{done} was acknowledged, {begun} begun, and {found} is there"
            interrupted += begun > done
            published += found > done
            stamp = begun + 1
            store.put("k", stamped(stamp, nbytes))  # the next put works
            _check(store, readers, stamp)
        for reader in readers:
            reader.send("end")
            reader.join()
    finally:
        for reader in readers:
            reader.close()
    print(f"{kills} kills, {interrupted} in a put, {published} of which had published already")
    assert interrupted > kills // 3, "few kills fell into a put: this tests nothing"


def _journal(writer: Worker, begun: int, done: int) -> tuple[int, int]:
    """The last put that a dead writer began, and the last that was acknowledged."""
    while True:
        try:
            word, stamp = writer.channel.recv()
        except (EOFError, ConnectionResetError):
            return begun, done
        begun, done = (stamp, done) if word == "begun" else (begun, stamp)


def _check(store: memstore.Store, readers: list[Worker], stamp: int) -> None:
    """The readers go on, and have found nothing torn; once they let go, only what is live has a file."""
    for reader in readers:
        reader.send("rest")
    for reader in readers:
        assert reader.recv()[1] <= stamp
    assert left_after_gc(store) == []
    assert headers_not_live(store) == []
    for reader in readers:
        reader.send("go on")
