"""What the tests of checkpoints call on ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import memstore
from memstore.integrations import dcp
from memstore.integrations.dcp import SavePlanner, StorageReader, StorageWriter
from tests.integrations.dcp.states import load, save
from tests.ranks.meshes import mesh_of

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
    tensor = distribute_tensor(whole, mesh_of(saved[0]), _placements(saved[1]))
    save({"w": tensor, "step": 5}, StorageWriter(source, key=key), planner=SavePlanner())
    found: list[bool] = []
    for shape, placements in loaded:
        target = {"w": zeros([13, 10], device_mesh=mesh_of(shape), placements=_placements(placements))}
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


def sharded_and_plain(place: str, key: str | None) -> list[bool]:
    """Saves a ShardedTensor and a plain tensor, and loads each as the other. Whether both are right, for each spec."""
    whole, source = torch.arange(200, dtype=torch.float32).view(10, 20), opened(place, key)
    found: list[bool] = []
    for spec in SPECS:
        state = {"sharded": sharded_tensor.zeros(spec, 10, 20), "plain": whole}
        for shard in state["sharded"].local_shards():
            shard.tensor.copy_(-_part(whole, shard.metadata))
        save(state, StorageWriter(source, key=key))
        target = {"sharded": torch.zeros(10, 20), "plain": sharded_tensor.zeros(spec, 10, 20)}
        load(target, StorageReader(source, key=key))
        shards = target["plain"].local_shards()
        right = all(torch.equal(shard.tensor, _part(whole, shard.metadata)) for shard in shards)
        found.append(right and torch.equal(target["sharded"], -whole))
    return found


def _wrapped(starts: list[int], rows_of: torch.Tensor) -> DTensor:
    """A DTensor of which each rank holds the rows from its start to that of the next rank, as `rows_of` has them."""
    rank = dist.get_rank()
    start, stop = starts[rank], [*starts[1:], 16][rank]
    wrapper = LocalShardsWrapper(local_shards=[rows_of[start:stop]], local_offsets=[(start, 0)])
    mesh = mesh_of((4,))
    return DTensor.from_local(wrapper, mesh, [Shard(0)], shape=torch.Size([16, 2]), stride=(2, 1))


def wrapped_shards(place: str, key: str | None, asynchronous: bool = False) -> bool:
    """Saves rows that are spread unevenly, in torch's wrappers, and loads them spread otherwise."""
    source, whole, target = opened(place, key), torch.arange(32.0).view(16, 2), torch.zeros(16, 2)
    changing = whole.clone()
    state = {"w": _wrapped([0, 4, 7, 11], changing)}
    if asynchronous:
        future: Any = dcp.async_save(state, checkpoint_id=place)
        changing.zero_()
        future.result()
    else:
        save(state, StorageWriter(source, key=key))
    starts = [0, 6, 8, 9]
    load({"w": _wrapped(starts, target)}, StorageReader(source, key=key))
    rank = dist.get_rank()
    mine = slice(starts[rank], [*starts[1:], 16][rank])
    return torch.equal(target[mine], whole[mine]) and int(target.count_nonzero()) <= whole[mine].numel()


# --- how torch calls a storage ---------------------------------------------------------------------------------------


def with_cached_plans(place: str, key: str | None) -> list[list[float]]:
    """Saves again and again with a planner that caches plans; what each save has."""
    source, mesh, rank = opened(place, key), mesh_of((4,)), dist.get_rank()
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


def rows(value: float) -> Any:
    return distribute_tensor(torch.full((16, 4), value), mesh_of((dist.get_world_size(),)), [Shard(0)])


def save_rows(place: str, key: str | None, value: float, dies: bool = False) -> None:
    kind = _Dies if dies else StorageWriter
    save({"w": rows(value)}, kind(opened(place, key), key=key))


def load_rows(place: str, key: str | None, dies: bool = False) -> float:
    target = {"w": rows(0.0)}
    load(target, (_DiesReading if dies else StorageReader)(opened(place, key), key=key))
    return float(target["w"].to_local().mean())


class _Failing(SavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise ArithmeticError("rank 2 has no data")
        return super().resolve_data(write_item)


def save_with_a_failing_planner(place: str, key: str | None) -> str:
    try:
        save({"w": rows(9.0)}, StorageWriter(opened(place, key), key=key), planner=_Failing())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
