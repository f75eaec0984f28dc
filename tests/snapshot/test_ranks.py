"""Snapshots of several ranks: what is shared is written once, and restored by other ranks in other layouts."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import memstore
from memstore import Snapshot, StateDict, TensorShard
from tests.snapshot.ranks import all_right, on_ranks


def whole() -> torch.Tensor:
    return torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def _take_own(rank: int, path: str) -> None:
    Snapshot.take(path, {"state": StateDict(rank=rank, x=torch.full((3,), float(rank)), both=torch.ones(2))})


def _restore_own(rank: int, path: str) -> Any:
    state = StateDict(rank=-1, x=torch.zeros(3))
    Snapshot(path).restore({"state": state})
    return state["rank"], state["x"].tolist()


def test_each_rank_gets_its_own_values_and_a_new_one_those_of_rank_0(path: str) -> None:
    all_right(on_ranks(2, _take_own, path))
    found = all_right(on_ranks(3, _restore_own, path))
    assert found == [(0, [0.0] * 3), (1, [1.0] * 3), (0, [0.0] * 3)]
    Snapshot(path).verify()
    assert Snapshot(path).read_object("1/state/rank") == 1
    assert Snapshot(path).metadata.world_size == 2


def _take_replicated(rank: int, path: str, globs: list[str]) -> list[str]:
    state = StateDict(**{f"w{i}": torch.full((1000,), float(i)) for i in range(8)}, own=torch.tensor(rank))
    before = set(os.listdir("/proc/self/fd"))
    Snapshot.take(path, {"state": state}, replicated=globs)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the folder, if at all
    return os.listdir(path)


@pytest.mark.parametrize(
    "globs", [["state/w*"], pytest.param(["**"], marks=pytest.mark.full), ["0/state/w*", "1/state/w*"]]
)
def test_replicated_tensors_are_written_once_and_balanced(path: str, globs: list[str]) -> None:
    all_right(on_ranks(2, _take_replicated, path, globs))
    sizes = [os.path.getsize(f"{path}/{name}") for name in os.listdir(path) if name.endswith(".safetensors")]
    assert len(sizes) == 2 and sum(sizes) < 8 * 4000 + 3000 and max(sizes) - min(sizes) < 1000
    for rank in (0, 1):
        assert Snapshot(path).read_object(f"{rank}/state/w3").tolist() == [3.0] * 1000
    if globs != ["**"]:
        assert [Snapshot(path).read_object(f"{rank}/state/own").item() for rank in (0, 1)] == [0, 1]


def _take_ddp(rank: int, path: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((2, 4), float(rank))).sum().backward()
    optimizer.step()
    Snapshot.take(path, {"model": model, "optimizer": optimizer}, replicated=["optimizer/*"])
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


def _restore_ddp(rank: int, path: str) -> Any:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (4, 4)
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


def test_modules_of_ddp_are_written_once_and_read_by_other_numbers_of_ranks(path: str) -> None:
    want = all_right(on_ranks(2, _take_ddp, path))[0]
    with open(f"{path}/model.safetensors.index.json") as file:
        assert set(json.load(file)["weight_map"]) == set(want)
    assert all_right(on_ranks(3, _restore_ddp, path)) == [want] * 3


LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
}


def _tensor(layout: str, world_size: int, value: torch.Tensor) -> Any:
    if layout == "plain":
        return value.clone()
    if layout == "grid":
        mesh = init_device_mesh("cpu", (2, world_size // 2))
        return distribute_tensor(value, mesh, [Shard(1), Shard(0)], src_data_rank=None)
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2))
        return distribute_tensor(value, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(value, mesh, LAYOUTS[layout], src_data_rank=None)


def _take_sharded(rank: int, path: str, layout: str) -> int:
    value = _tensor(layout, dist.get_world_size(), whole())
    snapshot = Snapshot.take(path, {"state": StateDict(x=value)}, replicated=["state/x"])
    return snapshot.metadata.nbytes


def _restore_sharded(rank: int, path: str, layout: str) -> Any:
    state = StateDict(x=_tensor(layout, dist.get_world_size(), torch.zeros(7, 6)))
    Snapshot(path).restore({"state": state})
    found = state["x"]
    return (found.full_tensor() if isinstance(found, DTensor) else found).tolist()


full = pytest.mark.full


@pytest.mark.parametrize(
    "layout, world_size",
    [
        ("columns", 3),
        ("hybrid", 4),
        pytest.param("rows", 2, marks=full),
        pytest.param("replicated", 2, marks=full),
        pytest.param("grid", 4, marks=full),
        pytest.param("plain", 2, marks=full),
    ],
)
def test_tensors_go_from_any_layout_to_any_other(path: str, layout: str, world_size: int) -> None:
    sizes = all_right(on_ranks(world_size, _take_sharded, path, layout))
    assert sizes[0] < 7 * 6 * 4 + 300 * world_size
    Snapshot(path).verify()
    assert torch.equal(Snapshot(path).read_object("0/state/x"), whole())
    assert torch.equal(Snapshot(path).get_state_dict_for_key("state")["x"], whole())
    targets = {"rows": [("columns", 2)], "columns": [("plain", 1)], "grid": [("rows", 3)], "hybrid": [("grid", 4)]}
    for target, ranks in targets.get(layout, [("rows", 2)]):
        assert all_right(on_ranks(ranks, _restore_sharded, path, target)) == [whole().tolist()] * ranks


def _take_fsdp(rank: int, path: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    Snapshot.take(path, {"model": model, "optimizer": optimizer})
    return _fsdp_values(model, optimizer)


def _fsdp_values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    weights = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    return weights, [state["exp_avg"].full_tensor().tolist() for state in optimizer.state.values()]


def _restore_fsdp(rank: int, path: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    found = _fsdp_values(model, optimizer)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return found


def test_fsdp_and_an_optimizer_that_has_no_state_yet(path: str) -> None:
    want = all_right(on_ranks(2, _take_fsdp, path))[0]
    assert all_right(on_ranks(3, _restore_fsdp, path)) == [want] * 3
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    Snapshot(path).restore({"model": model})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == want[0]


def _take_shards(rank: int, path: str, rows: list[tuple[int, int]]) -> None:
    start, stop = rows[rank]
    Snapshot.take(path, {"state": StateDict(x=TensorShard(whole()[start:stop], (7, 6), (start, 0)))})


def test_parts_that_leave_a_hole_or_overlap_are_refused_on_all_ranks(path: str) -> None:
    for rows, match in (([(0, 3), (4, 7)], "36 of its 42"), ([(0, 4), (3, 7)], "overlap")):
        for outcome in on_ranks(2, _take_shards, path, rows):
            assert isinstance(outcome, memstore.ShardMismatchError) and match in str(outcome)
        assert not os.path.exists(path)
    all_right(on_ranks(2, _take_shards, path, [(0, 3), (3, 7)]))
    target = TensorShard(torch.zeros(2, 6), (7, 6), (2, 0))
    assert Snapshot(path).read_object("0/state/x", target) is target
    assert torch.equal(target.local, whole()[2:4])


def _take_pipeline(rank: int, path: str) -> None:
    model = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
    torch.nn.init.constant_(model[f"layer{rank}"].weight, float(rank))
    Snapshot.take(path, {"model": model})


def test_layers_of_several_ranks_are_put_together(path: str) -> None:
    all_right(on_ranks(2, _take_pipeline, path))
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(2, 2) for i in range(2)})
    Snapshot(path).restore({"model": model})
    assert [model[f"layer{i}"].weight.mean().item() for i in range(2)] == [0.0, 1.0]


def _restore_swapped(rank: int, path: str) -> Any:
    model = torch.nn.ModuleDict({f"layer{1 - rank}": torch.nn.Linear(2, 2)})
    Snapshot(path).restore({"model": model})
    refused = torch.nn.ModuleDict({"layer0": torch.nn.Linear(2, 2)})
    with pytest.raises(memstore.StructureMismatchError, match=r"layer1\.bias: unexpected"):
        Snapshot(path).restore({"model": refused})
    return model[f"layer{1 - rank}"].state_dict()["weight"].mean().item()


def test_layers_may_be_on_other_ranks_than_those_that_saved_them_but_each_on_one(path: str) -> None:
    all_right(on_ranks(2, _take_pipeline, path))
    assert all_right(on_ranks(2, _restore_swapped, path)) == [1.0, 0.0]


def _fail(rank: int, path: str, where: str) -> None:
    class Broken(StateDict):
        def state_dict(self) -> dict[str, Any]:
            if rank == 1 and where == "state_dict":
                raise ArithmeticError("it has no state today")
            return super().state_dict()

    value: Any = complex if rank == 1 and where == "leaf" else 1
    app_state: Any = {"state": Broken(x=value, y=torch.ones(3) * rank)}
    if rank == 1 and where == "app_state":
        app_state = {"state": 7}
    Snapshot.take(path, app_state)


@pytest.mark.parametrize("where", ["app_state", "state_dict", "leaf"])
def test_a_failure_of_one_rank_is_told_by_all_and_leaves_nothing(path: str, where: str) -> None:
    first, second = on_ranks(2, _fail, path, where)
    assert isinstance(first, memstore.MemstoreError) and str(first).startswith("rank 1"), first
    assert isinstance(second, (ArithmeticError, TypeError)), second
    assert not os.path.exists(path)


class _Summing(StateDict):
    """Its state is a sum over all ranks, as that of a sharded optimizer may be."""

    def state_dict(self) -> dict[str, Any]:
        dist.all_reduce(total := torch.ones(1))
        return {"total": total}


class _Failing(StateDict):
    def state_dict(self) -> dict[str, Any]:
        raise ArithmeticError("it has no state today")


def _fails_before_a_collective(rank: int, path: str) -> tuple[str, float]:
    state = {"a": _Failing() if rank else StateDict(), "b": _Summing()}
    with pytest.raises((ArithmeticError, memstore.MemstoreError)) as raised:
        Snapshot.take(path, state)
    dist.all_reduce(total := torch.full((1,), float(rank)))  # a collective of the training, which must meet no other
    return str(raised.value), total.item()


def test_a_state_dict_that_fails_shifts_no_collective_of_the_others(path: str) -> None:
    (first, first_total), (_, second_total) = all_right(on_ranks(2, _fails_before_a_collective, path))
    assert "rank 1 failed: ArithmeticError" in first and first_total == second_total == 1.0
    assert not os.path.exists(path)


def _differ(rank: int, path: str) -> None:
    state = StateDict(x=torch.zeros(3 + rank))
    Snapshot(path).restore({"model": torch.nn.Linear(2 + rank, 2), "state": state})


def test_a_mismatch_on_one_rank_restores_nothing_on_any(path: str) -> None:
    Snapshot.take(path, {"model": torch.nn.Linear(2, 2), "state": StateDict(x=torch.ones(3))})
    for outcome in on_ranks(2, _differ, path):
        assert isinstance(outcome, memstore.StructureMismatchError) and "model/weight" in str(outcome)


def _take_and_fail_to_restore(rank: int, path: str) -> tuple[str, list[str]]:
    snapshot = Snapshot.take(path if rank == 0 else f"{path}-of-rank-1", {"state": StateDict(x=torch.ones(3))})

    class Broken(StateDict):
        where = ""

        def state_dict(self) -> dict[str, Any]:
            if self.where == "state_dict":
                raise ArithmeticError("no state today")
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            if self.where == "load_state_dict":
                raise ArithmeticError("no loading today")

    said: list[str] = []
    for where in ("path", "app_state", "state_dict", "load_state_dict"):
        state = Broken(x=torch.zeros(3))
        state.where = where if rank else ""
        app_state: Any = {"state": 7 if rank and where == "app_state" else state}
        try:
            Snapshot(f"{path}-not" if rank and where == "path" else path).restore(app_state)
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    return snapshot.path, said


def test_rank_0_says_where_a_snapshot_is_and_a_failure_of_one_rank_to_restore_is_told_by_all(path: str) -> None:
    (first_path, first), (second_path, second) = all_right(on_ranks(2, _take_and_fail_to_restore, path))
    assert first_path == second_path == path
    assert [text.split()[0] for text in second] == ["NoSnapshotError", "TypeError", *["ArithmeticError"] * 2]
    assert len(first) == 4 and all("rank 1" in text for text in first), first
