"""Damage in the rows of sharded puts that wait, and of their outcomes: it is found, and a repair drops them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

import memstore
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE, RETIRED
from tests.damage.sharded_stores import check, make
from tests.examples import one_in
from tests.inside import delete_raw_row, put_raw_row, root_of


@pytest.fixture
def damaged(scratch: str) -> Iterator[memstore.Store]:
    """A store with parts that wait, and outcomes; it is repaired at the end."""
    make(scratch)
    with memstore.open(scratch) as store:
        assert store.verify().ok
        yield store
        detail = [error.detail for error in store.verify().damaged]
        assert detail, "nothing was found"
    assert memstore.repair(scratch).lost == ()
    check(scratch)


def change(store: memstore.Store, action: Callable[[Transaction], object], *, whole: bool = True) -> list[str]:
    """What `verify` finds once the catalog was changed; with `whole`, without blaming a key."""
    root = root_of(store)
    with root.guard:
        root.catalog.update(action)
    report = store.verify()
    assert report.checked == 3 and (not whole or {error.key for error in report.damaged} == {None})
    return [error.detail for error in report.damaged]


def flip(table: str) -> Callable[[Transaction], object]:
    def action(transaction: Transaction) -> None:
        key, stored = transaction.rows_with(table, b"", 1)[0]
        middle = len(stored) // 2
        put_raw_row(transaction, table, key, stored[:middle] + bytes([stored[middle] ^ 1]) + stored[middle + 1 :])

    return action


@pytest.mark.parametrize("table", one_in(3, [tables.PENDING, tables.CONTENTS, tables.OUTCOMES]))
def test_a_flipped_bit(damaged: memstore.Store, table: str) -> None:
    assert any("checksum" in detail for detail in change(damaged, flip(table)))


def test_a_part_without_its_content(damaged: memstore.Store) -> None:
    def lose(transaction: Transaction) -> None:
        delete_raw_row(transaction, tables.CONTENTS, transaction.rows_with(tables.CONTENTS, b"", 1)[0][0])

    (detail,) = change(damaged, lose)
    assert "has lost what rank" in detail and "'waiting 0'" in detail


@pytest.mark.parametrize("state", one_in(2, [LIVE, RETIRED]))
def test_a_part_whose_segment_is_not_prepared(damaged: memstore.Store, state: int) -> None:
    def spoil(transaction: Transaction) -> None:
        part = tables.parts_of(transaction)[0]
        row = transaction.segment(part.segment)
        assert row is not None
        transaction.put_segment(part.segment, msgspec.structs.replace(row, state=state))

    assert any("table 'pending' names it" in detail for detail in change(damaged, spoil, whole=False))


def test_a_segment_that_is_prepared_for_nobody(damaged: memstore.Store) -> None:
    details = change(damaged, lambda transaction: tables.delete_part(transaction, tables.parts_of(transaction)[0]))
    assert any("2 rows are prepared, and 1 are listed" in detail for detail in details), details
