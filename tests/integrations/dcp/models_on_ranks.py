"""Models and their optimizers, spread in each of torch's ways, as functions that the tests call on four ranks."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, Stager, StorageReader, StorageWriter
from tests.integrations.dcp.on_ranks import opened
from tests.integrations.dcp.states import like, load, save
from tests.ranks.meshes import mesh_of


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))


def _spread(model: torch.nn.Module, how: str) -> torch.nn.Module:
    if how == "FSDP2":
        return fully_shard(model, mesh=mesh_of((4,)))
    if how == "HSDP":
        return fully_shard(model, mesh=mesh_of((2, 2), ("replicas", "shards")))
    if how == "DDP":
        return DistributedDataParallel(model)
    if how == "FSDP1":  # without a mesh its state dicts have ShardedTensors
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "HSDP1":
        mesh, hybrid = mesh_of((2, 2)), ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=hybrid,
            use_orig_params=True,
        )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if how == "TP":
        return parallelize_module(model, mesh_of((4,)), plan)
    if how == "FSDP2 and TP":
        mesh = mesh_of((2, 2), ("dp", "tp"))
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
    if isinstance(value, ShardedTensor):
        return _all_gather_sharded_tensor(value)
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
    load(target, StorageReader(source, key=key), planner=LoadPlanner())
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


# --- ranks with parts of a model, and models with parts of a checkpoint -----------------------------------------------


def load_stages(place: str, key: str | None) -> bool:
    """Each rank saves one layer of four, as stages of a pipeline do; then all of them load the whole, spread."""
    source, rank = opened(place, key), dist.get_rank()
    with torch.device("meta"):
        stages = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    mine = stages[rank].to_empty(device="cpu")
    with torch.no_grad():
        mine.weight.fill_(rank + 1)
        mine.bias.fill_(-rank)
    state = dict(zip(("model", "optimizer"), get_state_dict(stages, torch.optim.Adam(mine.parameters())), strict=True))
    with pytest.raises(CheckpointException, match="weight: a meta tensor"):
        save(state, StorageWriter(source, key=key))
    state["model"] = {name: value for name, value in state["model"].items() if not value.is_meta}
    save(state, StorageWriter(source, key=key))
    whole: Any = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))), mesh=mesh_of((4,)))
    optimizers = torch.optim.Adam(whole.parameters())
    target = dict(zip(("model", "optimizer"), get_state_dict(whole, optimizers), strict=True))
    load(target, StorageReader(source, key=key))
    set_state_dict(whole, optimizers, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    found = [(_full(layer.weight).unique().tolist(), _full(layer.bias).unique().tolist()) for layer in whole]
    return found == [([stage + 1.0], [-float(stage)]) for stage in range(4)]


def load_unreal(place: str, key: str | None) -> bool:
    """Loads into DTensors on the meta device, which torch makes real."""
    source = opened(place, key)
    model, _ = trained("TP", 1)
    save({"model": model.state_dict()}, StorageWriter(source, key=key), planner=SavePlanner())
    with torch.device("meta"):
        unreal = _spread(torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6)), "TP")
    target = {"model": unreal.state_dict()}
    load(target, StorageReader(source, key=key), planner=LoadPlanner())
    unreal.load_state_dict(target["model"], assign=True)
    found, expected = _full(unreal.state_dict()), _full(model.state_dict())
    return all(torch.equal(found[name], expected[name]) for name in expected)


class _Tuned(torch.nn.Module):
    """A frozen model with a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = _model(7), torch.nn.Linear(6, 3)
        for parameter in self.base.parameters():
            parameter.requires_grad = False

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(data))


def tune(place: str, key: str | None) -> list[str]:
    """Loads a checkpoint into a part of a model, and saves what of that is trained. What was found at each start."""
    source = opened(place, key)
    bases, heads = (f"{place}/base", f"{place}/head") if key is None else (source, source)
    base_key, head_key = key and f"{key}/base", key and f"{key}/head"
    base, _ = trained("FSDP2", 3)
    expected = _full(get_state_dict(base, [])[0])
    save({"model": get_state_dict(base, [])[0]}, StorageWriter(bases, key=base_key))
    story: list[str] = []
    for _ in range(2):
        model: Any = fully_shard(_Tuned(), mesh=mesh_of((4,)))
        optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
        part, _ = get_state_dict(
            model, [], submodules={model.base}, options=StateDictOptions(keep_submodule_prefixes=False)
        )
        load({"model": part}, StorageReader(bases, key=base_key))
        loose = StateDictOptions(strict=False, ignore_frozen_params=True)
        set_state_dict(model, [], model_state_dict={model.base: part}, optim_state_dict={}, options=loose)
        heads_state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=loose), strict=True))
        try:
            load(heads_state, StorageReader(heads, key=head_key))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=heads_state["model"],
                optim_state_dict=heads_state["optimizer"],
                options=loose,
            )
            story.append(f"step {float(_full(heads_state['optimizer'])['state']['head.weight']['step']):g}")
        except CheckpointException:
            story.append("nothing")
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=loose), strict=True))
        assert sorted(saved["model"]) == ["head.bias", "head.weight"]
        save(saved, StorageWriter(heads, key=head_key))
        found = _full(get_state_dict(model, [])[0])
        assert all(torch.equal(found[f"base.{name}"], value) for name, value in expected.items())
    return story


# --- saves by a process of torch's own, and what is sent to it --------------------------------------------------------


def _stager(name: str) -> Any:
    """memstore's, or torch's with shared memory, as its process needs it."""
    if name == "memstore":
        return Stager()
    return DefaultStager(StagingOptions(False, True, False, False))


def _state(how: str, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, optimizer = trained(how, seed)
    return model, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _local(value: Any) -> Any:
    """Copies of what this rank holds."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _local(entry) for key, entry in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


def sent(how: str, stager: str) -> bool:
    """What is staged, pickled as for a queue and received again: what the model has, though that changes."""
    model, state = _state(how, 1)
    expected = _local(state)
    message = ForkingPickler.dumps(_stager(stager).stage(state))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = ForkingPickler.loads(message)
    kinds = {name: (type(value), value.placements) for name, value in state["model"].items() if hasattr(value, "_spec")}
    same = all((type(found["model"][name]), found["model"][name].placements) == kinds[name] for name in kinds)
    return same and _same(expected, _local(found))


def save_by_process(place: str, key: str | None, how: str, stager: str) -> list[bool]:
    """Two saves by torch's process, of which the second has to fail and the third succeed."""
    source, found = opened(place, key), list[bool]()
    for number, failing in ((1, False), (2, True), (3, False)):
        model, state = _state(how, number)
        expected = _local(state)
        future: Any = state_dict_saver.async_save(
            state,
            storage_writer=StorageWriter(place, key=key, overwrite=not failing),
            planner=SavePlanner(),
            async_stager=_stager(stager),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if failing:
            found.append("overwrite is False" in str(future.exception()))
            continue
        future.result()
        target = like(_state(how, 9)[1])
        load(target, StorageReader(source, key=key), planner=LoadPlanner())
        found.append(_same(expected, _local(target)))
    return found
