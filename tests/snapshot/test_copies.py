"""Snapshots that are pickled, copied and sent: by their path, never with what this process has open."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict

Copy = Callable[[Any], Any]

COPIES: dict[str, Copy] = {
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "deep-copied": copy.deepcopy,
    "deep-copied in a dict": lambda value: copy.deepcopy({"resume": value})["resume"],
    "copied": copy.copy,
}


class OnlyPickled:
    """What a snapshot can only store with pickle."""


def take(path: str, number: float = 1.0) -> Snapshot:
    return Snapshot.take(path, {"state": StateDict(w=torch.full((3,), number), step=7)})


def restored(snapshot: Snapshot) -> list[float]:
    state = StateDict(w=torch.zeros(3), step=0)
    snapshot.restore({"state": state})
    assert state["step"] == 7
    return state["w"].tolist()


def read(snapshot: Snapshot) -> list[list[float]]:
    """What all calls that read bytes give."""
    state = snapshot.get_state_dict_for_key("state")
    return [
        restored(snapshot),
        snapshot.read_object("0/state/w").tolist(),
        snapshot.view()["state"]["w"].tolist(),
        state["w"].tolist(),
    ]


def opened(path: str) -> Snapshot:
    """One that has been read."""
    take(path)
    snapshot = Snapshot(path)
    restored(snapshot)
    return snapshot


def taken(path: str) -> Snapshot:
    """One that has been taken, and then read."""
    snapshot = take(path)
    restored(snapshot)
    return snapshot


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("made", [opened, taken, take], ids=["opened", "taken and read", "taken"])
def test_a_copy_reads_beside_the_original_and_after_it(
    tmp_path: Path, made: Callable[[str], Snapshot], copied: Copy
) -> None:
    snapshot = made(f"{tmp_path}/s")
    other = copied(snapshot)
    assert other is not snapshot and other.path == snapshot.path
    assert read(other) == read(snapshot) == [[1.0] * 3] * 4
    del snapshot
    assert read(other) == [[1.0] * 3] * 4


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_no_copy_closes_a_file_that_got_the_originals_descriptor(tmp_path: Path, copied: Copy) -> None:
    snapshot = opened(f"{tmp_path}/s")
    other = copied(snapshot)
    del snapshot
    with open(f"{tmp_path}/log.txt", "w") as log:  # has the number of the folder that was closed
        assert restored(other) == [1.0] * 3
        del other
        log.write("still open")
    assert Path(tmp_path, "log.txt").read_text() == "still open"


@pytest.mark.full  # they import torch anew
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_one_that_is_sent_to_a_started_child_reads_there(tmp_path: Path, method: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        assert pool.submit(restored, opened(f"{tmp_path}/s")).result() == [1.0] * 3


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_options(tmp_path: Path, copied: Copy) -> None:
    path = f"{tmp_path}/s"
    snapshot = Snapshot.take(
        path, {"state": StateDict(x=OnlyPickled())}, allow_pickle=True, storage_options={"timeout": 5.0}
    )
    other = copied(snapshot)
    assert isinstance(other.get_state_dict_for_key("state")["x"], OnlyPickled) and other._timeout == 5.0
    with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
        copied(Snapshot(path)).get_state_dict_for_key("state")


def test_copies_have_the_process_group_and_pickles_can_not(tmp_path: Path) -> None:
    group = object()
    snapshot = Snapshot(f"{tmp_path}/s", group)
    assert copy.copy(snapshot).pg is group and copy.deepcopy(snapshot).pg is group
    with pytest.raises(TypeError, match="with a process group can't be pickled: send its path"):
        pickle.dumps(snapshot)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_opens_what_is_at_the_path_by_then(tmp_path: Path, copied: Copy) -> None:
    path = f"{tmp_path}/s"
    snapshot = opened(path)
    other, third = copied(snapshot), copied(snapshot)
    os.rename(path, f"{tmp_path}/moved")
    with pytest.raises(memstore.NotAStoreError, match="no such folder"):
        restored(other)
    assert snapshot.read_object("0/state/w").tolist() == [1.0] * 3, "the original has its folder open"
    take(path, 2.0)
    assert restored(other) == restored(third) == [2.0] * 3
    shutil.rmtree(path)
    with pytest.raises(memstore.NotAStoreError, match="no such folder"):
        restored(copied(third))
