"""Draws by priority, against prefix sums of numpy over the priorities themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.replay.priorities import LARGEST, SumTree

CAPACITIES = st.one_of(st.integers(1, 50), st.sampled_from([2047, 2048, 2049, 4096, 4097, 10_000]))
SEEDS = st.integers(0, 2**32 - 1)


def new_tree(capacity: int) -> SumTree:
    return SumTree(np.zeros(SumTree.nodes(capacity)), capacity)


def changes(capacity: int) -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    """Slots, and whole numbers as their priorities: floats add them up exactly."""
    pair = st.tuples(st.integers(0, capacity - 1), st.integers(0, 9))
    return st.lists(
        st.lists(pair, max_size=40).map(lambda pairs: ([p[0] for p in pairs], [p[1] for p in pairs])), max_size=4
    )


@given(st.data(), CAPACITIES)
def test_it_finds_what_prefix_sums_find(data: st.DataObject, capacity: int) -> None:
    tree, expected = new_tree(capacity), np.zeros(capacity)
    for slots, priorities in data.draw(changes(capacity)):
        if len(slots) == 1:
            tree.set_one(slots[0], priorities[0])
        else:
            tree.set(np.array(slots, np.int64), np.array(priorities, np.float64))
        for slot, priority in zip(slots, priorities, strict=True):
            expected[slot] = priority
    assert tree.priorities.tolist() == expected.tolist()
    assert tree.sums()[-1] == expected.sum()
    places = np.arange(0, expected.sum(), 0.5)
    assert tree.find(places, tree.sums()).tolist() == expected.cumsum().searchsorted(places, "right").tolist()


@given(CAPACITIES, SEEDS, st.integers(0, 300))
def test_draws_are_as_even_as_their_shares(capacity: int, seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    tree = new_tree(capacity)
    priorities = generator.random(capacity) ** 3 * (generator.random(capacity) < 0.7)
    priorities[generator.integers(capacity)] = 1.0
    tree.set(np.arange(capacity), priorities)
    drawn = tree.draw(count, generator)
    assert drawn.shape == (count,) and (np.diff(drawn) >= 0).all()
    assert (priorities[drawn] > 0).all()
    expected = count * priorities / priorities.sum()
    assert np.abs(np.bincount(drawn, minlength=capacity) - expected).max() < 2


@given(CAPACITIES, SEEDS)
def test_sums_are_made_anew_after_a_change_that_was_cut_off(capacity: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    memory = np.zeros(SumTree.nodes(capacity))
    tree, whole = SumTree(memory, capacity), new_tree(capacity)
    priorities = generator.integers(0, 9, capacity).astype(np.float64)
    whole.set(np.arange(capacity), priorities)
    memory[: _above(capacity)] = generator.random(_above(capacity))
    tree.priorities[:] = priorities
    tree.rebuild()
    assert tree.sums()[-1] == whole.sums()[-1] == priorities.sum()
    places = np.arange(0.0, priorities.sum())
    assert tree.find(places, tree.sums()).tolist() == whole.find(places, whole.sums()).tolist()


def _above(capacity: int) -> int:
    """How many sums stand before the priorities: all, if there is one level alone."""
    tree = SumTree(memory := np.arange(float(SumTree.nodes(capacity))), capacity)
    return int(tree.priorities[0]) if len(memory) > capacity else 0


@given(CAPACITIES, SEEDS)
def test_memory_that_changes_under_a_draw_gives_some_slot(capacity: int, seed: int) -> None:
    """What a draw without a lock may find: sums and priorities that don't belong together."""
    generator = np.random.default_rng(seed)
    memory = generator.random(SumTree.nodes(capacity)) * generator.choice([0, 1, 1e300], SumTree.nodes(capacity))
    memory[0] += 1
    drawn = SumTree(memory, capacity).draw(100, generator)
    assert (drawn >= 0).all() and (drawn < capacity).all()


def test_the_largest_priorities_have_a_sum() -> None:
    tree = new_tree(5000)
    tree.set(np.arange(5000), LARGEST)
    assert np.isfinite(tree.sums()[-1])
    assert set(tree.draw(5000, np.random.default_rng(0))) >= set(range(1, 4999))


def test_a_tree_over_shared_memory_sees_what_another_sets() -> None:
    memory = np.zeros(SumTree.nodes(3000))
    one, other = SumTree(memory, 3000), SumTree(memory, 3000)
    one.set_one(2999, 2.0)
    assert other.sums()[-1] == 2.0
    assert other.draw(3, np.random.default_rng(0)).tolist() == [2999] * 3


def test_it_takes_two_numbers_a_slot() -> None:
    for capacity in (1, 2048, 2049, 100_000, 1_000_000, 1_100_000):
        assert SumTree.nodes(capacity) < 2 * capacity + 2 * 2048


def test_without_priorities_there_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="all priorities are 0"):
        new_tree(3).draw(1, np.random.default_rng(0))


def test_of_a_slot_that_is_named_twice_the_last_priority_stays() -> None:
    for capacity, times in itertools.product((10, 5000), (2, 100)):
        tree = new_tree(capacity)
        tree.set(np.full(times, 7), np.arange(times, dtype=np.float64))
        assert tree.sums()[-1] == tree.priorities[7] == times - 1
