"""A repair brings back sharded entries of which all segments are there, and nothing of the others."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch

import memstore
from memstore import TensorShard
from memstore.engine.format.headers import STATE_AT
from tests.children import in_child
from tests.damage.sharded_stores import RANKS, check, make, put, whole
from tests.damage.stores import CATALOG, content_of, files_of, header_size, overwrite
from tests.support import faults
from tests.support.equality import is_same


def segments(root: str, key: str) -> tuple[str, ...]:
    with memstore.open(root) as store:
        return store.info(key).files


@pytest.mark.parametrize("checksum", [True, False])
def test_a_store_that_is_whole_stays_as_it_is(scratch: str, checksum: bool) -> None:
    before = make(scratch, checksum=checksum)
    kept = {path: content_of(path) for key in ("a", "b") for path in segments(scratch, key)}
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("a", "b", "plain"), ())
    with memstore.open(scratch) as store:
        assert {key: store.version(key) for key in store} == before
    assert {path: content_of(path) for path in kept} == kept
    check(scratch)


def test_parts_that_wait_are_given_back(scratch: str) -> None:
    make(scratch)
    report = memstore.repair(scratch)
    assert report.swept_bytes > 0
    assert len(files_of(scratch)) == 2 * RANKS + 1
    with memstore.open(scratch) as store:
        assert store.pending() == ()
        assert not put(store, "waiting", ranks=range(2, 3))  # its attempt begins anew
        assert store.pending("waiting")[0].ranks == (2,)


@pytest.mark.parametrize("checksum", [True, False])
def test_without_a_catalog_the_headers_tell(scratch: str, checksum: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = make(scratch, checksum=checksum)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    with caplog.at_level(logging.WARNING, "memstore"):
        report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("a", "b", "plain"), ())
    assert not any("back without" in message for message in caplog.messages)
    with memstore.open(scratch) as store:
        assert {key: store.version(key) for key in store} == before
        assert store.verify().checked == (3 if checksum else 0)
        assert [len(store.info(key).files) for key in ("a", "b")] == [RANKS, RANKS]
    check(scratch)


def test_the_record_that_headers_make_is_the_one_that_was_put(scratch: str) -> None:
    """But for the time, and for objects and descriptions that are equal."""
    from memstore.engine import index
    from tests.inside import root_of

    make(scratch)
    with memstore.open(scratch) as store:
        (before,) = [index.find(root_of(store), b"a")]
    os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    with memstore.open(scratch) as store:
        after = index.find(root_of(store), b"a")
    assert before is not None and after is not None
    for name in before.__struct_fields__:
        if name != "created":
            assert getattr(before, name) == getattr(after, name), name


@pytest.mark.parametrize(("gone", "with_catalog"), [(0, True), (1, False), (2, False)])
def test_one_missing_segment_loses_the_entry_and_keeps_the_others(scratch: str, gone: int, with_catalog: bool) -> None:
    make(scratch)
    files = segments(scratch, "a")
    os.unlink(files[gone])
    if not with_catalog:
        os.truncate(f"{scratch}/{CATALOG}", 0)
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("b", "plain"), ("a",))
    aside = {name for name in files_of(scratch) if name.endswith(".damaged")}
    assert aside == {os.path.basename(path) + ".damaged" for path in files if path != files[gone]}
    check(scratch, lost={"a"})


@pytest.mark.parametrize("with_catalog", [True, False])
def test_exchanged_files_are_found_by_their_put_ids(scratch: str, with_catalog: bool) -> None:
    make(scratch)
    one, two = segments(scratch, "a")[0], segments(scratch, "b")[2]
    three = segments(scratch, "a")[1]
    shutil.copy(one, f"{scratch}.aside")
    shutil.copy(two, one)
    shutil.copy(three, two)
    shutil.copy(f"{scratch}.aside", three)
    if not with_catalog:
        os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).lost == ()
    check(scratch)


WAYS = {
    "slots": lambda path: overwrite(path, 37, bytes(100)),
    "size": lambda path: overwrite(path, 0, b"\xff" * 8),
    "description": lambda path: overwrite(path, 700, b"damage"),
    "all of the header": lambda path: overwrite(path, 0, os.urandom(header_size(path))),
}


@pytest.mark.parametrize(
    "way", [way if way == "description" else pytest.param(way, marks=pytest.mark.full) for way in WAYS]
)
def test_a_damaged_header_is_made_anew_if_the_bytes_fit(scratch: str, way: str) -> None:
    before = make(scratch)
    path = segments(scratch, "a")[1]
    WAYS[way](path)
    with memstore.open(scratch) as store:
        (error,) = store.verify().damaged
        assert error.key == "a" and path in str(error.path)
    assert memstore.repair(scratch).lost == ()
    with memstore.open(scratch) as store:
        assert {key: store.version(key) for key in store} == before
    check(scratch)
    # what its rank said of the value is gone, and so the entry if the catalog goes too
    os.truncate(f"{scratch}/{CATALOG}", 0)
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("b", "plain"), ("a",))
    assert len([name for name in files_of(scratch) if name.endswith(".damaged")]) == RANKS
    check(scratch, lost={"a"})


@pytest.mark.parametrize("way", ["description", pytest.param("size", marks=pytest.mark.full)])
def test_a_damaged_header_without_checksums(scratch: str, way: str) -> None:
    make(scratch, checksum=False)
    WAYS[way](segments(scratch, "a")[1])
    assert memstore.repair(scratch).lost == ()
    check(scratch)


def test_damaged_bytes_are_not_mended(scratch: str) -> None:
    make(scratch)
    path = segments(scratch, "a")[0]
    overwrite(path, header_size(path) + 100, b"damage")
    overwrite(path, 700, b"damage")
    assert memstore.repair(scratch).lost == ("a",)
    check(scratch, lost={"a"})


def test_a_damaged_header_without_the_catalog_loses_the_entry(scratch: str) -> None:
    make(scratch)
    WAYS["description"](segments(scratch, "a")[1])
    os.truncate(f"{scratch}/{CATALOG}", 0)
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("b", "plain"), ("a",))
    assert len([name for name in files_of(scratch) if name.endswith(".damaged")]) == RANKS
    check(scratch, lost={"a"})


def test_an_older_version_doesnt_stand_in_for_one_that_is_incomplete(scratch: str) -> None:
    """Its owner was killed before it could mark the headers of what it replaced: both say live."""
    make(scratch)
    with memstore.open(scratch) as store:
        held = store.get("a")
        old = store.info("a").files
        aside = {path: content_of(path) for path in old}
        put(store, "a", 7)
        new = store.info("a").files
        assert not set(new) & set(old)
    for path, content in aside.items():
        overwrite(path, 0, content)
    del held
    os.unlink(new[2])
    os.truncate(f"{scratch}/{CATALOG}", 0)
    report = memstore.repair(scratch)
    assert "a" in report.lost
    check(scratch, lost={"a"})


@pytest.mark.parametrize("checksum", [False, True])
def test_what_only_a_rank_without_bytes_says_comes_back(scratch: str, checksum: bool) -> None:
    said = [{"t": torch.ones(5000)}, {"text": "only here", "none": torch.empty(0, 3)}, {"n": 5}]
    with memstore.open(scratch, checksum=checksum) as store:
        for rank, value in enumerate(said):
            store.put_sharded("k", value, attempt="1", rank=rank, world_size=3, wait=False)
        assert is_same(store.get("k"), said[0] | said[1] | said[2])
    os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).recovered == ("k",)
    with memstore.open(scratch, verify=True) as store:
        assert is_same(store.get("k"), said[0] | said[1] | said[2]) and store.verify().ok


def test_a_rank_without_bytes_is_told_of(scratch: str, caplog: pytest.LogCaptureFixture) -> None:
    with memstore.open(scratch, checksum=True) as store:
        for rank in range(2):
            value = {"t": TensorShard(torch.ones(5000)[: 5000 * (1 - rank)], (5000,), (5000 * rank,))}
            store.put_sharded("k", value, attempt="1", rank=rank, world_size=2, wait=False)
        assert len(store.info("k").files) == 1, "rank 1 says nothing that rank 0 doesn't"
    os.truncate(f"{scratch}/{CATALOG}", 0)
    with caplog.at_level(logging.WARNING, "memstore"):
        assert memstore.repair(scratch).recovered == ("k",)
    (message,) = [message for message in caplog.messages if "back without" in message]
    assert "'k'" in message and "ranks 1" in message
    with memstore.open(scratch, verify=True) as store:
        assert torch.equal(store.get("k")["t"], torch.ones(5000)) and store.verify().ok


def test_a_plain_put_over_a_sharded_one_and_back(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        store.put("a", torch.zeros(4000))
        put(store, "plain", 2)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).recovered == ("a", "b", "plain")
    with memstore.open(scratch, verify=True) as store:
        assert (store.get("a") == 0).all()
        assert is_same(store.get("plain"), whole(2)) and store.verify().ok


@pytest.mark.parametrize("with_catalog", [True, False])
def test_a_publication_that_was_cut_off_is_swept(scratch: str, with_catalog: bool) -> None:
    """Its headers say live already; the lock page has its note."""
    make(scratch)
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(publish_and_die, scratch)
    assert len(live_parts(scratch, "half")) == RANKS
    if not with_catalog:
        os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).lost == ()
    assert len(files_of(scratch)) == 2 * RANKS + 1
    check(scratch)


@pytest.mark.parametrize("synced", [RANKS - 1, RANKS])
def test_a_publication_that_a_crash_of_the_host_cut_off(scratch: str, synced: int) -> None:
    """Nothing notes it then. If all of its headers say live, it may have been acknowledged: so it is there."""
    make(scratch)
    page = content_of(f"{scratch}/lock")
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(publish_and_die, scratch)
    overwrite(f"{scratch}/lock", 0, page)
    for name in live_parts(scratch, "half")[synced:]:
        overwrite(f"{scratch}/segments/{name}", STATE_AT, b"filling")
    assert memstore.repair(scratch).lost == ()
    with memstore.open(scratch, verify=True) as store:
        assert ("half" in store) == (synced == RANKS)
        if synced == RANKS:
            assert is_same(store.get("half"), whole()) and store.verify().ok
            store.delete("half")
    check(scratch)


def publish_and_die(root: str) -> None:
    with memstore.open(root) as store:
        commits = faults.record(lambda: put(store, "whole"), names=frozenset({faults.COMMIT}))
        store.delete("whole")
        with faults.at_step(len(commits), faults.die, names=frozenset({faults.COMMIT})):
            put(store, "half")


def live_parts(root: str, key: str) -> list[str]:
    found: list[str] = []
    for name in files_of(root):
        head = content_of(f"{root}/segments/{name}")[:4096]
        if b" state=live " in head and f'"key":"{key}"'.encode() in head:
            found.append(name)
    return found
