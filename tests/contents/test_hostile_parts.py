"""What parts and records of sharded values say may be anybody's work: a typed error, or a value of stored bytes."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore import contents, structure
from memstore.contents.merging import merge
from memstore.contents.reading import RankPart, read_part
from memstore.engine import PART_MARK, Content, FoundPart, Record, end_of, index, mapped_size
from memstore.engine.format.headers import read_header
from memstore.engine.format.records import SegmentExtent, decode_segments
from memstore.errors import CorruptionError, MemstoreError, PartialCommitError, ShardMismatchError
from tests.contents.mutations import mutated
from tests.damage.sharded_stores import part, put
from tests.examples import examples
from tests.inside import root_of

_TYPED = (CorruptionError, ShardMismatchError, PartialCommitError)


@functools.cache
def _found() -> tuple[FoundPart, ...]:
    """What the headers of a put say."""
    with tempfile.TemporaryDirectory() as folder, memstore.open(f"{folder}/store", checksum=True) as store:
        put(store, "k")
        record = index.find(root_of(store), b"k")
        assert record is not None
        made: list[FoundPart] = []
        for extent, path in zip(record.segments, store.info("k").files, strict=True):
            with open(path, "rb") as file:
                found = read_header(file.read(extent.start), extent.size)
            made.append(FoundPart(found.description, found.checksums, msgspec.structs.replace(extent, base=0)))
    return tuple(made)


def _whole() -> Content:
    content = contents.content_of_headers("k", _found())
    assert content is not None
    return content


_FIRST = _found()[0].said.removeprefix(PART_MARK)


@given(said=mutated(_FIRST) | st.binary(max_size=200))
@settings(max_examples=examples(400))
def test_what_a_part_says(said: bytes) -> None:
    one, *others = _found()
    try:
        read = read_part(PART_MARK + said, one.extent)
        merged = merge("k", [read, *(read_part(other.said, other.extent) for other in others)], with_checksums=True)
    except _TYPED:
        return
    _check_bounds(merged, [read.segment, *(other.extent for other in others)])


def _check_bounds(merged: Content, extents: list[SegmentExtent | None]) -> None:
    """No box lies outside of the files, and there is no more room than the files' bytes can fill."""
    sizes = sum(extent.size for extent in extents if extent is not None)
    record = _record(merged)
    end = record.segments[-1].base + record.segments[-1].size if record.segments else 0
    assert merged.nbytes <= (end + (1 << 16)) * (1 + len(extents)) and end <= sizes + (len(extents) << 21)
    for boxes in contents.boxes_of(record).values():
        for box in boxes:
            assert any(
                extent.base + extent.start <= box.place < extent.base + extent.size for extent in record.segments
            )


def _record(content: Content) -> Record:
    return Record(
        *(1, 2, 0, 3, 0, content.nbytes, 0.0, content.description, content.objects),
        checksums=content.checksums,
        parts=content.parts,
        boxes=content.boxes,
    )


@given(stored=mutated(msgspec.msgpack.encode((_found()[0].said, [b"12345678"] * 4))) | st.binary(max_size=200))
@settings(max_examples=examples(200))
def test_what_the_catalog_keeps_of_a_part(stored: bytes) -> None:
    try:
        read = contents.read_content(stored, _found()[0].extent)
    except CorruptionError:
        return
    assert isinstance(read, RankPart)


@given(checksums=st.none() | st.binary(max_size=64), said=mutated(_FIRST))
@settings(max_examples=examples(100))
def test_headers_that_dont_fit_give_no_value(checksums: bytes | None, said: bytes) -> None:
    one, *others = _found()
    contents.content_of_headers("k", [FoundPart(PART_MARK + said, checksums, one.extent), *others])
    contents.content_of_headers("k", [FoundPart(PART_MARK, checksums, one.extent), *others])


@given(stored=mutated(_whole().parts or b"") | st.binary(max_size=100))
@settings(max_examples=examples(300))
def test_extents(stored: bytes) -> None:
    try:
        extents = decode_segments(stored)
    except CorruptionError:
        return
    end = 0
    for extent in extents:
        assert extent.segment > 0 and extent.put_id > 0 and 0 <= extent.start <= extent.size and extent.base >= end
        end = extent.base + extent.size
    assert end <= 1 << 46


@pytest.fixture(scope="module")
def filled() -> Iterator[memstore.Store]:
    with tempfile.TemporaryDirectory() as folder, memstore.open(f"{folder}/store", checksum=True) as store:
        put(store, "k")
        yield store


@given(data=st.data())
@settings(max_examples=examples(250))
def test_a_record_that_lies_with_a_right_checksum(filled: memstore.Store, data: st.DataObject) -> None:
    root = root_of(filled)
    right = index.find(root, b"k")
    assert right is not None and right.boxes is not None and right.parts is not None
    kind = data.draw(st.sampled_from(["boxes", "parts", "description", "nbytes", "checksums", "start"]))
    if kind in ("nbytes", "start"):
        changed: object = data.draw(st.sampled_from([0, 1, 4096, right.nbytes - 1, right.nbytes + 1, 1 << 40, 1 << 62]))
    elif kind == "checksums":
        changed = data.draw(st.none() | st.binary(max_size=80))
    else:
        changed = data.draw(mutated(getattr(right, kind)))
    wrong = msgspec.structs.replace(right, **{kind: changed})
    with memstore.open(filled.root, "r", verify=True, timeout=1.0) as verified, contextlib.ExitStack() as after:
        after.callback(_write, filled, right)
        _write(filled, wrong)
        for look in (
            lambda: filled.get("k"),
            lambda: filled.get("k", out=part(1)),
            lambda: _look_through(filled.view("k")),
            lambda: verified.get("k"),
            lambda: filled.info("k"),
        ):
            with contextlib.suppress(MemstoreError):
                look()


@pytest.mark.parametrize("start", [0, 1, 4096, 1 << 40, 1 << 62])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 40, 1 << 62])
def test_the_range_of_a_value_has_room_for_its_files(filled: memstore.Store, start: int, nbytes: int) -> None:
    """Else what is mapped or read there would go over other memory of the process, on storage that hosts share say."""
    right = index.find(root_of(filled), b"k")
    assert right is not None and len(right.segments) > 1
    for hosts in (None, (bytes(16),) * len(right.segments)):
        wrong = msgspec.structs.replace(right, start=start, nbytes=nbytes, hosts=hosts)
        with contextlib.suppress(CorruptionError):
            assert mapped_size(wrong, wrong.segments) >= end_of(wrong.segments)


def test_a_range_without_room_for_a_file_is_refused(filled: memstore.Store) -> None:
    """Nothing is mapped, in the range or behind it."""
    root = root_of(filled)
    record = index.find(root, b"k")
    assert record is not None
    with pytest.raises(CorruptionError, match="have no room in 4,096 addresses"):
        root.storage.map_beside(record.segments, 4096)


def test_a_sharded_record_without_files(filled: memstore.Store) -> None:
    root = root_of(filled)
    right = index.find(root, b"k")
    assert right is not None
    with contextlib.ExitStack() as after:
        after.callback(_write, filled, right)
        _write(filled, msgspec.structs.replace(right, parts=msgspec.msgpack.encode([])))
        with pytest.raises(CorruptionError, match="'k': a part of it lies in none of its 0 files"):
            filled.info("k")


def _look_through(view: Any) -> None:
    for _, tensor in structure.iter_tensors(view):
        (tensor[:3] if tensor.dim() else tensor).clone()


def _write(store: memstore.Store, record: Record) -> None:
    root = root_of(store)
    with root.guard:
        root.catalog.update(lambda transaction: transaction.put_record(b"k", record))
