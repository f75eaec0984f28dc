"""What no box has, and boxes that overlap: against counting."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from hypothesis import given
from hypothesis import strategies as st

from memstore.sharding import Box, overlap, uncovered, whole
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
