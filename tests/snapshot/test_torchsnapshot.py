"""What scripts for torchsnapshot do, with no more than the import changed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import memstore as torchsnapshot
from memstore import Snapshot, Stateful
from tests.snapshot.ranks import all_right, on_ranks

EPOCHS, STEPS = 3, 4


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        yield folder


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(
    model: torch.nn.Module, folder: str, restore_from: str | None = None, replicated: list[str] | None = None
) -> str:
    """The loop of torchsnapshot's examples: a snapshot an epoch, all of them with the random state."""
    optim = torch.optim.Adagrad(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=2, gamma=0.5)
    progress = torchsnapshot.StateDict(current_epoch=0)
    app_state: dict[str, Stateful] = {
        "rng_state": torchsnapshot.RNGState(),
        "model": model,
        "optim": optim,
        "scheduler": scheduler,
        "progress": progress,
    }
    if restore_from is not None:
        snapshot = torchsnapshot.Snapshot(path=restore_from)
        snapshot.restore(app_state=app_state)
    while progress["current_epoch"] < EPOCHS:
        for _ in range(STEPS):
            inputs, labels = torch.rand((8, 16)), torch.rand((8, 1))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)
            optim.zero_grad()
            loss.backward()
            optim.step()
        scheduler.step()
        progress["current_epoch"] += 1
        torchsnapshot.Snapshot.take(
            path=f"{folder}/epoch-{progress['current_epoch']}", app_state=app_state, replicated=replicated
        )
    return "".join(str(value.tolist()) for value in model.state_dict().values())


def test_the_loop_of_one_process_is_resumed_bit_for_bit(folder: str) -> None:
    torch.manual_seed(42)
    want = train(network(), f"{folder}/whole")
    torch.manual_seed(1)
    assert train(network(), f"{folder}/resumed", restore_from=f"{folder}/whole/epoch-1") == want


def _train_ddp(rank: int, folder: str, restore_from: str | None) -> str:
    torch.manual_seed(42 if restore_from is None else 1)
    return train(DistributedDataParallel(network()), folder, restore_from, replicated=["**"])


def test_the_loop_of_ddp_is_resumed_bit_for_bit(folder: str) -> None:
    want = all_right(on_ranks(2, _train_ddp, f"{folder}/whole", None))
    assert all_right(on_ranks(2, _train_ddp, f"{folder}/resumed", f"{folder}/whole/epoch-1")) == want
    manifest = Snapshot(f"{folder}/whole/epoch-1").get_manifest()
    entries = {path: entry for path, entry in manifest.items() if "/rng_state/" not in path}  # which differ
    first = {path.removeprefix("0/"): entry for path, entry in entries.items() if path.startswith("0/")}
    assert "model/module.0.weight" in first and "optim/state/0/sum" in first
    assert {f"{rank}/{path}": entry for path, entry in first.items() for rank in (0, 1)} == entries  # written once


def test_objects_are_read_one_by_one(folder: str) -> None:
    model, progress = network(), torchsnapshot.StateDict(steps=7, losses=[0.5, 0.25], name="run")
    snapshot = Snapshot.take(f"{folder}/a", {"model": model, "progress": progress})
    assert snapshot.read_object("0/progress/steps") == 7
    assert snapshot.read_object(path="0/progress/losses/1") == 0.25
    weight = snapshot.read_object("0/model/0.weight")
    assert torch.equal(weight, model[0].weight)
    out = torch.empty_like(model[0].weight)
    assert snapshot.read_object("0/model/0.weight", obj_out=out, memory_budget_bytes=4096) is out
    assert torch.equal(out, model[0].weight)
    manifest = snapshot.get_manifest()
    assert {"0/model/0.weight", "0/progress/steps"} <= manifest.keys()
    assert manifest["0/model/0.weight"].shape == (8, 16) and snapshot.metadata.manifest.keys() == manifest.keys()
    assert snapshot.metadata.world_size == 1
    state_dict = snapshot.get_state_dict_for_key("progress")
    assert state_dict == {"steps": 7, "losses": [0.5, 0.25], "name": "run"}


def test_a_model_that_grew_is_restored_as_far_as_it_fits(folder: str) -> None:
    Snapshot.take(f"{folder}/a", {"model": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})})
    grown = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with pytest.raises(torchsnapshot.StructureMismatchError):
        Snapshot(f"{folder}/a").restore({"model": grown})
    Snapshot(f"{folder}/a").restore({"model": grown}, strict=False)


class _Counter:
    """An object with a state of its own, as a data loader's."""

    def __init__(self) -> None:
        self.count, self.loaded = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": {"epoch": torch.arange(self.count)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.loaded = state_dict["count"], True


def test_objects_with_the_two_methods_need_nothing_else(folder: str) -> None:
    counter, other = _Counter(), _Counter()
    assert isinstance(counter, torchsnapshot.Stateful)
    counter.count = 5
    Snapshot.take(f"file://{folder}/a", {"loader": counter})
    Snapshot(f"{folder}/a").restore({"loader": other})
    assert other.loaded and other.count == 5
    with pytest.raises(TypeError, match="StateDict"):
        Snapshot.take(f"{folder}/b", {"step": 5})


def _own_and_replicated(rank: int, folder: str) -> tuple[int, float]:
    pg = torch.distributed.new_group(list(range(2)))
    state = torchsnapshot.StateDict(own=torch.full((3,), float(rank)), same=torch.ones(3))
    snapshot = Snapshot.take(f"{folder}/a", {"state": state}, pg, ["state/same"])
    state["own"], state["same"] = torch.zeros(3), torch.zeros(3)
    Snapshot(f"{folder}/a", pg=pg).restore({"state": state})
    assert snapshot.path == f"{folder}/a" and state["same"].tolist() == [1.0] * 3
    return rank, state["own"][0].item()


def test_ranks_of_a_group_of_their_own(folder: str) -> None:
    assert all_right(on_ranks(2, _own_and_replicated, folder)) == [(0, 0.0), (1, 1.0)]
    entries = Snapshot(f"{folder}/a").get_manifest()
    assert {"0/state/own", "1/state/own", "0/state/same", "1/state/same"} <= entries.keys()
