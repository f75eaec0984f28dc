"""The arithmetic of boxes, against counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memstore.sharding import cover, runs


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return shape, [draw(st.integers(0, 30)) for _ in shape]


def elements(shape: list[int], stride: list[int]) -> set[int]:
    return {int(np.dot(index, stride)) if shape else 0 for index in np.ndindex(*shape)}


@given(boxes())
def test_runs_cover_the_elements_of_a_box(box: tuple[list[int], list[int]]) -> None:
    offsets, length = runs(*box, limit=1000)
    covered = {int(start) + i for start in offsets for i in range(length)}
    assert covered >= elements(*box)
    assert (max(covered) if covered else 0) == max(elements(*box), default=0)


def test_runs_of_dense_boxes_are_exact() -> None:
    assert [part if isinstance(part, int) else part.tolist() for part in runs((3, 4), (4, 1), 10)] == [[0], 12]
    assert [part if isinstance(part, int) else part.tolist() for part in runs((3, 2), (4, 1), 10)] == [[0, 4, 8], 2]
    assert [part if isinstance(part, int) else part.tolist() for part in runs((4, 3), (1, 4), 10)] == [[0], 12]
    assert [part if isinstance(part, int) else part.tolist() for part in runs((), (), 10)] == [[0], 1]
    assert [part if isinstance(part, int) else part.tolist() for part in runs((2, 5, 2), (100, 10, 2), 3)] == [
        [0, 100],
        43,
    ]


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 40))
def test_a_cover_is_the_fewest_ranges_of_units(starts: list[int], length: int) -> None:
    first, last = cover(np.array(starts, np.int64), length, 16)
    units = {at // 16 for start in starts for at in range(start, start + length)}
    assert {at for a, b in zip(first, last, strict=True) for at in range(a // 16, b // 16)} == units
    assert not len(first) or (first[1:] > last[:-1]).all()
    assert all(at % 16 == 0 for at in [*first, *last])
