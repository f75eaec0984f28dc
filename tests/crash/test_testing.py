"""The tools of these tests: workers start, talk, die and are counted; faults hit the step that they are meant for."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch

import memstore
from tests.children import Child, Wire
from tests.crash.leftovers import open_fds
from tests.support import faults
from tests.support.fork_server import ForkServer, WorkerError


def echo(channel: Connection, *arguments: object) -> None:
    channel.send(arguments)
    while True:
        channel.send(channel.recv())


def lose_its_output(channel: Connection) -> None:
    """As a process that was started with closed files."""
    channel.send("said before the end")
    sys.stdout, sys.stderr = None, io.StringIO()
    sys.stderr.close()
    atexit.register(channel.send, "said at the end")


def report(channel: Connection) -> None:
    """Sends what a worker starts with: its threads, torch's threads, its parent, and what is open."""
    files = sorted(file for file in open_fds() if int(file.split()[0]) > 2)
    channel.send((len(os.listdir("/proc/self/task")), torch.get_num_threads(), os.getppid(), files))


def fail(channel: Connection) -> None:
    raise LookupError("on purpose")


def leave(channel: Connection, code: int) -> None:
    raise SystemExit(code)


def test_worker_answers_until_it_is_killed(server: ForkServer) -> None:
    with server.start(echo, 1, "two") as worker:
        assert worker.recv() == (1, "two")
        worker.send({"three": 3})
        assert worker.recv() == {"three": 3}
        with pytest.raises(TimeoutError):
            worker.recv(timeout=0.01)
        with pytest.raises(TimeoutError):
            worker.wait(timeout=0.01)
        worker.kill(signal.SIGTERM)
        assert worker.wait() == -signal.SIGTERM
        worker.kill()
        with pytest.raises(WorkerError, match="ended with -15"):
            worker.recv()
    assert not os.path.exists(f"/proc/{worker.pid}")


def test_worker_starts_clean(server: ForkServer) -> None:
    with server.start(echo), server.start(report) as worker:
        threads, torch_threads, parent, files = worker.recv()
        assert (threads, torch_threads, parent) == (1, 1, server.pid)
        assert len(files) == 1, f"it has more than its channel: {files}"
        worker.join()


def test_worker_says_what_it_raised(server: ForkServer) -> None:
    with server.start(fail) as worker, pytest.raises(WorkerError, match="LookupError: on purpose"):
        worker.join()
    with server.start(leave, 7) as worker:
        assert worker.wait() == 7
    with server.start(leave, 0) as worker:
        worker.join()


def test_a_worker_without_output_ends_as_others_do(server: ForkServer) -> None:
    with server.start(lose_its_output) as worker:
        assert [worker.recv(), worker.recv(), worker.wait()] == ["said before the end", "said at the end", 0]


def test_function_must_have_a_name(server: ForkServer) -> None:
    with pytest.raises(ValueError, match="can't be imported"):
        server.start(lambda channel: None)


@pytest.mark.full
@pytest.mark.parametrize("end", ["close", "kill"])
def test_workers_end_with_their_server(end: str) -> None:
    server = ForkServer()
    workers = [server.start(echo) for _ in range(3)]
    for worker in workers:
        worker.recv()
    if end == "close":
        began = time.monotonic()
        with Child(_wait_for_a_message):  # it inherits this end of the server's channel
            server.close()
        assert time.monotonic() - began < 30
    else:
        os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_runs(worker.pid) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    server.close()
    with pytest.raises(WorkerError, match="is gone|did not fork"):
        server.start(echo)


def _wait_for_a_message(wire: Wire) -> None:
    wire.receive()


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_step_is_found(store: memstore.Store) -> None:
    """A put goes to the kernel and to the catalog in the order that its protocol says."""
    store.put("first", torch.zeros(1024))  # the first one of a new store recovers
    names = faults.record(lambda: store.put("k", torch.zeros(1024)))
    for first, second in (
        ("mutex_lock", faults.COMMIT),
        (faults.COMMIT, "open_into"),
        ("open_into", "lock_exclusive"),
        ("lock_exclusive", "write_at"),
        ("write_at", "unlock"),
        ("unlock", "futex_wake"),
    ):
        assert names.index(first) < names.index(second), names
    assert names.count(faults.COMMIT) == 2
    assert set(names) <= faults.STEPS


def test_fault_hits_one_step_of_one_thread(store: memstore.Store) -> None:
    error = faults.raising(OSError(errno.EIO, "on purpose"))
    with faults.at_step(2, error, names=frozenset({"write_at"})), pytest.raises(OSError, match="on purpose"):
        store.put("k", torch.zeros(1024))
    assert "k" not in store
    with faults.at_step(99, error):
        store.put("k", torch.zeros(1024))
    assert "k" in store
