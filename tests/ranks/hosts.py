"""What ranks on two hosts do together: rank r is a process of host r % 2. Run by test_hosts.py."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import memstore
import memstore.integrations.torchstore as ts
from memstore.errors import StructureMismatchError
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.ranks.meshes import mesh_of

SHAPE = (8, 12)


def whole() -> torch.Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE)


def put_rows(paths: Sequence[str], key: str) -> int:
    return put_rows_within(paths, key, 60.0)


def put_rows_within(paths: Sequence[str], key: str, timeout: float) -> int:
    """Of a DTensor whose rows are spread over all ranks."""
    mesh = mesh_of([dist.get_world_size()])
    rows = whole().chunk(mesh.size())[dist.get_rank()]
    value = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)  # no collective: a rank may not come
    with memstore.open(paths[dist.get_rank() % 2], timeout=timeout) as store:
        return store.put_sharded(key, {"w": value, "step": 7})  # pyright: ignore[reportReturnType]


def get_placed(paths: Sequence[str], key: str, placement: Any) -> bool:
    """On the other host, in another placement: whether it is what was put."""
    mesh = mesh_of([dist.get_world_size()])
    like = distribute_tensor(torch.zeros(SHAPE), mesh, [placement])
    with memstore.open(paths[(dist.get_rank() + 1) % 2], timeout=60.0) as store:
        found: Any = store.get(key, like={"w": like, "step": 0}) if placement != Replicate() else store.get(key)
    local = found["w"].to_local() if isinstance(found["w"], DTensor) else found["w"]
    expected = distribute_tensor(whole(), mesh, [placement]).to_local()
    return torch.equal(local, expected) and found["step"] == 7


# --- a trainer's float32, spread by rows, for a generator's bfloat16, spread by columns -------------------------------

LEAVES, WEIGHT = 5, (64, 96)


def weights() -> dict[str, torch.Tensor]:
    return {
        f"layers.{leaf}": torch.randn(WEIGHT, generator=torch.Generator().manual_seed(leaf)) for leaf in range(LEAVES)
    }


def put_weights(path: str, key: str) -> None:
    mesh = mesh_of([dist.get_world_size()])
    rank, size = dist.get_rank(), dist.get_world_size()
    with memstore.open(path, timeout=60.0) as store:
        rows = {name: whole.chunk(size)[rank].clone() for name, whole in weights().items()}
        store.put_sharded(key, {name: DTensor.from_local(local, mesh, [Shard(0)]) for name, local in rows.items()})


def columns(mesh: DeviceMesh, names: Sequence[str], dtype: torch.dtype) -> dict[str, DTensor]:
    local = torch.zeros(WEIGHT[0], WEIGHT[1] // 2, dtype=dtype)
    return {name: DTensor.from_local(local.clone(), mesh, [Shard(1)], run_check=False) for name in names}


def are_filled(targets: dict[str, DTensor], names: Sequence[str]) -> bool:
    """Whether just these have what was put, as the dtype of each, and the others their zeros."""
    half, stored = dist.get_rank(), weights()
    return all(
        torch.equal(target.to_local(), stored[name].chunk(2, 1)[half].to(target.dtype))
        if name in names
        else not target.to_local().any()
        for name, target in targets.items()
    )


def get_cast(path: str, key: str, by: str) -> list[str] | None:
    """Two ranks fill bfloat16 columns of what they have in common with what is stored. The names of the result."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return None
    names = [*weights(), "head"]
    targets: Any = columns(mesh, names, torch.bfloat16)
    if by == "get":
        with memstore.open(path, timeout=60.0) as store:
            found = store.get(key, out=targets, strict=False, cast=True)
    else:
        os.environ[ROOT_VARIABLE], name = os.path.split(path)
        found = asyncio.run(ts.get_state_dict(key, targets, strict=False, store_name=name))
        ts.reset_client(name)
        del os.environ[ROOT_VARIABLE]
    assert are_filled(targets, names[:-1])
    return list(found)


def get_uncast(path: str, key: str) -> str | None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return None
    names = list(weights())
    targets: Any = {**columns(mesh, names[:-1], torch.float32), **columns(mesh, names[-1:], torch.bfloat16)}
    with memstore.open(path, timeout=60.0) as store, pytest.raises(StructureMismatchError) as found:
        store.get(key, out=targets)
    assert are_filled(targets, [])
    return str(found.value)


def load_whole(paths: Sequence[str], key: str) -> bool:
    """All ranks load a module of which each has all tensors."""
    model = torch.nn.ParameterDict({name.replace(".", "_"): torch.zeros(WEIGHT) for name in weights()})
    with memstore.open(paths[dist.get_rank() % len(paths)], timeout=60.0) as store:
        store.load_model(key, model)
    return all(map(torch.equal, model.values(), weights().values()))


def load_cast(paths: Sequence[str], key: str) -> tuple[str, bool]:
    """All ranks load a module of bfloat16, in another placement: what the error without cast says, and the outcome."""
    path, mesh = paths[dist.get_rank() % len(paths)], mesh_of([dist.get_world_size()])
    model = torch.nn.ParameterDict(
        {
            name.replace(".", "_"): DTensor.from_local(torch.zeros(64, 24).bfloat16(), mesh, [Shard(1)])
            for name in weights()
        }
    )
    with memstore.open(path, timeout=60.0) as store:
        with pytest.raises(StructureMismatchError) as refused:
            store.load_model(key, model)
        assert not any(one.to_local().any() for one in model.values())
        store.load_model(key, model, cast=True)
    expected = [one.chunk(4, 1)[dist.get_rank()].bfloat16() for one in weights().values()]
    return str(refused.value), all(map(torch.equal, (one.to_local() for one in model.values()), expected))


def save_weights(paths: Sequence[str], key: str) -> None:
    """As a module of float32, by rows."""
    path, mesh = paths[dist.get_rank() % len(paths)], mesh_of([dist.get_world_size()])
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.ParameterDict(
        {
            name.replace(".", "_"): DTensor.from_local(whole.chunk(size)[rank].clone(), mesh, [Shard(0)])
            for name, whole in weights().items()
        }
    )
    with memstore.open(path, timeout=60.0) as store:
        store.save_model(key, model)
