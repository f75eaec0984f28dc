"""`memstore checkpoints`: what it lists, and what it removes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
from memstore import CheckpointManager, Snapshot
from tests.checkpoints.states import folders, state
from tests.cli.test_commands import call, call_json, run


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[str]:
    """A root with six steps, the last saves going back, and an unfinished one."""
    root = str(tmp_path / "run")
    with CheckpointManager(root, keep_last=None, async_=False, metric="loss", best="min") as manager:
        for step in (10, 20, 30, 40, 15):
            manager.save(step, state(step), {"loss": abs(step - 21), "rate": float("nan")})
        manager.save(25, state(25))
        os.makedirs(f"{root}/50")
        open(f"{root}/50/_CHECKPOINT_METADATA", "w").close()
        Snapshot.take(f"{root}/step-000060", state(60))
        manager.save(70, state(70))
        os.remove(f"{root}/step-000070/memstore_snapshot.json")
    yield root


def test_steps_are_listed_with_what_they_are(steps: str) -> None:
    lines = call("checkpoints", steps).splitlines()
    assert lines[0].split() == ["step", "size", "age", "state", "metrics"]
    states = {int(line.split()[0]): line for line in lines[1:]}
    assert sorted(states) == [10, 15, 20, 25, 30, 40, 50, 60, 70]
    assert "best" in states[20] and "loss 1, rate nan" in states[20]
    assert "latest" in states[25] and "unfinished" in states[70]
    assert "of another writer" in states[60] and "unreadable: orbax" in states[50]
    assert sum("latest" in line or "best" in line for line in lines) == 2
    assert "best" in next(line for line in call("checkpoints", steps, "--best", "max").splitlines() if " 40 " in line)


def test_the_list_as_json(steps: str) -> None:
    found = {one["step"]: one for one in call_json("checkpoints", steps)}
    assert found[20]["best"] and found[20]["whole"] and found[20]["metrics"] == {"loss": 1.0, "rate": "nan"}
    assert found[25]["latest"] and not found[70]["whole"] and not found[60]["managed"]
    assert found[50]["format"] == "orbax" and found[10]["path"] == f"{steps}/step-000010"
    assert found[10]["nbytes"] == memstore.Snapshot(found[10]["path"]).metadata.nbytes
    assert call_json("checkpoints", f"{steps}/nothing") == []
    assert "no such folder" in call("checkpoints", f"{steps}/nothing")
    assert "it is one itself" in call("checkpoints", f"{steps}/step-000010")


def test_a_step_that_is_being_written_is_told(steps: str) -> None:
    manager = CheckpointManager(steps, keep_last=None)
    claimed = manager._storage.claim(80, {}, None, "snapshot")  # pyright: ignore[reportPrivateUsage]
    found = {one["step"]: one for one in call_json("checkpoints", steps)}
    assert found[80]["being_written"] and not found[70]["being_written"]
    assert json.loads(call("checkpoints", steps, "--prune", "--json"))["removed"] == [f"{steps}/step-000070"]
    assert "step-000080" in folders(steps)
    claimed.held.close()


def test_prune_removes_unfinished_ones_and_by_rules_also_whole_ones(steps: str) -> None:
    before = folders(steps)
    assert "1 checkpoint removed" in call("checkpoints", steps, "--prune")
    assert folders(steps) == [name for name in before if name != "step-000070"]
    said = call("checkpoints", steps, "--prune", "--keep-last", "1", code=2)
    assert "say --yes" in said and len(folders(steps)) == len(before) - 1
    held = Snapshot(f"{steps}/step-000030").view()
    code, output, errors = run(
        ("checkpoints", steps, "--prune", "--keep-last", "2", "--keep-every", "40", "--keep-best", "1", "--yes")
    )
    assert code == 3 and "step-000030 stays: it is being read" in errors and "1 checkpoint removed" in output
    assert folders(steps) == ["50", *(f"step-0000{step}" for step in (15, 20, 25, 30, 40, 60))]
    del held
    call("checkpoints", steps, "--prune", "--keep-best", "1", "--yes")  # the newest stays by itself
    assert folders(steps) == ["50", "step-000020", "step-000025", "step-000060"]
    assert CheckpointManager(steps).latest() == 25


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--keep-last", "1"), "are for --prune"),
        (("--yes",), "--yes is for --prune"),
        (("--prune", "--keep-last", "0"), "x>=1"),
    ],
)
def test_wrong_usage(steps: str, options: tuple[str, ...], says: str) -> None:
    assert says in " ".join(call("checkpoints", steps, *options, code=2).split())


def test_which_is_the_best_has_to_be_said_where_no_manager_did(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    CheckpointManager(root, async_=False).save(1, state(1), {"loss": 2.0})
    assert not call_json("checkpoints", root)[0]["best"]
    assert call_json("checkpoints", root, "--best", "min")[0]["best"]
    assert "--best max or --best min" in call("checkpoints", root, "--metric", "loss", code=2)
    assert "--best max" in call("checkpoints", root, "--prune", "--keep-best", "1", code=2)


def test_what_a_removal_frees_is_told_without_what_other_steps_share(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    values = memstore.StateDict({f"w{i}": torch.full((1000,), float(i)) for i in range(9)})
    with CheckpointManager(root, keep_last=None, async_=False, incremental=True) as manager:
        for step in range(4):
            values[f"w{step}"] += 1
            manager.save(step, {"state": values})
    freed = call_json("checkpoints", root, "--prune", "--keep-last", "1", "--yes")
    assert len(freed["removed"]) == 3 and freed["nbytes"] < 1000  # the last one has all files
    Snapshot(f"{root}/step-000003").verify()
