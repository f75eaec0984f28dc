"""What each sampler gives, alone and beside others in other processes; and who waits for whom."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memstore
from memstore.replay.priorities import LARGEST, SumTree
from tests.children import Child, Wire, children, in_child
from tests.replay.rows import SPEC, check_priorities, check_whole, in_the_copy, numbers_of, ring_of, rows


def new(store: memstore.Store, capacity: int = 100, **options: Any) -> memstore.ReplayBuffer:
    return memstore.ReplayBuffer(store, "replay", SPEC, capacity=capacity, **options)


# --- uniform ----------------------------------------------------------------------------------------------------------


def test_all_rows_are_equally_likely(store: memstore.Store) -> None:
    buffer = new(store, 20, seed=1)
    buffer.extend(rows(0, 20))
    buffer.extend(rows(20, 10))
    counts = torch.bincount(torch.tensor(numbers_of(buffer.sample(20_000))), minlength=30)
    assert counts[:10].sum() == 0
    assert (counts[10:] - 1000).abs().max() < 150


def test_a_seed_repeats_and_other_processes_and_copies_differ(store: memstore.Store) -> None:
    buffer = new(store, seed=7)
    buffer.extend(rows(0, 100))
    first = buffer.sample(50)["index"].tolist()
    assert memstore.ReplayBuffer(store, "replay", seed=7).sample(50)["index"].tolist() == first

    def child() -> list[int]:
        return buffer.sample(50)["index"].tolist()

    others = [in_child(child), in_child(child), buffer.sample(50)["index"].tolist()]
    assert len({tuple(other) for other in [first, *others]}) == 4


def test_without_replacement_each_row_comes_once_a_pass(store: memstore.Store) -> None:
    buffer = new(store, replacement=False, seed=3)
    buffer.extend(rows(0, 10))
    first = [number for _ in range(2) for number in numbers_of(buffer.sample(5))]
    assert sorted(first) == list(range(10))
    batches = [numbers_of(buffer.sample(4)) for _ in range(5)]  # two passes, and a batch that has parts of both
    assert all(len(set(batch)) == 4 for batch in batches)
    seen = [number for batch in batches for number in batch]
    assert sorted(seen) == sorted([*range(10), *range(10)])
    assert sorted(seen[:10]) == list(range(10))
    buffer.extend(rows(10, 5))
    with pytest.raises(memstore.StoreTimeoutError, match="it has 15 rows, and without replacement a sample takes 16"):
        buffer.sample(16, timeout=0)


def test_a_pass_leaves_out_what_was_written_over_meanwhile(store: memstore.Store) -> None:
    buffer = new(store, 10, replacement=False, seed=3)
    buffer.extend(rows(0, 10))
    first = numbers_of(buffer.sample(3))
    buffer.extend(rows(10, 5))
    rest = numbers_of(buffer.sample(10 - len({*range(5, 10)} & {*first}) - 5))
    assert sorted([*(number for number in first if number >= 5), *rest]) == list(range(5, 10))


# --- handed out once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "expected"), [("fifo", [0, 1, 2, 3, 4]), ("lifo", [5, 4, 3, 2, 1])])
def test_rows_are_handed_out_once_in_their_order(store: memstore.Store, sampler: Any, expected: list[int]) -> None:
    buffer = new(store, sampler=sampler)
    other = memstore.ReplayBuffer(store, "replay", sampler=sampler)
    buffer.extend(rows(0, 6))
    assert numbers_of(buffer.sample(2)) + numbers_of(other.sample(3)) == expected
    with pytest.raises(memstore.StoreTimeoutError, match="no 2 rows wait to be handed out"):
        other.sample(2, timeout=0.01)
    assert len(numbers_of(buffer.sample(1))) == 1
    buffer.extend(rows(6, 1))
    assert numbers_of(other.sample(1)) == [6]
    assert len(buffer) == 7


@pytest.mark.parametrize("sampler", ["fifo", "lifo"])
def test_a_sample_that_fails_when_it_has_its_rows_puts_them_back(store: memstore.Store, sampler: Any) -> None:
    limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=1, tolerance=4.0)
    buffer = new(store, sampler=sampler, rate_limiter=limiter)
    buffer.extend(rows(0, 4))
    assert len(numbers_of(buffer.sample(1))) == 1
    with pytest.raises(RuntimeError):
        buffer.sample(3, device="a device that there is not")
    assert len(numbers_of(buffer.sample(3, timeout=0))) == 3


def _consume(wire: Wire, number: int, root: str, sampler: Any) -> list[int]:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay", sampler=sampler)
    found: list[int] = []
    wire.send()
    while True:
        is_over = wire.has_message
        try:
            found += numbers_of(buffer.sample(3, timeout=0.2))
        except memstore.StoreTimeoutError:
            if is_over:
                return found


@pytest.mark.parametrize("sampler", ["fifo", "lifo"])
def test_two_consumers_get_all_rows_between_them(root: str, sampler: Any) -> None:
    with memstore.open(root) as store:
        # the oldest rows are safe from the ring with a rate limiter; of the newest first, old ones wait for ever
        limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=1, tolerance=50.0)
        buffer = new(store, 64, rate_limiter=limiter) if sampler == "fifo" else new(store, 600)
        with children(2, _consume, root, sampler) as consumers:
            for consumer in consumers:
                consumer.receive()
            for start in range(0, 600, 4):
                buffer.extend(rows(start, 4), timeout=60.0)
            for consumer in consumers:
                consumer.send()
            found = [consumer.receive() for consumer in consumers]
        assert sorted(found[0] + found[1]) == list(range(600))


# --- waiting ----------------------------------------------------------------------------------------------------------


def _sample_one(wire: Wire, root: str, sampler: Any) -> list[int]:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay", sampler=sampler)
    wire.send()
    return numbers_of(buffer.sample(2, timeout=60.0))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo"])
def test_who_samples_an_empty_buffer_is_woken_by_the_first_rows(root: str, sampler: Any) -> None:
    with memstore.open(root) as store:
        buffer = new(store, sampler="prioritized")
        with Child(_sample_one, root, sampler) as child:
            child.receive()
            child.wait_until_it_sleeps_on_a_futex()
            buffer.extend(rows(5, 2))
            assert set(child.receive()) <= {5, 6}


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo", "lifo"])
def test_an_empty_buffer_times_out(store: memstore.Store, sampler: Any) -> None:
    buffer = new(store, sampler=sampler)
    started = time.monotonic()
    with pytest.raises(memstore.StoreTimeoutError, match=r"'replay': (it has no rows|no row)"):
        buffer.sample(1, timeout=0.05)
    assert time.monotonic() - started >= 0.05
    assert buffer.sample(0)["index"].shape == (0,)


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("options", [{"sampler": "fifo"}, {"sampler": "lifo"}, {"replacement": False}], ids=str)
def test_a_sample_that_no_buffer_of_this_capacity_has_is_refused_at_once(
    root: str, options: dict[str, Any], mode: Any
) -> None:
    with memstore.open(root) as store:
        buffer = new(store, 8, **options)
        buffer.extend(rows(0, 8))
        with memstore.open(root, mode) as other:
            if mode == "r" and "sampler" in options:
                return  # which notes what it hands out
            buffer = new(other, 8, **options)
            with pytest.raises(ValueError, match=r"^'replay' has 8 slots, and .*9 .*: sample fewer at a time$"):
                buffer.sample(9, timeout=3600)
            assert sorted(numbers_of(buffer.sample(8))) == list(range(8))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo"])
def test_slices_that_no_buffer_of_this_capacity_has_are_refused_at_once(store: memstore.Store, sampler: Any) -> None:
    buffer = new(store, 8, sampler=sampler)
    buffer.extend(rows(0, 8))
    with pytest.raises(ValueError, match="'replay' has 8 slots, and a slice of 9 rows never fits: take shorter slices"):
        buffer.sample_slices(1, 9, end_key=None, timeout=3600)
    assert buffer.sample_slices(5, 8, end_key=None).shape == (5, 8)
    assert buffer.sample_slices(0, 9, end_key=None).shape == (0, 9)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_with_replacement_a_sample_may_be_larger_than_the_buffer(store: memstore.Store, sampler: Any) -> None:
    buffer = new(store, 8, sampler=sampler)
    buffer.extend(rows(0, 2))
    assert set(numbers_of(buffer.sample(100))) == {0, 1}


def test_a_rate_limiter_lets_samplers_and_writers_wait_for_each_other(store: memstore.Store) -> None:
    limiter = memstore.RateLimiter(samples_per_insert=2.0, min_size=4, tolerance=4.0)
    buffer = new(store, rate_limiter=limiter)
    buffer.extend(rows(0, 3))
    with pytest.raises(memstore.StoreTimeoutError, match=r"nobody sample 1 rows .*min_size=4.*, 3 rows added, 0 s"):
        buffer.sample(1, timeout=0)
    buffer.extend(rows(3, 3))  # a difference of 12: the most
    with pytest.raises(memstore.StoreTimeoutError, match=r"lets no 1 rows in .*, 6 rows added, 0 sampled"):
        buffer.extend(rows(6, 1), timeout=0)
    for _ in range(8):
        buffer.sample(1, timeout=0)  # to a difference of 4: the least
    with pytest.raises(memstore.StoreTimeoutError, match="8 sampled"):
        memstore.ReplayBuffer(store, "replay").sample(1, timeout=0)
    assert (buffer.cursor, len(buffer)) == (6, 6)
    buffer.add({name: leaf[0] for name, leaf in rows(6, 1).items()}, timeout=0)
    buffer.sample(2, timeout=0)


def test_a_sample_wakes_a_writer_that_waits(root: str) -> None:
    with memstore.open(root) as store:
        limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=2, tolerance=2.0)
        buffer = new(store, rate_limiter=limiter)
        buffer.extend(rows(0, 4))
        with Child(_add_one, root) as child:
            child.receive()
            child.wait_until_it_sleeps_on_a_futex()
            buffer.sample(1)
            assert child.receive() == 4


def _add_one(wire: Wire, root: str) -> int:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay")
    wire.send()
    return int(buffer.extend(rows(4, 1), timeout=60.0))


def test_a_writer_that_died_takes_nothing_from_the_rate_limiter(root: str) -> None:
    with memstore.open(root) as store:
        limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=1, tolerance=3.0)
        buffer = new(store, 8, rate_limiter=limiter)
        buffer.extend(rows(0, 1))
        with Child(_claim_and_stop, root) as child:
            child.receive()
            with pytest.raises(memstore.StoreTimeoutError, match="1 rows added"):
                buffer.extend(rows(1, 3), timeout=0.02)
        assert buffer.extend(rows(1, 3), timeout=0).tolist() == [4, 5, 6]


def _claim_and_stop(wire: Wire, root: str) -> None:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay")

    def stop() -> None:
        wire.send()
        wire.receive()

    with in_the_copy(buffer, stop):
        buffer.extend(rows(1, 3))


# --- priorities -------------------------------------------------------------------------------------------------------


def test_rows_are_drawn_by_their_priorities(store: memstore.Store) -> None:
    buffer = new(store, 50, sampler="prioritized", alpha=0.7, beta=0.5, seed=11)
    index = buffer.extend(rows(0, 40))
    priorities = torch.rand(40, generator=torch.Generator().manual_seed(5)) * 10 + 0.01
    assert buffer.update_priority(index, priorities) == 40
    samples = [buffer.sample(100) for _ in range(200)]
    counts = torch.bincount(torch.cat([sample["index"] for sample in samples]), minlength=40)
    expected = priorities**0.7 / (priorities**0.7).sum() * 20_000
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 66  # 39 degrees of freedom: one in 200, if draws were independent; by shares they are closer
    sample = samples[0]
    probability = priorities[sample["index"]] ** 0.7 / (priorities**0.7).sum()
    weights = (40 * probability) ** -0.5
    torch.testing.assert_close(sample["weight"], weights / weights.max())


@pytest.mark.parametrize(
    "priority",
    [
        [2.0, 3.0],
        (2, 3),
        torch.tensor([2, 3]),
        torch.tensor([2.0, 3.0]).bfloat16(),
        torch.nn.Parameter(torch.tensor([2.0, 3.0])),
    ],
    ids=["list", "ints", "int tensor", "bfloat16", "with a graph"],
)
def test_priorities_of_any_kind(store: memstore.Store, priority: Any) -> None:
    buffer = new(store, 4, sampler="prioritized", alpha=1.0)
    index = buffer.extend(rows(0, 2), priority=priority)
    assert buffer_leaves(buffer)[:2] == [2.0, 3.0]
    assert buffer.update_priority(index.int(), priority) == 2
    assert buffer.update_priority(index.tolist(), 1) == 2
    assert buffer.extend(rows(2, 1)).tolist() == [2] and buffer_leaves(buffer)[:3] == [1.0, 1.0, 3.0]


def test_a_new_row_has_the_largest_priority_ever_given(store: memstore.Store) -> None:
    buffer = new(store, 10, sampler="prioritized", alpha=1.0)
    buffer.extend(rows(0, 2))
    buffer.update_priority([0], 5.0)
    buffer.update_priority([0], 0.5)
    buffer.extend(rows(2, 1))
    buffer.extend(rows(3, 1), priority=0.25)
    leaves = buffer_leaves(buffer)
    assert leaves[:4] == [0.5, 1.0, 5.0, 0.25]


def buffer_leaves(buffer: memstore.ReplayBuffer) -> list[float]:
    priorities = ring_of(buffer).priorities
    assert priorities is not None
    return priorities.tree.priorities.tolist()


def test_rows_that_were_written_over_keep_their_own_priority(store: memstore.Store) -> None:
    buffer = new(store, 4, sampler="prioritized", alpha=1.0)
    old = buffer.extend(rows(0, 4))
    buffer.extend(rows(4, 2))
    assert buffer.update_priority(old, 9.0) == 2
    assert buffer_leaves(buffer) == [1.0, 1.0, 9.0, 9.0]
    assert buffer.update_priority(torch.tensor([100, -1]), 3.0) == 0
    assert buffer.update_priority([], []) == 0
    assert buffer.update_priority([5, 5], [2.0, 3.0]) == 2
    assert buffer_leaves(buffer) == [1.0, 3.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        ([0], -1.0, ValueError, "a priority of -1.0: they are finite, 0 at least"),
        ([0], float("nan"), ValueError, "a priority of nan"),
        ([0], [1.0, 2.0], ValueError, r"priorities of shape \[2\] for 1 row:"),
        ([0], "high", TypeError, "priorities are numbers, and not 'high'"),
        ([0.5], 1.0, TypeError, "an index is of integers, and not of float64"),
        ([[0]], 1.0, ValueError, "an index has one dimension, and not 2"),
    ],
)
def test_what_is_no_priority_changes_nothing(
    store: memstore.Store, index: Any, priority: Any, error: type[Exception], message: str
) -> None:
    buffer = new(store, 4, sampler="prioritized")
    buffer.extend(rows(0, 4))
    with pytest.raises(error, match=message):
        buffer.update_priority(index, priority)
    assert buffer_leaves(buffer) == [1.0] * 4
    if error is ValueError and index == [0]:
        with pytest.raises(error):
            buffer.extend(rows(4, 1), priority=priority)
        assert buffer.cursor == 4


def test_a_buffer_without_priorities_says_so(store: memstore.Store) -> None:
    buffer = new(store)
    with pytest.raises(memstore.StructureMismatchError, match="was made without priorities"):
        buffer.extend(rows(0, 1), priority=1.0)
    with pytest.raises(memstore.StructureMismatchError, match="was made without priorities"):
        buffer.update_priority([0], 1.0)
    assert buffer.cursor == 0


def _train(wire: Wire, number: int, root: str) -> int:
    buffer = memstore.ReplayBuffer(memstore.open(root), "replay", sampler="prioritized", seed=number)
    wire.send()
    wire.receive()
    changed = 0
    for _ in range(60):
        sample = buffer.sample(32)
        numbers_of(sample)
        assert ((sample["weight"] > 0) & (sample["weight"] <= 1)).all()
        changed += buffer.update_priority(sample["index"], sample["number"].double() % 7 + 0.1)
    return changed


def test_learners_and_writers_at_once(root: str) -> None:
    with memstore.open(root) as store:
        buffer = new(store, 200, sampler="prioritized")
        buffer.extend(rows(0, 100))
        with children(2, _train, root) as learners:
            for learner in learners:
                learner.receive()
            for learner in learners:
                learner.send()
            for start in range(100, 2100, 10):
                buffer.extend(rows(start, 10), priority=1.0 + start % 5)
            assert all(learner.receive() > 0 for learner in learners)
        check_priorities(buffer)


# --- threads, forks ---------------------------------------------------------------------------------------------------


def test_threads_share_one_buffer(store: memstore.Store) -> None:
    buffer = new(store, 64)
    failures: list[BaseException] = []

    def write(first: int) -> None:
        for start in range(first, first + 400, 4):
            buffer.extend(rows(start, 4))

    def read() -> None:
        for _ in range(100):
            numbers_of(buffer.sample(16))

    def guarded(action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(write, first)) for first in (0, 1000, 2000)]
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert ring_of(buffer).numbers.added == 1200
    check_whole(store, buffer, 5000)


# --- draws by priority, against prefix sums of numpy over the priorities themselves -----------------------------------


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
