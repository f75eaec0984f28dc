"""Verify, gc and repair of served roots: what other hosts need stays, and a lost membership is said, never guessed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

import msgspec
import pytest

import memstore
from memstore.distributed.catalog import look, run
from memstore.distributed.rules import (
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    Member,
    Ownership,
    answer_again,
)
from memstore.distributed.rules.messages import Done, Resolve
from memstore.distributed.rules.roster import found
from memstore.engine import Change, MembershipChanged, make_room_and_retry, need_cluster, sweep_all
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.protocols.put import commit
from memstore.engine.repair.survey import survey
from memstore.engine.root.folder import CATALOG
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError
from tests.distributed.catalog import operations
from tests.distributed.catalog.filling import fill
from tests.distributed.catalog.operations import BYTES, OTHER, before_change, damage_of, flipped, give, state_of
from tests.engine import bytes_store


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield f"{folder}/store"


def prepared(root: Root) -> dict[str, object]:
    """Makes a member with everything: what it owns, has lent, owes, has copied, and is handed over."""
    before_change(root)
    now = deadline_after(10)

    def more(tables: operations.CatalogTables) -> None:
        session = tables.new_session()
        tables.put_last_call(session, 3, LastCall(1, Done()))
        give(tables, b"given")
        place = tables.all_lent(0, 10)[0][0]
        tables.put_leaving(b"leaving", LeavingGroup(OTHER, 7))
        tables.put_kept(b"kept", KeptGroup(OTHER, 8))
        tables.keep({b"kept/k": Entry(5, b"body", (place,))})
        tables.put_owned(b"replaced", Grant(9, 1))
        tables.granted = 12
        tables.put_ownerships([Ownership(b"", OTHER, Grant(12, 1))])
        tables.owe(operations.Place(OTHER, 99, 9))

    run(root, more, now)
    assert damage_of(root) == []
    return state_of(root)


def damaged(path: str, change: Callable[[Transaction], None]) -> None:
    """Writes rows that no checksum fits, behind everybody's back."""
    with bytes_store.opened(path) as root:
        root.mutex.run(lambda: root.catalog.update(change), deadline_after(10))


def test_a_sound_one_keeps_all_but_its_copies(path: str) -> None:
    with bytes_store.opened(path) as root:
        old = prepared(root)
        groups = look(root, _groups, deadline_after(10))
        files = set(os.listdir(root.segments))
        copied = _files_of_copies(root)
    del root  # it keeps the lock page mapped
    report = memstore.repair(path)
    assert report.lost == ()
    with bytes_store.opened(path) as root:
        assert state_of(root) == {**old, "copies": [], "membership": 3}
        assert look(root, _groups, deadline_after(10)) == groups
        assert set(os.listdir(root.segments)) == files - copied and copied
        assert damage_of(root) == []
        assert survey(f"{path}/{CATALOG}", locked=True).is_sound


def _groups(tables: operations.CatalogTables) -> list[object]:
    handed = [tables.all_leaving(), tables.all_kept(), tables.kept_page(b"kept", 10)]
    return [tables.all_owned(None, 10), *handed, tables.granted, tables.ownerships(0, 10)]


def _files_of_copies(root: Root) -> set[str]:
    copies = look(root, lambda tables: tables.copies(b"", 10), deadline_after(10))
    return {f"{copy.record.segment:016x}.safetensors" for _, copy in copies}


@pytest.mark.parametrize("how", ["row", "file"])
def test_a_lost_membership_is_said_and_never_guessed(path: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with bytes_store.opened(path) as root:
        prepared(root)
    if how == "row":
        damaged(path, flipped(tables.CLUSTER))
        assert not survey(f"{path}/{CATALOG}", locked=True).is_sound
    else:
        with open(f"{path}/{CATALOG}/data.mdb", "r+b") as file:
            file.write(bytes(1 << 16))
    del root  # it keeps the lock page mapped
    memstore.repair(path)
    assert "can't be one any more" in caplog.text
    with bytes_store.opened(path) as root:
        change = Change(b"k", bytes_store.draft(root, b"k", b"inline").content)
        with pytest.raises(MembershipChanged):
            commit(root, [change], deadline_after(10))
        with pytest.raises(CorruptionError, match="memstore remove"):
            look(root, lambda tables: tables.standing(), deadline_after(10))
        # what is here can be read
        assert root.catalog.read(b"replaced") is not None
        assert bytes_store.get(root, b"replaced") == BYTES
        rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
        assert {row.key for row in rows.values()} >= {b"replaced", b"lent", b"given"}, "others may need these"
        assert [words for words in damage_of(root) if "the row that says of which is lost" not in str(words)] == []


def test_calls_are_refused_after_a_repair_that_may_have_lost_their_answers(path: str) -> None:
    with bytes_store.opened(path) as root:
        prepared(root)
        session = look(root, _session, deadline_after(10))
    damaged(path, flipped(tables.CALLS))
    del root  # it keeps the lock page mapped
    memstore.repair(path)
    with bytes_store.opened(path) as root:
        assert look(root, lambda tables: tables.standing(), deadline_after(10)) is not None
        answer = look(root, lambda tables: answer_again(tables, Resolve(session, 3, 2)), deadline_after(10))
        assert type(answer).__name__ == "NoSession"
        assert run(root, lambda tables: tables.new_session(), deadline_after(10)) > session
        assert damage_of(root) == []


def _session(tables: operations.CatalogTables) -> int:
    return max(number for number in range(1000) if tables.has_session(number))


def test_lent_segments_whose_rows_are_damaged_are_asked_after(path: str) -> None:
    """By the next audit, under the keys that their rows have; and no entries are made of them."""
    with bytes_store.opened(path) as root:
        old = prepared(root)
        lent = look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10))
    for place, _ in lent:
        damaged(path, flipped(tables.LENT, tables.pack_number(place.put_id)))
    del root  # it keeps the lock page mapped
    memstore.repair(path)
    with bytes_store.opened(path) as root:
        found_rows = look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10))
        assert [(place, one.key, one.session) for place, one in found_rows if one.key in (b"lent", b"given")] == [
            (place, one.key, 0) for place, one in lent
        ]
        assert root.catalog.read(b"lent") is root.catalog.read(b"given") is None
        assert state_of(root)["records"] == old["records"]
        assert damage_of(root) == []


def test_one_that_was_never_told_of_members_is_repaired_as_any(path: str) -> None:
    with bytes_store.opened(path) as root:
        bytes_store.put(root, b"k", BYTES)
        need_cluster(root, deadline_after(10))
    del root  # it keeps the lock page mapped
    memstore.repair(path)
    with bytes_store.opened(path) as root:
        assert bytes_store.put(root, b"k", BYTES) > 0
        assert root.catalog.view(Transaction.counters).membership == 0
        member = Member(root.member_id(), "here")
        run(root, lambda tables: found(tables, member, b"C" * 16), deadline_after(10))


def test_a_copy_of_the_folder_of_a_member_opens_and_is_whole(path: str) -> None:
    """Values of other hosts whose records are here aren't looked for in files of this one."""
    with bytes_store.opened(path) as root:
        prepared(root)
    del root  # it keeps the lock page mapped
    report = memstore.repair(path)
    assert "elsewhere" in report.recovered
    assert memstore.repair(path).recovered == report.recovered


def test_gc_gives_up_copies_and_keeps_what_is_lent(path: str) -> None:
    with bytes_store.opened(path) as root:
        old = prepared(root)
        live = root.catalog.view(Transaction.counters).live
        (copied,) = [os.path.getsize(f"{root.segments}/{name}") for name in _files_of_copies(root)]
        assert sweep_all(root, deadline_after(10), keep=None) == 0
        assert state_of(root) == old, "an opening gives up nothing"
        sweep_all(root, deadline_after(10))
        assert state_of(root) == {**old, "copies": []}
        assert root.catalog.view(Transaction.counters).live == live - copied
        assert damage_of(root) == []
        lent = look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10))
        assert all(look(root, lambda tables: [tables.is_there(place) for place, _ in lent], deadline_after(10)))


def test_a_full_store_gives_up_copies_for_a_put(path: str) -> None:
    with bytes_store.opened(path) as root:
        prepared(root)
        counters = root.catalog.view(Transaction.counters)

    with bytes_store.opened(path, capacity=counters.live + counters.filling + 100) as root:
        membership = root.catalog.view(Transaction.counters).membership
        with pytest.raises(memstore.StoreFullError):
            make_room_and_retry(_claim_only, root, b"large", deadline_after(10), "large")
        assert look(root, lambda tables: tables.copies(b"", 10), deadline_after(10)) == []
        assert membership


def _claim_only(root: Root, key: bytes, deadline: float) -> None:
    fill(root, key, b"x" * (1 << 16))


def test_what_was_lent_before_a_reboot_is_asked_after_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bytes_store.opened(path) as root:
        before_change(root)
        (place, lent), *_ = look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10))
        row = Lent(lent.key, OTHER, 1, 2, 3, 1 << 50)
        run(root, lambda tables: tables.lend(place, row), deadline_after(10))
        monkeypatch.setattr("memstore.distributed.catalog.rows.boot_id", lambda: b"another boot")
        due = msgspec.structs.replace(row, until=0)
        assert look(root, lambda tables: tables.lent(place), deadline_after(10)) == due
        assert look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10))[0] == (place, due)
