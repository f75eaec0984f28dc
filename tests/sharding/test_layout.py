"""Which boxes each rank holds: against torch's own way to cut a tensor."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from memstore.sharding import Box, MeshLayout, MeshPiece, Split
from tests.sharding.strategies import Spread, assembled, counts, numbered, spreads


@given(spreads())
def test_each_rank_holds_what_torch_gives_it(spread: Spread) -> None:
    whole, layout = numbered(spread.shape), spread.layout
    for coordinate in spread.coordinates:
        expected = spread.local(whole, coordinate)
        pieces = layout.pieces(coordinate)
        assert layout.local_shape(coordinate) == tuple(expected.shape)
        assert torch.equal(assembled(pieces, expected.shape, whole), expected)
        assert not any(piece.box.is_empty or piece.local.shape != piece.box.shape for piece in pieces)
        assert (counts(expected.shape, [piece.local for piece in pieces]) == 1).all()


@given(spreads())
def test_all_ranks_cover_the_tensor_and_the_primary_ones_write_it_once(spread: Spread) -> None:
    layout = spread.layout
    held = {coordinate: [piece.box for piece in layout.pieces(coordinate)] for coordinate in spread.coordinates}
    primaries = [box for coordinate, boxes in held.items() if layout.is_primary(coordinate) for box in boxes]
    assert (counts(spread.shape, primaries) == 1).all()
    copies = math.prod(
        ranks
        for ranks, placement in zip(spread.mesh_shape, spread.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    assert (counts(spread.shape, [box for boxes in held.values() for box in boxes]) == copies).all()
    assert layout.is_replicated == (copies > 1)


sizes = st.integers(1, 5)


@given(sizes, sizes, st.integers(0, 40))
def test_fsdp_over_tensor_parallel_cuts_for_the_tensor_parallel_ranks_first(dp: int, tp: int, rows: int) -> None:
    whole = numbered((rows,))
    spread = Spread((rows,), (dp, tp), (_StridedShard(0, split_factor=tp), Shard(0)))
    layout = spread.layout.unstrided()
    assert layout is not None
    for i, j in spread.coordinates:
        by_tensor_parallel = Shard(0)._split_tensor(whole, tp, with_padding=False)[0][j]
        expected = Shard(0)._split_tensor(by_tensor_parallel, dp, with_padding=False)[0][i]
        assert torch.equal(assembled(layout.pieces((i, j)), expected.shape, whole), expected)
        if rows % (dp * tp) == 0:
            assert spread.layout.pieces((i, j)) == layout.pieces((i, j))


def test_the_order_of_strided_splits_is_that_of_torch() -> None:
    mesh_shape, orders = (2, 3, 2), list(itertools.permutations(range(3)))
    for order in orders:
        factors = [math.prod(mesh_shape[other] for other in order[: order.index(i)] if other > i) for i in range(3)]
        layout = MeshLayout((24,), mesh_shape, tuple(Split(i, 0, factor) for i, factor in enumerate(factors)))
        assert layout.unstrided() == MeshLayout((24,), mesh_shape, tuple(Split(i, 0) for i in order))
    assert MeshLayout((24,), mesh_shape, (Split(0, 0, 5), Split(1, 0))).unstrided() is None


def test_a_strided_share_is_several_boxes_one_behind_the_other_in_the_local_tensor() -> None:
    layout = MeshLayout((8, 3), (2,), (Split(0, 0, factor=2),))
    assert layout.local_shape((1,)) == (4, 3)
    assert layout.pieces((1,)) == [
        MeshPiece(Box((2, 0), (2, 3)), Box((0, 0), (2, 3))),
        MeshPiece(Box((6, 0), (2, 3)), Box((2, 0), (2, 3))),
    ]


def test_shares_that_adjoin_are_one_box() -> None:
    assert len(MeshLayout((8,), (1,), (Split(0, 0, factor=4),)).pieces((0,))) == 1


def test_mesh_dimensions_share_a_tensor_dimension_in_the_order_of_the_splits() -> None:
    left_to_right = MeshLayout((8,), (2, 2), (Split(0, 0), Split(1, 0)))
    assert [left_to_right.pieces((0, 1))[0].box.offsets, left_to_right.pieces((1, 0))[0].box.offsets] == [(2,), (4,)]
    right_to_left = MeshLayout((8,), (2, 2), (Split(1, 0), Split(0, 0)))
    assert [right_to_left.pieces((0, 1))[0].box.offsets, right_to_left.pieces((1, 0))[0].box.offsets] == [(4,), (2,)]


@pytest.mark.parametrize(("size", "expected"), [(5, [2, 2, 1, 0]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0])])
def test_the_last_ranks_may_hold_less_or_nothing(size: int, expected: list[int]) -> None:
    layout = MeshLayout((size, 2), (4,), (Split(0, 0),))
    assert [layout.local_shape((rank,)) for rank in range(4)] == [(held, 2) for held in expected]
    assert [len(layout.pieces((rank,))) for rank in range(4)] == [int(held > 0) for held in expected]


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    layout = MeshLayout((4,), (2,), (Split(0, 0),))
    assert (layout.pieces(None), layout.local_shape(None), layout.is_primary(None)) == ([], (0,), False)


def test_a_tensor_without_dimensions_is_one_box_on_each_rank() -> None:
    layout = MeshLayout((), (2,), ())
    assert layout.pieces((1,)) == [MeshPiece(Box((), ()), Box((), ()))]
    assert [layout.is_primary((0,)), layout.is_primary((1,)), layout.is_replicated] == [True, False, True]


def test_a_mesh_dimension_of_one_rank_replicates_nothing() -> None:
    assert not MeshLayout((4,), (1, 2), (Split(1, 0),)).is_replicated
