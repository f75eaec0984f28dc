"""What ranks on two hosts do together: rank r is a process of host r % 2. Run by test_hosts.py."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import memstore
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
