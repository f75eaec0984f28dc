"""A process is stopped, as by SIGSTOP, while it holds a lock: others say so, in time, and go on when it does."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import memstore
from memstore.testing.fork_server import ForkServer, Worker
from tests.crash import blockers
from tests.crash.values import SMALL, stamp_of, stamped

TIMEOUT = 0.3
SLACK = 0.5
VALUE = torch.zeros(8, dtype=torch.int64)

CALLS: dict[str, Callable[[memstore.Store], object]] = {
    "put": lambda store: store.put("k", VALUE, timeout=TIMEOUT),
    "put-large": lambda store: store.put("k", stamped(1, SMALL), timeout=TIMEOUT),
    "put-many": lambda store: store.put_many({"k": VALUE, "l": VALUE}, timeout=TIMEOUT),
    "delete": lambda store: store.delete("held", timeout=TIMEOUT),
    "delete-many": lambda store: store.delete_many(["held"], timeout=TIMEOUT),
    "gc": lambda store: store.gc(timeout=TIMEOUT),
    "pickle-ref": lambda store: _pickle(store.root),
}


def _pickle(root: str) -> None:
    with memstore.open(root, "r+", timeout=TIMEOUT) as store:
        ForkingPickler(io.BytesIO()).dump(store.ref("held"))


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    worker.kill(signal.SIGSTOP)
    with open(f"/proc/{worker.pid}/stat") as file:  # the signal takes effect at once, for a process that sleeps
        while file.read().rpartition(")")[2].split()[0] != "T":
            file.seek(0)
    try:
        yield
    finally:
        worker.kill(signal.SIGCONT)


@pytest.fixture
def owner(store: memstore.Store, server: ForkServer) -> Iterator[Worker]:
    """A stopped process that holds the mutex of `store`."""
    with server.start(blockers.hold_mutex, store.root) as worker:
        assert worker.recv() == "held"
        with stopped(worker):
            yield worker


@pytest.mark.parametrize("name", CALLS)
def test_timeout_names_the_stopped_owner(name: str, store: memstore.Store, owner: Worker) -> None:
    started = time.monotonic()
    with pytest.raises(memstore.StoreTimeoutError, match=rf"held by pid {owner.pid}\b.*stopped"):
        CALLS[name](store)
    assert TIMEOUT <= time.monotonic() - started < TIMEOUT + SLACK
    owner.kill(signal.SIGCONT)
    owner.send("release")
    assert owner.recv() == "released"
    assert "k" not in store
    CALLS[name](store)


def test_reads_need_no_mutex(store: memstore.Store, owner: Worker) -> None:
    assert stamp_of(store.get("held", timeout=TIMEOUT)) == 1
    assert list(store.get_many(["held"], timeout=TIMEOUT)) == ["held"]
    assert list(store) == ["held"]
    assert store.info("held").nbytes == SMALL
    assert store.stats().keys == 1
    assert stamp_of(store.ref("held").get()) == 1
    with memstore.open(store.root, "r", timeout=TIMEOUT) as reader:
        assert stamp_of(reader.get("held")) == 1


def test_killed_while_stopped(store: memstore.Store, owner: Worker) -> None:
    owner.kill()
    assert owner.wait() == -9
    assert store.put("k", VALUE, timeout=TIMEOUT) > 0


def test_interrupt_ends_a_wait_for_the_mutex(store: memstore.Store, server: ForkServer) -> None:
    with server.start(blockers.be_interrupted_in_put, store.root) as worker:
        assert worker.recv() == "opened"
        with server.start(blockers.hold_mutex, store.root) as owner:
            assert owner.recv() == "held"
            worker.send("put")
            assert worker.recv() < SLACK
            owner.send("release")
            assert owner.recv() == "released"
            store.put("k", VALUE, timeout=5.0)


def test_an_open_that_timed_out_can_be_repeated(store: memstore.Store, owner: Worker, server: ForkServer) -> None:
    with server.start(blockers.open_and_retry, store.root) as worker:
        assert f"held by pid {owner.pid}" in worker.recv()
        owner.kill(signal.SIGCONT)
        owner.send("release")
        assert owner.recv() == "released"
        worker.send("again")
        assert worker.recv() == store.version("k")


def test_open_behind_a_stopped_opener_times_out(store: memstore.Store, server: ForkServer) -> None:
    with server.start(blockers.hold_folder, store.root) as worker:
        assert worker.recv() == "held"
        with stopped(worker):
            started = time.monotonic()
            with pytest.raises(memstore.StoreTimeoutError, match=f"pid {worker.pid} to finish opening"):
                memstore.open(store.root, timeout=TIMEOUT)
            assert TIMEOUT <= time.monotonic() - started < TIMEOUT + SLACK
            store.put("k", VALUE, timeout=TIMEOUT)  # who has it open is not concerned
        worker.send("release")
        memstore.open(store.root, timeout=5.0).close()
