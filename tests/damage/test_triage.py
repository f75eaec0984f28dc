"""Which batches of segments a repair may take for published ones, by what their headers say."""

from __future__ import annotations

import pytest

from memstore.engine.format.headers import ParsedHeader
from memstore.engine.format.records import LIVE, Record
from memstore.engine.repair.choice import is_whole


def segment(put_id: int, version: int, count: int) -> ParsedHeader:
    return ParsedHeader(put_id, LIVE, version, 7, count, "store", "key", b"", b"", None, 4096, 0)


@pytest.mark.parametrize("last", [None, 4])
@pytest.mark.parametrize(
    ("expected", "segments"),
    [
        (True, [(1, 5, 1)]),
        (True, [(1, 5, 2), (2, 6, 2)]),
        (True, [(2, 6, 2), (2, 6, 2), (1, 5, 2)]),  # a file and its copy
        (True, [(1, 5, 3), (2, 5, 3), (3, 6, 3)]),  # a version of two segments
        (False, [(1, 5, 3), (2, 6, 3)]),  # the last segment is missing
        (False, [(1, 5, 2), (2, 7, 2)]),  # between them there is a version that has no segment
        (False, [(1, 5, 3), (1, 5, 3), (3, 6, 3)]),  # a copy stands for nothing
    ],
)
def test_a_batch_is_whole_if_all_its_segments_are_there(
    expected: bool, segments: list[tuple[int, int, int]], last: int | None
) -> None:
    assert is_whole([segment(*one) for one in segments], last) is expected


def test_a_batch_follows_on_the_last_version() -> None:
    assert not is_whole([segment(1, 6, 1)], 4)  # it has values in the catalog alone, so its first number was skipped
    assert not is_whole([segment(1, 4, 1)], 4)


def test_a_record_names_its_segments() -> None:
    record = Record(1, 2, 3, 8192, 4096, 1024, 1.5, b"", b"")
    assert [extent.segment for extent in record.segments] == [3]
    assert Record(1, 2, 0, 0, 0, 3, 1.5, b"", b"", b"abc").segments == ()
