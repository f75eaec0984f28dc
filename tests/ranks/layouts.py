"""What the ranks of tests/ranks put and get: DTensors of every layout that torch makes. Runs on ranks."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import memstore
from tests.ranks.meshes import mesh_of


class Case(NamedTuple):
    """A tensor, and how it lies on a mesh."""

    name: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    dtype: torch.dtype = torch.float32


CASES = (
    Case("rows", (8, 3), (4,), (Shard(0),)),
    Case("columns", (3, 8), (4,), (Shard(1),)),
    Case("uneven", (7, 3), (4,), (Shard(0),)),
    Case("empty shards", (2, 3), (4,), (Shard(0),)),
    Case("no elements", (0, 3), (4,), (Shard(0),)),
    Case("replicated", (5, 2), (4,), (Replicate(),)),
    Case("0-d", (), (4,), (Replicate(),)),
    Case("bfloat16", (9, 5), (4,), (Shard(1),), torch.bfloat16),
    Case("float8", (8, 4), (4,), (Shard(0),), torch.float8_e4m3fn),
    Case("hybrid", (6, 5), (2, 2), (Replicate(), Shard(0))),
    Case("replicas inside", (6, 5), (2, 2), (Shard(1), Replicate())),
    Case("both dims", (5, 6), (2, 2), (Shard(0), Shard(1))),
    Case("one dim twice", (9, 2), (2, 2), (Shard(0), Shard(0))),
    Case("strided", (8, 2), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    Case("3-D mesh", (5, 6, 4), (2, 1, 2), (Shard(2), Shard(1), Shard(0))),
    Case("3-D mesh, replicated", (4, 6), (2, 2, 1), (Replicate(), Shard(1), Replicate())),
)


def whole(case: Case) -> torch.Tensor:
    count = torch.Size(case.shape).numel()
    return (torch.arange(count) % 97 - 40).reshape(case.shape).to(case.dtype)


def sharded(case: Case) -> DTensor:
    source = whole(case)
    if case.dtype.itemsize == 1:  # torch has no collectives of float8
        spread = distribute_tensor(source.view(torch.uint8), mesh_of(case.mesh), case.placements, src_data_rank=None)
        return DTensor.from_local(
            spread.to_local().view(case.dtype), spread.device_mesh, case.placements, shape=spread.shape,
            stride=spread.stride(), run_check=False,
        )  # fmt: skip
    return distribute_tensor(source, mesh_of(case.mesh), case.placements, src_data_rank=None)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


# --- functions that ranks run -----------------------------------------------------------------------------------------


def put_matrix(root: str, names: Sequence[str], dtype: torch.dtype | None = None) -> Any:
    value = {case.name: sharded(case) for case in CASES if case.name in names}
    with memstore.open(root) as store:
        return store.put_sharded("key", value, dtype=dtype)


def get_into_matrix(root: str, layouts: dict[str, Case]) -> None:
    """Reads every stored tensor into another layout, on another mesh perhaps."""
    with memstore.open(root) as store:
        for how in ("out", "like"):
            targets = {name: torch.zeros_like(sharded(case)) for name, case in layouts.items()}
            options: Any = {how: targets}
            found = store.get("key", **options)
            assert (found is targets) == (how == "out")
            for name, case in layouts.items():
                expected = sharded(case)
                assert isinstance(found[name], DTensor)
                assert found[name].placements == expected.placements and found[name].shape == expected.shape
                assert is_same(found[name].to_local(), expected.to_local()), (how, name)


def rank() -> int:
    return dist.get_rank()
