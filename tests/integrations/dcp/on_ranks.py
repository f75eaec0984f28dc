"""What the tests of checkpoints call on ranks."""

from __future__ import annotations

import errno
import glob
import io
import os
import pickle
import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.futures import Future

import memstore
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
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


def save_and_add(folder: str, changed: int) -> float:
    """Saves, and saves an increment, with other rows on one rank. Returns the mean of what is loaded of that."""
    state = {"w": distribute_tensor(torch.ones(16, 400), mesh_of((dist.get_world_size(),)), [Shard(0)])}
    save(state, StorageWriter(f"{folder}/1"))
    if dist.get_rank() == changed:
        state["w"].to_local().add_(1)
    save(state, StorageWriter(f"{folder}/2", base="latest"))
    state["w"].to_local().zero_()
    load(state, StorageReader(f"{folder}/2"))
    return float(state["w"].to_local().mean())


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


# --- calls of a storage that fail on one rank of several --------------------------------------------------------------


class Failure(NamedTuple):
    """Which call fails on which rank, and who coordinates. `late`: the error is in the future that the call returns."""

    call: str
    rank: int
    coordinator: int = 0
    late: bool = False


SAVES = [
    Failure("set_up_storage_writer", 0),
    Failure("prepare_local_plan", 1),
    Failure("prepare_global_plan", 0),
    Failure("write_data", 2),
    Failure("write_data", 3, late=True),
    Failure("finish", 0),
    Failure("set_up_storage_writer", 1, coordinator=1),
    Failure("write_data", 0, coordinator=3),
    Failure("finish", 1, coordinator=1),
]
LOADS = [
    Failure("read_metadata", 0),
    Failure("read_metadata", 3, coordinator=1),
    Failure("set_up_storage_reader", 0),
    Failure("prepare_local_plan", 1),
    Failure("prepare_global_plan", 2, coordinator=2),
    Failure("read_data", 3),
    Failure("read_data", 0, coordinator=2),
    Failure("read_data", 2, coordinator=3, late=True),
]


def _failing(kind: Any, failure: Failure) -> Any:
    real = getattr(kind, failure.call)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() != failure.rank:
            return real(self, *arguments, **options)
        error = ArithmeticError(f"in {failure.call}")
        if not failure.late:
            raise error
        future: Any = Future()
        future.set_exception(error)
        return future

    return type(kind.__name__, (kind,), {failure.call: call})


def _told(function: Any, failure: Failure) -> list[tuple[int, bool]]:
    """Of which ranks torch tells errors, and whether these are the ones that the call raised there."""
    try:
        function(coordinator_rank=failure.coordinator)
    except CheckpointException as error:
        return sorted((rank, f"in {failure.call}" in str(one[0])) for rank, one in error.failures.items())
    return []


def fail_saves(place: str, key: str | None) -> list[tuple[list[tuple[int, bool]], float]]:
    """What torch tells of each save that fails, and what the checkpoint has after it."""
    source = opened(place, key)
    save_rows(place, key, 1.0)
    found: list[tuple[list[tuple[int, bool]], float]] = []
    for failure in SAVES:
        writer = _failing(StorageWriter, failure)(source, key=key)
        state = {"w": rows(2.0)}
        told = _told(partial(state_dict_saver._save_state_dict, state, writer), failure)
        found.append((told, load_rows(place, key)))
    save_rows(place, key, 3.0)
    assert load_rows(place, key) == 3.0
    return found


def fail_loads(place: str, key: str | None) -> list[tuple[list[tuple[int, bool]], float]]:
    """What torch tells of each load that fails, and what the next one gives."""
    source = opened(place, key)
    save_rows(place, key, 1.0)
    found: list[tuple[list[tuple[int, bool]], float]] = []
    for failure in LOADS:
        reader = _failing(StorageReader, failure)(source, key=key)
        state = {"w": rows(0.0)}
        told = _told(partial(state_dict_loader._load_state_dict, state, reader), failure)
        found.append((told, load_rows(place, key)))
    return found


@contextmanager
def _small_files() -> Generator[None]:
    """This process may write no files that have more than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_again_and_again(place: str) -> tuple[list[str], list[int]]:
    """Which errors saves have on rank 2, that has no room, and how many files are there after each; then one succeeds.

    The errors are kept, as in an `except` clause: by their tracebacks they refer to the writers.
    """
    errors: list[CheckpointException] = []
    there: list[int] = []
    for _ in range(3):
        try:
            if dist.get_rank() == 2:
                with _small_files():
                    save({"w": rows(2.0)}, StorageWriter(place))
            else:
                save({"w": rows(2.0)}, StorageWriter(place))
        except CheckpointException as error:
            errors.append(error)
        there.append(len(glob.glob(f"{place}/*.safetensors")))
        dist.barrier()
    save_rows(place, None, 3.0)
    return [f"{rank}: {type(one[0]).__name__}" for error in errors for rank, one in error.failures.items()], there


def save_in_vain(path: str, failing: int) -> bool:
    """memstore's own call, whose bytes one rank can't write. Returns whether the error arrived."""
    place = "memstore.integrations.dcp.places.write_boxes"

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch(place, fail) if dist.get_rank() == failing else nullcontext():
        try:
            dcp.save({"w": rows(1.0)}, checkpoint_id=path)
        except CheckpointException:
            dist.barrier()
            return True
    return False


# --- what trainers ask of a storage of checkpoints --------------------------------------------------------------------


# -- a trainer's parts, each of which says and takes its own state -----------------------------------------------------


class Model(Stateful):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class Optimizer(Stateful):
    """By the names of parameters, so that ranks with other parameters don't meet."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


class Progress(Stateful):
    """Numbers as tensors, and what the trainer has pickled itself: as bytes, a key a rank, and as a stream."""

    def __init__(self, step: int) -> None:
        self.step, self.losses, self.rows = step, [float(step)], step * 10 + dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {
            "step": torch.tensor(self.step, dtype=torch.int32),
            "losses": losses,
            f"rows of rank {dist.get_rank()}": pickle.dumps(self.rows),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"].item())
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])
        self.rows = pickle.loads(state_dict[f"rows of rank {dist.get_rank()}"])


def _trainer(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    mesh = mesh_of((dist.get_world_size(),))
    model: Any = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 6)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(step):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {
        "model": Model(model),
        "optimizer": Optimizer(model, optimizer),
        "schedule": schedule,
        "progress": Progress(step),
    }


def _shown(trainer: dict[str, Any]) -> Any:
    moments = trainer["optimizer"].optimizer.state[trainer["model"].model[0].weight]["exp_avg"]
    progress = trainer["progress"]
    return (
        float(trainer["model"].model[1].weight.full_tensor().sum()),
        float(moments.full_tensor().sum()),
        trainer["schedule"].last_epoch,
        (progress.step, progress.losses, progress.rows),
    )


def train_on(place: str, key: str | None, planners: str) -> tuple[bool, bool]:
    """Saves a trainer of parts, and goes on from it in a fresh one; then takes its weights only."""
    source, saved = opened(place, key), _trainer(3)
    ours = planners == "memstore"
    save(saved, StorageWriter(source, key=key), planner=SavePlanner() if ours else None)
    fresh = _trainer(1)
    load(fresh, StorageReader(source, key=key), planner=LoadPlanner() if ours else None)
    other = _trainer(1)
    before = _shown(other)
    load({"model": other["model"]}, StorageReader(source, key=key), planner=LoadPlanner() if ours else None)
    after = _shown(other)
    return _shown(fresh) == _shown(saved), after[0] == _shown(saved)[0] and after[1:] == before[1:]


# -- ranks that hold different things ----------------------------------------------------------------------------------


def experts(place: str, key: str | None) -> bool:
    """Tensors that only some ranks hold, spread over these, and keys in another order on each rank."""
    source, rank = opened(place, key), dist.get_rank()
    mesh = mesh_of((2, 2), ("experts", "replicas"))
    mine = mesh.get_local_rank("experts")
    whole = torch.arange(30.0).view(5, 6) + 100 * mine
    state = {f"shared {i}": torch.full((3,), float(i)) for i in sorted(range(4), key=lambda i: (i + rank) % 4)}
    state[f"expert {mine}"] = distribute_tensor(whole, mesh["replicas"], [Shard(0)])
    save(state, StorageWriter(source, key=key))
    target = {f"expert {i}": torch.zeros(5, 6) for i in (1, 0)} | {f"shared {rank}": torch.zeros(3)}
    load(target, StorageReader(source, key=key))
    right = all(torch.equal(target[f"expert {i}"], torch.arange(30.0).view(5, 6) + 100 * i) for i in range(2))
    return right and torch.equal(target[f"shared {rank}"], torch.full((3,), float(rank)))


def uneven(place: str, key: str | None) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Tensors of which some ranks hold less, or nothing. The chunks in torch's metadata, as saved and as read."""
    source, mesh = opened(place, key), mesh_of((4,))
    whole = torch.arange(12.0).view(3, 4)
    written = save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, StorageWriter(source, key=key))
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {"w": zeros([3, 4], device_mesh=mesh, placements=[placement])}
        load(target, StorageReader(source, key=key))
        assert torch.equal(target["w"].full_tensor(), whole), placement
    found = StorageReader(source, key=key).read_metadata()
    return [
        [(tuple(one.offsets), tuple(one.sizes)) for one in metadata.state_dict_metadata["w"].chunks]
        for metadata in (written, found)
    ]


def by_another_coordinator(place: str, key: str | None) -> float:
    """Rank 2 plans and publishes; then ranks 1 and 3 save and load by themselves, in a group of theirs."""
    source, mesh = opened(place, key), mesh_of((4,))
    for value in (1.0, 2.0):
        state = {"w": distribute_tensor(torch.full((8, 2), value), mesh, [Shard(0)])}
        state_dict_saver._save_state_dict(state, StorageWriter(source, key=key), coordinator_rank=2)
    target = {"w": zeros([8, 2], device_mesh=mesh, placements=[Shard(0)])}
    state_dict_loader._load_state_dict(target, StorageReader(source, key=key), coordinator_rank=3)
    found = float(target["w"].full_tensor().mean())
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        writer = StorageWriter(source if key else f"{place}-two", key=key and f"{key}-two")
        state_dict_saver.save({"n": torch.full((2,), 5.0)}, storage_writer=writer, process_group=group)
        two = {"n": torch.zeros(2)}
        reader = StorageReader(source if key else f"{place}-two", key=key and f"{key}-two")
        state_dict_loader.load(two, storage_reader=reader, process_group=group)
        found += float(two["n"].mean())
    dist.barrier()
    return found


def read_only(place: str) -> list[float]:
    """Loads by the path of a store, and from one that is opened to read: no rank may send a reference."""
    save({"w": torch.full((3,), 2.0)}, StorageWriter(place, key="checkpoint"))
    found: list[float] = []
    with memstore.open(place, "r") as store:
        for reader in (StorageReader(place, key="checkpoint"), StorageReader(store, key="checkpoint")):
            target = {"w": torch.zeros(3)}
            load(target, reader)
            found.append(float(target["w"].mean()))
    return found


def unfinished_collectives(place: str, key: str | None) -> bool:
    """Saves and loads DTensors whose memory a collective of torch is still to fill."""
    source, mesh = opened(place, key), mesh_of((4,))
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    for _ in range(3):
        state = {"w": spread.redistribute(mesh, [Replicate()], async_op=True)}
        save(state, StorageWriter(source, key=key))
        target = {"w": torch.zeros(64, 32)}
        load(target, StorageReader(source, key=key))
        if not torch.equal(target["w"], whole):
            return False
    return True


# -- tensors that say themselves what of them is saved -----------------------------------------------------------------


class Column(torch.Tensor):
    """A matrix of which each rank has some columns, by the protocol of torch's planners."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Column:
        make: Any = torch.Tensor._make_wrapper_subclass
        made = make(cls, (local.shape[0], local.shape[1] * dist.get_world_size()), dtype=local.dtype)
        made.local = local
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Column({self.local})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func}: nobody computes with it")

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([0, self.local.shape[1] * dist.get_rank()]), self.local.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunk = self._chunk()
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size())
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.local


def own_protocol(place: str, key: str | None) -> bool:
    source, rank = opened(place, key), dist.get_rank()
    save({"w": Column(torch.full((3, 2), float(rank)))}, StorageWriter(source, key=key))
    target, whole = {"w": Column(torch.zeros(3, 2))}, {"w": torch.zeros(3, 8)}
    load(target, StorageReader(source, key=key))
    load(whole, StorageReader(source, key=key))
    right = whole["w"][0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    return right and torch.equal(target["w"].local, torch.full((3, 2), float(rank)))


# -- asynchronous saves that nobody waits for --------------------------------------------------------------------------


def overlapping_saves(place: str) -> list[float]:
    """Begins saves to several paths and to one, waits for none, and saves once more. What the checkpoints have."""
    futures: list[Any] = [dcp.async_save({"w": rows(i)}, checkpoint_id=f"{place}/{i:g}") for i in (0.0, 1.0, 2.0, 3.0)]
    futures += [dcp.async_save({"w": rows(i)}, checkpoint_id=f"{place}/same") for i in (7.0, 8.0, 9.0)]
    dcp.save({"w": rows(4.0)}, checkpoint_id=f"{place}/4")
    assert all(future.done() for future in futures), "the save that isn't asynchronous was the last one"
    assert [future.exception() for future in futures] == [None] * len(futures)
    return [load_rows(f"{place}/{name}", None) for name in ("0", "1", "2", "3", "same", "4")]
