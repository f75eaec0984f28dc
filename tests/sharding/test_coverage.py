"""What no box has, boxes that overlap or lie outside, and boxes cut: against counting, and against torch."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.sharding import Box, cover_of, narrow_to, overlap, slabs, uncovered, whole
from tests.sharding.strategies import Spread, boxes, counts, shapes, spreads

Case = tuple[tuple[int, ...], list[Box]]  # a shape, and boxes of it


@st.composite
def boxes_of_a_shape(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    return shape, draw(st.lists(boxes(shape), max_size=6))


@given(boxes_of_a_shape(), st.data())
def test_uncovered_parts_are_those_that_no_box_has(case: Case, data: st.DataObject) -> None:
    shape, held = case
    wanted = data.draw(boxes(shape))
    gaps = uncovered(wanted, held)
    missing = (counts(shape, held) == 0) & (counts(shape, [wanted]) == 1)
    assert (counts(shape, gaps) == missing).all()  # and none of them twice
    assert not any(gap.is_empty for gap in gaps)
    assert gaps == sorted(gaps)


@given(boxes_of_a_shape())
def test_an_overlap_is_found_where_two_boxes_share_an_element(case: Case) -> None:
    shape, held = case
    pair = overlap(held)
    assert (pair is not None) == bool((counts(shape, held) > 1).any())
    if pair is not None:
        assert pair[0] < pair[1]
        assert held[pair[0]].meet(held[pair[1]]) is not None


@given(boxes_of_a_shape(), st.data())
def test_a_cover_is_exact_where_each_element_lies_in_one_box_and_nothing_outside(
    case: Case, data: st.DataObject
) -> None:
    shape, held = case
    found = cover_of(shape, held)
    assert found.outside is None and found.is_exact == bool((counts(shape, held) == 1).all())
    by = [data.draw(st.integers(1, 3)) * size for size in shape]
    moved = [Box((0, *shape), (1, *shape)), *(whole(shape).moved(by) for _ in shape[:1] if shape[0])]
    for wrong in moved:
        place = data.draw(st.integers(0, len(held)))
        outside = cover_of(shape, [*held[:place], wrong, *held[place:]])
        assert outside.outside == place and not outside.is_exact


@given(shapes(), st.integers(1, 40))
def test_slabs_are_the_whole_in_order(shape: tuple[int, ...], most: int) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    cut = list(slabs(shape, most))
    in_order = [number for slab in cut for number in narrow_to(numbers, slab).reshape(-1).tolist()]
    assert in_order == list(range(numbers.numel()))
    assert all(math.prod(slab.shape) <= most for slab in cut)


@given(boxes_of_a_shape(), st.data())
def test_a_box_is_narrowed_as_a_tensor_is(case: Case, data: st.DataObject) -> None:
    shape, held = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    for box in held:
        assert box.within(whole(shape)._replace(offsets=box.offsets)).moved(box.offsets) == box
        for dim, size in enumerate(box.shape):
            start = data.draw(st.integers(0, size))
            length = data.draw(st.integers(0, size - start))
            narrowed = narrow_to(numbers, box.narrow(dim, start, length))
            assert narrowed.equal(narrow_to(numbers, box).narrow(dim, start, length))


@given(spreads())
def test_boxes_of_primary_ranks_cover_all_and_don_t_overlap(spread: Spread) -> None:
    layout = spread.layout
    held = [piece.box for place in spread.coordinates if layout.is_primary(place) for piece in layout.pieces(place)]
    assert uncovered(whole(spread.shape), held) == []
    assert overlap(held) is None


def test_one_box_that_is_missing_from_a_grid_is_named() -> None:
    grid = [Box(offsets, (2, 3)) for offsets in itertools.product(range(0, 8, 2), range(0, 9, 3))]
    lost = grid.pop(4)
    assert uncovered(whole((8, 9)), grid) == [lost]


def test_a_thousand_boxes_take_no_square_of_the_steps() -> None:
    """Eight times as many boxes take some 8 to 12 times as many; a comparison of each two would take 64 times."""
    sizes = {(125, 1, 1): (1000, 1, 1), (1, 125, 1): (1, 1000, 1), (1, 1, 125): (1, 1, 1000)}
    for few, many in {**sizes, (5, 5, 5): (10, 10, 10), (11, 1, 11): (32, 1, 32)}.items():
        for of_few, of_many in zip(_looks_at_a_grid(few), _looks_at_a_grid(many), strict=True):
            assert _steps(of_many) < 12 * _steps(of_few)


def _steps(call: Callable[[], object]) -> int:
    """Counts the opcodes that a call executes: a busy machine executes as many."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _looks_at_a_grid(sides: tuple[int, ...]) -> tuple[Callable[[], object], Callable[[], object]]:
    grid = [Box(offsets, (4, 4, 4)) for offsets in itertools.product(*(range(0, 4 * side, 4) for side in sides))]
    region = whole([4 * side for side in sides])
    assert uncovered(region, grid) == []
    assert overlap(grid) is None
    return partial(uncovered, region, grid), partial(overlap, grid)
