"""What DTensors say of a rank: on torch's fake ranks, against the tensor that was distributed."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import memstore
from memstore.sharding import Box, TensorShard, local_shape, place, sharded_leaf
from tests.children import in_a_child, in_child
from tests.sharding.fake_world import as_rank, each_rank
from tests.sharding.strategies import LAYOUTS, assembled, numbered


def check_layouts(layouts: tuple[Any, ...]) -> None:
    for shape, mesh_shape, placements in layouts:
        tensor = numbered(shape)
        for _ in each_rank(math.prod(mesh_shape)):
            mesh = init_device_mesh("cpu", mesh_shape)
            value = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
            local = value.to_local()
            leaf = sharded_leaf(value)
            assert leaf is not None
            assert (leaf.shape, leaf.dtype) == (shape, torch.int64)
            memory = local.untyped_storage().data_ptr()
            assert all(shard.local.untyped_storage().data_ptr() == memory for shard in leaf.shards)
            assert all(torch.equal(shard.local, tensor[shard.box.slices]) for shard in leaf.shards)
            assert sum(shard.local.numel() for shard in leaf.shards) == local.numel()
            pieces = place(mesh, placements, shape)
            assert [piece.box for piece in pieces] == [shard.box for shard in leaf.shards]
            assert local_shape(mesh, placements, shape) == tuple(local.shape)
            assert torch.equal(assembled(pieces, local.shape, tensor), local)
            at = mesh.get_coordinate()
            assert at is not None
            replicating = [i for i, placement in enumerate(placements) if isinstance(placement, Replicate)]
            assert leaf.is_primary == all(at[i] == 0 for i in replicating)
            assert leaf.is_replicated == any(mesh_shape[i] > 1 for i in replicating)


def test_a_dtensor_says_what_torch_gives_each_rank() -> None:
    in_child(check_layouts, LAYOUTS)


@in_a_child
def test_a_parameter_that_is_a_dtensor_has_plain_views() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        value: Any = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
        tensors: tuple[Any, Any] = (value, value * 2)
        for tensor in tensors:
            leaf = sharded_leaf(tensor)
            assert leaf is not None
            assert leaf.shards[0].box == Box((2, 0), (2, 2))
            local = leaf.shards[0].local
            assert type(local) is torch.Tensor
            assert not local.requires_grad and local.grad_fn is None
            local.zero_()  # as a copy into it would: no complaint about a leaf, and it is the parameter's memory
            assert tensor.to_local().eq(0).all()


class Refusing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a mode")


MODES: dict[str, Callable[[], Any]] = {
    "fake": FakeTensorMode,
    "fake, allowing real ones": functools.partial(FakeTensorMode, allow_non_fake_inputs=True),
    "inference": torch.inference_mode,
    "default device": functools.partial(torch.device, "meta"),
    "function mode": Refusing,
}


@pytest.mark.parametrize("name", MODES)
@in_a_child
def test_modes_of_torch_change_nothing(name: str) -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)], src_data_rank=None)
        for value in (sharded, TensorShard(torch.arange(3.0), (5,), (0,))):
            with MODES[name]():
                leaf = sharded_leaf(value)
            assert leaf is not None
            (shard,) = leaf.shards
            assert type(shard.local) is torch.Tensor and not shard.local.is_inference()
            assert torch.equal(shard.local, torch.arange(3.0))


@in_a_child
def test_a_local_tensor_that_a_collective_still_fills_is_waited_for() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        pending = value.redistribute(placements=[Replicate()], async_op=True)
        with torch.no_grad():
            on_its_way = pending.to_local()  # itself, and no view of it
        assert isinstance(on_its_way, AsyncCollectiveTensor) and not on_its_way.completed, "this tests nothing"
        for tensor in (pending, TensorShard(on_its_way, (4,), (0,))):
            leaf = sharded_leaf(tensor)
            assert leaf is not None
            assert [type(shard.local) for shard in leaf.shards] == [torch.Tensor]
            assert on_its_way.completed


@in_a_child
def test_a_dtensor_that_is_not_sharded_from_left_to_right_says_its_own_boxes() -> None:
    """Torch can shard a dimension by a later mesh dimension first; it writes the same as _StridedShard, too."""
    tensor, placements = numbered((8, 2)), (Shard(0), Shard(0))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    for _ in each_rank(4):
        mesh = init_device_mesh("cpu", (2, 2))
        strided = DTensorSpec._convert_shard_order_to_StridedShard(order, placements, mesh)
        assert any(isinstance(placement, _StridedShard) for placement in strided), "this tests nothing"
        local = distribute_tensor(tensor, mesh, strided, src_data_rank=None).to_local()
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        value = DTensor(local, DTensorSpec(mesh, placements, meta, shard_order=order), requires_grad=False)
        leaf = sharded_leaf(value)
        assert leaf is not None
        assert [torch.equal(shard.local, tensor[shard.box.slices]) for shard in leaf.shards] == [True]


def rows_of_fsdp(rank: int, rows: int, dp: int, tp: int) -> tuple[str, list[int]]:
    """How FSDP2 places a parameter of tensor parallel ranks, and the rows that its DTensor is said to have here."""
    tensor = numbered((rows, 2)).float()
    with as_rank(rank, dp * tp):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        module: Any = torch.nn.Module()
        module.weight = torch.nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(0)], src_data_rank=None))
        fully_shard(module, mesh=mesh["dp"])
        weight: Any = module.weight
        leaf = sharded_leaf(weight)
        assert leaf is not None
        assert all(torch.equal(shard.local, tensor[shard.box.slices]) for shard in leaf.shards)
        return str(weight.placements), [shard.box.shape[0] for shard in leaf.shards]


def test_fsdp_over_tensor_parallel_says_its_rows_where_sizes_do_not_divide_evenly() -> None:
    """By its placements as torch reads them, the last row would be at rank 4, and rank 5 had none."""
    found = [in_child(rows_of_fsdp, rank, 7, 3, 2) for rank in range(6)]
    assert {placements for placements, _ in found} == {"(_StridedShard(dim=0, sf=2), Shard(dim=0))"}
    assert [rows for _, rows in found] == [[2], [1], [2], [1], [], [1]]


def test_a_dtensor_that_does_not_tell_what_it_holds_is_refused() -> None:
    with pytest.raises(memstore.UnsupportedValueError, match=r"at \(2, 2\) if FSDP2 made it as if distrib"):
        in_child(rows_of_fsdp, 10, 27, 3, 4)


@in_a_child
def test_ranks_outside_of_the_mesh_may_hold_the_same() -> None:
    for _ in each_rank(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
        value = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)], src_data_rank=None)
        leaf = sharded_leaf(value)
        assert leaf is not None
        assert (leaf.is_primary, leaf.is_replicated) == (True, True)


@in_a_child
def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        value = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        leaf = sharded_leaf(value)
        assert leaf is not None
        assert (leaf.shape, leaf.shards, leaf.is_primary) == ((4,), (), False)
        assert place(mesh, [Shard(0)], (4,)) == []
        assert local_shape(mesh, [Shard(0)], (4,)) == tuple(value.to_local().shape)


@in_a_child
def test_what_no_boxes_can_be_said_of_is_refused_with_the_reason() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(memstore.UnsupportedValueError, match=r"Partial\(sum\) of mesh dimension 0.*redistribute"):
            sharded_leaf(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
        unlike = DTensor.from_local(
            torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,)
        )
        with pytest.raises(memstore.UnsupportedValueError, match=r"of shape \(2,\);.*has \(4,\) at \(0,\).*from_local"):
            sharded_leaf(unlike)
        for placements, shape, message in (
            ([Shard(2)], (3, 3), r"Shard\(dim=2\) of mesh dimension 0.*from -2 to 1, or Replicate\(\)"),
            ([Shard(0)], (), r"of shape \(\) doesn't have; use Replicate\(\)"),
            ([Shard(0), Shard(1)], (3, 3), "2 placements for a mesh of 1 dimensions"),
            (Shard(0), (3,), r"are a list .* and not Shard\(dim=0\): write \[Shard\(dim=0\)\]"),
            (["Shard(0)"], (3,), r"placement 'Shard\(0\)' of mesh dimension 0 is unknown; known are"),
            ([type("Odd", (Shard,), {})(0)], (3,), "is unknown"),
        ):
            with pytest.raises(memstore.UnsupportedValueError, match=message):
                place(mesh, placements, shape)
        with pytest.raises(memstore.UnsupportedValueError, match="expected a DeviceMesh of torch, found 'cpu'"):
            place("cpu", [Shard(0)], (3,))
