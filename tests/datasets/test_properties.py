"""Any spec, batch and index: a dataset behaves as plain tensors do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from tensordict import TensorDict

import memstore
from memstore.structure import DTYPES, traits
from tests.examples import examples

few = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
numbers = itertools.count()

DTYPE_LIST = [dtype for dtype in DTYPES.values() if dtype not in traits.QUANTIZED]
dtypes = st.sampled_from(DTYPE_LIST)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
pairs = st.tuples(shapes, dtypes)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
specs = st.recursive(pairs, lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=5)


def example_of(spec: Any) -> Any:
    """The spec of the same rows, as an example of one."""
    if isinstance(spec, dict):
        return TensorDict({key: example_of(inner) for key, inner in spec.items()})
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype)


def batch_of(spec: Any, count: int, random: np.random.Generator) -> Any:
    """Rows of random bits."""
    if isinstance(spec, dict):
        return {key: batch_of(inner, count, random) for key, inner in spec.items()}
    shape, dtype = spec
    size = (count, *shape, dtype.itemsize)
    bits = torch.from_numpy(random.integers(0, 2 if dtype is torch.bool else 256, size, np.uint8))
    return bits.view(dtype).reshape(count, *shape) if bits.numel() else torch.empty((count, *shape), dtype=dtype)


def bits_of(value: Any) -> Any:
    """To be compared: whether a NaN is the same one, too."""
    if isinstance(value, torch.Tensor):
        plain = value.contiguous()
        return tuple(value.shape), value.dtype, plain.view(torch.uint8).flatten().tolist() if value.numel() else []
    return {key: bits_of(inner) for key, inner in value.items()}


def part_of(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: part_of(inner, start, stop) for key, inner in value.items()}
    return value[start:stop]


@given(spec=specs, counts=st.lists(st.integers(0, 3), min_size=1, max_size=3), seed=st.integers(0, 1 << 30))
@few
def test_rows_of_any_spec_come_back(store: memstore.Store, spec: Any, counts: list[int], seed: int) -> None:
    key, random = f"data {next(numbers)}", np.random.default_rng(seed)
    data = store.create_dataset(key, spec, capacity=max(sum(counts), 1))
    batch = batch_of(spec, sum(counts), random)
    for stop, count in zip(itertools.accumulate(counts), counts, strict=True):
        assert data.extend(part_of(batch, stop - count, stop)) == range(stop - count, stop)
    expected = bits_of(batch)
    assert data.spec == spec
    assert bits_of(data[:]) == bits_of(store.open_dataset(key, "r")[:]) == bits_of(store.view(key)) == expected
    assert store.create_dataset(f"{key} by example", example_of(spec), capacity=1).spec == spec
    assert bits_of(store.create_dataset_from(f"{key} of rows", data[:], capacity=20)[:]) == expected
    data.seal()
    assert bits_of(store.get(key)) == expected
    del data
    store.delete_many([key, f"{key} by example", f"{key} of rows"])


# --- indices ----------------------------------------------------------------------------------------------------------

LENGTH = 5
COLUMNS = {"x": ((2,), torch.float32), "y": ((), torch.int64)}
rows = st.integers(-LENGTH, LENGTH - 1)
bounds = st.none() | st.integers(-LENGTH - 2, LENGTH + 2)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(-3, 3).filter(bool))
lists = st.lists(rows, max_size=6)
masks = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
tensors = st.builds(lambda given, dtype: torch.tensor(given, dtype=dtype), lists, st.sampled_from(INTEGERS))
positive = st.lists(st.integers(0, LENGTH - 1), max_size=6)
unsigned = st.builds(lambda given, dtype: torch.tensor(given, dtype=dtype), positive, st.sampled_from(UNSIGNED))
one = rows | rows.map(np.int32) | rows.map(torch.tensor) | rows.map(lambda row: np.array(row, np.int8))
many = (
    lists
    | masks
    | tensors
    | unsigned
    | masks.map(torch.tensor)
    | masks.map(np.array)
    | lists.map(lambda given: np.array(given, np.int16))
    | slices
    | st.builds(range, st.integers(0, LENGTH), st.integers(0, LENGTH), st.integers(1, 3))
)


def places(index: Any) -> list[int]:
    """What it means, by numpy."""
    plain = index.long().numpy() if isinstance(index, torch.Tensor) and index.dtype != torch.bool else index
    return np.arange(LENGTH)[plain if isinstance(plain, slice) else _array(plain)].tolist()


def _array(index: Any) -> Any:
    found = np.asarray(index)
    return found if found.dtype == bool else found.astype(np.int64)


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[memstore.Dataset]:
    with memstore.open(str(tmp_path_factory.mktemp("columns") / "store")) as opened:
        yield opened.create_dataset("columns", COLUMNS, capacity=LENGTH + 2, length=LENGTH)


def fresh(start: int, count: int = LENGTH) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"x": number[:, None].expand(count, 2) / 2, "y": number}


@given(index=many)
@example(index=slice(-LENGTH - 1, None, -1))  # none: it starts before the first row
@settings(max_examples=examples(300))
def test_any_index_of_rows_means_what_it_means_for_numpy(columns: memstore.Dataset, index: Any) -> None:
    columns[:] = fresh(0)
    expected = places(index)
    for found in (columns[index], columns.read_rows(index)):
        assert found["y"].tolist() == expected and found["x"][:, 1].tolist() == [row / 2 for row in expected]
    columns[index] = fresh(100, len(expected))
    plain = np.arange(LENGTH)
    plain[expected] = np.arange(100, 100 + len(expected))
    assert columns[:]["y"].tolist() == plain.tolist()
    assert (columns[:]["x"][:, 0] * 2).tolist() == plain.tolist()


@given(index=one)
@settings(max_examples=examples(50))
def test_any_integer_is_one_row(columns: memstore.Dataset, index: Any) -> None:
    columns[:] = fresh(0)
    row = int(index) % LENGTH
    assert columns[index]["y"] == row and columns[index]["x"].shape == (2,)
    columns[index] = {"x": torch.ones(2), "y": torch.tensor(100)}
    assert columns[:]["y"].tolist() == [100 if i == row else i for i in range(LENGTH)]


outside = st.integers().filter(lambda row: not -LENGTH <= row < LENGTH)


@given(index=outside | outside.map(lambda row: [0, row]) | st.lists(st.booleans(), max_size=LENGTH - 1).map(np.array))
@settings(max_examples=examples(100))
def test_a_row_that_is_not_there_is_refused(columns: memstore.Dataset, index: Any) -> None:
    columns[:] = fresh(0)
    if isinstance(index, np.ndarray) and not index.size:
        index = np.array([], bool)
    for call in (lambda: columns[index], lambda: columns.__setitem__(index, fresh(100, 2))):
        with pytest.raises((IndexError, TypeError, memstore.StructureMismatchError)):
            call()
    assert columns[:]["y"].tolist() == list(range(LENGTH))


@given(count=st.integers(0, LENGTH + 3), index=slices | lists)
@settings(max_examples=examples(50))
def test_another_number_of_rows_is_refused(columns: memstore.Dataset, count: int, index: Any) -> None:
    columns[:] = fresh(0)
    if count == len(places(index)):
        return
    with pytest.raises(ValueError, match="rows? for"):
        columns[index] = fresh(100, count)
    assert columns[:]["y"].tolist() == list(range(LENGTH))
