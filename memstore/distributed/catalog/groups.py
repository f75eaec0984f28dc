"""Rows of groups in one transaction: what this host owns, what is handed over from it or to it, and the directory.

A group's row stands under `group_row`, so rows are in the order of groups. Records that were handed over and aren't
served yet stand under their keys in `given`; no row beside them keeps their bytes: what of these lies here is lent. The
directory has a second table by the numbers of grants, in which deputies are told of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memstore.distributed.catalog.rows import (
    encode,
    grant_of,
    kept_entry_of,
    kept_group_of,
    leaving_of,
    ownership_of,
    readable,
)
from memstore.distributed.rules import Entry, Grant, KeptGroup, LeavingGroup, Ownership
from memstore.engine import Effects, Transaction, tables
from memstore.errors import CorruptionError

Row = TypeVar("Row")

_MOST_ROWS = 1 << 20
_DAMAGED = b""  # the body of a row of `given` whose record was damaged at the owner before


class GroupTables:
    """Rows of groups in one transaction. `CatalogTables` is one."""

    _transaction: Transaction
    _member: bytes
    _effects: Effects

    # --- what this host owns ------------------------------------------------------------------------------------------

    def owned(self, group: bytes) -> Grant | None:
        return self._of_group(tables.OWNED, group, grant_of)

    def put_owned(self, group: bytes, grant: Grant) -> None:
        self._put(tables.OWNED, tables.group_row(group), encode(grant), adds=True)

    def drop_owned(self, group: bytes) -> None:
        self._delete(tables.OWNED, tables.group_row(group))
        if self._effects.counters.membership:  # else it is no member yet, and its processes ask nobody
            self._change_membership()

    def all_owned(self, after: bytes | None, limit: int) -> list[tuple[bytes, Grant]]:
        return self._groups(tables.OWNED, grant_of, limit, after)

    # --- what is handed over ------------------------------------------------------------------------------------------

    def leaving(self, group: bytes) -> LeavingGroup | None:
        return self._of_group(tables.LEAVING, group, leaving_of)

    def put_leaving(self, group: bytes, leaving: LeavingGroup) -> None:
        self._put(tables.LEAVING, tables.group_row(group), encode(leaving))
        self._change_membership()

    def drop_leaving(self, group: bytes) -> None:
        self._delete(tables.LEAVING, tables.group_row(group))

    def all_leaving(self) -> list[tuple[bytes, LeavingGroup]]:
        return self._groups(tables.LEAVING, leaving_of)

    def kept(self, group: bytes) -> KeptGroup | None:
        return self._of_group(tables.KEPT, group, kept_group_of)

    def put_kept(self, group: bytes, kept: KeptGroup) -> None:
        self._put(tables.KEPT, tables.group_row(group), encode(kept), adds=True)

    def drop_kept(self, group: bytes) -> None:
        self._delete(tables.KEPT, tables.group_row(group))
        for key, _ in self.kept_page(group, _MOST_ROWS):
            self._delete(tables.GIVEN, key)

    def all_kept(self) -> list[tuple[bytes, KeptGroup]]:
        return self._groups(tables.KEPT, kept_group_of)

    def keep(self, key: bytes, entry: Entry | None) -> None:
        self._put(tables.GIVEN, key, _DAMAGED if entry is None else encode(entry), adds=True)

    def kept_page(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
        rows: list[tuple[bytes, bytes]] = []
        if group and (stored := self._transaction.row(tables.GIVEN, group)) is not None:
            rows.append((group, stored))
        rows += self._transaction.rows_with(tables.GIVEN, group + b"/", limit)
        return [(key, _kept_entry(key, stored)) for key, stored in rows[:limit]]

    def forget_kept(self, key: bytes) -> None:
        self._delete(tables.GIVEN, key)

    # --- the directory ------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> int:
        """The last number of a grant that was given here. A repair may have lost it, and not the rows."""
        said = tables.read_body(self._transaction, tables.CLUSTER, tables.GRANTED)
        if said is not None:
            return int.from_bytes(said, "big")
        numbers = [int.from_bytes(key[: tables.NUMBER_SIZE], "big") for key, _ in self._rows(tables.GRANTS)]
        return max(numbers, default=0)

    @granted.setter
    def granted(self, number: int) -> None:
        self._put(tables.CLUSTER, tables.GRANTED, tables.pack_number(number))

    @property
    def mirrored(self) -> tuple[int, int]:
        """A term, and up to which number all rows of its seed are here."""
        said = tables.read_body(self._transaction, tables.CLUSTER, tables.MIRRORED) or bytes(2 * tables.NUMBER_SIZE)
        return int.from_bytes(said[: tables.NUMBER_SIZE], "big"), int.from_bytes(said[tables.NUMBER_SIZE :], "big")

    @mirrored.setter
    def mirrored(self, mirrored: tuple[int, int]) -> None:
        self._put(tables.CLUSTER, tables.MIRRORED, b"".join(map(tables.pack_number, mirrored)))

    def ownership(self, group: bytes) -> Ownership | None:
        return self._of_group(tables.DIRECTORY, group, ownership_of)

    def put_ownership(self, row: Ownership) -> None:
        self._drop_number(row.group)
        self._put(tables.DIRECTORY, tables.group_row(row.group), encode(row), adds=True)
        self._put(tables.GRANTS, _number_row(row), b"", adds=True)

    def drop_ownership(self, group: bytes) -> None:
        self._drop_number(group)
        self._delete(tables.DIRECTORY, tables.group_row(group))

    def _drop_number(self, group: bytes) -> None:
        try:
            old = self.ownership(group)
        except CorruptionError:  # its number leads to another row, or to none, and is passed over
            return
        if old is not None:
            self._delete(tables.GRANTS, _number_row(old))

    def ownerships(self, after: int, limit: int) -> list[Ownership]:
        """Returns rows by number, beyond that one."""
        rows: list[Ownership] = []
        last = tables.pack_number(after + 1)
        while len(rows) < limit and (found := self._rows(tables.GRANTS, limit, last)):
            for key, _ in found:
                last, group = key, key[tables.NUMBER_SIZE + 1 :]
                try:
                    row = self.ownership(group)
                except CorruptionError as error:
                    self.pass_over(group, error)
                    continue
                if row is not None and _number_row(row) == key:
                    rows.append(row)
        return rows[:limit]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def pass_over(self, key: bytes, why: CorruptionError) -> None:
        raise NotImplementedError

    def _change_membership(self) -> None:
        """Makes processes of this host look anew who owns what. Those that wait here for a key are woken for it."""
        self._effects.counters.membership += 1
        self._effects.is_change = self._effects.wakes_all = True

    def _of_group(self, table: str, group: bytes, read: Callable[[bytes], Row]) -> Row | None:
        said = tables.read_body(self._transaction, table, tables.group_row(group))
        return None if said is None else read(said)

    def _groups(
        self, table: str, read: Callable[[bytes], Row], limit: int = _MOST_ROWS, after: bytes | None = None
    ) -> list[tuple[bytes, Row]]:
        def read_row(key: bytes, stored: bytes) -> Row:
            return read(tables.body_of(key, stored))

        start = b"" if after is None else tables.group_row(after)
        found = readable(self._transaction, self._member, table, read_row, limit, start)
        return [(key[1:], row) for key, row in found]

    def _rows(self, table: str, limit: int = _MOST_ROWS, after: bytes = b"") -> list[tuple[bytes, bytes]]:
        return self._transaction.rows_with(table, b"", limit, after)

    def _put(self, table: str, key: bytes, body: bytes, *, adds: bool = False) -> None:
        tables.put_body(self._transaction, table, key, body)
        self._effects.is_change = True
        self._effects.adds |= adds

    def _delete(self, table: str, key: bytes) -> None:
        self._transaction.delete_row(table, key)
        self._effects.is_change = True


def _number_row(row: Ownership) -> bytes:
    return tables.pack_number(row.grant.number) + tables.group_row(row.group)


def _kept_entry(key: bytes, stored: bytes) -> Entry | None:
    """Reads a row of `given`. None: the record is damaged, here or where it came from."""
    try:
        said = tables.body_of(key, stored)
        return None if said == _DAMAGED else kept_entry_of(said)
    except CorruptionError:
        return None
