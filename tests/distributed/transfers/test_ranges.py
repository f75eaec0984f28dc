"""Sets of ranges behave as the sets of bytes that they stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memstore.distributed.transfers.messages import Ranges, merged, one_range

_PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def _ranges(pairs: list[tuple[int, int]], gap: int = 0) -> Ranges:
    starts, stops = zip(*pairs, strict=True) if pairs else ((), ())
    return merged(np.array(starts, np.int64), np.array(stops, np.int64), gap)


def _bytes(ranges: Ranges) -> set[int]:
    pairs = zip(ranges.starts.tolist(), ranges.stops.tolist(), strict=True)
    return {at for start, stop in pairs for at in range(start, stop)}


def _is_in_order(ranges: Ranges) -> bool:
    return bool((ranges.starts < ranges.stops).all() and (ranges.starts[1:] > ranges.stops[:-1]).all())


@given(_PAIRS)
def test_merged_has_every_byte_once(pairs: list[tuple[int, int]]) -> None:
    ranges = _ranges(pairs)
    assert _bytes(ranges) == {at for start, stop in pairs for at in range(start, stop)}
    assert _is_in_order(ranges) and ranges.nbytes == len(_bytes(ranges))


@given(_PAIRS, st.integers(0, 9))
def test_a_gap_is_joined_if_it_is_small(pairs: list[tuple[int, int]], gap: int) -> None:
    apart, joined = _ranges(pairs), _ranges(pairs, gap)
    assert _bytes(apart) <= _bytes(joined)
    assert (joined.starts[1:] - joined.stops[:-1] > gap).all()
    added = _bytes(joined) - _bytes(apart)
    assert _ranges([(at, at + 1) for at in added]).nbytes <= gap * max(len(apart.starts) - 1, 0)


@given(_PAIRS, _PAIRS)
def test_what_is_there_is_left_out(wanted: list[tuple[int, int]], there: list[tuple[int, int]]) -> None:
    left = _ranges(wanted).without(_ranges(there))
    assert _bytes(left) == _bytes(_ranges(wanted)) - _bytes(_ranges(there))
    assert _is_in_order(left)


@given(_PAIRS, _PAIRS)
def test_ranges_meet_that_have_a_byte_in_common(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    one, other = _ranges(some), _ranges(others)
    assert one.meets(other) == other.meets(one) == bool(_bytes(one) & _bytes(other))


@given(_PAIRS, st.integers(0, 70))
def test_a_split_shares_the_bytes(pairs: list[tuple[int, int]], nbytes: int) -> None:
    ranges = _ranges(pairs)
    first, rest = ranges.split(nbytes)
    assert first.nbytes == min(nbytes, ranges.nbytes)
    assert _bytes(first) | _bytes(rest) == _bytes(ranges) and not _bytes(first) & _bytes(rest)
    assert not (_bytes(first) and _bytes(rest)) or max(_bytes(first)) < min(_bytes(rest))


@given(_PAIRS, st.integers(0, 60), st.integers(0, 60))
def test_a_cut_keeps_what_lies_in_it(pairs: list[tuple[int, int]], first: int, last: int) -> None:
    ranges = _ranges(pairs)
    assert _bytes(ranges.cut(first, last)) == _bytes(ranges) & set(range(first, last))


def test_an_empty_range_is_none() -> None:
    assert not one_range(3, 3)
    assert one_range(3, 4).nbytes == 1
