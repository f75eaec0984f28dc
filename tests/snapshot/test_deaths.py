"""Takes and restores that are killed, fail, or meet another: a whole snapshot is there or none, and the next works."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from tests.children import Child, Wire, in_child
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.snapshot.leftovers import MANIFEST, app_state, check_whats_left, number_in, take
from tests.support import faults
from tests.support.equality import assert_same

FILES = ["memstore_snapshot.json", "model.safetensors", "state.safetensors"]


def steps(chosen: frozenset[str] = faults.STEPS) -> list[str]:
    """Those of a take by one process, from a path that isn't there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return faults.record(lambda: take(f"{folder}/s", 1.0), names=chosen)


def _die_at(path: str, step: int, after: bool) -> None:
    with faults.at_step(step, faults.die, after=after):
        take(path, 1.0)


def die_at(path: str, step: int, after: bool) -> None:
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_at, path, step, after)


def test_a_take_that_is_killed_at_a_step(path: str) -> None:
    names = steps()
    assert names.count("link") == 2 and "sync" in names, names
    for i, step in enumerate([3, names.index("truncate") + 1, len(names) - 8, len(names) - 4, len(names)]):
        die_at(f"{path}{i}", step, after=True)
        check_whats_left(f"{path}{i}")


@pytest.mark.full
def test_a_take_that_is_killed_at_every_step(path: str) -> None:
    for step in range(1, len(steps()) + 1):
        for after in (False, True):
            die_at(f"{path}{step}{after}", step, after)
            check_whats_left(f"{path}{step}{after}")


def test_takes_that_are_killed_again_and_again(path: str) -> None:
    names = steps()
    publication = len(names) - names[::-1].index("link")
    for step in range(5, publication - 2, 5):
        die_at(path, step, after=False)
    check_whats_left(path)


def test_a_take_that_fails_at_every_step_leaves_nothing(path: str) -> None:
    chosen = faults.STEPS - faults.CLEANUPS
    names = steps(chosen)
    for step, name in enumerate(names, 1):
        there = f"{path}{step}"
        failing = faults.at_step(step, faults.raising(OSError(errno.EIO, "injected")), names=chosen)
        with contextlib.suppress(OSError, memstore.MemstoreError), failing:
            take(there, 1.0)
        if os.path.exists(f"{there}/{MANIFEST}"):  # it failed once it was published
            assert number_in(there) == 1.0
        else:
            left = os.listdir(there) if os.path.exists(there) else []
            assert not left or (name == "unlink" and len(left) == 1), (step, name, left)
            take(there, 2.0)
            assert number_in(there) == 2.0


# --- two jobs ---------------------------------------------------------------------------------------------------------


def _racer(wire: Wire, path: str, number: float, asynchronous: bool) -> str:
    wire.send("ready")
    wire.receive()
    try:
        if asynchronous:
            Snapshot.async_take(path, app_state(number)).wait()
        else:
            take(path, number)
    except memstore.AlreadyExistsError as error:
        assert path in str(error)
        return "was late"
    return "won"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_of_jobs_that_take_to_one_path_one_wins(path: str, asynchronous: bool) -> None:
    for attempt in range(1 if asynchronous else 3):
        there = f"{path}{attempt}"
        racers = [Child(_racer, there, float(number), asynchronous) for number in range(3)]
        try:
            for racer in racers:
                assert racer.receive() == "ready"
            for racer in racers:
                racer.send()
            outcomes = [racer.receive() for racer in racers]
        finally:
            for racer in racers:
                racer.__exit__()
        assert outcomes.count("won") == 1
        assert number_in(there) == float(outcomes.index("won"))
        assert len([name for name in os.listdir(there) if name.endswith(".safetensors")]) == 2, os.listdir(there)
        assert not [name for name in os.listdir(there) if "part" in name or name.endswith((".claim", ".new"))]


def _take_in_the_middle(path: str) -> str:
    """Another job publishes right before this one links its manifest."""
    links = frozenset({"link"})  # of the claim, and of the manifest
    with faults.at_step(2, lambda: in_child(take, path, 2.0), names=links):
        try:
            take(path, 1.0)
        except memstore.AlreadyExistsError as error:
            return str(error)
    return ""


def test_a_take_that_is_late_by_a_step_loses_and_leaves_nothing(path: str) -> None:
    assert "was first" in in_child(_take_in_the_middle, path)
    assert number_in(path) == 2.0
    assert len(os.listdir(path)) == 4, os.listdir(path)  # two files, the index, the manifest


def test_files_that_are_there_already_are_neither_written_over_nor_removed(path: str) -> None:
    os.makedirs(path)
    for name in ("model.safetensors", "config.json", "state.safetensors", "model.safetensors.index.json"):
        with open(f"{path}/{name}", "w") as file:
            file.write("of somebody else")
    take(path, 1.0)
    assert number_in(path) == 1.0
    with open(f"{path}/model.safetensors") as file:
        assert file.read() == "of somebody else"
    with open(f"{path}/model.safetensors.index.json") as file:
        assert file.read() == "of somebody else"


def test_a_users_file_that_is_called_as_a_takes_stays(path: str) -> None:
    os.makedirs(path)
    theirs = ("model-00112233aabbccdd.safetensors", "state-00001-of-00002-0123456789abcdef.safetensors")
    for name in theirs:
        open(f"{path}/{name}", "w").close()
    for step in (12, 20):  # takes that have left a trace, too
        die_at(path, step, after=False)
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) > 2
    take(path, 2.0)
    assert number_in(path) == 2.0
    left = {name for name in os.listdir(path) if not name.endswith(".json")}
    assert set(theirs) < left and len(left) == 4, left


# --- a full disk ------------------------------------------------------------------------------------------------------


def _fill_up(folder: str, asynchronous: bool) -> None:
    room = free_bytes(folder)
    state = {"state": StateDict(x=torch.zeros(room // 3), y=torch.zeros(room // 3, dtype=torch.int64))}
    path = f"{folder}/snapshot"
    for _ in range(2):
        with pytest.raises(memstore.StoreFullError):
            if asynchronous:
                Snapshot.async_take(path, state).wait()
            else:
                Snapshot.take(path, state)
        assert not os.path.exists(path)
        assert free_bytes(folder) > room - (1 << 17)
    take(path, 1.0)
    assert number_in(path) == 1.0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_a_full_disk_is_an_error_and_leaves_nothing(asynchronous: bool) -> None:
    on_small_tmpfs(4, _fill_up, asynchronous)


def test_what_a_restore_gives_does_not_depend_on_the_files_any_more(path: str) -> None:
    take(path, 1.0)
    state = app_state(-1.0)
    Snapshot(path).restore(state)
    for name in os.listdir(path):
        os.truncate(f"{path}/{name}", 0)
    assert_same(torch.full((5,), 1.0), state["state"]["x"])
