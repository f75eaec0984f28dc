"""Copies from the boxes of one layout into those of another: against a mask."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.sharding import Box, BoxIndex, copies, narrow_to, whole
from tests.patience import least_seconds
from tests.sharding.strategies import Spread, boxes, counts, numbered, shapes, spreads

Held = list[tuple[Box, torch.Tensor]]


@st.composite
def two_spreads(draw: st.DrawFn) -> tuple[Spread, Spread]:
    shape = draw(shapes())
    return draw(spreads(shape)), draw(spreads(shape))


def of_rank(spread: Spread, coordinate: tuple[int, ...], local: torch.Tensor) -> Held:
    return [(piece.box, narrow_to(local, piece.local)) for piece in spread.layout.pieces(coordinate)]


@given(two_spreads())
def test_a_tensor_moves_from_any_layout_to_any_other(case: tuple[Spread, Spread]) -> None:
    stored_as, wanted_as = case
    tensor = numbered(stored_as.shape)
    stored = [
        held
        for coordinate in stored_as.coordinates
        if stored_as.layout.is_primary(coordinate)
        for held in of_rank(stored_as, coordinate, stored_as.local(tensor, coordinate))
    ]
    for coordinate in wanted_as.coordinates:
        expected = wanted_as.local(tensor, coordinate)
        local = torch.full_like(expected, -1)
        plan = copies(of_rank(wanted_as, coordinate, local), stored)
        assert plan.missing == []
        assert sum(into.numel() for into, _ in plan.pairs) == expected.numel()
        for into, source in plan.pairs:
            into.copy_(source)
        assert torch.equal(local, expected)


@given(shapes(), st.data())
def test_what_nothing_stored_has_is_named_and_left_alone(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor, target = numbered(shape), torch.full(shape, -1)
    stored = data.draw(st.lists(boxes(shape), max_size=5))
    box = data.draw(boxes(shape))
    plan = copies([(box, target[box.slices])], [(held, tensor[held.slices]) for held in stored])
    for into, source in plan.pairs:
        assert into.shape == source.shape
        into.copy_(source)
    is_missing = torch.tensor((counts(shape, [box]) == 1) & (counts(shape, stored) == 0))
    is_copied = torch.tensor((counts(shape, [box]) == 1) & (counts(shape, stored) > 0))
    assert torch.equal(target, torch.where(is_copied, tensor, -1))
    assert torch.equal(torch.tensor(counts(shape, plan.missing)), is_missing.long())


@given(shapes(), st.data())
def test_an_index_finds_the_boxes_that_meet_another(shape: tuple[int, ...], data: st.DataObject) -> None:
    stored = data.draw(st.lists(boxes(shape), max_size=8))
    wanted = data.draw(boxes(shape))
    found = BoxIndex(stored).meeting(wanted)
    expected = {} if wanted.is_empty else {i: wanted.meet(box) for i, box in enumerate(stored) if not box.is_empty}
    assert dict(found) == {number: meet for number, meet in expected.items() if meet is not None}
    assert len(dict(found)) == len(found)


def test_equal_boxes_are_read_once_from_the_first() -> None:
    first, second, target = torch.zeros(4), torch.ones(4), torch.full((2,), -1.0)
    plan = copies([(Box((1,), (2,)), target)], [(whole((4,)), first), (whole((4,)), second)])
    assert [source.data_ptr() for _, source in plan.pairs] == [first[1:].data_ptr()]
    assert plan.pairs[0][0] is target


def test_a_tensor_without_dimensions_is_copied() -> None:
    target = torch.tensor(-1)
    plan = copies([(Box((), ()), target)], [(Box((), ()), torch.tensor(7))])
    for into, source in plan.pairs:
        into.copy_(source)
    assert target.item() == 7
    assert copies([(Box((), ()), target)], []).missing == [Box((), ())]


def test_hundreds_of_boxes_meet_hundreds_without_all_pairs() -> None:
    """From 400 boxes to 400 of another grid, 1,444 copies. Each pair looked at, 160,000 of them, takes a second."""
    size = 380
    tensor, target = torch.zeros(size, size), torch.zeros(size, size)
    cuts = (range(0, size, 19), [0, *range(10, size, 19)])
    grids = [
        [
            (box, owner[box.slices])
            for box in (
                Box((a, c), (b - a, d - c))
                for (a, b), (c, d) in itertools.product(zip(cut, [*cut[1:], size], strict=True), repeat=2)
            )
        ]
        for cut, owner in zip(cuts, (tensor, target), strict=True)
    ]
    plan = copies(grids[1], grids[0])
    assert plan.missing == []
    assert sum(into.numel() for into, _ in plan.pairs) == size * size
    assert least_seconds(lambda: copies(grids[1], grids[0]), 0.1) < 0.5
