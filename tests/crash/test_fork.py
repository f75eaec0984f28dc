"""Stores in forked, spawned and ending processes: no deadlock, no lock or file that stays, no wrong byte, no crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memstore
from tests.crash import forks
from tests.crash.leftovers import leftovers
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at
from tests.support.fork_server import ForkServer

STARTED = [pytest.param(name, marks=pytest.mark.full) for name in ("spawn", "forkserver")]  # a new interpreter


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 100])
def test_children_of_a_busy_process(count: int, store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.fork_while_busy, store.root, count) as worker:
        worker.join(250)


def test_killed_children_of_a_busy_process(store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.kill_children_while_busy, store.root, 18) as worker:
        worker.join(250)
    assert stamp_at(store, "killed") == 4


@pytest.mark.parametrize(
    "nbytes", [INLINE, *(pytest.param(nbytes, marks=pytest.mark.full) for nbytes in (SMALL, LARGE))]
)
def test_fork_at_each_step_of_another_threads_put(nbytes: int, store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.fork_at_steps, store.root, nbytes) as worker:
        first, second = worker.recv(250), worker.recv(250)
        assert "mutex_lock" in first and "mutex_lock" in second
        worker.join(250)


@pytest.mark.parametrize(("count", "nbytes"), [(20, SMALL), (1, SMALL), (1, LARGE)])
def test_child_that_c_forked_keeps_no_reader_out(
    count: int, nbytes: int, store: memstore.Store, server: ForkServer
) -> None:
    with server.start(forks.fork_in_c_at_steps, store.root, count, nbytes) as worker:
        worker.join()


@pytest.mark.parametrize(
    ("nbytes", "step", "reuse"),
    [
        (SMALL, "write_at", False),
        (SMALL, "write_at", True),
        (LARGE, "truncate", False),
        (LARGE, "collapse", False),
        (LARGE, "write_at", True),
    ],
)
def test_child_keeps_no_lock_of_its_parents_put(
    nbytes: int, step: str, reuse: bool, store: memstore.Store, server: ForkServer
) -> None:
    """The parent dies in the middle of the put, and the child lives on: what was to be filled is nobody's."""
    with server.start(forks.die_and_leave_a_child, store.root, nbytes, step, reuse) as worker:
        assert worker.recv() == "forked"
        worker.kill()
        assert worker.wait() == -9
        store.gc()
        assert leftovers(store) == []
        assert stamp_at(store, "k") == 1


def test_child_has_the_values_that_its_parent_holds(store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.fork_with_held_values, store.root) as worker:
        worker.join()


@pytest.mark.parametrize("context", ["fork", *STARTED])
def test_data_loader(context: str, store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.load, store.root, context) as worker:
        worker.join(250)


@pytest.mark.parametrize("context", ["fork", *STARTED])
def test_store_refs_and_leaves_go_to_a_new_process(context: str, store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.exchange, store.root, context) as worker:
        worker.join(250)


@pytest.mark.parametrize("context", ["fork", *STARTED])
def test_leaves_as_arguments_of_a_new_process(context: str, store: memstore.Store, server: ForkServer) -> None:
    with server.start(forks.pass_leaves, store.root, context) as worker:
        worker.join(250)


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.full)])
def test_end_with_everything_alive(times: int, store: memstore.Store, server: ForkServer, tmp_path: Path) -> None:
    for _ in range(times):
        with server.start(forks.end_untidily, store.root, str(tmp_path / "stderr")) as worker:
            assert (worker.wait(), (tmp_path / "stderr").read_text()) == (0, "")
        store.gc()
        assert leftovers(store) == []


@pytest.mark.full
def test_end_of_a_script(root: str) -> None:
    """An interpreter that nothing of memstore's tests has touched."""
    code = """if True:
        import sys, torch, memstore
        class Reader:
            def __init__(self, value): self.value, self.alias = value, value.numpy()
            def __del__(self): assert int(self.value[-1]) == int(self.alias[-1]) == 1
        store = memstore.open(sys.argv[1])
        store.put("k", torch.ones(1 << 20, dtype=torch.int64))
        value, reader, ref = store.get("k"), Reader(store.get("k")), store.ref("k")
        row = value[5:7]
    """
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
