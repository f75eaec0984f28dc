"""What the tests of checkpoints call on ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memstore
from memstore.integrations import dcp
from memstore.integrations.dcp import SavePlanner, Stager, StorageReader, StorageWriter
from tests.integrations.dcp.states import load, save

Mesh = tuple[int, ...]


def opened(place: str, key: str | None) -> Any:
    """A path, or a store at it."""
    return place if key is None else memstore.open(place)


def _placements(text: str) -> list[Any]:
    return [Replicate() if one == "R" else Shard(int(one)) for one in text]


def _whole() -> torch.Tensor:
    return torch.arange(13 * 10, dtype=torch.float32).view(13, 10)


def reshard(place: str, key: str | None, saved: tuple[Mesh, str], loaded: list[tuple[Mesh, str]]) -> list[bool]:
    """Saves a DTensor in one layout, and loads it in others. Whether each is right."""
    source, whole = opened(place, key), _whole()
    tensor = distribute_tensor(whole, init_device_mesh("cpu", saved[0]), _placements(saved[1]))
    save({"w": tensor, "step": 5}, StorageWriter(source, key=key), planner=SavePlanner())
    found: list[bool] = []
    for shape, placements in loaded:
        target = {"w": zeros([13, 10], device_mesh=init_device_mesh("cpu", shape), placements=_placements(placements))}
        load(target, StorageReader(source, key=key))
        found.append(torch.equal(target["w"].full_tensor(), whole))
    return found


SPECS = [
    ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:2", "rank:3"]),
    ChunkShardingSpec(dim=1, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
    EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[0, 0], shard_sizes=[7, 20], placement="rank:3"),
            ShardMetadata(shard_offsets=[7, 0], shard_sizes=[1, 20], placement="rank:0"),
            ShardMetadata(shard_offsets=[8, 0], shard_sizes=[2, 20], placement="rank:3"),
        ]
    ),
]


def sharded_tensors(place: str, key: str | None, first: int, second: int) -> bool:
    """Saves a ShardedTensor by one spec, of which a rank may have several parts or none, and loads it by another."""
    whole = torch.arange(200, dtype=torch.float32).view(10, 20)
    state = {"w": sharded_tensor.zeros(SPECS[first], 10, 20)}
    for shard in state["w"].local_shards():
        shard.tensor.copy_(_part(whole, shard.metadata))
    source = opened(place, key)
    save(state, StorageWriter(source, key=key))
    target = {"w": sharded_tensor.zeros(SPECS[second], 10, 20)}
    load(target, StorageReader(source, key=key))
    return all(torch.equal(shard.tensor, _part(whole, shard.metadata)) for shard in target["w"].local_shards())


def _part(whole: torch.Tensor, metadata: Any) -> torch.Tensor:
    (row, column), (rows, columns) = metadata.shard_offsets, metadata.shard_sizes
    return whole[row : row + rows, column : column + columns]


# --- models -----------------------------------------------------------------------------------------------------------


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))


def _spread(model: torch.nn.Module, how: str) -> torch.nn.Module:
    if how == "FSDP2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    if how == "HSDP":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if how == "TP":
        return parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
    if how == "FSDP2 and TP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    return model


def trained(how: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = _spread(_model(seed), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _full(entry) for key, entry in value.items()}
    return value


def model_and_optimizer(place: str, key: str | None, saved: str, loaded: str, asynchronous: bool = False) -> bool:
    """Trains a model for a step, saves it, and loads it into one that is spread otherwise."""
    source = opened(place, key)
    model, optimizer = trained(saved, 1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    expected = {name: _full(value).clone() for name, value in state["model"].items()}
    moments = _full(state["optimizer"])["state"]["0.weight"]["exp_avg"].clone()
    if asynchronous:
        _save_asynchronously(state, source, key, model)
    else:
        save(state, StorageWriter(source, key=key), planner=SavePlanner())
    other, others = trained(loaded, 2)
    target = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    load(target, StorageReader(source, key=key), planner=dcp.LoadPlanner())
    set_state_dict(other, others, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    found = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    same = all(torch.equal(_full(value), expected[name]) for name, value in found["model"].items())
    return same and torch.equal(_full(found["optimizer"])["state"]["0.weight"]["exp_avg"], moments)


def _save_asynchronously(state: Any, source: Any, key: str | None, model: torch.nn.Module) -> None:
    future: Any = state_dict_saver.async_save(
        state, storage_writer=StorageWriter(source, key=key), planner=SavePlanner(), async_stager=Stager()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    future.result()


def train_while_saving(place: str) -> tuple[bool, float]:
    """Trains with FSDP2 while a save runs; whether the checkpoint has what the weights were when it was called."""
    model, optimizer = trained("FSDP2", 1)
    right = True
    for step in range(3):
        state = {"model": {name: value.detach() for name, value in model.state_dict().items()}, "step": step}
        expected = {name: value.to_local().clone() for name, value in state["model"].items()}
        future: Any = dcp.async_save(state, checkpoint_id=place)
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        future.result()
        target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}, "step": -1}
        dcp.load(target, checkpoint_id=place)
        right &= target["step"] == step
        right &= all(torch.equal(value.to_local(), expected[name]) for name, value in target["model"].items())
    return right, float(target["step"])


# --- how torch calls a storage ---------------------------------------------------------------------------------------


def with_cached_plans(place: str, key: str | None) -> list[list[float]]:
    """Saves again and again with a planner that caches plans; what each save has."""
    source, mesh, rank = opened(place, key), init_device_mesh("cpu", (4,)), dist.get_rank()
    found: list[list[float]] = []
    for step in range(4):
        rows = 8 if step < 3 else 12  # the last one's plans are others
        state = {"w": distribute_tensor(torch.full((rows, 2), float(step)), mesh, [Shard(0)]), f"own {rank}": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, StorageWriter(source, key=key), planner=planner)
        target = {"w": zeros([rows, 2], device_mesh=mesh, placements=[Shard(0)]), f"own {rank}": -1}
        load(target, StorageReader(source, key=key))
        found.append([float(target["w"].full_tensor().mean()), target[f"own {rank}"]])
    if key is not None:
        assert list(source.keys()) == [key], "what told ranks of the save is gone"
    return found


def without_collectives(place: str, key: str | None) -> float:
    """Each rank has a checkpoint of its own."""
    source, rank = opened(place, key), dist.get_rank()
    for value in (1.0, 2.0):
        save({"w": torch.full((3,), rank + value)}, StorageWriter(source, key=key), use_collectives=False)
    target = {"w": torch.zeros(3)}
    load(target, StorageReader(source, key=key))
    return float(target["w"][0]) - rank


class _Dies(StorageWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


class _DiesReading(StorageReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_data(plan, planner)


def _rows(value: float) -> Any:
    return distribute_tensor(torch.full((16, 4), value), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save_rows(place: str, key: str | None, value: float, dies: bool = False) -> None:
    kind = _Dies if dies else StorageWriter
    save({"w": _rows(value)}, kind(opened(place, key), key=key))


def load_rows(place: str, key: str | None, dies: bool = False) -> float:
    target = {"w": _rows(0.0)}
    load(target, (_DiesReading if dies else StorageReader)(opened(place, key), key=key))
    return float(target["w"].to_local().mean())


class _Failing(SavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise ArithmeticError("rank 2 has no data")
        return super().resolve_data(write_item)


def save_with_a_failing_planner(place: str, key: str | None) -> str:
    try:
        save({"w": _rows(9.0)}, StorageWriter(opened(place, key), key=key), planner=_Failing())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
