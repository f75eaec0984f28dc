"""DTensors whose local tensors wrap others, as an 8-bit optimizer's states under FSDP2: stored part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.errors import PartialCommitError, ShardMismatchError, StructureMismatchError
from memstore.integrations import dcp
from memstore.sharding import TensorShards
from tests.snapshot.ranks import all_right, on_ranks

A = torch.arange(64 * 8.0).reshape(64, 8) + 1
B = A * 2


def two(rank: int, factor: float = 1.0) -> TwoTensor:
    rows = slice(rank * 32, rank * 32 + 32)
    return TwoTensor(factor * A[rows], factor * B[rows])


def placed(rank: int, factor: float = 1.0) -> Any:
    return DTensor.from_local(two(rank, factor), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def holds(value: Any, rank: int, factor: float = 1.0) -> bool:
    local, want = value.to_local(), two(rank, factor)
    return type(local) is TwoTensor and torch.equal(local.a, want.a) and torch.equal(local.b, want.b)


class Model(torch.nn.Module):
    def __init__(self, rank: int, factor: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(placed(rank, factor))
        self.bias = torch.nn.Parameter(torch.full((3,), factor))


def _put(rank: int, path: str) -> Any:
    with memstore.open(path) as store:
        store.put_sharded("key", {"w": placed(rank), "step": 4})
        got = store.get("key")
        shown = store.view("key")["w"]
        dist.barrier()
    same = type(got["w"]) is TwoTensor and torch.equal(got["w"].a, A) and torch.equal(got["w"].b, B)
    return same, type(shown).__name__, got["step"]


def test_a_sharded_put_stores_all_parts_and_a_get_joins_them(tmp_path: Path) -> None:
    assert all_right(on_ranks(2, _put, str(tmp_path / "store"))) == [(True, "TwoTensor", 4)] * 2


def _save_model(rank: int, path: str) -> Any:
    model, other = Model(rank, 1.0), Model(rank, 0.0)
    weight = other.w
    with memstore.open(path) as store:
        store.save_model("model", model)
        store.load_model("model", other)
        dist.barrier()
    return holds(other.w, rank), other.w is weight, other.bias.tolist()


def test_a_model_is_saved_and_filled_in_place(tmp_path: Path) -> None:
    assert all_right(on_ranks(2, _save_model, str(tmp_path / "store"))) == [(True, True, [1.0] * 3)] * 2


def _take(rank: int, path: str, asynchronous: bool) -> Any:
    app_state = {
        "model": Model(rank, 1.0),
        "state": memstore.StateDict(x=placed(rank, 3.0), y=[{"z": placed(rank, 4.0)}]),
    }
    if asynchronous:
        snapshot = memstore.Snapshot.async_take(path, app_state).wait()
    else:
        snapshot = memstore.Snapshot.take(path, app_state)
    snapshot.verify()
    model, state = Model(rank, 0.0), memstore.StateDict(x=placed(rank, 0.0), y=[{"z": placed(rank, 0.0)}])
    x = state["x"]
    snapshot.restore({"model": model, "state": state})
    part = snapshot.get_state_dict_for_key("state")["x"]
    resharded = memstore.StateDict(x=DTensor.from_local(TwoTensor(A * 0, A * 0), x.device_mesh, [Replicate()]), y=[])
    with pytest.raises(StructureMismatchError, match="state/x: .*the sharding that it was saved with"):
        snapshot.restore({"state": resharded})
    right = holds(model.w, rank) and holds(state["x"], rank, 3.0) and holds(state["y"][0]["z"], rank, 4.0)
    return right, state["x"] is x, type(part) is TensorShards


@pytest.mark.parametrize("asynchronous", [False, True])
def test_snapshots_restore_them_into_the_same_sharding(tmp_path: Path, asynchronous: bool) -> None:
    found = all_right(on_ranks(2, _take, str(tmp_path / "snapshot"), asynchronous))
    assert found == [(True, True, True)] * 2


def _save_dcp(rank: int, path: str, asynchronous: bool) -> Any:
    if asynchronous:
        dcp.async_save({"w": placed(rank)}, checkpoint_id=path).result()
    else:
        dcp.save({"w": placed(rank)}, checkpoint_id=path)
    same = {"w": placed(rank, 0.0)}
    dcp.load(same, checkpoint_id=path)
    mesh = init_device_mesh("cpu", (2,))
    whole = {"w": DTensor.from_local(TwoTensor(A * 0, A * 0), mesh, [Replicate()], run_check=False)}
    dcp.load(whole, checkpoint_id=path)
    local: Any = whole["w"].to_local()
    return holds(same["w"], rank), torch.equal(local.a, A) and torch.equal(local.b, B)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_dcp_load_them_into_any_sharding_that_the_class_can_cut(
    tmp_path: Path, asynchronous: bool
) -> None:
    assert all_right(on_ranks(2, _save_dcp, str(tmp_path / "checkpoint"), asynchronous)) == [(True, True)] * 2


def _put_parts(rank: int, path: str, starts: list[int]) -> str:
    shard = memstore.TensorShard(two(rank), (64, 8), (starts[rank], 0))
    with memstore.open(path) as store:
        try:
            store.put_sharded("key", {"w": shard})
        except (PartialCommitError, ShardMismatchError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return "stored"


@pytest.mark.parametrize(
    ("starts", "told"),
    [([0, 0], "PartialCommitError"), ([0, 16], "ShardMismatchError"), ([32, 32], "PartialCommitError")],
)
def test_parts_that_overlap_or_are_missing_are_refused(tmp_path: Path, starts: list[int], told: str) -> None:
    found = all_right(on_ranks(2, _put_parts, str(tmp_path / "store"), starts))

    assert all(one.startswith(told) and "['w']" in one for one in found), found
