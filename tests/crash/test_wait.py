"""wait, and readers that hold what they got: every put wakes the one, and works around the other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import index as entries
from memstore.listing import opened
from tests.crash import blockers, forks, workers
from tests.crash.blockers import sleepers
from tests.crash.leftovers import leftovers
from tests.crash.operations import OPERATIONS
from tests.crash.test_kill_at_steps import KILLED
from tests.crash.values import LARGE, SMALL, stamp_of, stamped
from tests.inside import root_of
from tests.patience import least_seconds, wait_until
from tests.support import faults
from tests.support.fork_server import ForkServer, Worker

PROMPTLY = 0.5  # seconds
VALUE = torch.zeros(8, dtype=torch.int64)

Waiter = Callable[..., Worker]


@pytest.fixture
def waiter(store: memstore.Store, server: ForkServer) -> Iterator[Waiter]:
    """Starts a process that waits for "k", and returns when it sleeps. Nothing but a wake ends that in time."""
    started: list[Worker] = []

    def start(*, newer_than: int = 0, key: str = "k", threads: int = 1, **options: Any) -> Worker:
        options = {"timeout": float("inf"), **options}
        started.append(server.start(blockers.wait_for, store.root, key, newer_than, threads, options))
        assert started[-1].recv() == "waiting"
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def test_put_wakes_another_process(store: memstore.Store, waiter: Waiter) -> None:
    worker = waiter()
    version = store.put("k", VALUE)
    assert worker.recv() == [version]


def test_put_wakes_a_reader_without_the_right_to_write(store: memstore.Store, waiter: Waiter) -> None:
    worker = waiter(mode="r")
    version = store.put("k", VALUE)
    assert worker.recv() == [version]


def test_put_wakes_a_thread(store: memstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "LOOK_EVERY", blockers.NEVER)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(store.wait, "k", timeout=60.0)
        wait_until(lambda: sleepers(store) == 1)
        assert store.put("k", VALUE) == wait.result(30)


def test_put_many_and_put_of_a_large_value_wake(store: memstore.Store, waiter: Waiter) -> None:
    worker = waiter()
    versions = store.put_many({"j": VALUE, "k": torch.zeros(1 << 20, dtype=torch.uint8)})
    assert worker.recv() == [versions["k"]]


def test_wakes_a_hundred(store: memstore.Store, waiter: Waiter) -> None:
    crowd = [waiter(threads=25) for _ in range(4)]
    version = store.put("k", VALUE)
    assert [found for worker in crowd for found in worker.recv()] == [version] * 100


def test_delete_does_not_wake(store: memstore.Store, waiter: Waiter) -> None:
    version = store.put("k", VALUE)
    worker = waiter(newer_than=version)
    store.delete("k")
    assert not worker.channel.poll(PROMPTLY / 5)
    again = store.put("k", VALUE)
    assert again > version
    assert worker.recv() == [again]


def test_another_key_on_the_same_bell_does_not_end_a_wait(store: memstore.Store, waiter: Waiter) -> None:
    bell = opened(store).doorbell.bell
    other = next(key for key in map(str, range(100_000)) if bell(key.encode()) == bell(b"k"))
    worker = waiter()
    store.put(other, VALUE)
    assert not worker.channel.poll(PROMPTLY / 5)
    version = store.put("k", VALUE)
    assert worker.recv() == [version]


def test_returns_at_once_what_is_there(store: memstore.Store) -> None:
    version = store.put("k", VALUE)
    assert store.wait("k", timeout=0) == version
    assert store.wait("k", newer_than=version - 1, timeout=0) == version


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_times_out(store: memstore.Store, timeout: float) -> None:
    version = store.put("k", VALUE)

    def wait() -> None:
        with pytest.raises(memstore.StoreTimeoutError, match=f"'k' is at version {version}") as raised:
            store.wait("k", newer_than=version, timeout=timeout)
        assert isinstance(raised.value, TimeoutError)
        assert raised.value.key == "k"

    assert timeout <= least_seconds(wait, timeout + PROMPTLY) < timeout + PROMPTLY
    with pytest.raises(TimeoutError, match="'nothing' doesn't exist"):
        store.wait("nothing", timeout=timeout)


def test_close_ends_a_wait(root: str) -> None:
    store = memstore.open(root)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(store.wait, "k", timeout=60.0)
        wait_until(lambda: sleepers(store) == 1)
        store.close()  # seen at the next look, within a second
        with pytest.raises(memstore.StoreClosedError):
            wait.result(30)


def test_interrupt_ends_a_wait(store: memstore.Store, server: ForkServer) -> None:
    with server.start(blockers.be_interrupted_in_wait, store.root) as worker:
        worker.recv()
        worker.join()


@pytest.mark.parametrize("name", ["put-inline", "put-small", "overwrite-large"])
def test_next_owner_wakes_for_a_writer_that_died_before_ringing(
    name: str, store: memstore.Store, server: ForkServer, waiter: Waiter
) -> None:
    """Killed right after the commit, the writer has woken nobody: the ring sequence says so."""
    worker = _die(store, server, waiter, name, faults.COMMIT, after=True)
    store.delete("nothing", missing_ok=True)  # takes the mutex, and has nothing to ring for itself
    assert worker.recv() == [store.version("a")]


def test_waiter_looks_by_itself_if_its_writer_died_before_the_wake(
    store: memstore.Store, server: ForkServer, waiter: Waiter
) -> None:
    worker = _die(store, server, waiter, "put-small", "futex_wake", after=False, looks_again=True)
    assert worker.recv(30) == [store.version("a")]


def _die(
    store: memstore.Store, server: ForkServer, waiter: Waiter, name: str, step: str, *, after: bool, **options: Any
) -> Worker:
    """A process waits for "a", and another dies at a step of putting it. Returns the first."""
    version = OPERATIONS[name].reset(store)["a"]
    with server.start(workers.steps_of, store.root, name) as worker:
        names = worker.recv()
        worker.join()
    version = OPERATIONS[name].reset(store)["a"]
    publishing = [number for number, found in enumerate(names, 1) if found == faults.COMMIT][:2][-1]
    number = publishing if step == faults.COMMIT else names.index(step) + 1
    waiting = waiter(key="a", newer_than=version, **options)
    with server.start(workers.die_at, store.root, name, number, after) as worker:
        assert worker.wait() == KILLED
    return waiting


# --- readers that hold what they got, one version for ever or a thousand ----------------------------------------------


def files(store: memstore.Store) -> int:
    return len(os.listdir(root_of(store).segments))


@pytest.mark.parametrize(
    ("nbytes", "puts"),
    [
        (SMALL, 1_000),
        pytest.param(SMALL, 10_000, marks=pytest.mark.full),
        pytest.param(LARGE, 10_000, marks=pytest.mark.full),
    ],
)
def test_one_idle_reader_for_ever(nbytes: int, puts: int, store: memstore.Store, server: ForkServer) -> None:
    store.put("k", stamped(0, nbytes))
    catalog = store.stats().catalog_bytes
    with server.start(workers.hold_until_told, store.root, "k") as reader:
        assert reader.recv() == 0
        most = 0
        for stamp in range(1, puts + 1):
            store.put("k", stamped(stamp, nbytes))
            most = max(most, files(store)) if stamp % 64 == 0 else most
        assert most <= 4, "the held one, the live one, and what is kept for reuse"
        stats = store.stats()
        assert stats.pinned_by == (reader.pid,)
        assert stats.live_bytes == stats.pinned_bytes > nbytes
        assert 0 < stats.reusable_bytes <= 2 * stats.live_bytes
        assert stats.catalog_bytes == catalog
        reader.send("look")
        assert reader.recv() == 0
        reader.send("end")
        reader.join()
    for stamp in range(4):
        store.put("k", stamped(stamp, nbytes))
    assert store.stats().pinned_bytes == 0
    assert files(store) <= 4
    assert leftovers(store, spares=True) == []


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.full)])
def test_a_reader_of_a_thousand_versions(count: int, store: memstore.Store) -> None:
    held: list[torch.Tensor] = []
    for stamp in range(count):
        store.put("k", stamped(stamp, SMALL))
        held.append(store.get("k"))
    store.put("k", stamped(count, SMALL))
    assert files(store) >= count + 1
    assert [stamp_of(value) for value in held] == list(range(count))
    del held
    gc.collect()
    for stamp in range(count):
        store.put("k", stamped(stamp, SMALL))
    assert files(store) <= 4, "puts give back what a reader let go, a few files each"
    assert leftovers(store, spares=True) == []


def test_gc_gives_a_thousand_versions_back_at_once(store: memstore.Store) -> None:
    held: list[torch.Tensor] = []
    for stamp in range(1000):
        store.put("k", stamped(stamp, SMALL))
        held.append(store.get("k"))
    assert store.gc() == 0
    del held[::2]
    assert store.gc() > 499 * SMALL
    assert [stamp_of(value) for value in held] == list(range(1, 1000, 2))
    del held
    store.gc()
    assert leftovers(store) == []


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_child_forked_while_its_parent_fills_pins_nothing(
    nbytes: int, store: memstore.Store, server: ForkServer
) -> None:
    """The child lives on; what the parent put then is replaced, and its file used again."""
    with server.start(forks.fork_while_filling, store.root, nbytes) as worker:
        worker.join()
