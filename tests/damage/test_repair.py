"""A repair brings back all that is whole, says what is lost, and deletes no bytes that may be somebody's."""

from __future__ import annotations

import logging
import os
import shutil

import lmdb
import msgspec
import pytest
import torch

import memstore
from memstore.engine.catalog.tables import NAMES, OPTIONAL, Transaction
from memstore.engine.files.segments import write_slots
from memstore.engine.format import headers
from memstore.engine.format.headers import HeaderSlots
from memstore.engine.format.records import LIVE, Record
from tests.children import Child, Wire, in_child
from tests.damage.stores import (
    CATALOG,
    INLINE,
    check_repaired,
    content_of,
    copy,
    files_of,
    header_size,
    make,
    overwrite,
    paths,
    values,
    versions,
)
from tests.examples import one_in
from tests.inside import put_raw_row, raw_row, root_of
from tests.support import faults

DAMAGED = ".damaged"


@pytest.mark.parametrize("checksum", [True, False])
def test_a_store_that_is_whole_stays_as_it_is(scratch: str, checksum: bool) -> None:
    before = make(scratch, checksum=checksum)
    with memstore.open(scratch, capacity="1GiB"):
        pass
    segments = {key: content_of(path) for key, path in paths(scratch).items()}
    for _ in range(2):
        report = memstore.repair(scratch)
        assert report.recovered == tuple(sorted(values())) and report.lost == ()
        with memstore.open(scratch) as store:
            assert versions(store) == before
            assert store.stats().capacity == 1 << 30
            assert store.stats().reusable_bytes == 0
        assert {key: content_of(path) for key, path in paths(scratch).items()} == segments
        check_repaired(scratch)


def tables_of(root: str, more: str | None = None) -> set[str]:
    """The tables of the catalog, after one more was made, with a row."""
    with lmdb.open(os.path.dirname(f"{root}/{CATALOG}"), max_dbs=20, map_size=1 << 30) as env:
        if more:
            table = env.open_db(more.encode())
            with env.begin(write=True) as transaction:
                transaction.put(b"a key", b"of a later version", db=table)
        with env.begin() as transaction:
            return {bytes(name).decode() for name, _ in transaction.cursor()}


def test_a_table_of_a_later_version_is_no_damage(scratch: str) -> None:
    """A repair leaves it behind: its rows are not among those that this version can vouch for."""
    before = make(scratch)
    assert "later" in tables_of(scratch, "later")
    with memstore.open(scratch) as store:
        assert versions(store) == before
        assert store.verify().ok
    report = memstore.repair(scratch)
    assert report.recovered == tuple(sorted(values())) and report.lost == ()
    assert tables_of(scratch) == {*NAMES, *OPTIONAL}
    with memstore.open(scratch) as store:
        assert versions(store) == before
    check_repaired(scratch)


def test_what_it_gives_back_is_told(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        reusable = store.stats().reusable_bytes
    assert memstore.repair(scratch).swept_bytes == reusable > 0
    assert files_of(scratch) == {os.path.basename(path) for path in paths(scratch).values()}


CATALOGS = {
    "empty": lambda path: os.truncate(path, 0),
    "missing": os.unlink,
    "zeros": lambda path: overwrite(path, 0, bytes(os.path.getsize(path))),
    "noise": lambda path: overwrite(path, 0, os.urandom(1 << 16)),
    "half a page": lambda path: os.truncate(path, 2048),
    "two pages": lambda path: os.truncate(path, 8192),
}


def test_a_tensor_of_many_dimensions_comes_back(scratch: str) -> None:
    """More than those that external files may have."""
    with memstore.open(scratch) as store:
        store.put("many", torch.ones([1] * 1023 + [3000]))
        assert store.verify().ok
    os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).recovered == ("many",)
    with memstore.open(scratch) as store:
        assert store.get("many").sum() == 3000


@pytest.mark.parametrize("kind", one_in(3, CATALOGS))
def test_without_a_catalog_the_headers_tell(scratch: str, kind: str) -> None:
    before = make(scratch)
    CATALOGS[kind](f"{scratch}/{CATALOG}")
    report = memstore.repair(scratch)
    assert set(report.recovered) == set(values()) - INLINE
    check_repaired(scratch, lost=INLINE)
    with memstore.open(scratch) as store:
        assert versions(store) == {key: before[key] for key in set(values()) - INLINE}
        assert "deleted" not in store


def test_a_catalog_without_its_list_of_readers(scratch: str) -> None:
    make(scratch)
    for spoil in (os.unlink, lambda path: overwrite(path, 0, os.urandom(4096)), lambda path: os.truncate(path, 100)):
        spoil(f"{scratch}/catalog/local/lock.mdb")
        assert memstore.repair(scratch).lost == ()
        check_repaired(scratch)


def test_an_older_put_than_the_newest_doesnt_come_back(scratch: str) -> None:
    """Its owner was killed before it could mark the header: both say live."""
    make(scratch)
    with memstore.open(scratch) as store:
        (old,) = store.info("segment/1").files
        shutil.copy(old, f"{scratch}.old")
        held = store.get("segment/1")  # so that its file isn't used again
        store.put("segment/1", torch.zeros(5000))
        store.put("segment/1", values()["segment/1"])
        assert store.info("segment/1").files != (old,)
    del held
    shutil.copy(f"{scratch}.old", old)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    check_repaired(scratch, lost=INLINE)
    assert not os.path.exists(old)


def test_a_deleted_key_stays_deleted_where_the_catalog_can_be_read(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        store.put("gone", torch.zeros(5000))
        (path,) = store.info("gone").files
        shutil.copy(path, f"{scratch}.live")
        store.delete("gone")
    shutil.copy(f"{scratch}.live", path)  # killed before the header was marked
    flip_a_record(scratch, b"inline/0")  # the catalog is damaged elsewhere
    report = memstore.repair(scratch)
    assert report.lost == ("inline/0",)
    check_repaired(scratch, lost={"inline/0"})


def test_what_nobody_can_know_is_said(scratch: str, caplog: pytest.LogCaptureFixture) -> None:
    """A key comes back whose delete was cut off before its file was marked, and values in the catalog are gone."""
    make(scratch)
    in_child_killed(delete_and_die_after_the_commit, scratch)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    with caplog.at_level(logging.WARNING, "memstore"):
        report = memstore.repair(scratch)
    assert "gone" in report.recovered and report.lost == ()
    inline, deleted = caplog.messages
    assert "up to 1536 bytes" in inline and "nobody can say which" in inline
    assert "cut off" in deleted and "'gone'" in deleted
    with memstore.open(scratch) as store:
        store.delete("gone")
    check_repaired(scratch, lost=INLINE)


def delete_and_die_after_the_commit(root: str) -> None:
    with memstore.open(root) as store:
        store.put("gone", torch.zeros(5000))
        store.put("too", torch.zeros(5000))
        steps = faults.record(lambda: store.delete("too"))
        with faults.at_step(steps.index(faults.COMMIT) + 1, faults.die, after=True):
            store.delete("gone")


def test_a_store_that_is_whole_is_no_reason_to_warn(scratch: str, caplog: pytest.LogCaptureFixture) -> None:
    make(scratch)
    with caplog.at_level(logging.WARNING, "memstore"):
        memstore.repair(scratch)
    assert caplog.messages == []


def flip_a_record(root: str, key: bytes, bit: int = 300) -> None:
    with memstore.open(root) as store:
        opened = root_of(store)

        def write(transaction: Transaction) -> None:
            stored = bytearray(raw_row(transaction, "entries", key))
            stored[bit // 8] ^= 1 << bit % 8
            put_raw_row(transaction, "entries", key, bytes(stored))

        with opened.guard:
            opened.catalog.update(write)


def test_a_damaged_record_is_made_of_its_header(scratch: str) -> None:
    before = make(scratch)
    for key in ("segment/1", "objects", "nested"):
        flip_a_record(scratch, key.encode())
    assert memstore.repair(scratch).lost == ()
    check_repaired(scratch)
    with memstore.open(scratch) as store:
        assert versions(store) == before


@pytest.mark.parametrize(
    "spoiled", [1, 50, 600, *(pytest.param(at, marks=pytest.mark.full) for at in (30, 70, 200, 4000))]
)
@pytest.mark.parametrize("key", one_in(3, ["segment/1", "nested", "objects"]))
def test_a_damaged_header_is_made_of_its_record(scratch: str, key: str, spoiled: int) -> None:
    make(scratch)
    path = paths(scratch)[key]
    before = content_of(path)
    overwrite(path, spoiled, b"?")
    if key == "objects" and spoiled in (600, 4000):  # in the objects, which no record has
        assert memstore.repair(scratch).lost == ("objects",)
        check_repaired(scratch, lost={"objects"})
        return
    assert memstore.repair(scratch).lost == ()
    after = content_of(path)
    batch = slice(103, 128 + 25)  # of one, whatever it was, and its check
    assert before[:103] == after[:103] and before[batch.stop :] == after[batch.stop :]
    check_repaired(scratch)


@pytest.mark.parametrize("checksum", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "spoiled",
    [
        "the start",
        "the description",
        *(pytest.param(what, marks=pytest.mark.full) for what in ("the key", "what closes them", "the entries")),
    ],
)
def test_objects_outlive_damage_around_them(scratch: str, spoiled: str, checksum: bool) -> None:
    """They are in the header only. It is no JSON any more, or no text at all; but they are where they were."""
    make(scratch, checksum=checksum)
    path = paths(scratch)["objects"]
    before = content_of(path)
    at = {
        "the start": 8,
        "the key": before.index(b'"key":') + 8,
        "what closes them": before.index(b'","description"'),
        "the description": before.index(b'"description":"') + 20,
        "the entries": before.index(b'"data_offsets"') + 3,
    }[spoiled]
    if spoiled == "the start" and not checksum:
        at = headers.STORE_AT + 3  # the slots tell the put, where the bytes have no checksums
    for byte in (b'"', b"\xff", b"A", b"\\"):
        overwrite(path, 0, before[: header_size(path)])
        overwrite(path, at, byte if before[at : at + 1] != byte else b"=")
        assert memstore.repair(scratch).lost == (), byte
        check_repaired(scratch)
        path = paths(scratch)["objects"]


def test_a_damaged_header_without_checksums(scratch: str) -> None:
    """It is kept where the rest of it names the put; else the bytes may be another's, and are set aside."""
    make(scratch, checksum=False)
    files = paths(scratch)
    overwrite(files["segment/0"], 1000, b"?")
    overwrite(files["segment/1"], 1, b"?")
    overwrite(files["segment/2"], 0, bytes(4096))
    content = content_of(files["segment/2"])
    assert memstore.repair(scratch).lost == ("segment/2",)
    check_repaired(scratch, lost={"segment/2"})
    assert content_of(files["segment/2"] + DAMAGED) == content


def test_damaged_bytes_are_not_taken_for_the_records(scratch: str) -> None:
    make(scratch)
    path = paths(scratch)["segment/1"]
    overwrite(path, 1000, b"?")
    overwrite(path, header_size(path) + 10, b"??")
    assert memstore.repair(scratch).lost == ("segment/1",)
    check_repaired(scratch, lost={"segment/1"})
    assert os.path.exists(path + DAMAGED) and not os.path.exists(path)


@pytest.mark.parametrize("size", one_in(3, [0, 7, 100, 4095, 4096, 5000]))
def test_a_truncated_file_is_lost_and_kept(scratch: str, size: int) -> None:
    make(scratch)
    path = paths(scratch)["segment/1"]
    os.truncate(path, size)
    assert memstore.repair(scratch).lost == ("segment/1",)
    assert os.path.getsize(path + DAMAGED) == size
    check_repaired(scratch, lost={"segment/1"})


def test_a_damaged_file_is_kept_where_the_catalog_is_lost(scratch: str) -> None:
    """Its key is told as far as it can be read."""
    make(scratch)
    files = paths(scratch)
    overwrite(files["segment/1"], 1000, b"?")
    overwrite(files["segment/2"], 0, bytes(4096))
    os.truncate(f"{scratch}/{CATALOG}", 0)
    assert memstore.repair(scratch).lost == ("segment/1",)
    check_repaired(scratch, lost={*INLINE, "segment/1", "segment/2"})
    assert {os.path.exists(files[key] + DAMAGED) for key in ("segment/1", "segment/2")} == {True}


def test_a_missing_file_is_lost(scratch: str) -> None:
    make(scratch)
    os.unlink(paths(scratch)["nested"])
    assert memstore.repair(scratch).lost == ("nested",)
    check_repaired(scratch, lost={"nested"})


@pytest.mark.parametrize("with_catalog", [True, False])
def test_exchanged_files_are_found_under_their_new_names(scratch: str, with_catalog: bool) -> None:
    before = make(scratch)
    files = paths(scratch)
    one, other = files["segment/1"], files["nested"]
    os.rename(one, f"{scratch}.aside")
    os.rename(other, one)
    os.rename(f"{scratch}.aside", other)
    if not with_catalog:
        os.truncate(f"{scratch}/{CATALOG}", 0)
    lost = set() if with_catalog else INLINE
    assert memstore.repair(scratch).lost == ()
    check_repaired(scratch, lost=lost)
    with memstore.open(scratch) as store:
        assert all(store.version(key) == before[key] for key in store)


def test_a_file_copied_over_another(scratch: str) -> None:
    make(scratch)
    files = paths(scratch)
    shutil.copy(files["segment/1"], files["nested"])
    assert memstore.repair(scratch).lost == ("nested",)
    check_repaired(scratch, lost={"nested"})


def test_a_file_moved_over_another_with_the_same_bytes(scratch: str) -> None:
    """Its checksums fit both; but it is one key's only."""
    with memstore.open(scratch, checksum=True) as store:
        for key in ("a", "b"):
            store.put(key, torch.ones(5000))
    files = paths(scratch)
    os.rename(files["a"], files["b"])
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("a",), ("b",))
    with memstore.open(scratch) as store:
        assert (store.get("a") == 1).all() and store.verify().ok


def test_a_catalog_that_is_older_than_its_files(scratch: str) -> None:
    """As LMDB takes the page before, if the newest one that starts it is damaged."""
    make(scratch)
    shutil.copy(f"{scratch}/{CATALOG}", f"{scratch}.old")
    with memstore.open(scratch) as store:
        version = store.put("segment/1", torch.ones(7000))
    shutil.copy(f"{scratch}.old", f"{scratch}/{CATALOG}")
    memstore.repair(scratch)
    with memstore.open(scratch) as store:
        assert store.version("segment/1") == version
        assert (store.get("segment/1") == 1).all()
        assert store.verify().ok


@pytest.mark.parametrize("with_catalog", [True, False])
def test_what_was_being_published_doesnt_appear(scratch: str, with_catalog: bool) -> None:
    """Killed when the headers say live, and the catalog doesn't."""
    make(scratch)
    in_child_killed(put_and_die_at_the_commit, scratch)
    if not with_catalog:
        os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    check_repaired(scratch, lost=set() if with_catalog else INLINE)


def put_and_die_at_the_commit(root: str) -> None:
    with memstore.open(root) as store:
        steps = faults.record(lambda: store.put("nested", torch.ones(5000)))
        last = max(i for i, name in enumerate(steps, 1) if name == faults.COMMIT)
        store.put("nested", values()["nested"])
        with faults.at_step(last, faults.die):
            store.put("nested", torch.zeros(5000))


def in_child_killed(function: object, *arguments: object) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(function, *arguments)  # type: ignore[arg-type]


def test_no_compare_and_swap_is_fooled(scratch: str) -> None:
    before = make(scratch)
    with memstore.open(scratch) as store:
        gone = store.put("inline/0", 5)
        store.delete("inline/0")
    os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    with memstore.open(scratch) as store:
        assert store.put("inline/0", 6) > max(gone, *before.values())
        with pytest.raises(memstore.VersionConflictError):
            store.put("inline/0", 7, expect_version=gone)


@pytest.mark.parametrize("name", one_in(2, ["lock", "doorbell"]))
def test_pages_are_written_anew_in_place(scratch: str, name: str) -> None:
    make(scratch)
    path = f"{scratch}/{name}"
    inode = os.stat(path).st_ino
    for spoil in (
        lambda: overwrite(path, 0, os.urandom(4096)),
        lambda: overwrite(path, 0, b"\xff" * 4096),
        lambda: os.truncate(path, 0),
        lambda: os.truncate(path, 4097),
    ):
        spoil()
        memstore.repair(scratch)
        assert os.stat(path).st_ino == inode and os.path.getsize(path) == 4096
        check_repaired(scratch)
    os.unlink(path)
    memstore.repair(scratch)
    check_repaired(scratch)


def test_waiters_wait_on_afterwards(scratch: str) -> None:
    make(scratch)
    memstore.repair(scratch)
    with memstore.open(scratch) as store, Child(put_when_told, scratch) as child:
        child.receive()
        before = store.version("inline/1")
        child.send()
        assert store.wait("inline/1", newer_than=before, timeout=20.0) > before


def put_when_told(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        wire.send()
        wire.receive()
        store.put("inline/1", 1)


def test_it_needs_the_store_for_itself(scratch: str) -> None:
    make(scratch)
    with Child(open_until_told, scratch) as child:
        child.receive()
        with pytest.raises(memstore.StoreTimeoutError, match=f"pid {child.pid}"):
            memstore.repair(scratch, timeout=0.1)
        child.send()
        assert memstore.repair(scratch, timeout=20.0).lost == ()  # as soon as it has closed it
    check_repaired(scratch)


def open_until_told(wire: Wire, root: str) -> None:
    with memstore.open(root):
        wire.send()
        wire.receive()


def test_values_that_are_held_stay(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        store.put("held", torch.full((5000,), 3))
        held = store.get("held")
        store.delete("held")
        kept = store.get("nested")
    memstore.repair(scratch)
    assert (held == 3).all()
    check_repaired(scratch)
    assert torch.equal(kept["a"], values()["nested"]["a"])


def test_without_settings_it_is_refused(scratch: str) -> None:
    make(scratch)
    for text in ("", "{", '{"format": 1}'):
        with open(f"{scratch}/memstore.json", "w") as file:
            file.write(text)
        with pytest.raises(memstore.NotAStoreError, match=r"memstore\.json"):
            memstore.repair(scratch)
    os.unlink(f"{scratch}/memstore.json")
    with pytest.raises(memstore.NotAStoreError, match=r"memstore\.json"):
        memstore.repair(scratch)
    with pytest.raises(memstore.NotAStoreError):
        memstore.repair(f"{scratch}/nothing")
    with pytest.raises(TypeError):
        memstore.repair("")


def test_files_of_others_are_left_alone(scratch: str) -> None:
    make(scratch)
    make(f"{scratch}2")
    with memstore.open(f"{scratch}2") as store:
        for _ in range(50):
            store.put("nested", torch.zeros(5000))  # newer than ours
    others = paths(f"{scratch}2")["nested"]
    folder = f"{scratch}/segments"
    shutil.copy(others, f"{folder}/00000000000000ff.safetensors")
    for name in ("notes.txt", "model.safetensors", "00ff.safetensors"):
        with open(f"{folder}/{name}", "w") as file:
            file.write("mine")
    os.symlink(f"{folder}/notes.txt", f"{folder}/00000000000000fe.safetensors")
    os.mkfifo(f"{folder}/00000000000000fd.safetensors")
    os.truncate(f"{scratch}/{CATALOG}", 0)
    before = {name for name in files_of(scratch) if "f" in name.split(".")[0] or "n" in name[0] or "m" in name[0]}
    memstore.repair(scratch)
    assert before <= files_of(scratch)
    check_repaired(scratch, lost=INLINE)


def test_the_catalog_of_another_store_counts_for_nothing(scratch: str) -> None:
    make(scratch)
    with memstore.open(f"{scratch}2") as store:
        store.put_many({"foreign": 1, "nested": 2, "segment/1": torch.zeros(5000)})
    shutil.copy(f"{scratch}2/{CATALOG}", f"{scratch}/{CATALOG}")
    memstore.repair(scratch)
    check_repaired(scratch, lost=INLINE)


def test_progress_comes_to_its_end(scratch: str) -> None:
    make(scratch)
    seen: list[tuple[int, int]] = []
    memstore.repair(scratch, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    assert len({total for _, total in seen}) == 1


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("spoil", ["header", "catalog"])
def test_a_repair_that_is_killed_can_be_repeated(scratch: str, spoil: str, stride: int) -> None:
    """Killed after each of its steps that change something."""
    make(f"{scratch}0")
    if spoil == "header":
        overwrite(paths(f"{scratch}0")["segment/1"], 1000, b"?")
        os.truncate(paths(f"{scratch}0")["segment/2"], 5000)
        lost = {"segment/2"}
    else:
        os.truncate(f"{scratch}0/{CATALOG}", 0)
        lost = INLINE
    copy(f"{scratch}0", scratch)
    steps = in_child(faults.record, RepairOf(scratch))
    kills = [i for i, name in enumerate(steps, 1) if name in ("rename", "unlink", "write_at", "link", faults.COMMIT)]
    assert len(kills) > 8
    for number in kills[::stride]:
        copy(f"{scratch}0", scratch)
        in_child_killed(repair_and_die, scratch, number)
        memstore.repair(scratch)
        check_repaired(scratch, lost=lost)


class RepairOf:
    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self) -> None:
        memstore.repair(self.root)


def repair_and_die(root: str, number: int) -> None:
    with faults.at_step(number, faults.die, after=True):
        memstore.repair(root)


def test_a_made_header_is_what_the_put_wrote(scratch: str) -> None:
    """Whether the plan was made of a value, or read from a record."""
    from memstore import contents

    make(scratch)
    with memstore.open(scratch) as store:
        opened = root_of(store)
        for key, path in paths(scratch).items():
            with opened.guard:
                record = opened.catalog.read(key.encode())
            assert record is not None
            content = content_of(path)
            made = contents.header_of(opened.settings.store, key, record, memoryview(content))
            assert made is not None
            after = headers.SLOTS_OFFSET + headers.SLOTS_SIZE
            assert made[after:] == content[after : record.start]


def test_numbers_beyond_reason_are_damage(scratch: str) -> None:
    """A version that leaves no room to count on from would stop the store."""
    make(scratch)
    path = paths(scratch)["segment/1"]
    fd = os.open(path, os.O_RDWR)
    write_slots(fd, HeaderSlots(2**64 - 1, LIVE, 2**64 - 1))
    os.close(fd)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    check_repaired(scratch, lost={*INLINE, "segment/1"})


def test_it_fits_the_record_that_is_written_anew(scratch: str) -> None:
    """What a header gives is the record that the put wrote, but for the time."""
    make(scratch)
    before = records_of(scratch)
    os.truncate(f"{scratch}/{CATALOG}", 0)
    memstore.repair(scratch)
    after = records_of(scratch)
    for key in set(values()) - INLINE:
        assert abs(after[key].created - before[key].created) < 60
        assert msgspec.structs.replace(after[key], created=before[key].created) == before[key]


def records_of(root: str) -> dict[str, Record]:
    with memstore.open(root) as store:
        opened = root_of(store)
        with opened.guard:
            found = {key: opened.catalog.read(key.encode()) for key in store}
    return {key: record for key, record in found.items() if record is not None}
