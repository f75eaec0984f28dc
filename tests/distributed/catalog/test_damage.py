"""Damaged rows of real catalogs: they are passed over and told once, and everything else goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from memstore.distributed.catalog import look, rows, run
from memstore.distributed.rules import Entry, Grant, Lent, Ownership, directory
from memstore.distributed.rules.directory import begin
from memstore.distributed.rules.messages import Done, Give, Release
from memstore.distributed.rules.roster import leave
from memstore.engine import sweep_all
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.protocols.sweep import drop_copies
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError
from tests.distributed.catalog import operations, sharded_operations
from tests.distributed.catalog.direct import Host, Hosts
from tests.distributed.catalog.filling import asked, fill, published
from tests.distributed.catalog.operations import OTHER, Place, before_change, flipped
from tests.engine import bytes_store

KEYS = [f"g/{number}".encode() for number in range(48)]
LARGE = 5_000  # bytes; in a segment


@pytest.fixture
def hosts(folder: str) -> Iterator[Hosts]:
    """One, with a value under each key; others may join."""
    with contextlib.ExitStack() as stack:
        made = Hosts()
        first = made.add(stack.enter_context(bytes_store.opened(f"{folder}/a")), "a")
        made.settle()
        for key in KEYS:
            made.put(first, key, key.ljust(LARGE, b"."))
        yield made


def spoil(root: Root, table: str, key: bytes | None = None) -> None:
    root.mutex.run(lambda: root.catalog.update(flipped(table, key)), deadline_after(10))


def gets(hosts: Hosts, host: Host) -> dict[bytes, object]:
    """What each key is there: its bytes, None, or the error."""
    found: dict[bytes, object] = {}
    for key in KEYS:
        try:
            found[key] = hosts.get(host, key)
        except CorruptionError as error:
            found[key] = (type(error), error.key)
    return found


def test_a_group_is_handed_over_and_listed_past_a_damaged_record(
    hosts: Hosts, folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rows, "_told", set[tuple[bytes, bytes, str]]()
    )  # of other tests of this process: it tells of so many, and no more
    a = hosts.all["a"]
    damaged = KEYS[::5]
    for key in damaged:
        spoil(a.root, "entries", key)
    with contextlib.ExitStack() as stack:
        b = hosts.add(stack.enter_context(bytes_store.opened(f"{folder}/b")), "b")
        hosts.settle()
        run(a.root, lambda tables: begin(tables, b"g", b.member.id), deadline_after(10))
        hosts.settle()
        assert b.owns(KEYS[0]) and not a.owns(KEYS[0])
        expected = {key: key.ljust(LARGE, b".") for key in KEYS}
        for host in (a, b):
            assert gets(hosts, host) == {**expected, **{key: (CorruptionError, key.decode()) for key in damaged}}
            assert hosts.keys(host) == sorted(KEYS)
        there = [host.root.catalog.view(Transaction.keys, b"", None, 100) for host in (a, b)]
        assert there == [sorted(damaged), sorted(KEYS)], "the damaged ones stay where they are, too"
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for key in damaged:
        of_key = [text for text in told if repr(key.decode()) in text and "passed over" in text]
        assert len(of_key) == 2, "once a row"


def test_a_group_is_handed_over_past_damaged_rows_of_segments(hosts: Hosts, folder: str) -> None:
    """The record is whole, and so is the file: only who would lend it doesn't find it."""
    a = hosts.all["a"]
    segments = a.root.catalog.view(lambda transaction: dict(transaction.segments()))
    for segment, row in segments.items():
        if row.key in KEYS[::5]:
            spoil(a.root, "segments", tables.pack_number(segment))
    with bytes_store.opened(f"{folder}/b") as root:
        b = hosts.add(root, "b")
        hosts.settle()
        run(a.root, lambda tables: begin(tables, b"g", b.member.id), deadline_after(10))
        hosts.settle()
        assert b.owns(KEYS[0])
        assert hosts.keys(b) == sorted(KEYS)
        for host in (a, b):
            assert gets(hosts, host) == {key: key.ljust(LARGE, b".") for key in KEYS}


def test_a_root_joins_past_a_damaged_record(hosts: Hosts, folder: str) -> None:
    names = [b"own%d" % number for number in range(300)]  # more than a batch
    with bytes_store.opened(f"{folder}/b") as root:
        for name in names:
            bytes_store.put(root, name, name)
        for name in (min(names), b"own7"):
            spoil(root, "entries", name)
        b = hosts.add(root, "b")
        hosts.settle()
        assert not b.standing().is_joining and b.owns(b"own8")
        for name in set(names) - {min(names), b"own7"}:
            assert hosts.get(hosts.all["a"], name) == name
        with pytest.raises(CorruptionError):
            hosts.get(b, b"own7")


def test_an_entry_that_can_be_no_record_is_damaged_where_it_comes(hosts: Hosts) -> None:
    """And not lost, as its giver deletes it next. (Here the giver was removed since.)"""
    a = hosts.all["a"]
    body = asked(a.root, fill(a.root, b"new/whole", b"small")).body or b""
    give = Give(b"new", OTHER, 7, ((b"new/bad", Entry(5, b"\xc1")), (b"new/whole", Entry(6, body))), version=9)
    assert run(a.root, lambda tables: a.index.answer(tables, give), deadline_after(10)) == Done()
    roster = a.standing().roster
    run(a.root, lambda tables: directory.give(tables, roster, b"new", a.member.id, 7, OTHER), deadline_after(10))
    hosts.settle(2)
    assert hosts.get(a, b"new/whole") == b"small"
    with pytest.raises(CorruptionError, match="owned it before") as caught:
        a.root.catalog.read(b"new/bad")
    assert caught.value.key == "new/bad"


def test_other_rows_are_looked_at_past_damaged_ones(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        before_change(root)
        filled = fill(root, b"another", operations.BYTES)
        (place,) = asked(root, filled).places
        run(root, lambda tables: tables.lend(place, Lent(b"another", OTHER)), deadline_after(10), sealed=filled.sealed)
        published(root, filled)
        for number, name in enumerate((b"first", b"second")):
            grant = Grant(70 + number, 1)
            row = Ownership(name, OTHER, grant)
            run(root, lambda tables, name=name, grant=grant: tables.put_owned(name, grant), deadline_after(10))
            run(root, lambda tables, row=row: tables.put_ownerships([row]), deadline_after(10))
            owed = Place(OTHER, 90 + number, 9)
            run(root, lambda tables, owed=owed: tables.owe(owed), deadline_after(10))
        for table in (tables.LENT, tables.OWNED, tables.DIRECTORY, tables.OWED, tables.COPIES):
            spoil(root, table)

        def read(tables: operations.CatalogTables) -> list[object]:
            return [
                [lent.key for _, lent in tables.all_lent(0, 1)],
                [group for group, _ in tables.all_owned(None, 1)],
                [row.group for row in tables.ownerships(60, 1)],
                [owed.put_id for owed in tables.owed(10)],
                tables.copies(b"", 10),
                tables.copy(b"elsewhere"),
            ]

        assert look(root, read, deadline_after(10)) == [*([b"another"], [b"second"], [b"second"]), *([91], [], None)]


@pytest.mark.parametrize("table", [tables.LENT, "segments"])
@pytest.mark.parametrize("way", ["release", "audit"])
def test_what_is_lent_is_given_back_past_damaged_rows(folder: str, table: str, way: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        hosts = Hosts()
        host = hosts.add(root, "a")
        hosts.settle()
        places = [_lend(root, key) for key in (b"first", b"second", b"third")]
        spoil(root, table, tables.pack_number(places[0].put_id if table == tables.LENT else places[0].segment))
        if way == "audit":
            hosts.audit()
        else:
            answer = run(root, lambda tables: host.index.answer(tables, Release(tuple(places))), deadline_after(10))
            assert answer == Done()
        are_there = look(root, lambda tables: [tables.is_there(place) for place in places[1:]], deadline_after(10))
        assert are_there == [False, False]


def test_an_audit_leaves_what_a_damaged_record_here_may_name(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        hosts = Hosts()
        hosts.add(root, "a")
        hosts.settle()
        named, other = _lend(root, b"named"), _lend(root, b"other")
        run(root, lambda tables: tables.put_damaged(b"named"), deadline_after(10))
        hosts.audit()
        are_there = look(root, lambda tables: [tables.is_there(place) for place in (named, other)], deadline_after(10))
        assert are_there == [True, False]


def _lend(root: Root, key: bytes) -> Place:
    """Lends it to a host that is no member any more."""
    filled = fill(root, key, operations.BYTES)
    (place,) = asked(root, filled).places
    lent = Lent(key, OTHER, 1, 2, 3)
    run(root, lambda tables: tables.lend(place, lent), deadline_after(10), sealed=filled.sealed)
    published(root, filled)
    return place


def test_attempts_of_a_removed_host_end_past_a_damaged_row_of_a_part(hosts: Hosts) -> None:
    a = hosts.all["a"]
    sharded_operations.before_prepare(a.root)
    sharded_operations.prepare(a.root)
    parts = look(a.root, lambda tables: tables.parts(), deadline_after(10))
    assert len(parts) == 2
    spoil(a.root, "segments", tables.pack_number(parts[0].place.segment))
    run(a.root, leave, deadline_after(10))
    assert look(a.root, lambda tables: tables.parts(), deadline_after(10)) == []


def test_a_copy_whose_row_is_damaged_is_dropped_with_the_others(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        before_change(root)
        spoil(root, tables.COPIES)
        drop_copies(root, deadline_after(10))
        sweep_all(root, deadline_after(10))
        assert root.catalog.view(lambda transaction: transaction.count(tables.COPIES)) == 0
        assert "can't be dropped" in caplog.text and "elsewhere" in caplog.text
