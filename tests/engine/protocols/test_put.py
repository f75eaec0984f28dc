"""Puts of drafts, and commits of changes: what their callers may count on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest

from memstore.engine.files.segments import SealedSegment, WritableMemory
from memstore.engine.format.records import FILLING
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.put import Draft, claim, commit, put
from memstore.engine.protocols.sweep import abandon
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import KeyNotFoundError, StoreFullError, VersionConflictError
from tests.engine import bytes_store
from tests.engine.bytes_store import draft, get, opened

LARGE = b"x" * 100_000


def files(root: Root) -> list[str]:
    return sorted(os.listdir(root.segments))


def filling(root: Root) -> int:
    with root.guard:
        rows = root.catalog.view(lambda transaction: list(transaction.segments()))
    return sum(row.state == FILLING for _, row in rows)


def inline(key: bytes, version: int | None = None, expect: int | None = None) -> Change:
    return Change(key, Content(b"bytes", b"", 5, inline=b"value"), expect, version=version)


# --- put --------------------------------------------------------------------------------------------------------------


def test_drafts_of_all_kinds_are_one_batch(root: str) -> None:
    with opened(root) as store:
        drafts = [draft(store, b"small", b"s"), draft(store, b"large", LARGE), draft(store, b"other", b"o" * 5000)]
        assert put(store, drafts, deadline_after(10)) == [2, 3, 4]  # 1 is skipped: an inline value has no file
        assert [get(store, key) for key in (b"small", b"large", b"other")] == [b"s", LARGE, b"o" * 5000]


def test_a_draft_is_put_again_where_a_sweep_made_room(root: str) -> None:
    with opened(root) as store:
        bytes_store.put(store, b"gone", LARGE)
        bytes_store.delete(store, b"gone")
        first = draft(store, b"key", LARGE)
        tries: list[int] = []

        def fill(memory: WritableMemory) -> bytes | None:
            tries.append(len(files(store)))
            if len(tries) == 1:
                raise OSError(errno.ENOSPC, "no room")
            assert first.fill is not None
            return first.fill(memory)

        assert put(store, [Draft(b"key", first.content, None, first.header, fill)], deadline_after(10)) == [2]
        assert (len(tries), get(store, b"key"), filling(store)) == (2, LARGE, 0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: OSError(errno.ENOSPC, "no room"), StoreFullError),
        (lambda: ValueError("of the caller"), ValueError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_a_fill_that_fails_leaves_nothing(
    root: str, make: Callable[[], BaseException], expected: type[BaseException]
) -> None:
    def fill(memory: WritableMemory) -> bytes | None:
        np.asarray(memory)[:10] = 1
        raise make()

    with opened(root) as store:
        second = draft(store, b"second", LARGE)
        drafts = [draft(store, b"first", LARGE), Draft(b"second", second.content, None, second.header, fill)]
        with pytest.raises(expected):
            put(store, drafts, deadline_after(10))
        assert (files(store), filling(store), get(store, b"first")) == ([], 0, None)


def test_a_lost_race_keeps_the_file(root: str) -> None:
    with opened(root) as store:
        with pytest.raises(VersionConflictError):
            put(store, [draft(store, b"key", LARGE, expect=7)], deadline_after(10))
        assert (len(files(store)), filling(store)) == (1, 0)
        put(store, [draft(store, b"key", LARGE)], deadline_after(10))
        assert len(files(store)) == 1


def test_checksums_of_a_fill_are_in_the_record(root: str) -> None:
    with opened(root) as store:
        plain = draft(store, b"key", LARGE)
        put(store, [Draft(b"key", plain.content, None, plain.header, lambda memory: b"8 bytes!")], deadline_after(10))
        record = store.catalog.read(b"key")
        assert record is not None and record.checksums == b"8 bytes!"


# --- commit -----------------------------------------------------------------------------------------------------------


def test_a_given_version_is_the_records(root: str) -> None:
    with opened(root) as store:
        assert commit(store, [inline(b"key", version=100)], deadline_after(10)) == [100]
        assert commit(store, [inline(b"other", version=50)], deadline_after(10)) == [50]
        assert commit(store, [inline(b"key", expect=100), inline(b"third")], deadline_after(10)) == [101, 102]


def test_a_given_version_is_newer_than_the_keys(root: str) -> None:
    with opened(root) as store:
        commit(store, [inline(b"key", version=100)], deadline_after(10))
        for version in (99, 100):
            with pytest.raises(AssertionError, match="no newer than 100"):
                commit(store, [inline(b"key", version=version)], deadline_after(10))
        assert commit(store, [inline(b"key")], deadline_after(10)) == [101]


def sealed(root: Root, key: bytes) -> SealedSegment:
    plain = draft(root, key, LARGE)
    assert plain.header is not None and plain.fill is not None
    writer = claim(root, key, plain.header.nbytes, plain.content.nbytes, 0, deadline_after(10))
    writer.allocate(plain.header, plain.content.nbytes, root.guard, on_tmpfs=False)
    plain.fill(writer)
    return writer.seal(None, durable=False)


def test_a_sealed_segment_is_all_that_a_commit_needs(root: str) -> None:
    with opened(root) as store:
        change = Change(b"key", draft(store, b"key", LARGE).content, segments=(sealed(store, b"key"),), version=9)
        assert commit(store, [change], deadline_after(10)) == [9]
        change.segments[0].file.close()
        record = store.catalog.read(b"key")
        assert record is not None and (record.version, record.put_id) == (9, change.segments[0].put_id)
        assert (get(store, b"key"), filling(store)) == (LARGE, 0)


def test_a_record_names_one_segment_as_yet(root: str) -> None:
    """More are refused, and leave nothing live."""
    with opened(root) as store:
        segments = (sealed(store, b"key"), sealed(store, b"key"))
        change = Change(b"key", draft(store, b"key", LARGE).content, segments=segments)
        with pytest.raises(AssertionError, match="one segment"):
            commit(store, [change], deadline_after(10))
        assert get(store, b"key") is None
        for segment in segments:
            segment.file.close()
        bytes_store.put(store, b"other", b"recovers, and sweeps")
        assert (files(store), filling(store)) == ([], 0)


def test_a_deletion_of_what_is_not_there(root: str) -> None:
    with opened(root) as store:
        with pytest.raises(KeyNotFoundError):
            commit(store, [inline(b"key"), Change(b"none", None)], deadline_after(10))
        assert get(store, b"key") is None
        assert commit(store, [inline(b"key"), Change(b"none", None, missing_ok=True)], deadline_after(10)) == [1, 0]


def test_writers_are_given_back_by_their_ids_alone(root: str) -> None:
    """A row that another put has by now is left alone."""
    with opened(root) as store:
        writer = claim(store, b"key", 4096, 100_000, 0, deadline_after(10))
        abandon(store, [writer])
        writer.close()
        again = claim(store, b"key", 4096, 100_000, 0, deadline_after(10))
        abandon(store, [writer])
        assert filling(store) == 1
        abandon(store, [again])
        again.close()
        assert (filling(store), files(store)) == (0, [])
