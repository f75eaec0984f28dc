"""Managers that save increments, and to several tiers: retention, kills, a second manager, memory that is lost."""

from __future__ import annotations

import os
import random
import shutil
from typing import Any

import pytest
import torch

import memstore
from memstore import CheckpointManager, Snapshot, StateDict
from memstore.snapshot import load_manifest
from tests.checkpoints.states import folders, whole
from tests.children import Child, Wire, in_child
from tests.snapshot.ranks import all_right, on_ranks
from tests.support import faults

LEAVES = 20


class Run:
    """A state of which a few leaves change in each step, and what it was."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.values = StateDict({f"w{i}": torch.full((500,), float(i)) for i in range(LEAVES)}, step=0)
        self.was: dict[int, list[float]] = {}

    def step(self, manager: CheckpointManager, step: int) -> None:
        for leaf in self.chance.sample(range(LEAVES), self.chance.choice([0, 1, 3])):
            self.values[f"w{leaf}"] += 1
        self.values["step"] = step
        self.was[step] = self.sums()
        assert manager.save(step, {"state": self.values})

    def sums(self) -> list[float]:
        return [self.values[f"w{i}"].sum().item() for i in range(LEAVES)]

    def check(self, manager: CheckpointManager) -> None:
        now = {name: value.clone() if name != "step" else value for name, value in self.values.items()}
        for step in manager.steps():
            manager.restore({"state": self.values}, step)
            assert self.values["step"] == step and self.sums() == self.was[step]
        self.values.update(now)


def linked(path: str) -> int:
    return sum(os.stat(f"{path}/{name}").st_nlink > 1 for name in os.listdir(path) if name.endswith(".safetensors"))


BACKENDS = pytest.mark.parametrize("backend", ["snapshot", "dcp"])


@BACKENDS
@pytest.mark.parametrize("async_", [False, True])
def test_any_step_may_be_removed_and_those_that_stay_are_whole(root: str, async_: bool, backend: Any) -> None:
    run, options = Run(), {"async_": async_, "incremental": True, "backend": backend}
    with CheckpointManager(root, keep_last=2, keep_every=4, **options) as manager:
        for step in range(12):
            run.step(manager, step)
    assert manager.steps() == [0, 4, 8, 10, 11]
    run.check(manager)
    assert linked(f"{root}/step-000011")
    for name in whole(root):
        Snapshot(f"{root}/{name}").verify()
        needed = 4 * 500 * LEAVES
        assert load_manifest(f"{root}/{name}").nbytes < 2 * needed + 20_000


def test_each_so_many_th_save_is_whole(root: str) -> None:
    run = Run()
    with CheckpointManager(root, keep_last=None, async_=False, incremental=3) as manager:
        for step in range(1, 8):
            run.step(manager, step)
    own = [step for step in range(1, 8) if "state.safetensors" in os.listdir(f"{root}/step-{step:06}")]
    assert own == [1, 3, 6]
    run.check(manager)


def test_arguments_that_cannot_be_meant(root: str) -> None:
    with pytest.raises(ValueError, match="incremental"):
        CheckpointManager(root, incremental=0)
    with pytest.raises(TypeError, match="list of paths"):
        CheckpointManager(root, then=root)


def _die(root: str, number: int) -> None:
    manager = CheckpointManager(root, keep_last=1, async_=False, incremental=True)
    state = StateDict({f"w{i}": torch.full((500,), float(i)) for i in range(LEAVES)}, step=2)
    with faults.at_step(number, faults.die, after=True):
        manager.save(2, {"state": state})


def test_a_manager_that_is_killed_while_it_saves_an_increment_or_removes_its_base(root: str) -> None:
    def begin(there: str) -> tuple[CheckpointManager, Run]:
        run, manager = Run(), CheckpointManager(there, keep_last=1, async_=False, incremental=True)
        run.step(manager, 1)
        return manager, run

    manager, run = begin(f"{root}-recorded")
    names = faults.record(lambda: run.step(manager, 2))
    links = [number for number, name in enumerate(names, 1) if name == "link"]
    unlinks = [number for number, name in enumerate(names, 1) if name == "unlink" and number > links[-1]]
    for i, number in enumerate([links[-3], links[-2], links[-1], unlinks[-3], unlinks[-1]]):
        there = f"{root}-{i}"
        manager, run = begin(there)
        with pytest.raises(RuntimeError, match="-9"):
            in_child(_die, there, number)
        assert whole(there) and whole(there) <= {"step-000001", "step-000002"}
        for name in whole(there):
            Snapshot(f"{there}/{name}").verify()
        again = CheckpointManager(there, keep_last=1, async_=False, incremental=True)
        again.restore({"state": run.values})
        run.step(again, 3)
        assert folders(there) == ["step-000003"]
        run.check(again)


def _saves(wire: Wire, root: str, seed: int) -> int:
    manager = CheckpointManager(root, keep_last=2, async_=False, incremental=True)
    run = Run(seed)
    wire.send()
    wire.receive()
    for step in range(12):
        run.step(manager, 2 * step + seed)
    return seed


@pytest.mark.filterwarnings("ignore:.*restored none")
def test_two_managers_on_one_root_share_with_each_others_steps_and_remove_them(root: str) -> None:
    jobs = [Child(_saves, root, seed) for seed in range(2)]
    try:
        for job in jobs:
            job.receive()
        for job in jobs:
            job.send()
        assert [job.receive() for job in jobs] == [0, 1]
    finally:
        for job in jobs:
            job.__exit__()
    for name in whole(root):
        Snapshot(f"{root}/{name}").verify()
    assert whole(root)


# --- tiers ------------------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("async_", [False, True])
def test_memory_keeps_the_newest_and_the_disk_what_the_rules_say(root: str, async_: bool, backend: Any) -> None:
    run, options = Run(), {"keep_last": 3, "async_": async_, "incremental": True, "then": [f"{root}/disk"]}
    options["backend"] = backend
    with CheckpointManager(f"{root}/memory", **options) as manager:
        for step in range(6):
            run.step(manager, step)
    assert folders(f"{root}/memory") == ["step-000005"]
    assert folders(f"{root}/disk") == ["step-000003", "step-000004", "step-000005"]
    assert manager.steps() == [3, 4, 5] and manager.latest() == 5
    run.check(manager)
    # The host was started again.
    shutil.rmtree(f"{root}/memory")
    again = CheckpointManager(f"{root}/memory", **options)
    assert again.latest() == 5 and again.restore({"state": run.values}) == 5 and run.sums() == run.was[5]
    with again:
        run.step(again, 6)
    assert folders(f"{root}/memory") == ["step-000006"] and again.steps() == [4, 5, 6]
    run.check(again)


def test_a_step_that_only_memory_has_is_the_one_to_continue_from(root: str) -> None:
    run, options = Run(), {"async_": False, "then": [f"{root}/disk"]}
    manager = CheckpointManager(f"{root}/memory", **options)
    run.step(manager, 1)
    run.step(manager, 2)
    shutil.rmtree(f"{root}/disk/step-000002")
    again = CheckpointManager(f"{root}/memory", **options)
    assert again.latest() == 2 and again.steps() == [1, 2]
    run.check(again)
    run.step(again, 3)
    assert folders(f"{root}/memory") == ["step-000003"] and folders(f"{root}/disk") == ["step-000001", "step-000003"]


def test_a_save_has_one_number_in_all_tiers(root: str) -> None:
    """Else a step of another run's memory could be taken for the newest."""
    run = Run()
    on_disk = CheckpointManager(f"{root}/disk", async_=False)
    for step in range(5):
        run.step(on_disk, step)
    both = CheckpointManager(f"{root}/memory", async_=False, then=[f"{root}/disk"])
    both.restore({"state": run.values})
    run.step(both, 5)
    run.step(on_disk, 6)
    assert both.latest() == 6
    run.check(both)


def _ranks(rank: int, root: str, backend: str) -> list[int]:
    options: dict[str, Any] = {"keep_last": 2, "incremental": True, "then": [f"{root}/disk"], "replicated": ["state/*"]}
    options["backend"] = backend
    run = Run()
    with CheckpointManager(f"{root}/memory", **options) as manager:
        for step in range(4):
            run.step(manager, step)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(f"{root}/memory")
    torch.distributed.barrier()
    run.check(CheckpointManager(f"{root}/memory", **options))
    return manager.steps()


@BACKENDS
def test_ranks_save_increments_to_tiers(root: str, backend: str) -> None:
    assert all_right(on_ranks(2, _ranks, root, backend)) == [[2, 3]] * 2
    for name in whole(f"{root}/disk"):
        Snapshot(f"{root}/disk/{name}").verify()
        assert linked(f"{root}/disk/{name}")


def test_an_old_memstore_that_removes_a_base_does_no_harm(root: str) -> None:
    """It knows nothing of increments, and unlinks what it finds."""
    run = Run()
    manager = CheckpointManager(root, keep_last=None, async_=False, incremental=True)
    for step in range(4):
        run.step(manager, step)
    for step in range(3):
        for name in os.listdir(f"{root}/step-{step:06}"):
            os.unlink(f"{root}/step-{step:06}/{name}")
    memstore.Snapshot(f"{root}/step-000003").verify()
    run.check(manager)
