"""Replaced versions that are kept, in a damaged store: they never come in place of the present one."""

from __future__ import annotations

import logging
import os

import pytest
import torch

import memstore
from memstore.engine.catalog import tables
from memstore.engine.format.records import LIVE, RETIRED, SegmentRow
from memstore.engine.sync.primitives import deadline_after
from tests.damage.stores import CATALOG, flip
from tests.inside import put_raw_row, raw_row, root_of

KEYS = ("inline", "segment", "mixed", "sharded")


def value(key: str, number: int) -> torch.Tensor:
    """Under "mixed", values in files are replaced by inline ones, the last of which is one."""
    size = {"inline": 10, "segment": 20_000, "sharded": 20_000, "mixed": 10 if number % 2 else 20_000}[key]
    return torch.full((size,), number)


def make(root: str) -> dict[str, tuple[int, ...]]:
    with memstore.open(root, checksum=True) as store:
        for key in KEYS:
            for number in range(4):
                if key == "sharded" and number:
                    shard = memstore.TensorShard(value(key, number), (20_000,), (0,))
                    store.put_sharded(key, shard, attempt=str(number), rank=0, world_size=1)
                else:
                    store.put(key, value(key, number), history=3)
        return {key: store.versions(key) for key in KEYS}


def check(root: str, versions: dict[str, tuple[int, ...]], lost: set[str] | None = None) -> None:
    with memstore.open(root, verify=True) as store:
        assert set(store) == versions.keys() - (lost or set())
        for key in store:
            assert store.versions(key) == versions[key]
            for number, version in enumerate(store.versions(key), 4 - len(versions[key])):
                assert torch.equal(store.get(key, version=version), value(key, number)), (key, version)
        assert store.verify().ok
        for key in store:
            store.put(key, value(key, 4))
            assert len(store.versions(key)) == min(len(versions[key]) + 1, 3), "its limit is known still"
        store.clear()
        store.gc()
        assert os.listdir(f"{root}/segments") == []


def test_a_store_that_is_whole_stays_as_it_is(scratch: str) -> None:
    versions = make(scratch)
    for _ in range(2):
        assert memstore.repair(scratch).lost == ()
    check(scratch, versions)


def test_without_a_catalog_the_present_versions_come_back_alone(scratch: str) -> None:
    """Where a present version lay in the catalog, no replaced one comes in its place."""
    versions = make(scratch)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    report = memstore.repair(scratch)
    assert report.recovered == ("segment", "sharded")
    with memstore.open(scratch, verify=True) as store:
        for key in store:
            assert store.versions(key) == versions[key][-1:] and torch.equal(store.get(key), value(key, 3))


def spoil_entry(root: str, key: str) -> None:
    with memstore.open(root) as store:
        opened = root_of(store)

        def act(transaction: tables.Transaction) -> None:
            stored = bytearray(raw_row(transaction, "entries", key.encode()))
            stored[20] ^= 1
            put_raw_row(transaction, "entries", key.encode(), bytes(stored))

        opened.mutex.run(lambda: opened.catalog.update(act), deadline_after(10))


@pytest.mark.parametrize("key", ["inline", "mixed"])
def test_a_damaged_record_isnt_replaced_by_an_older_version(
    scratch: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    versions = make(scratch)
    spoil_entry(scratch, key)
    with memstore.open(scratch) as store:
        assert [one.key for one in store.verify().damaged] == [key]
    with caplog.at_level(logging.WARNING):
        report = memstore.repair(scratch)
    assert report.lost == (key,)
    assert f"2 versions that were replaced, and were kept, are lost: {versions[key][0]} of '{key}'" in caplog.text
    kept = [name for name in os.listdir(f"{scratch}/segments") if name.endswith(".damaged")]
    assert len(kept) == (key == "mixed"), "nobody deletes what may be wanted"
    for name in kept:
        os.unlink(f"{scratch}/segments/{name}")
    check(scratch, versions, {key})


def test_a_damaged_record_of_a_file_comes_back_from_it(scratch: str) -> None:
    versions = make(scratch)
    spoil_entry(scratch, "segment")
    assert memstore.repair(scratch).lost == ()
    with memstore.open(scratch) as store:
        assert store.versions("segment") == versions["segment"]


@pytest.mark.parametrize("where", ["header", "data"])
def test_damage_of_a_replaced_version_is_found(scratch: str, where: str) -> None:
    versions = make(scratch)
    version = versions["segment"][0]
    with memstore.open(scratch) as store:
        root = root_of(store)
        record = root.catalog.view(tables.kept_record, b"segment", version)
        assert record is not None
        path = f"{scratch}/segments/{record.segment:016x}.safetensors"
    flip(path, 8 * (record.start + 500) if where == "data" else 8 * 600)
    with memstore.open(scratch, verify=True) as store:
        (damage,) = store.verify().damaged
        assert (damage.key, damage.path) == ("segment", path) and f"version {version}, which was" in damage.detail
        if where == "data":
            with pytest.raises(memstore.CorruptionError):
                store.get("segment", version=version)
        assert torch.equal(store.get("segment"), value("segment", 3))


def spoil_version(store: memstore.Store, key: bytes) -> None:
    root = root_of(store)
    name = root.catalog.view(tables.kept_versions, key)[0].name

    def act(transaction: tables.Transaction) -> None:
        stored = bytearray(raw_row(transaction, "history", name))
        stored[30] ^= 1
        put_raw_row(transaction, "history", name, bytes(stored))

    root.mutex.run(lambda: root.catalog.update(act), deadline_after(10))


def test_a_damaged_row_is_found_and_in_nobodys_way(scratch: str) -> None:
    versions = make(scratch)
    with memstore.open(scratch) as store:
        spoil_version(store, b"segment")
        with pytest.raises(memstore.CorruptionError):
            store.get("segment", version=versions["segment"][0])
        assert not store.verify().ok
        for number in (4, 5, 6):
            store.put("segment", value("segment", number))
        assert len(store.versions("segment")) == 3
    report = memstore.repair(scratch)
    assert report.lost == () and report.swept_bytes > 0
    with memstore.open(scratch) as store:
        assert store.verify().ok
        assert store.versions("inline") == versions["inline"]


def segments_of(store: memstore.Store) -> tuple[dict[int, SegmentRow], set[int]]:
    """All rows of segments, and the segments of replaced versions."""
    root = root_of(store)
    rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
    kept = root.catalog.view(lambda transaction: transaction.rows_with(tables.HISTORY, b"", 100))
    return rows, {one.segment for row in kept for one in tables.read_version(*row)[1].segments}


def test_headers_of_replaced_versions_say_so(scratch: str) -> None:
    """After a repair, too; the rows of their files say live."""
    make(scratch)
    for _ in range(2):
        with memstore.open(scratch) as store:
            rows, replaced = segments_of(store)
        assert len(replaced) == 5
        for segment, row in rows.items():
            if row.state == LIVE:
                with open(f"{scratch}/segments/{segment:016x}.safetensors", "rb") as file:
                    state = b" state=retired " if segment in replaced else b" state=live "
                    assert state in file.read(128)
            else:
                assert row.state == RETIRED and segment not in replaced
        memstore.repair(scratch)
