"""A process is stopped, as by SIGSTOP, while it holds a lock: others say so, in time, and go on when it does."""

from __future__ import annotations

import io
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import memstore
from memstore.testing.fork_server import ForkServer, Worker
from tests.crash import blockers
from tests.crash.leftovers import leftovers
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at, stamp_of, stamped

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


def until_stopped(worker: Worker) -> None:
    deadline = time.monotonic() + 20
    with open(f"/proc/{worker.pid}/stat") as file:
        while file.read().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            file.seek(0)
            time.sleep(0.001)


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    worker.kill(signal.SIGSTOP)
    until_stopped(worker)
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
    _times_out(rf"held by pid {owner.pid}\b.*stopped", lambda: CALLS[name](store))
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


@pytest.mark.parametrize("nbytes", [INLINE, SMALL, LARGE])
def test_stopped_in_a_commit(nbytes: int, store: memstore.Store, server: ForkServer) -> None:
    """It holds the mutex, and LMDB's transaction is open: reads go on, writes and openings say who it is."""
    with server.start(blockers.stop_in_put, store.root, nbytes, "committing") as worker:
        until_stopped(worker)
        who = rf"held by pid {worker.pid}\b.*stopped"
        assert stamp_at(store, "k") == 0
        for name in ("put-large", "gc"):
            _times_out(who, lambda name=name: CALLS[name](store))
        with server.start(blockers.open_and_retry, store.root) as other:
            assert f"held by pid {worker.pid}" in other.recv()
            worker.kill(signal.SIGCONT)
            version = worker.recv()
            other.send("again")
            other.recv()
        assert store.wait("k", newer_than=version, timeout=5.0) > version


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_stopped_while_it_fills(nbytes: int, store: memstore.Store, server: ForkServer) -> None:
    """It holds a file and no mutex: nobody waits for it, and nobody takes what it fills for a dead one's."""
    with server.start(blockers.stop_in_put, store.root, nbytes, "filling") as worker:
        until_stopped(worker)
        filling = store.stats().filling_bytes
        assert filling >= nbytes
        for stamp in range(2, 12):
            store.put("k", stamped(stamp, nbytes), timeout=TIMEOUT)
            memstore.open(store.root, timeout=TIMEOUT).close()
            store.gc(timeout=TIMEOUT)
            assert stamp_at(store, "k") == stamp
        assert store.stats().filling_bytes == filling
        worker.kill(signal.SIGCONT)
        assert worker.recv() == store.version("k")
        assert stamp_at(store, "k") == 1
    store.gc()
    assert leftovers(store) == []


def test_a_second_opener_is_not_late(store: memstore.Store, owner: Worker, server: ForkServer) -> None:
    """The first one waits for the stopped process, and has locked the folder meanwhile."""
    with ExitStack() as stack:
        openers = [stack.enter_context(server.start(blockers.open_and_retry, store.root)) for _ in range(3)]
        started = time.monotonic()
        errors = [opener.recv() for opener in openers]
        assert time.monotonic() - started < TIMEOUT + 2 * SLACK
        waited_for = {int(pid) for error in errors for pid in re.findall(r"pid (\d+)", error)}
        assert owner.pid in waited_for <= {owner.pid, *(opener.pid for opener in openers)}, errors
        owner.kill(signal.SIGCONT)
        owner.send("release")
        assert owner.recv() == "released"
        for opener in openers:
            opener.send("again")
            opener.recv()


def test_threads_that_wait_stand_in_nobodys_way(scratch: str, server: ForkServer) -> None:
    """One waits in an opening, one in a put: forks, and other stores' openings and closes, don't wait for them."""
    with ExitStack() as stack:
        worker = stack.enter_context(server.start(blockers.live_beside_stopped_owners, scratch))
        assert worker.recv() == "opened"
        owners = [stack.enter_context(server.start(blockers.hold_mutex, f"{scratch}{number}")) for number in range(2)]
        for owner in owners:
            assert owner.recv() == "held"
            stack.enter_context(stopped(owner))
        worker.send("go")
        errors, taken = worker.recv()
        assert taken < 1.0
        for owner, error in zip(owners, errors, strict=True):
            assert f"held by pid {owner.pid}" in error


def _times_out(who: str, call: Callable[[], object]) -> None:
    started = time.monotonic()
    with pytest.raises(memstore.StoreTimeoutError, match=who):
        call()
    assert TIMEOUT <= time.monotonic() - started < TIMEOUT + SLACK
