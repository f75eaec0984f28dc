"""What TensorShards and ShardedTensors say of a rank; and that other values say nothing."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed._shard.sharded_tensor as sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import memstore
from memstore.sharding import Box, TensorShard, place, sharded_leaf, whole
from tests.children import in_a_child
from tests.patience import least_seconds
from tests.sharding.fake_world import each_rank


@in_a_child
def test_a_sharded_tensor_says_its_local_shards() -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])  # type: ignore[arg-type]
    for rank in each_rank(2):
        value: Any = sharded_tensor.empty(  # pyright: ignore[reportUnknownMemberType]
            spec, 5, 3, dtype=torch.bfloat16
        )
        (held,) = value.local_shards()
        held.tensor.fill_(rank)
        leaf = sharded_leaf(value)
        assert leaf is not None
        assert (leaf.shape, leaf.dtype, leaf.is_primary, leaf.is_replicated) == ((5, 3), torch.bfloat16, True, True)
        (shard,) = leaf.shards
        assert shard.box == (Box((0, 0), (3, 3)), Box((3, 0), (2, 3)))[rank]
        assert shard.local.data_ptr() == held.tensor.data_ptr()


# --- TensorShard ------------------------------------------------------------------------------------------------------


def test_a_tensor_shard_is_a_box() -> None:
    local = torch.ones(2, 3, requires_grad=True)
    leaf = sharded_leaf(memstore.TensorShard(local, torch.Size([4, 3]), (2, 0)))
    assert leaf is not None
    assert (leaf.shape, leaf.dtype, leaf.is_primary) == ((4, 3), torch.float32, True)
    (shard,) = leaf.shards
    assert shard.box == Box((2, 0), (2, 3))
    assert shard.local.data_ptr() == local.data_ptr() and not shard.local.requires_grad


@pytest.mark.parametrize(
    ("shape", "whole_shape", "offsets"), [((0, 3), (4, 3), (4, 0)), ((0,), (0,), (0,)), ((2, 0), (2, 0), (0, 0))]
)
def test_an_empty_tensor_shard_has_no_box(shape: Any, whole_shape: Any, offsets: Any) -> None:
    leaf = sharded_leaf(TensorShard(torch.ones(shape), whole_shape, offsets))
    assert leaf is not None
    assert (leaf.shape, leaf.shards) == (whole_shape, ())


def test_a_tensor_shard_without_dimensions_is_the_whole() -> None:
    leaf = sharded_leaf(TensorShard(torch.tensor(3), (), ()))
    assert leaf is not None
    assert [(shard.box, shard.local.item()) for shard in leaf.shards] == [(whole(()), 3)]


@pytest.mark.parametrize(
    ("local", "shape", "offsets", "message"),
    [
        (torch.ones(2), (4, 3), (0, 0), r"of shape \(2,\) at the offsets \(0, 0\).*of shape \(4, 3\).*dimensions"),
        (torch.ones(2), (4,), (0, 0), "does not lie within"),
        (torch.ones(2), (4,), (3,), "does not lie within"),
        (torch.ones(2), (4,), (-1,), "does not lie within"),
        (torch.ones(0), (4,), (5,), "does not lie within"),
        (torch.ones(0), (-1,), (-1,), "does not lie within"),
        (torch.ones(2), (4.0,), (0,), r"`global_shape` must be a tuple of ints, found \(4.0,\)"),
        (torch.ones(2), (4,), 0, "`offsets` must be a tuple of ints, found 0"),
        ([1.0, 2.0], (4,), (0,), "whose `local` is a list; it must be a plain tensor"),
    ],
)
def test_a_tensor_shard_that_is_no_part_is_refused(local: Any, shape: Any, offsets: Any, message: str) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match=message):
        sharded_leaf(TensorShard(local, shape, offsets))


def test_a_tensor_shard_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(TensorShard(torch.arange(2), (4,), (1,))))
    assert (again.local.tolist(), again.global_shape, again.offsets) == ([0, 1], (4,), (1,))


# --- other values -----------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


PLAIN: tuple[Any, ...] = (
    torch.ones(2),
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(2).as_subclass(Subclass),
    None,
    3,
    "a",
    {},
    [1],
)


def test_other_values_are_none_of_these() -> None:
    assert [sharded_leaf(value) for value in PLAIN] == [None] * len(PLAIN)


def test_it_costs_next_to_nothing_for_other_values() -> None:
    """0.3 us where this was written."""
    calls = range(1000)
    for value in PLAIN:
        assert least_seconds(lambda value=value: [sharded_leaf(value) for _ in calls], 0.002) < 0.002 * 3


@in_a_child
def test_torch_may_lack_distributed() -> None:
    for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
        del sys.modules[name]
    assert sharded_leaf(PLAIN[2]) is None
    assert sharded_leaf(TensorShard(torch.ones(2), (2,), (0,))) is not None
    with pytest.raises(memstore.UnsupportedValueError, match="expected a DeviceMesh"):
        place(object(), [], ())
    assert "torch.distributed" not in sys.modules
