"""TorchStore's calls as ranks make them: what tests/ranks/test_torchstore.py runs on them."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.ranks.meshes import mesh_of


def whole(step: float = 0.0) -> torch.Tensor:
    return torch.arange(16 * 12.0).reshape(16, 12) + step


def enter(job: str) -> None:
    """As processes do that were started by one which has initialized the store."""
    os.environ[ROOT_VARIABLE] = job
    ts.reset_client()


def dtensor(ranks: list[int], shape: list[int], placements: list[Placement], value: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))
    return distribute_tensor(value, mesh, placements)


def put(job: str, key: str, shape: list[int], placements: list[Placement], step: float = 0.0) -> bool:
    """Returns whether the key was there afterwards, before all ranks had put."""
    enter(job)
    value = dtensor(list(range(4)), shape, placements, whole(step))

    async def use() -> bool:
        await ts.put(key, value)
        return await ts.exists(key)

    return asyncio.run(use())


def put_unless(job: str, key: str, skipped: int, step: float) -> None:
    """All ranks but one put."""
    enter(job)
    value = dtensor(list(range(4)), [4], [Shard(0)], whole(step))
    if dist.get_rank() != skipped:
        asyncio.run(ts.put(key, value))


def get_into(job: str, key: str, ranks: list[int], shape: list[int], placements: list[Placement]) -> bool | None:
    """Whether this rank's part was filled with what belongs there; None: it has none."""
    enter(job)
    target = dtensor(ranks, shape, placements, torch.zeros(16, 12))
    expected = dtensor(ranks, shape, placements, whole())
    if dist.get_rank() not in ranks:
        return None
    assert asyncio.run(ts.get(key, target)) is target
    found: dict[str, Any] = asyncio.run(ts.get_batch({key: target}))
    return found[key] is target and torch.equal(target.to_local(), expected.to_local())


def put_expert(job: str) -> None:
    """Each rank puts another key, of a DTensor that all of them hold whole."""
    enter(job)
    rank = dist.get_rank()
    mesh = mesh_of((4,))
    asyncio.run(ts.put(f"expert{rank}", DTensor.from_local(whole(rank), mesh, [Replicate()], run_check=False)))


def put_batch(job: str) -> None:
    """A shard of one key, and a plain tensor of a key of its own."""
    enter(job)
    rank = dist.get_rank()
    asyncio.run(ts.put_batch({"w": dtensor([0, 1, 2, 3], [4], [Shard(0)], whole()), f"plain{rank}": torch.ones(3)}))


def delete_pending(job: str, key: str) -> None:
    enter(job)
    if dist.get_rank() == 0:
        asyncio.run(ts.delete_batch([key]))


# --- an FSDP model, and its followers ---------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8, bias=False))


def put_fsdp(job: str, steps: int, dtype: torch.dtype | None) -> None:
    """Each step adds 1 to all weights."""
    enter(job)
    trained = fully_shard(model(), mesh=mesh_of((4,)))

    async def use() -> None:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(1)
            await ts.put_state_dict({"model": trained.state_dict(), "step": steps}, "policy", transfer_dtype=dtype)

    asyncio.run(use())


def get_tensor_parallel(job: str, stored: torch.dtype, dtype: torch.dtype, steps: int, strict: bool) -> bool | None:
    """Two ranks, by columns. All ranks call it. If it isn't strict, these have a tensor more than is stored."""
    enter(job)
    mesh = DeviceMesh("cpu", [0, 1])
    state = model().state_dict()
    for name, value in state.items():
        for _ in range(steps):
            value.add_(1)
        state[name] = value.to(stored).to(dtype)
    targets = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.dim() - 1)])
        for name, value in state.items()
    }
    if dist.get_rank() > 1:
        return None
    head = {} if strict else {"head": torch.zeros(3, dtype=dtype)}
    into: dict[str, Any] = {"model": targets, "step": 0, **head}
    found = asyncio.run(ts.get_state_dict("policy", into, strict=strict))
    assert list(found) == ["model", "step"] and all(found["model"][name] is targets[name] for name in targets)
    assert not any(one.any() for one in head.values())
    width = {name: value.shape[-1] // 2 for name, value in state.items()}
    return into["step"] == steps and all(
        torch.equal(target.to_local(), state[name].narrow(-1, dist.get_rank() * width[name], width[name]))
        for name, target in targets.items()
    )


def follow(job: str, rounds: int) -> int:
    """Ranks 0 and 1 put, 2 and 3 get meanwhile. Returns how many versions a getter has seen; all of one step each."""
    enter(job)
    writers, readers = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    rank = dist.get_rank()
    if rank < 2:
        value = {f"w{number}": DTensor.from_local(torch.zeros(4, 8), writers, [Shard(0)]) for number in range(20)}
        for _ in range(rounds):
            for tensor in value.values():
                tensor.to_local().add_(1)
            asyncio.run(ts.put_state_dict(value, "policy"))
        return rounds
    targets = {f"w{number}": DTensor.from_local(torch.zeros(8, 4), readers, [Shard(1)]) for number in range(20)}
    seen: set[float] = set()
    while max(seen, default=0.0) < rounds:
        try:
            asyncio.run(ts.get_state_dict("policy", targets))
        except KeyError:
            continue  # nothing was put yet
        steps = {float(step) for target in targets.values() for step in target.to_local().unique()}
        assert len(steps) == 1, steps
        seen |= steps
    return len(seen)


# --- initialize_spmd --------------------------------------------------------------------------------------------------


def spmd(rounds: int, folder: str) -> list[str]:
    """Several lives of a store. The ranks are those of one host."""
    os.environ.pop(ROOT_VARIABLE, None)
    if dist.get_rank() == 0:
        os.environ[ROOT_VARIABLE] = folder  # not in /dev/shm, where other tests count what is left
    rank = dist.get_rank()
    env = ts.spmd.SPMDEnv(rank, rank, 4, 4, "127.0.0.1", 1)

    async def use(count: int) -> list[str]:
        await ts.initialize_spmd(ts.LocalRankStrategy(), env=env)
        await ts.put(f"{count}.{rank}", torch.tensor(rank))
        dist.barrier()
        keys = await ts.keys()
        assert int(await ts.get(f"{count}.{(rank + 1) % 4}")) == (rank + 1) % 4
        dist.barrier()
        await ts.shutdown()
        dist.barrier()
        return keys

    found = [asyncio.run(use(count)) for count in range(rounds)][-1]
    os.environ.pop(ROOT_VARIABLE, None)
    return found
