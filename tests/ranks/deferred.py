"""Deferred modules on ranks: sharded before they are made, and trained then. Runs on ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from memstore.errors import UnsupportedValueError
from tests.ranks.meshes import mesh_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False), nn.BatchNorm1d(5))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return make()


def shard(model: Any) -> nn.Module:
    """FSDP2; of 7 rows, ranks have parts of different sizes."""
    mesh = mesh_of((dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    outputs: list[torch.Tensor] = []
    for number in range(3):
        output = model(torch.linspace(-1, 1, 18).view(3, 6) + number)
        outputs.append(output.detach().clone())
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.state_dict().items()
    }


def check_alike(made: nn.Module, usual: nn.Module) -> None:
    ours, theirs = locals_of(made), locals_of(usual)
    assert list(ours) == list(theirs) and not is_deferred(made)
    for name, one in theirs.items():
        assert torch.equal(ours[name], one), name
    for one, other in zip(made.parameters(), usual.parameters(), strict=True):
        assert type(one) is type(other) and one.requires_grad


def train_fully_sharded(source: str | None) -> None:
    """Sharded while it is deferred, then replayed, or read from a source of which each rank takes its part.

    The optimizer is made before.
    """
    usual = shard(seeded(net))
    made = shard(seeded(lambda: deferred_init(net)))
    if source is not None:
        seeded(lambda: made)
    assert is_deferred(made)
    optimizer, before = torch.optim.SGD(made.parameters(), lr=0.1), list(made.parameters())
    done = materialize_module(made, source=source)
    assert bool(done.found) == (source is not None)
    assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
    check_alike(made, usual)
    for one, other in zip(train(made, optimizer), train(usual), strict=True):
        assert torch.equal(one, other)
    check_alike(made, usual)


def parallelize() -> None:
    """Tensor parallel without a broadcast; with one it is refused by name."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = mesh_of((dist.get_world_size(),))
    usual = parallelize_module(seeded(net), mesh, plan, src_data_rank=None)
    made = parallelize_module(seeded(lambda: deferred_init(net)), mesh, plan, src_data_rank=None)
    materialize_module(made)
    check_alike(made, usual)
    with pytest.raises(UnsupportedValueError, match="is a collective.*src_data_rank=None"):
        parallelize_module(seeded(lambda: deferred_init(net)), mesh, {"0": ColwiseParallel()})


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5, bias=False), nn.LayerNorm(5))


def parallelize_and_shard(source: str | None) -> None:
    """Tensor parallel, and then FSDP2 on the other dimension of the mesh, all while it is deferred."""
    mesh = mesh_of((2, 2), ("dp", "tp"))

    def spread(model: Any) -> Any:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    usual = spread(seeded(block))
    made = spread(seeded(lambda: deferred_init(block)))
    assert len(materialize_module(made, source=source).found) == (0 if source is None else 5)
    check_alike(made, usual)
    for one, other in zip(train(made), train(usual), strict=True):
        assert torch.equal(one, other)
    check_alike(made, usual)


def change_what_is_distributed() -> None:
    """What is done with a deferred DTensor isn't recorded, and is no secret either."""
    mesh = mesh_of((dist.get_world_size(),))

    def spread() -> Any:
        model = seeded(lambda: deferred_init(net))
        return parallelize_module(model, mesh, {"0": ColwiseParallel()}, src_data_rank=None)

    for change in (nn.init.zeros_, lambda one: one.detach().mul_(2)):
        made = spread()
        with torch.no_grad():
            change(made[0].weight)
        with pytest.raises(UnsupportedValueError, match=r"DTensor of shape \(7, 6\) was written once"):
            materialize_module(made)
        assert is_deferred(made)
    made = shard(seeded(lambda: deferred_init(net)))
    nn.init.zeros_(made.get_parameter("0.weight"))
    with pytest.raises(UnsupportedValueError, match="was written once"):
        materialize_module(made)
    made = spread().half()
    with pytest.raises(UnsupportedValueError, match=r"0\.weight, 0\.bias: DTensors on meta.*dtype="):
        materialize_module(made)


def replicate() -> None:
    """DDP: it refuses what has no memory, and takes what was materialized."""
    made = seeded(lambda: deferred_init(net))
    with pytest.raises(RuntimeError, match="meta"):
        nn.parallel.DistributedDataParallel(made)
    materialize_module(made)
    usual: Any = nn.parallel.DistributedDataParallel(seeded(net))
    wrapped: Any = nn.parallel.DistributedDataParallel(made)
    for one, other in zip(train(wrapped), train(usual), strict=True):
        assert torch.equal(one, other)


def collectives() -> None:
    tensor = deferred_init(lambda: torch.ones(3))
    for call in (dist.all_reduce, lambda one: dist.broadcast(one, 0), lambda one: dist.all_gather([one], one)):
        with pytest.raises(UnsupportedValueError, match="collective"):
            call(tensor)
