"""Pictures of shards: what is drawn fits its width, and shows which rank has put what."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from memstore import LeafInfo, ShardInfo
from memstore.cli.render import ShardLayout, number_layouts, picture


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> ShardLayout:
    """Ranks in the order of their offsets."""
    cuts = [[size * i // part for i in range(part + 1)] for size, part in zip(shape, parts, strict=True)]
    boxes = itertools.product(*map(itertools.pairwise, cuts))
    return shape, tuple(
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box), rank)
        for rank, box in enumerate(boxes)
    )


def test_a_tensor_cut_along_two_dimensions() -> None:
    assert picture(grid((1024, 512), (2, 2)), 32) == [
        "[1024, 512]  down: dim 0  right: dim 1",
        "     0          256        512",
        "   0 ┌──────────┬──────────┐",
        "     │    0     │    1     │",
        " 512 ├──────────┼──────────┤",
        "     │    2     │    3     │",
        "1024 └──────────┴──────────┘",
    ]


@pytest.mark.parametrize(("shape", "parts", "dim"), [((12,), (3,), 0), ((12, 5), (3, 1), 0), ((5, 12), (1, 3), 1)])
def test_a_tensor_cut_along_one_dimension(shape: tuple[int, ...], parts: tuple[int, ...], dim: int) -> None:
    assert picture(grid(shape, parts), 24) == [
        f"{list(shape)}  right: dim {dim}",
        "0      4      8      12",
        "┌──────┬──────┬──────┐",
        "│  0   │  1   │  2   │",
        "└──────┴──────┴──────┘",
    ]


def test_sizes_that_differ_and_boxes_that_are_no_grid() -> None:
    shards = (((0, 0), (6, 4), 0), ((0, 4), (6, 12), 1), ((6, 0), (6, 16), 12))
    assert picture(((12, 16), shards), 40) == [
        "[12, 16]  down: dim 0  right: dim 1",
        "   0       4                        16",
        " 0 ┌───────┬────────────────────────┐",
        "   │   0   │           1            │",
        " 6 ├───────┴────────────────────────┤",
        "   │               12               │",
        "12 └────────────────────────────────┘",
    ]


def test_the_middle_of_many_is_left_out() -> None:
    assert picture(grid((640,), (64,)), 40) == [
        "[640]  right: dim 0",
        "0    10   20   30  610  620  630  640",
        "┌────┬────┬────┬───┬────┬────┬────┐",
        "│ 0  │ 1  │ 2  │ … │ 61 │ 62 │ 63 │",
        "└────┴────┴────┴───┴────┴────┴────┘",
    ]
    assert len(picture(grid((640, 640), (64, 64)), 80)) < 24


def test_more_than_two_dimensions() -> None:
    lines = picture(grid((8, 4, 6), (4, 2, 3)), 80)
    assert [line for line in lines if line.startswith("at ")] == ["at 0 of dim 0", "at 2 of dim 0", "at 4 of dim 0"]
    assert lines[-1] == "... and 1 more" and any("│       17        │" in line for line in lines)


@given(st.data(), st.integers(20, 200))
def test_any_layout(data: st.DataObject, width: int) -> None:
    parts = tuple(data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=4)))
    shape = tuple(part * data.draw(st.integers(1, 1000)) for part in parts)
    assume(math.prod(parts) <= 1000)
    lines = picture(grid(shape, parts), width)
    body = [line for line in lines if set(line) & set("│┌└├")]
    assert all(len(line) <= max(width, 40) for line in body)
    assert len(body) <= 3 * 20 and "0" in "".join(lines)


def test_leaves_that_lie_alike_have_one_picture() -> None:
    def leaf(name: str, *shards: ShardInfo) -> LeafInfo:
        return LeafInfo((name,), torch.float32, (4,), 16, shards)

    halves = [ShardInfo((0,), (2,), 0, "x"), ShardInfo((2,), (2,), 1, "y")]
    other = [ShardInfo((0,), (2,), 1, "x"), ShardInfo((2,), (2,), 0, "y")]
    found = number_layouts(
        [leaf("a", *halves), leaf("b", *halves), leaf("c", *other), leaf("d", ShardInfo((0,), (4,), 3, "z")), leaf("e")]
    )
    assert found.notes == {("a",): "(1)", ("b",): "(1)", ("c",): "(2)", ("d",): "rank 3"}
    lines = list(found.pictures(80))
    assert [line for line in lines if line.startswith("(")] == ["(1)  [4]  right: dim 0", "(2)  [4]  right: dim 0"]
