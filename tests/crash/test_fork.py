"""Stores in forked, spawned and ending processes: no deadlock, no lock or file that stays, no wrong byte, no crash."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import memstore
from memstore import _threads
from memstore.engine import syscalls
from tests.children import in_child
from tests.crash import fork_imports, forks
from tests.crash.forks import in_fork, reap
from tests.crash.leftovers import leftovers
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at, stamped
from tests.inside import root_of, spares_of
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


# --- a fork in the middle of another thread's import: the child imports the same, and doesn't wait for ever -----------


@pytest.fixture
def filled(root: str) -> str:
    with memstore.open(root) as store:
        store.put("value", {"w": torch.ones(300, 40)})
        store.put("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        store.put("tensordict", TensorDict({"x": torch.ones(3, 2000)}, [3]))
    return root


def fork_in(root: str, *names: str) -> dict[str, str]:
    """Forks at the first import of each operation, in a fresh interpreter. Returns what was imported, "-": nothing."""
    command = [sys.executable, "-m", "tests.crash.fork_imports", root, *names]
    folder = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.full
def test_a_child_that_was_forked_during_an_opening_or_a_first_call(filled: str) -> None:
    found = fork_in(filled, "open", "put", "get", "view")
    assert found.pop("open").startswith("memstore.")
    assert found == {"put": "-", "get": "-", "view": "torch.distributed.tensor"}, "this is imported in a hot path"


@pytest.mark.full
def test_a_child_that_was_forked_during_any_first_call(filled: str) -> None:
    found = fork_in(filled, *fork_imports.OPERATIONS)
    assert "tensordict" in found["tensordict"] and found["files"].startswith("memstore.formats"), found


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensordict", "view", "files", "rows", "get"])
def test_a_child_that_was_forked_during_the_opening_of_another_thread_and_does_all_else_first(
    filled: str, name: str
) -> None:
    fork_in(filled, name)


def test_a_fork_waits_for_an_import() -> None:
    inside, over = threading.Event(), threading.Event()

    def import_slowly() -> None:
        with _threads.between_forks():
            inside.set()
            over.wait(0.3)
            ended.append(time.monotonic())

    ended: list[float] = []
    thread = threading.Thread(target=import_slowly)
    thread.start()
    inside.wait()
    assert in_child(_imported) is True
    assert ended, "the fork came in the middle"
    thread.join()


def test_hooks_that_come_while_a_fork_waits_are_called_all() -> None:
    """A module that is imported registers some. `os` would call those for after the fork alone."""
    called: list[str] = []
    hooks = _threads.Hooks(*(functools.partial(called.append, name) for name in ("before", "parent", "child")))
    inside = threading.Event()

    def import_slowly() -> None:
        with _threads.between_forks():
            inside.set()
            threading.Event().wait(0.2)
            _threads.around_forks(hooks)

    thread = threading.Thread(target=import_slowly)
    thread.start()
    inside.wait()
    try:
        assert in_child(called.copy) == ["before", "child"]
        assert called == ["before", "parent"]
    finally:
        thread.join()
        _threads._hooks.remove(hooks)


def _imported() -> bool:
    with _threads.between_forks():
        return True


def test_an_import_may_fork() -> None:
    with _threads.between_forks():
        assert in_child(_imported)
    assert in_child(_imported)


def test_an_import_and_a_fork_that_wait_for_one_another_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would wait for ever: the import for a lock that the fork wants first, say by a finalizer."""
    monkeypatch.setattr(_threads, "PATIENCE", 0.1)
    inside, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with _threads.between_forks():
            inside.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    assert in_child(_imported)
    with _threads.between_forks():
        forked.set()
    thread.join()
    assert in_child(_imported)


# --- what a root has mapped to fill it again is not a forked child's --------------------------------------------------


@pytest.mark.parametrize("ended", ["replaced", "closed"])
def test_a_child_leaves_alone_what_lies_where_a_spare_was(ended: str, root: str, server: ForkServer) -> None:
    with server.start(_fork, root, ended) as worker:
        worker.join()


def _fork(_: object, path: str, ended: str) -> None:
    stores = [memstore.open(path)]
    old = root_of(stores[0])
    end: dict[str, Callable[[list[memstore.Store]], None]] = {"replaced": _replace, "closed": _close_during_put}
    end[ended](stores)
    spares = spares_of(old) or _spares
    assert spares, "this tests nothing"
    roots: list[Any] = [old]
    del old

    def child() -> None:
        address, size = spares[0]
        flags = syscalls._MAP_PRIVATE | syscalls._MAP_ANONYMOUS | syscalls._MAP_FIXED_NOREPLACE
        assert syscalls._mmap(address, size, syscalls._PROT_READ | syscalls._PROT_WRITE, flags, -1, 0) == address
        for store in stores:
            store.close()
        stores.clear()
        roots.clear()
        gc.collect()
        assert bytes(syscalls.memory_at(address, size)) == bytes(size)  # unmapped, it is a segmentation fault

    reap(in_fork(child))


_spares: list[tuple[int, int]] = []  # of a store that was replaced


def _replace(stores: list[memstore.Store]) -> None:
    """The folder is emptied, and another store made there."""
    path = stores[0].root
    stores[0].put("key", stamped(1, LARGE))
    _spares[:] = spares_of(root_of(stores[0]))
    for name in os.listdir(path):
        shutil.rmtree(f"{path}/{name}") if os.path.isdir(f"{path}/{name}") else os.unlink(f"{path}/{name}")
    stores.append(memstore.open(path))


def _close_during_put(stores: list[memstore.Store]) -> None:
    """The store is closed when a put is published, and its mapping not kept yet: another thread may do so."""
    put = import_module("memstore.engine.protocols.put")
    publish = put.publish

    def close_afterwards(*arguments: Any) -> list[int]:
        versions = publish(*arguments)
        stores[0].close()
        return versions

    put.publish = close_afterwards
    stores[0].put("key", stamped(1, LARGE))


# --- the end of an interpreter that still has stores open: nothing is printed -----------------------------------------


# What `os` has goes last of all, when the modules of memstore have lost their names: they were imported later.
PROGRAM = """
import builtins, os, sys
import torch
import memstore

folder = sys.argv[1]
store = memstore.open(f"{folder}/store")
store.put("key", {"w": torch.ones(5000), "x": 1})
snapshot = memstore.Snapshot.take(f"{folder}/taken", {"state": memstore.StateDict(w=torch.ones(3000))})
pending = memstore.Snapshot.async_take(f"{folder}/pending", {"state": memstore.StateDict(w=torch.ones(3000))})
pending.wait()
replay = memstore.ReplayBuffer(store, "replay", {"x": torch.zeros(3)}, capacity=8)
dataset = store.create_dataset("rows", {"x": torch.zeros(3)}, capacity=8)
for rows in (replay, dataset):
    rows.extend({"x": torch.ones(2, 3)})
os.kept = [store, store.get("key"), store.view("key"), store.ref("key"), store.keys()]
os.kept += [snapshot, snapshot.get_manifest(), memstore.Snapshot(f"{folder}/taken"), snapshot.view(), pending]
os.kept += [replay, replay.sample(2), dataset, dataset[:2]]
builtins.modules = [os, *(module for name, module in sys.modules.items() if name.startswith("memstore"))]
"""


def test_nothing_is_said(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
