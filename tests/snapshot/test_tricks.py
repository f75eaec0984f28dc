"""torchsnapshot's adapters, with the import changed: a script that shards by FSDP, and one that leaves DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from memstore import Snapshot, StateDict
from memstore.tricks.ddp import DistributedDataParallelAdapter
from memstore.tricks.fsdp import FSDPOptimizerAdapter
from tests.snapshot.ranks import all_right, on_ranks
from tests.support.equality import assert_same


def objects(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif kind == "FSDP":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[Any]:
    for step in range(first, last + 1):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [getattr(one, "full_tensor", one.detach)().detach().clone() for one in model.parameters()]


def run(rank: int, path: str, kind: str) -> None:
    model, optimizer = objects(kind)
    train(model, optimizer, 1, 3)
    app_state = {"model": model, "optim": FSDPOptimizerAdapter(model, optimizer)}
    Snapshot.take(path, app_state, replicated=["model/*", "optim/*"] if kind == "FSDP" else None)
    expected = train(model, optimizer, 4, 6)
    model, optimizer = objects(kind)
    train(model, optimizer, 7, 7)  # elsewhere
    Snapshot(path).restore({"model": model, "optim": FSDPOptimizerAdapter(model, optimizer)})
    assert_same(train(model, optimizer, 4, 6), expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fully_shard", "FSDP"])
def test_an_optimizer_of_a_sharded_module_continues(kind: str, path: str) -> None:
    all_right(on_ranks(2, run, path, kind))
    if kind == "fully_shard":  # on one rank, without FSDP
        model, optimizer = objects("")
        Snapshot(path).restore({"model": model, "optim": FSDPOptimizerAdapter(model, optimizer)})
        assert all(state["step"] == 3 for state in optimizer.state.values())


def test_a_module_that_was_wrapped_is_restored_into_a_plain_one(path: str) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    Snapshot.take(path, {"model": StateDict(wrapped)})
    Snapshot(path).restore({"model": DistributedDataParallelAdapter(other)})
    assert torch.equal(other.weight, model.weight)
    Snapshot.take(path + "-plain", {"model": DistributedDataParallelAdapter(model)})
    Snapshot(path + "-plain").restore({"model": other})
    assert torch.equal(other.bias, model.bias)
