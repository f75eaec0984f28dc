"""Asynchronous takes: tensors may change at once, failures come out in wait, and writers outlive their trainers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.snapshot import staging
from memstore.snapshot.storage import FileStorage
from tests.children import Child, Wire
from tests.snapshot.ranks import all_right, on_ranks

MANIFEST = "memstore_snapshot.json"


def state_of(number: float, rank: int = 0) -> dict[str, Any]:
    model = torch.nn.Linear(300, 200)
    torch.nn.init.constant_(model.weight, number)
    strided = torch.full((40, 30), number).t()
    return {"model": model, "state": StateDict(number=number, own=torch.full((3,), number + rank), strided=strided)}


def numbers_in(path: str, rank: int = 0) -> tuple[float, float]:
    state = state_of(-1.0)
    Snapshot(path).restore(state)
    (number,) = {*state["model"].weight.unique().tolist(), *state["state"]["strided"].unique().tolist()}
    assert number == state["state"]["number"]
    return number, state["state"]["own"][0].item() - rank


def test_tensors_may_change_as_soon_as_it_returns(path: str) -> None:
    app_state = state_of(1.0)
    waiting = []
    for i in range(5):
        waiting.append(Snapshot.async_take(f"{path}{i}", app_state))
        with torch.no_grad():
            app_state["model"].weight += 1
            app_state["state"]["strided"] += 1
        app_state["state"]["number"] += 1
    for i, one in enumerate(waiting):
        assert one.path == f"{path}{i}"
        one.wait().verify()
        assert one.done() and numbers_in(one.path)[0] == float(i + 1)


def test_progress_and_options(path: str) -> None:
    told: list[tuple[int, int]] = []
    waiting = Snapshot.async_take(
        path,
        {"state": StateDict(x=torch.ones(9), y=complex)},
        progress=lambda done, total: told.append((done, total)),
        durability="process",
        checksum=False,
        allow_pickle=True,
    )
    snapshot = waiting.wait(60)
    assert told and told[-1][0] == told[-1][1] == snapshot.metadata.nbytes and not snapshot.metadata.checksum
    assert snapshot.get_state_dict_for_key("state")["y"] is complex


def test_a_manifest_may_be_longer_than_a_message(path: str) -> None:
    state = {f"layer.{i}": torch.tensor(float(i)) for i in range(5000)}
    snapshot = Snapshot.async_take(path, {"state": StateDict(**state)}, durability="process").wait()
    assert os.path.getsize(f"{path}/{MANIFEST}") > 1 << 16
    assert snapshot.get_state_dict_for_key("state") == state


def test_a_snapshot_that_was_removed_before_the_wait_says_so(path: str) -> None:
    pending = Snapshot.async_take(path, {"state": StateDict(x=torch.ones(3))}, durability="process")
    other = Snapshot.async_take(f"{path}2", {"state": StateDict(x=torch.ones(3))}, durability="process")
    other.wait()  # which the same writer makes after the first one
    os.remove(f"{path}/{MANIFEST}")
    with pytest.raises(memstore.NotAStoreError, match="removed since"):
        pending.wait()


def test_what_can_be_told_at_once_is(path: str) -> None:
    Snapshot.take(path, state_of(1.0))
    with pytest.raises(memstore.AlreadyExistsError):
        Snapshot.async_take(path, state_of(2.0))


def test_a_take_that_another_one_overtakes_raises_in_wait(path: str) -> None:
    first = Snapshot.async_take(path, state_of(1.0))
    try:
        Snapshot.take(path, state_of(2.0))
    except memstore.AlreadyExistsError:
        first.wait()
        assert numbers_in(path)[0] == 1.0
    else:
        with pytest.raises(memstore.AlreadyExistsError):
            first.wait()
        assert numbers_in(path)[0] == 2.0
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) == 2


def _ranks_take(rank: int, path: str) -> float:
    app_state = state_of(1.0, rank)
    waiting = Snapshot.async_take(path, app_state, replicated=["model/*"])
    with torch.no_grad():
        app_state["model"].weight.zero_()
    snapshot = waiting.wait(100)
    assert waiting.done()
    return snapshot.metadata.created


def _ranks_read(rank: int, path: str) -> tuple[float, float]:
    return numbers_in(path, rank)


def test_the_last_of_several_ranks_publishes(path: str) -> None:
    created = all_right(on_ranks(3, _ranks_take, path))
    assert len(set(created)) == 1
    assert all_right(on_ranks(3, _ranks_read, path)) == [(1.0, 1.0)] * 3
    Snapshot(path).verify()
    left = os.listdir(path)
    assert not [name for name in left if "part" in name or name.endswith(".claim")], left


def _rotated_before_it_waits(rank: int, path: str) -> str:
    waiting = Snapshot.async_take(path, state_of(1.0, rank))
    if rank == 0:
        waiting.wait(60)
        torch.distributed.barrier()  # the writer of rank 1 may have been the last
        shutil.rmtree(path)
        torch.distributed.barrier()
        return ""
    waiting._take._write.wait(60)
    torch.distributed.barrier()
    torch.distributed.barrier()
    assert waiting.done()
    try:
        snapshot = waiting.wait(5)
    except memstore.MemstoreError as error:
        return str(error)
    with pytest.raises(memstore.NotAStoreError):
        snapshot.verify()
    return "removed: it was this rank that published"


def test_a_snapshot_that_was_removed_before_a_rank_waits(path: str) -> None:
    _, second = all_right(on_ranks(2, _rotated_before_it_waits, path))
    assert "removed" in second, second


def test_a_folder_knows_that_it_is_removed(path: str) -> None:
    there = FileStorage.create(path, durable=False)
    assert not there.is_removed
    os.rename(path, f"{path}2")
    os.mkdir(path)
    assert not there.is_removed
    os.rmdir(f"{path}2")
    assert there.is_removed


def _die_after_staging(rank: int, path: str) -> None:
    Snapshot.async_take(path, state_of(1.0, rank), replicated=["model/*"])
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(there: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(there):
        assert time.monotonic() < deadline, os.listdir(os.path.dirname(there))
        time.sleep(0.01)


def test_writers_complete_a_snapshot_whose_trainers_died(path: str) -> None:
    on_ranks(2, _die_after_staging, path, dead=(0, 1))
    _wait_for(f"{path}/{MANIFEST}")
    assert all_right(on_ranks(2, _ranks_read, path)) == [(1.0, 1.0)] * 2
    Snapshot(path).verify()


def _a_writer_fails(rank: int, path: str) -> None:
    write = staging.StagedTensors.write

    def write_where_something_is(self: Any, folder: str, files: Any, **options: Any) -> Any:
        with open(f"{folder}/{files[-1].name}", "w") as file:
            file.write("of somebody else")
        return write(self, folder, files, **options)

    if rank == 1:
        staging.StagedTensors.write = write_where_something_is
    Snapshot.async_take(path, state_of(1.0, rank)).wait(100)


def test_a_failure_of_one_writer_raises_in_wait_on_all_ranks(path: str) -> None:
    first, second = on_ranks(2, _a_writer_fails, path)
    assert isinstance(first, memstore.AlreadyExistsError) and str(first).startswith("rank 1: "), first
    assert isinstance(second, memstore.AlreadyExistsError) and "state-00002" in str(second), second
    left = [name for name in os.listdir(path) if "failure" not in name]
    assert left == ["state-00002-of-00002.safetensors"]
    Snapshot.take(path, state_of(2.0))
    assert numbers_in(path)[0] == 2.0
    with open(f"{path}/state-00002-of-00002.safetensors") as file:
        assert file.read() == "of somebody else"


def _one_never_comes(rank: int, path: str) -> str:
    prepared_only = rank == 1
    waiting = Snapshot.async_take(path, state_of(1.0, rank)) if not prepared_only else None
    if waiting is None:
        _stage_and_die(path, rank)
        return ""
    waiting._take._write.wait(60)
    try:
        waiting.wait(0.1)
    except memstore.StoreTimeoutError as error:
        return str(error)
    return "published"


def _stage_and_die(path: str, rank: int) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    staging.StagedTensors.write = die
    Snapshot.async_take(path, state_of(1.0, rank))


def test_a_rank_that_died_before_its_writer_had_the_bytes_is_named(path: str) -> None:
    first, _ = on_ranks(2, _one_never_comes, path, dead=(1,))
    assert "rank 1 has not written its part: it may have died" in str(first), first
    assert not os.path.exists(f"{path}/{MANIFEST}")
    Snapshot.take(path, state_of(2.0))
    assert numbers_in(path)[0] == 2.0
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) == 2


def _kill_the_writer(wire: Wire, path: str) -> str:
    waiting = Snapshot.async_take(f"{path}1", state_of(1.0))
    waiting.wait(60)
    writer = waiting._take._write.writer
    os.kill(writer, signal.SIGSTOP)
    waiting = Snapshot.async_take(f"{path}2", state_of(2.0))
    with pytest.raises(memstore.StoreTimeoutError):
        waiting.wait(0.05)
    assert not waiting.done()
    os.kill(writer, signal.SIGKILL)
    with pytest.raises(memstore.UnknownOutcomeError):
        waiting.wait(60)
    assert not os.path.exists(f"{path}2")
    Snapshot.async_take(f"{path}2", state_of(3.0)).wait(60)
    return "done"


def test_a_killed_writer_raises_in_wait_and_the_next_take_has_a_new_one(path: str) -> None:
    with Child(_kill_the_writer, path) as child:
        assert child.receive() == "done"
    assert numbers_in(f"{path}2")[0] == 3.0


def test_what_the_writer_loads_needs_no_torch() -> None:
    code = (
        "import memstore.snapshot.publishing, sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
