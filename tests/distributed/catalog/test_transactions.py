"""Transactions of a served root: wholly there or not at all, whoever dies or fails; and nothing of them elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os

import msgspec
import pytest

from memstore.distributed.catalog import CatalogTables, look, run
from memstore.distributed.rules import Entry, Lent, Place
from memstore.engine import Creation, close_root, open_root, sweep_all
from memstore.engine.catalog.tables import SERVED, Transaction
from memstore.engine.root import folder as folders
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError, FormatVersionError, NotAStoreError, StoreFullError
from tests.children import Child, Wire, in_child
from tests.distributed.catalog import operations
from tests.distributed.catalog.filling import asked, fill, given_up, published
from tests.distributed.catalog.killed import OPERATIONS, die_at, steps_of
from tests.distributed.catalog.operations import damage_of, state_of
from tests.engine import bytes_store
from tests.inside import owes_recovery, raw_row
from tests.support import faults

KILLED = -9
CAN_FAIL = faults.STEPS - faults.CLEANUPS - {faults.COMMIT}


@pytest.mark.parametrize(
    ("name", "after", "every"),
    [
        *((name, True, 4) for name in ("serve", "change", "lend", "publish")),
        *(pytest.param(name, after, 1, marks=pytest.mark.full) for name in OPERATIONS for after in (True, False)),
    ],
)
def test_kill_at_each_step(name: str, after: bool, every: int, folder: str) -> None:
    """In the fast run at some of them, the last one among these."""
    prepare, _ = OPERATIONS[name]
    with bytes_store.opened(f"{folder}/whole") as root:
        prepare(root)
        old = state_of(root)
        names = in_child(steps_of, root.path, name)
        new = state_of(root)
        assert old != new and damage_of(root) == []
    outcomes: list[bool] = []
    steps = [i for i in range(1, len(names) + 1) if names[i - 2 : i + 1] != ["futex_wake"] * 3]  # of all bells
    for number in steps[(len(steps) - 1) % every :: every]:
        what = f"{name}, killed {'after' if after else 'before'} step {number} of {names}"
        with bytes_store.opened(f"{folder}/{number}") as root:
            prepare(root)
            with Child(die_at, root.path, name, number, after) as child:
                child.process.join(100)
                assert child.process.exitcode == KILLED, what
            root.mutex.run(lambda: None, deadline_after(10))  # whoever comes next recovers
            found = state_of(root)
            assert _like(found, old) or _like(found, new), f"{what}: {found}"
            outcomes.append(_like(found, new))
            assert damage_of(root) == [], what
            sweep_all(root, deadline_after(10))
            rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
            assert all(row.state != 1 for row in rows.values()), what
            assert damage_of(root) == [], what
    assert outcomes == sorted(outcomes) and outcomes[-1] and (not outcomes[0] or name == "nothing")


def _like(found: dict[str, object], expected: dict[str, object]) -> bool:
    """Put ids of two roots are in one order, and not the same where a process has kept a file ahead."""
    return {**found, "first": 0} == {**expected, "first": 0}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("change", errno.EIO),
        ("change", errno.ENOSPC),
        *(pytest.param(name, errno.EIO, marks=pytest.mark.full) for name in ("prepare", "publish", "give up")),
    ],
)
def test_an_error_at_each_step_changes_nothing_or_all(name: str, error: int, folder: str) -> None:
    prepare, operation = OPERATIONS[name]
    with bytes_store.opened(f"{folder}/whole") as root:
        prepare(root)
        names = faults.record(lambda: operation(root), names=CAN_FAIL)
        new = state_of(root)
    failure = faults.raising(OSError(error, "injected"))
    for number, step in enumerate(names, 1):
        with bytes_store.opened(f"{folder}/{number}") as root:
            prepare(root)
            old = state_of(root)
            with contextlib.suppress(OSError), faults.at_step(number, failure, names=CAN_FAIL):
                operation(root)
            root.mutex.run(lambda: None, deadline_after(10))  # whoever comes next recovers
            found, what = state_of(root), f"step {number}: {step}"
            assert _like(found, old) or _like(found, new), what
            # once it is committed, headers that can't be marked retired are left so
            is_mark = _like(found, new) and step in ("open_into", "write_at")
            assert is_mark or damage_of(root) == [], what


def test_a_store_that_was_never_served_has_nothing_of_it(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        bytes_store.put(root, b"k", b"x" * 5_000)
        bytes_store.put(root, b"k", b"x" * 5_000)
        stored = root.catalog.view(lambda transaction: raw_row(transaction, "counters", b"counters"))
        assert len(stored) == 8 + 10 * 8  # a checksum and ten numbers
        assert look(root, lambda tables: (tables.standing(), tables.membership()), deadline_after(10)) == (None, 0)
        assert not root.catalog.is_served
        assert root.catalog.view(lambda transaction: [transaction.count(table) for table in SERVED]) == [0] * len(
            SERVED
        )
        with open(f"{root.path}/memstore.json") as file:
            assert "features" not in file.read()


def test_a_served_one_is_refused_by_older_versions(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.serve(root)
        stored = root.catalog.view(lambda transaction: raw_row(transaction, "counters", b"counters"))
        assert len(stored) == 8 + 11 * 8
        settings = folders.read_settings(root.path)
        assert settings is not None and settings.features == ("owners",)
    with open(f"{folder}/store/memstore.json") as file:
        text = file.read()
    with open(f"{folder}/store/memstore.json", "w") as file:
        file.write(text.replace('"owners"', '"later"'))
    with pytest.raises(FormatVersionError, match="later"), bytes_store.opened(f"{folder}/store"):
        pass
    with open(f"{folder}/store/memstore.json", "w") as file:  # as one that hashed homes were served by
        file.write(text.replace('"owners"', '"cluster"'))
    with pytest.raises(FormatVersionError, match="export"), bytes_store.opened(f"{folder}/store"):
        pass


def test_who_opened_it_before_sees_that_it_is_served(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        assert look(root, lambda tables: tables.standing(), deadline_after(10)) is None
        in_child(steps_of, root.path, "serve")
        standing = look(root, lambda tables: tables.standing(), deadline_after(10))
        assert standing is not None and standing.member == root.member_id()
        run(root, lambda tables: tables.new_session(), deadline_after(10))


def test_what_changes_nothing_writes_nothing(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.before_change(root)
        before = root.catalog.view(lambda transaction: (transaction.moment, transaction.counters()))
        run(
            root,
            lambda tables: (tables.standing(), tables.page(b"", 10), tables.retire(Place(b"?" * 16, 1, 1))),
            deadline_after(10),
        )
        assert root.catalog.view(lambda transaction: (transaction.moment, transaction.counters())) == before


def test_an_action_that_raises_has_changed_nothing(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.before_change(root)
        old = state_of(root)
        filled = fill(root, b"k", operations.BYTES)
        place = asked(root, filled).places[0]

        def act(tables: CatalogTables) -> None:
            tables.lend(place, Lent(b"k", b"o" * 16))
            raise KeyError("in the middle")

        with pytest.raises(KeyError):
            run(root, act, deadline_after(10), sealed=filled.sealed)
        assert state_of(root) == old
        given_up(root, filled)
        assert damage_of(root) == []


def test_an_action_that_is_refused_leaves_nothing_to_recover(folder: str) -> None:
    """Else whoever sends such requests would keep the store busy with recoveries."""
    with bytes_store.opened(f"{folder}/store") as root:
        operations.serve(root)
        for bad in (Entry(1, b"\xc1"), Entry(1, b"")):
            with pytest.raises(CorruptionError) as caught:
                run(root, lambda tables, bad=bad: tables.put_record(b"k", bad), deadline_after(10))
            assert "another host" in str(caught.value) and not owes_recovery(root)
        with pytest.raises(ZeroDivisionError):
            run(root, lambda tables: 1 // 0, deadline_after(10))
        assert owes_recovery(root), "of what nobody expects, nobody knows what it left"


def test_a_store_that_is_full_at_the_commit_takes_back_what_headers_say(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.serve(root)
        old, filled = state_of(root), fill(root, b"k", operations.BYTES)
        full = faults.raising(StoreFullError("no room for what the commit itself writes"))
        with pytest.raises(StoreFullError), faults.at_step(1, full, names=frozenset({faults.COMMIT})):
            operations.put(root, filled)
        assert owes_recovery(root)
        root.mutex.run(lambda: None, deadline_after(10))
        assert state_of(root) == old and damage_of(root) == []
        given_up(root, filled)


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_claimed_for_the_next_put_is_left(folder: str, error: int) -> None:
    """By who lends: what it had to do is done all the same, and nothing is kept."""
    with bytes_store.opened(f"{folder}/store") as root:
        operations.before_lend(root)
        names = faults.record(lambda: operations.lend(root), names=CAN_FAIL)
        assert root.next_put.file is not None
        failure = faults.raising(OSError(error, "injected"))
        for number, step in enumerate(names, 1):
            operations.before_lend(root)
            with contextlib.suppress(OSError), faults.at_step(number, failure, names=CAN_FAIL):
                operations.lend(root)
            root.mutex.run(lambda: None, deadline_after(10))
            operations.lend(root, b"next")
            operations.lend(root, b"and next")
            assert damage_of(root) == [], f"step {number}: {step}"


def _look_before_and_after(wire: Wire, path: str) -> None:
    os.access = lambda name, mode: mode != os.W_OK or str(name).endswith("lock.mdb")  # type: ignore[assignment]
    use = open_root(path, "r", Creation(), 10.0)
    for _ in range(2):
        is_served = look(use.root, lambda tables: tables.standing(), deadline_after(10)) is not None
        wire.send((use.root.lock is None, is_served))
        wire.receive()
    close_root(use)


def test_who_may_only_read_sees_that_it_is_served(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        path = root.path
    del root  # the child is to open a root of its own
    with Child(_look_before_and_after, path) as child:
        assert child.receive() == (True, False)
        with bytes_store.opened(path) as root:
            operations.serve(root)
        child.send()
        assert child.receive() == (True, True)
        child.send()


def test_an_action_is_repeated_when_the_catalog_grows(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.serve(root)
        filled = fill(root, b"k", operations.BYTES)
        change = asked(root, filled)
        (place,) = change.places
        calls: list[int] = []

        def act(tables: CatalogTables) -> None:
            calls.append(1)
            for number in range(600):
                key, there = b"many/%d" % number, Place(b"o" * 16, place.put_id, place.segment)
                tables.put_record(key, Entry(number + 1, change.body or b"", (there,)))
                tables.keep({key: Entry(number, b"." * 20_000)})
            tables.lend(change.places[0], Lent(b"k", b"o" * 16))
            tables.version = 600

        run(root, act, deadline_after(10), sealed=filled.sealed)
        published(root, filled)
        assert len(calls) > 1, "this tests nothing"
        assert len(look(root, lambda tables: tables.page(b"", 1_000), deadline_after(10))) == 600
        counters = root.catalog.view(Transaction.counters)
        assert (counters.live, counters.filling) == (filled.sealed[0].size, 0)
        assert damage_of(root) == []


def test_segments_that_are_gone_are_neither_lent_nor_owned(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        operations.serve(root)
        old = state_of(root)
        gone = Place(root.member_id(), 99, 99)
        with pytest.raises(CorruptionError, match="put 99"):
            run(root, lambda tables: tables.lend(gone, Lent(b"k", b"o" * 16)), deadline_after(10))
        with pytest.raises(CorruptionError, match="put 99"):
            run(root, lambda tables: tables.own(gone, b"k"), deadline_after(10))
        assert state_of(root) == old


def test_a_store_whose_id_is_no_members_cannot_be_served(folder: str) -> None:
    with bytes_store.opened(f"{folder}/store") as root:
        settings = root.settings
        root.settings = msgspec.structs.replace(settings, store="x")
        with pytest.raises(NotAStoreError, match="32 hexadecimal digits"):
            run(root, lambda tables: None, deadline_after(10))
        root.settings = settings
