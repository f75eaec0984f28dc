"""What trainers ask of a storage of checkpoints, as functions that the tests call on four ranks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

import memstore
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.integrations.dcp.on_ranks import load_rows, opened, rows
from tests.integrations.dcp.states import load, save
from tests.ranks.meshes import mesh_of

# --- a trainer's parts, each of which says and takes its own state ----------------------------------------------------


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


# --- ranks that hold different things ---------------------------------------------------------------------------------


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


# --- tensors that say themselves what of them is saved ----------------------------------------------------------------


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


# --- asynchronous saves that nobody waits for -------------------------------------------------------------------------


def overlapping_saves(place: str) -> list[float]:
    """Begins saves to several paths and to one, waits for none, and saves once more. What the checkpoints have."""
    futures: list[Any] = [dcp.async_save({"w": rows(i)}, checkpoint_id=f"{place}/{i:g}") for i in (0.0, 1.0, 2.0, 3.0)]
    futures += [dcp.async_save({"w": rows(i)}, checkpoint_id=f"{place}/same") for i in (7.0, 8.0, 9.0)]
    dcp.save({"w": rows(4.0)}, checkpoint_id=f"{place}/4")
    assert all(future.done() for future in futures), "the save that isn't asynchronous was the last one"
    assert [future.exception() for future in futures] == [None] * len(futures)
    return [load_rows(f"{place}/{name}", None) for name in ("0", "1", "2", "3", "same", "4")]
