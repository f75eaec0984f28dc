"""A process is killed while it creates or opens a store: whoever comes next has a whole store."""

from __future__ import annotations

import os
import shutil

import pytest

import memstore
from memstore.engine.protocols.put import claim
from memstore.engine.root import folder
from memstore.engine.sync.primitives import deadline_after
from tests.crash import workers
from tests.crash.leftovers import leftovers
from tests.crash.test_kill_at_steps import KILLED
from tests.crash.values import SMALL, stamp_at, stamped
from tests.inside import root_of
from tests.support.fork_server import ForkServer

FILES = {"catalog", folder.DOORBELL, folder.LOCK, folder.SEGMENTS, folder.SETTINGS}
KILLS = [  # at each so many-th of the steps, before them and after them in turn
    ("process", 5),
    *(pytest.param(durability, 1, marks=pytest.mark.full) for durability in ("process", "disk")),
]


@pytest.mark.parametrize(("durability", "stride"), KILLS)
def test_kill_while_creating(durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer) -> None:
    path: str = request.getfixturevalue("root" if durability == "process" else "disk_root")
    with server.start(workers.steps_of_open, path, durability) as worker:
        names = worker.recv()
    for half in range(stride // 2, 2 * len(names), stride):
        number, after = half // 2 + 1, half % 2 == 1
        shutil.rmtree(path, ignore_errors=True)
        what = f"killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        with server.start(workers.die_in_open, path, durability, number, after) as worker:
            assert worker.wait() == KILLED, what
        _check_reader_sees_all_or_nothing(path, what)
        with memstore.open(path, durability=durability, timeout=30.0) as store:
            store.put("a", stamped(1, SMALL))
            assert stamp_at(store, "a") == 1, what
            assert leftovers(store) == [], what
        assert set(os.listdir(path)) == FILES, what
        blocks = os.stat(f"{path}/{folder.CATALOG}/lock.mdb").st_blocks * 512
        assert blocks >= os.stat(f"{path}/{folder.CATALOG}/lock.mdb").st_size, f"sparse, {what}"


def _check_reader_sees_all_or_nothing(path: str, what: str) -> None:
    try:
        memstore.open(path, "r", timeout=30.0).close()
    except memstore.NotAStoreError:
        assert not os.path.exists(f"{path}/{folder.SETTINGS}"), what


@pytest.mark.parametrize(("durability", "stride"), KILLS)
def test_kill_while_opening(durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer) -> None:
    """What the dead opener was to sweep, the next one sweeps, or a put of its kind uses."""
    path: str = request.getfixturevalue("root" if durability == "process" else "disk_root")

    def leave_work() -> None:
        with memstore.open(path, durability=durability) as store:
            store.put("a", stamped(1, SMALL))
            held = store.get("a")
            store.put("a", stamped(2, SMALL))
            del held
            claim(root_of(store), b"b", 4096, SMALL, 0, deadline_after(5)).close()  # as one who died filling

    leave_work()
    with server.start(workers.steps_of_open, path, durability) as worker:
        names = worker.recv()
    assert "unlink" in names
    for half in range(stride // 2, 2 * len(names), stride):
        number, after = half // 2 + 1, half % 2 == 1
        what = f"killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        leave_work()
        with server.start(workers.die_in_open, path, durability, number, after) as worker:
            assert worker.wait() == KILLED, what
        with memstore.open(path, timeout=30.0) as store:
            assert leftovers(store, spares=True) == [], what
            assert stamp_at(store, "a") == 2, what
            store.put("a", stamped(3, SMALL))
            assert stamp_at(store, "a") == 3, what
            store.gc()
            assert leftovers(store) == [], what
