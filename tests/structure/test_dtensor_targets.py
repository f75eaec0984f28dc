"""get into DTensors, and with them as templates; StoredTensor.distribute. On torch's fake ranks, as a rule."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: F401 - loaded before the fork
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import memstore
from tests.boxed import BoxedStore, Layout, grid
from tests.children import Child, Wire, in_a_child
from tests.sharding.fake_world import as_rank, each_rank
from tests.sharding.strategies import LAYOUTS
from tests.support.equality import assert_same

STORED: tuple[Layout, ...] = (grid(1), grid(3), grid(1, 2), grid(2, 2, 2))


def opened_store() -> tuple[memstore.Store, BoxedStore]:
    store = memstore.open(tempfile.mkdtemp(dir="/dev/shm"), inline_limit=0)
    return store, BoxedStore(store)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) + 1.0


def zeros(like: torch.Tensor, mesh: Any, placements: Any) -> Any:
    return distribute_tensor(torch.zeros_like(like), mesh, placements, src_data_rank=None)


@in_a_child
def test_any_layout_is_read_into_any_other() -> None:
    store, boxed = opened_store()
    for shape, mesh_shape, placements in LAYOUTS:
        tensor = numbered(shape)
        for number, layout in enumerate(STORED):
            boxed.put(f"key{number}", {"w": tensor}, layout)
        for _ in each_rank(math.prod(mesh_shape)):
            mesh = init_device_mesh("cpu", mesh_shape)
            expected = distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
            for number in range(len(STORED)):
                out = {"w": zeros(tensor, mesh, placements)}
                before = memstore.bytes_read()
                assert store.get(f"key{number}", out=out) is out
                assert memstore.bytes_read() - before == expected.nbytes
                assert torch.equal(out["w"].to_local(), expected)
                like = store.get(f"key{number}", like=out)["w"]
                assert type(like) is DTensor and like is not out["w"]
                assert like.placements == out["w"].placements and like.device_mesh == mesh
                assert like.shape == tensor.shape and like.stride() == out["w"].stride()
                assert torch.equal(like.to_local(), expected)
                leaf = store.view(f"key{number}")["w"]
                before = memstore.bytes_read()
                made = leaf.distribute(mesh, placements)
                assert memstore.bytes_read() - before == expected.nbytes
                assert type(made) is DTensor and made.placements == out["w"].placements
                assert made.shape == tensor.shape and torch.equal(made.to_local(), expected)
                if leaf.ndim == 2:
                    turned = leaf.T.distribute(mesh, [Replicate()] * mesh.ndim)
                    assert torch.equal(turned.to_local(), tensor.T)


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))


@pytest.mark.parametrize("rank", [0, 1])
@in_a_child
def test_modules_and_optimizers(rank: int) -> None:
    store, boxed = opened_store()
    full = layers()
    optimizer = torch.optim.AdamW(full.parameters())
    full(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": full.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    boxed.put("boxed", state, grid(3))
    store.put("whole", state)
    with as_rank(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        for key in ("boxed", "whole"):
            model = layers()
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh)
            other = torch.optim.AdamW(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            other.step()
            out = {"model": model.state_dict(), "optimizer": other.state_dict(), "epoch": 0}
            store.get(key, out=out)
            assert out["epoch"] == 3
            for name, value in full.state_dict().items():
                rows = value.chunk(2)[rank]
                assert torch.equal(out["model"][name].to_local(), rows)
                assert torch.equal(model.get_parameter(name).to_local(), rows)  # its very memory
            for number, moments in optimizer.state_dict()["state"].items():
                own = out["optimizer"]["state"][number]
                assert torch.equal(own["exp_avg"].to_local(), moments["exp_avg"].chunk(2)[rank])
                assert torch.equal(own["step"], moments["step"])
            like = store.get(key, like=out)
            assert_same(like["model"]["0.weight"].to_local(), out["model"]["0.weight"].to_local())


@in_a_child
def test_kinds_of_dtensors() -> None:
    store, boxed = opened_store()
    tensor = numbered((6, 4))
    value = {"p": torch.nn.Parameter(tensor), "b": tensor.clone(), "td": TensorDict(x=tensor.clone())}
    boxed.put("key", value, grid(3))
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        parameter: Any = torch.nn.Parameter(zeros(tensor, mesh, [Shard(1)]))
        frozen: Any = torch.nn.Parameter(zeros(tensor, mesh, [Shard(0)]), requires_grad=False)
        out: dict[str, Any] = {"p": parameter, "b": frozen, "td": TensorDict(x=zeros(tensor, mesh, [Shard(0)]))}
        store.get("key", out=out)
        assert torch.equal(parameter.to_local(), tensor[:, 2:]) and out["p"] is parameter and parameter.requires_grad
        assert torch.equal(out["td"]["x"].to_local(), tensor[3:])
        like = store.get("key", like=out)
        assert isinstance(like["p"], torch.nn.Parameter) and like["p"].requires_grad and like["p"].is_leaf
        assert isinstance(like["b"], torch.nn.Parameter) and not like["b"].requires_grad
        assert torch.equal(like["td"]["x"].to_local(), tensor[3:]) and type(like["td"]) is TensorDict
        half = {"p": zeros(tensor.half(), mesh, [Shard(0)])}
        got = store.get("key", like=half)["p"]
        assert got.dtype == torch.float16 and torch.equal(got.to_local(), tensor[3:].half())
        tied = store.get("key", like={"p": parameter, "b": parameter})
        assert tied["p"] is tied["b"]
        partial = DTensor.from_local(torch.zeros(6, 4), mesh, [Partial()])
        with pytest.raises(memstore.StructureMismatchError, match=r"value\['b'\]: .*Partial"):
            store.get("key", out={"p": parameter, "b": partial})
        with pytest.raises(memstore.UnsupportedValueError, match="Partial"):
            store.view("key")["b"].distribute(mesh, [Partial()])
        with pytest.raises(memstore.StructureMismatchError, match=r"stored with shape \[6, 4\], here \[6, 5\]"):
            store.get("key", out={"p": zeros(torch.zeros(6, 5), mesh, [Shard(0)])})
        leaf = store.view("key")["p"]
        assert leaf.distribute(mesh, [Shard(0)]).requires_grad
        assert torch.equal(store.ref("key").get(out={"b": frozen})["b"].to_local(), tensor[3:])
        view = store.view("key")["b"][1:5, ::2]
        assert torch.equal(view.distribute(mesh, [Shard(0)]).to_local(), tensor[3:5, ::2])
        with torch.inference_mode():
            inference = zeros(tensor, mesh, [Shard(0)])
            made = leaf.distribute(mesh, [Shard(0)])
        assert torch.equal(store.get("key", out={"b": inference})["b"].to_local(), tensor[3:])
        assert not made.to_local().is_inference()


@in_a_child
def test_a_rank_outside_of_the_mesh() -> None:
    store, boxed = opened_store()
    tensor = numbered((6, 4))
    boxed.put("key", {"w": tensor}, grid(3))
    with as_rank(3, 4):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", [0, 1])
        assert mesh.get_coordinate() is None
        out = {"w": zeros(tensor, mesh, [Shard(0)])}
        before = memstore.bytes_read()
        store.get("key", out=out)
        assert store.get("key", like=out)["w"].shape == (6, 4)
        assert store.view("key")["w"].distribute(mesh, [Shard(0)]).to_local().numel() == 0
        assert memstore.bytes_read() == before


@in_a_child
def test_sharded_tensors() -> None:
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    store, boxed = opened_store()
    tensor = numbered((6, 4))
    boxed.put("key", {"w": tensor}, grid(2, 2))
    with as_rank(0, 1):
        shards = [
            OldShard.from_tensor_and_offsets(torch.zeros(2, 4), [0, 0], 0),
            OldShard.from_tensor_and_offsets(torch.zeros(4, 4), [2, 0], 0),
        ]
        out = {"w": ShardedTensor._init_from_local_shards(shards, 6, 4)}
        before = memstore.bytes_read()
        store.get("key", out=out)
        assert memstore.bytes_read() - before == tensor.nbytes
        assert torch.equal(torch.cat([shard.tensor for shard in out["w"].local_shards()]), tensor)
        with pytest.raises(memstore.UnsupportedValueError, match="ShardedTensor"):
            store.get("key", like=out)


def rank_of_gloo(wire: Wire, rank: int, meeting: str, root: str, key: str) -> bool:
    """Rank 0 reads; rank 1 is told when it did, and does nothing with the store: a collective would wait for it."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if rank:
        wire.receive()
        return True
    with memstore.open(root) as store:
        shape = store.info(key).leaves[0].shape
        local = torch.zeros(shape[0] // 2, *shape[1:])
        out = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        store.get(key, out=[out])
        like = store.get(key, like=[out])[0].to_local()
        made = store.view(key)[0].distribute(mesh, [Shard(0)]).to_local()
        whole = store.view(key)[0].distribute(mesh, [Replicate()]).to_local()
    return bool(local.all()) and torch.equal(local, like) and torch.equal(local, made) and whole.shape == shape


def test_no_rank_waits_for_another(root: str, tmp_path: Path) -> None:
    with memstore.open(root) as store:
        store.put("key", [numbered((64, 4))])
    meeting = str(tmp_path / "meeting")
    with Child(rank_of_gloo, 0, meeting, root, "key") as reader, Child(rank_of_gloo, 1, meeting, root, "key") as idle:
        assert reader.receive(60) is True
        idle.send()
        assert idle.receive(60) is True
