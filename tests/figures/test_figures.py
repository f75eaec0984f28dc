"""Statistics, histograms and comparisons agree with numpy's of the whole, and take little memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.figures import compare, histogram, pieces, summarize
from memstore.structure import DTYPES

FLOATS = st.floats(width=32, allow_subnormal=False)


@given(shape=st.lists(st.integers(0, 7), max_size=4), most=st.integers(1, 40), turned=st.booleans())
def test_pieces_are_the_tensor_in_order(shape: list[int], most: int, turned: bool) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    tensor = tensor.mT if turned and tensor.ndim > 1 else tensor
    found = list(pieces(tensor, most))
    assert all(0 < piece.numel() <= most for piece in found)
    assert [number for piece in found for number in piece.flatten().tolist()] == tensor.flatten().tolist()


@given(values=st.lists(FLOATS, max_size=30))
def test_statistics_are_numpys_of_what_is_finite(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    found = summarize(tensor)
    assert found is not None
    finite = np.array([value for value in values if math.isfinite(value)], np.float64)
    assert found.count == len(values) and found.nans == sum(map(math.isnan, values))
    assert found.infinities == sum(map(math.isinf, values)) and found.zeros == sum(value == 0 for value in values)
    if not finite.size:
        assert found.minimum is found.mean is found.maximum is found.deviation is None
        return
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    scale = float(np.abs(finite).max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * scale)
    assert found.deviation == pytest.approx(finite.std(), rel=1e-6, abs=1e-7 * scale)
    bins = histogram(tensor, found, 5)
    assert sum(one.count for one in bins) == finite.size
    assert bins[0].start == found.minimum and bins[-1].stop == found.maximum


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 7, generator=torch.Generator().manual_seed(1)) + 100
    whole = summarize(tensor)
    assert whole is not None
    drawn = histogram(tensor, whole)
    monkeypatch.setattr(pieces, "__defaults__", (64,))
    parts = summarize(tensor)
    assert parts is not None and parts.mean == pytest.approx(whole.mean) and parts.minimum == whole.minimum
    assert parts.deviation == pytest.approx(whole.deviation) and histogram(tensor, parts) == drawn


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_counted_or_left_alone(name: str) -> None:
    if name.startswith(("q",)):
        pytest.skip("no leaf has it: what is stored are its parts")
    tensor = torch.zeros(64, dtype=torch.uint8).view(DTYPES[name])
    found = summarize(tensor)
    assert compare(tensor, tensor) is None
    if found is None:
        assert name.startswith(("bits", "float4")) or name in {f"{s}int{n}" for s in ("", "u") for n in range(1, 8)}
    else:
        assert found.count == tensor.numel() and found.nans == 0
        assert sum(one.count for one in histogram(tensor, found)) == found.count


def test_whole_numbers_are_exact_and_have_a_bin_each() -> None:
    large = torch.tensor([2**63 - 1, -(2**63)])
    found = summarize(large)
    assert found is not None and (found.minimum, found.maximum) == (-(2**63), 2**63 - 1)
    unsigned = torch.tensor([2**64 - 1, 1], dtype=torch.uint64)
    found = summarize(unsigned)
    assert found is not None and (found.minimum, found.maximum) == (1, 2**64 - 1)
    few = torch.tensor([3, 3, 5])
    found = summarize(few)
    assert found is not None
    assert [(one.start, one.stop, one.count) for one in histogram(few, found)] == [(3, 3, 2), (4, 4, 0), (5, 5, 1)]
    flags = torch.tensor([True, False, True])
    found = summarize(flags)
    assert found is not None and [one.count for one in histogram(flags, found)] == [1, 2]


def test_extreme_floats_have_a_deviation() -> None:
    for scale in (1e300, 1e-300, 1e-310):
        found = summarize(torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64) * scale)
        assert found is not None and found.mean is not None and found.deviation is not None
        assert found.mean / scale == pytest.approx(1 / 6) and found.deviation / scale == pytest.approx(0.849837)


def test_extreme_floats_have_a_histogram() -> None:
    tensor = torch.tensor([-1.7e308, 0.0, 1.7e308, float("inf")], dtype=torch.float64)
    found = summarize(tensor)
    assert found is not None and sum(one.count for one in histogram(tensor, found)) == 3
    one = torch.full((5,), 2.5)
    found = summarize(one)
    assert found is not None and [(b.start, b.stop, b.count) for b in histogram(one, found)] == [(2.5, 2.5, 5)]


def test_complex_numbers_are_told_by_magnitude() -> None:
    found = summarize(torch.tensor([3 + 4j, 0j]))
    assert found is not None and (found.minimum, found.mean, found.maximum) == (0, 2.5, 5)


@given(values=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=20))
def test_differences_are_those_of_the_bits(values: list[tuple[float, float]]) -> None:
    ours, theirs = (torch.tensor(side, dtype=torch.float32) for side in zip(*values, strict=True))
    found = compare(ours, theirs)
    unequal = ours.view(torch.int32) != theirs.view(torch.int32)
    assert (found.count if found else 0) == int(unequal.sum())
    if found and bool((torch.isfinite(ours) & torch.isfinite(theirs)).all()):
        assert found.largest == float((ours.double() - theirs.double()).abs().max())


def test_how_far_whole_numbers_are_apart() -> None:
    found = compare(torch.tensor([2**63 - 1, 5]), torch.tensor([-(2**63), 5]))
    assert found is not None and found.count == 1 and found.largest == pytest.approx(2.0**64)
    found = compare(torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 3], dtype=torch.uint64))
    assert found is not None and found.largest == 2
    found = compare(torch.tensor([True]), torch.tensor([False]))
    assert str(found) == "1 of 1 element differs"


def test_what_differs_only_in_bits_is_told_so() -> None:
    zeros = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert str(compare(*zeros)) == "1 of 2 elements differs, and only by the sign of zero or the bits of NaN"
    assert str(compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, math.nan]))) == "2 of 2 elements differ"


def test_two_dtypes_are_compared_as_numbers() -> None:
    ours = torch.tensor([1.0, 0.1])
    assert compare(torch.ones(3), torch.ones(3, dtype=torch.float64)) is None
    found = compare(ours, ours.bfloat16())
    assert found is not None and found.count == 1 and found.largest == pytest.approx(0.0000976, rel=1e-2)


def test_a_large_tensor_takes_the_memory_of_a_piece() -> None:
    tensor = torch.zeros(1).expand(1 << 24)  # 64 MiB, if it had its elements
    tracemalloc.start()
    try:
        found = summarize(tensor)
        assert found is not None and found.zeros == 1 << 24
        assert compare(tensor, tensor) is None
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
