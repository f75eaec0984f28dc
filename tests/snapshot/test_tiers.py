"""Tiers: a snapshot in memory, then on a disk. Each is whole or none, and a restore takes the first that is there."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memstore
from memstore import Snapshot, StateDict
from tests.children import Child, Wire
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.snapshot.leftovers import MANIFEST, app_state, number_in, take
from tests.snapshot.ranks import all_right, on_ranks


def wait_until(is_so: Callable[[], object], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "this didn't come"
        time.sleep(0.002)


def states(pending: Any) -> list[str]:
    return [tier.state for tier in pending.status()]


def restored(snapshot: Snapshot) -> float:
    found = app_state(-1.0)
    snapshot.restore(found)
    return found["state"]["number"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_all_tiers_have_it_and_the_first_that_is_there_is_restored(path: str, asynchronous: bool) -> None:
    tiers = [f"{path}/disk", f"{path}/other"]
    if asynchronous:
        pending = Snapshot.async_take(f"{path}/memory", app_state(1.0), then=tiers)
        snapshot = pending.wait()
        assert states(pending) == ["whole"] * 3 and pending.done()
        assert [tier.path for tier in pending.status()] == [f"{path}/memory", *tiers]
    else:
        snapshot = Snapshot.take(f"{path}/memory", app_state(1.0), then=tiers)
    assert snapshot.path == f"{path}/memory" and list(snapshot.then) == tiers
    for there in (f"{path}/memory", *tiers):
        assert number_in(there) == 1.0
    for lost in (f"{path}/memory", *tiers):
        for again in (
            Snapshot(f"{path}/memory", then=tiers),
            pickle.loads(pickle.dumps(snapshot)),
            copy.copy(snapshot),
        ):
            assert restored(again) == 1.0
        shutil.rmtree(lost)
    with pytest.raises(memstore.NotAStoreError):
        restored(Snapshot(f"{path}/memory", then=tiers))


def test_a_damaged_manifest_in_memory_is_no_reason_to_fail(path: str) -> None:
    Snapshot.take(f"{path}/memory", app_state(1.0), then=[f"{path}/disk"])
    os.truncate(f"{path}/memory/{MANIFEST}", 50)
    assert restored(Snapshot(f"{path}/memory", then=[f"{path}/disk"])) == 1.0


def test_folders_that_cannot_be_meant(path: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        Snapshot.take(f"{path}/a", app_state(1.0), then=[f"{path}/b", f"{path}/../snapshot/a"])
    with pytest.raises(TypeError, match="list of paths"):
        Snapshot.take(f"{path}/a", app_state(1.0), then=f"{path}/b")
    take(f"{path}/there", 2.0)
    with pytest.raises(memstore.AlreadyExistsError):
        Snapshot.take(f"{path}/a", app_state(1.0), then=[f"{path}/there"])
    assert os.listdir(path) == ["there"]


def test_increments_of_each_tier_share_with_their_own(path: str) -> None:
    state = app_state(1.0) | {"more": StateDict({f"w{i}": torch.full((1000,), float(i)) for i in range(20)})}
    for step in range(3):
        state["state"]["number"] = float(step)
        state["more"][f"w{step}"] += 1
        base = "latest" if step != 1 else f"{path}/memory/0"
        pending = Snapshot.async_take(f"{path}/memory/{step}", state, base=base, then=[f"{path}/disk/{step}"])
        pending.wait()
    for tier in ("memory", "disk"):
        links = [os.stat(f"{path}/{tier}/2/{name}").st_nlink for name in os.listdir(f"{path}/{tier}/2")]
        assert max(links) == 3, (tier, links)
        Snapshot(f"{path}/{tier}/2").verify()
        assert Snapshot(f"{path}/{tier}/2").read_object("0/more/w1")[0].item() == 2.0


# --- the next tier fails, or the process is killed in it --------------------------------------------------------------


def _full_disk(folder: str, asynchronous: bool, path: str) -> None:
    fill(folder, leave=1 << 20)
    state = app_state(1.0) | {"large": StateDict(x=torch.zeros(2 << 20, dtype=torch.uint8))}
    with pytest.raises(memstore.StoreFullError):
        if asynchronous:
            pending = Snapshot.async_take(f"{path}/memory", state, then=[f"{folder}/disk"])
            wait_until(pending.done)
            memory, disk = pending.status()
            assert (memory.state, disk.state) == ("whole", "failed") and "No space" in str(disk.error)
            pending.wait()
        else:
            Snapshot.take(f"{path}/memory", state, then=[f"{folder}/disk"])
    assert not os.path.exists(f"{folder}/disk")
    assert number_in(f"{path}/memory") == 1.0
    # The other way round, the disk has it, and who waits is told.
    with pytest.warns(RuntimeWarning, match="there is no snapshot in"):
        if asynchronous:
            found = Snapshot.async_take(f"{folder}/memory", state, then=[f"{path}/disk"]).wait()
        else:
            found = Snapshot.take(f"{folder}/memory", state, then=[f"{path}/disk"])
    assert found.path == f"{path}/disk" and restored(found) == 1.0
    assert not os.path.exists(f"{folder}/memory")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_a_tier_that_is_full_leaves_the_others(asynchronous: bool, path: str) -> None:
    on_small_tmpfs(4, _full_disk, asynchronous, path)


def _takes_and_stops(wire: Wire, path: str) -> None:
    state = app_state(1.0) | {"large": StateDict(x=torch.zeros(128 << 20, dtype=torch.uint8))}
    pending = Snapshot.async_take(f"{path}/memory", state, then=[f"{path}/disk"])
    wire.send([tier._write.writer for tier in pending._take._tiers])
    wire.receive()


def test_a_writer_that_is_killed_in_the_second_tier_leaves_the_first_and_no_half_of_the_second(path: str) -> None:
    with Child(_takes_and_stops, path) as trainer:
        first, second = trainer.receive()
        assert first != second  # a slow disk keeps nobody from memory
        wait_until(lambda: [name for name in os.listdir(f"{path}/disk") if name.endswith(".safetensors")])
        os.kill(second, signal.SIGSTOP)
        is_written = os.path.exists(f"{path}/disk/{MANIFEST}")
        os.kill(trainer.process.pid, signal.SIGKILL)  # type: ignore[arg-type] # pyright: ignore
        os.kill(second, signal.SIGKILL)
    wait_until(lambda: os.path.exists(f"{path}/memory/{MANIFEST}"))
    assert number_in(f"{path}/memory") == 1.0
    assert restored(Snapshot(f"{path}/memory", then=[f"{path}/disk"])) == 1.0
    if not is_written:
        with pytest.raises(memstore.NotAStoreError):
            Snapshot(f"{path}/disk").verify()
        take(f"{path}/disk", 2.0)  # over what is left
        assert number_in(f"{path}/disk") == 2.0


def test_a_trainer_that_is_killed_leaves_both_to_the_writers(path: str) -> None:
    with Child(_takes_and_stops, path) as trainer:
        trainer.receive()
        os.kill(trainer.process.pid, signal.SIGKILL)  # type: ignore[arg-type] # pyright: ignore
    wait_until(lambda: os.path.exists(f"{path}/disk/{MANIFEST}") and os.path.exists(f"{path}/memory/{MANIFEST}"))
    for tier in ("memory", "disk"):
        assert number_in(f"{path}/{tier}") == 1.0


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks_take(rank: int, path: str) -> tuple[str, float]:
    state = {"state": StateDict(x=torch.full((9,), float(rank)))}
    Snapshot.take(f"{path}/memory", state, then=[f"{path}/disk"])
    pending = Snapshot.async_take(f"{path}/memory2", state, then=[f"{path}/disk2"])
    pending.wait()
    dist.barrier()
    # Each rank has a memory of its own, and rank 1's host was started again.
    mine = f"{path}/memory-of-{rank}"
    if rank == 0:
        shutil.copytree(f"{path}/memory", mine)
    dist.barrier()
    state["state"]["x"].fill_(-1)
    snapshot = Snapshot(mine, then=[f"{path}/disk"])
    snapshot.restore(state)
    return snapshot._open().path, state["state"]["x"][0].item()


def test_all_ranks_restore_from_one_tier(path: str) -> None:
    assert all_right(on_ranks(2, _ranks_take, path)) == [(f"{path}/disk", 0.0), (f"{path}/disk", 1.0)]
    for name in ("memory", "disk", "memory2", "disk2"):
        Snapshot(f"{path}/{name}").verify()


def _one_ranks_disk_is_full(rank: int, path: str) -> str:
    from memstore.snapshot.storage import FileStorage

    write = FileStorage.write

    def full(self: FileStorage, *arguments: Any, **options: Any) -> bytes:
        if rank == 1 and self.path.endswith("memory"):
            raise memstore.StoreFullError("there is no room", code=28)
        return write(self, *arguments, **options)

    FileStorage.write = full
    with contextlib.suppress(AssertionError), pytest.warns(RuntimeWarning, match="there is no snapshot in"):
        found = Snapshot.take(f"{path}/memory", {"state": StateDict(x=torch.ones(9))}, then=[f"{path}/disk"])
    return found.path


def test_a_tier_that_fails_on_one_rank_fails_on_all_and_the_next_is_written(path: str) -> None:
    assert all_right(on_ranks(2, _one_ranks_disk_is_full, path)) == [f"{path}/disk"] * 2
    Snapshot(f"{path}/disk").verify()
    assert not os.path.exists(f"{path}/memory")
