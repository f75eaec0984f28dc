"""Whatever is done to a buffer, it has what a plain list of rows has."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from tests.conftest import SHM
from tests.examples import examples

SPEC = {"y": ((), torch.int64), "x": ((2,), torch.float32), "done": ((1,), torch.bool)}
_keys = itertools.count()


@pytest.fixture(scope="module")
def shared() -> Iterator[memstore.Store]:
    with (
        tempfile.TemporaryDirectory(dir=SHM if SHM.exists() else None, prefix="memstore-test-") as folder,
        memstore.open(f"{folder}/store", timeout=10.0) as store,
    ):
        yield store


@dataclass
class Model:
    """Positions of rows; which were handed out; their priorities; which end an episode."""

    capacity: int
    head: int = 0
    taken: set[int] = field(default_factory=set[int])
    leaves: dict[int, float] = field(default_factory=dict[int, float])
    ends: set[int] = field(default_factory=set[int])
    largest: float = 1.0

    @property
    def rows(self) -> range:
        return range(max(self.head - self.capacity, 0), self.head)

    def waiting(self) -> list[int]:
        return [row for row in self.rows if row not in self.taken]

    def slices(self, length: int, *, whole: bool) -> list[int]:
        found = [row for row in self.rows if row + length <= self.head]
        return [row for row in found if whole or not self.ends.intersection(range(row, row + length - 1))]


def rows(positions: range, ends: set[int]) -> dict[str, torch.Tensor]:
    number = torch.arange(positions.start, positions.stop)
    done = torch.tensor([position in ends for position in positions], dtype=torch.bool)[:, None]
    return {"y": number, "x": number[:, None].float().expand(-1, 2), "done": done}


def check(sample: Any, model: Model) -> list[int]:
    index = sample["index"]
    assert torch.equal(sample["y"], index)
    assert torch.equal(sample["x"], index[..., None].float().expand(*index.shape, 2))
    assert sample["done"][..., 0].flatten().tolist() == [row in model.ends for row in index.flatten().tolist()]
    return index.flatten().tolist()


small = st.integers(1, 6)
OPERATIONS = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 7), st.sets(st.integers(0, 6))),
    st.tuples(st.just("extend by priority"), small, st.sampled_from([0.0, 0.5, 3.0])),
    st.tuples(st.just("add"), st.booleans()),
    st.tuples(st.just("uniform"), small),
    st.tuples(st.just("each once"), small),
    st.tuples(st.just("prioritized"), small),
    st.tuples(st.just("fifo"), small),
    st.tuples(st.just("lifo"), small),
    st.tuples(st.just("slices"), st.integers(1, 4), st.booleans()),
    st.tuples(
        st.just("update"), st.lists(st.integers(0, 9), max_size=4, unique=True), st.sampled_from([0.0, 1.0, 7.0])
    ),
    st.tuples(st.just("flush")),
    st.tuples(st.just("send")),
)


class Run:
    """A buffer that is opened with each sampler, and the model."""

    def __init__(self, store: memstore.Store, capacity: int) -> None:
        key = f"replay {next(_keys)}"
        self.model = Model(capacity)
        made = memstore.ReplayBuffer(store, key, SPEC, capacity=capacity, sampler="prioritized", alpha=0.5, seed=1)
        others = {name: memstore.ReplayBuffer(store, key, sampler=name, seed=2) for name in ("uniform", "fifo", "lifo")}
        once = memstore.ReplayBuffer(store, key, replacement=False, seed=3)
        self.by = {"prioritized": made, **others, "each once": once}
        self.seen: set[int] = set()

    def do(self, name: str, *arguments: Any) -> None:
        getattr(self, name.replace(" ", "_"))(*arguments)
        for buffer in self.by.values():
            assert (len(buffer), buffer.cursor) == (len(self.model.rows), self.model.head)

    def extend(self, count: int, ends: set[int], priority: float | None = None) -> None:
        model, buffer = self.model, self.by["uniform"]
        positions = range(model.head, model.head + count)
        ends = {model.head + end for end in ends if end < count}
        if count > model.capacity:
            with pytest.raises(memstore.StoreFullError):
                buffer.extend(rows(positions, ends))
            return
        assert buffer.extend(rows(positions, ends), priority=priority).tolist() == list(positions)
        self._added(positions, ends, priority)

    def extend_by_priority(self, count: int, priority: float) -> None:
        self.extend(count, set(), priority)

    def add(self, is_end: bool) -> None:
        ends = {self.model.head} if is_end else set[int]()
        row = {name: leaf[0] for name, leaf in rows(range(self.model.head, self.model.head + 1), ends).items()}
        assert self.by["fifo"].add(row) == self.model.head
        self._added(range(self.model.head, self.model.head + 1), ends, None)

    def _added(self, positions: range, ends: set[int], priority: float | None) -> None:
        model = self.model
        if priority is not None and positions:
            model.largest = max(model.largest, priority)
        model.head = positions.stop
        model.ends |= ends
        for row in positions:
            model.leaves[row] = (model.largest if priority is None else priority) ** 0.5

    def uniform(self, count: int) -> None:
        self._sample("uniform", count, set(self.model.rows))

    def _sample(self, sampler: str, count: int, allowed: set[int]) -> list[int]:
        if not allowed:
            never = sampler in ("fifo", "lifo", "each once") and count > self.model.capacity
            with pytest.raises(ValueError if never else memstore.StoreTimeoutError):
                self.by[sampler].sample(count, timeout=0)
            return []
        found = check(self.by[sampler].sample(count, timeout=0), self.model)
        assert len(found) == count and set(found) <= allowed
        return found

    def each_once(self, count: int) -> None:
        found = self._sample("each once", count, set(self.model.rows) if count <= len(self.model.rows) else set())
        assert len(set(found)) == len(found)
        if self.seen.intersection(found):
            self.seen.clear()  # a pass has begun
        self.seen.update(found)

    def prioritized(self, count: int) -> None:
        model = self.model
        leaves = {row: model.leaves[row] for row in model.rows}
        total = sum(leaves.values())
        if not total:
            self._sample("prioritized", count, set())
            return
        sample = self.by["prioritized"].sample(count, timeout=0)
        found = check(sample, model)
        assert all(leaves.get(row) for row in found)
        weights = torch.tensor([(len(leaves) * leaves[row] / total) ** -0.4 for row in found])
        torch.testing.assert_close(sample["weight"], (weights / weights.max()).float())
        for row, leaf in leaves.items():  # by shares: no row is drawn much more or less often than its part
            assert abs(found.count(row) - count * leaf / total) < 2

    def fifo(self, count: int) -> None:
        self._take("fifo", count, self.model.waiting()[:count])

    def lifo(self, count: int) -> None:
        self._take("lifo", count, self.model.waiting()[::-1][:count])

    def _take(self, sampler: str, count: int, expected: list[int]) -> None:
        if len(expected) < count:
            self._sample(sampler, count, set())
            return
        assert self._sample(sampler, count, set(expected)) == expected
        self.model.taken.update(expected)

    def slices(self, length: int, whole: bool) -> None:
        buffer, starts = self.by["uniform"], self.model.slices(length, whole=whole)
        end_key = None if whole else "done"
        if not starts:
            never = length > self.model.capacity
            error, message = (ValueError, "never fits") if never else (memstore.StoreTimeoutError, "follow each other")
            with pytest.raises(error, match=message):
                buffer.sample_slices(3, length, end_key=end_key, timeout=0)
            return
        sample = buffer.sample_slices(3, length, end_key=end_key, timeout=0)
        check(sample, self.model)
        assert sample.batch_size == torch.Size([3, length])
        assert (sample["index"].diff() == 1).all()
        assert set(sample["index"][:, 0].tolist()) <= set(starts)

    def update(self, back: list[int], priority: float) -> None:
        """Rows so far behind the head, some of them gone."""
        model = self.model
        index = [model.head - 1 - each for each in back if each < model.head]
        there = [row for row in index if row in model.rows]
        assert self.by["lifo"].update_priority(torch.tensor(index, dtype=torch.int64), priority) == len(there)
        if index:
            model.largest = max(model.largest, priority)
        model.leaves.update({row: float(priority**0.5) for row in there})

    def flush(self) -> None:
        self.by["uniform"].flush()

    def send(self) -> None:
        for name in ("uniform", "fifo", "lifo"):
            self.by[name] = pickle.loads(pickle.dumps(self.by[name]))


@settings(max_examples=examples(60))
@given(capacity=st.integers(1, 6), operations=st.lists(OPERATIONS, max_size=30))
def test_a_buffer_is_as_a_plain_list_of_rows(
    shared: memstore.Store, capacity: int, operations: list[tuple[Any, ...]]
) -> None:
    run = Run(shared, capacity)
    for operation in operations:
        run.do(*operation)
    shared.delete(run.by["uniform"].key)
