"""Rows of values of other hosts that were fetched, in one transaction. A damaged one is as none: they come again."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed.catalog.damage import readable, tell
from memstore.distributed.catalog.rows import Copy, copy_of, encode
from memstore.distributed.catalog.segments import LENT_VERSION, Segments
from memstore.distributed.rules import Place
from memstore.engine import Effects, Record, Transaction, tables
from memstore.errors import CorruptionError


class Copies:
    """Of one transaction. `CatalogTables` is one."""

    _transaction: Transaction
    _member: bytes
    _effects: Effects
    _segments: Segments

    def copy(self, key: bytes) -> Copy | None:
        """None, too, if its row is damaged: the value is fetched again."""
        row = self._row_of_copy(key)
        return None if row is None else copy_of(row.said)

    def _row_of_copy(self, key: bytes) -> tables.KeptRow | None:
        try:
            return tables.kept_row(self._transaction, tables.COPIES, key)
        except CorruptionError as error:
            tell(self._member, key, error)
            return None

    def put_copy(self, key: bytes, places: Sequence[Place], record: Record) -> None:
        """A copy, in place of an older one. Segments of `sealed` that it names become live.

        Args:
            places: that its bytes came from.
            record: of its version, in segments of this host.
        """
        self.delete_copy(key)
        for extent in record.segments:
            self._segments.hold(extent.segment, extent.put_id, key, LENT_VERSION)
        segments = tuple((extent.segment, extent.put_id) for extent in record.segments)
        row = tables.KeptRow(segments, encode(Copy(tuple(places), record)))
        tables.put_kept(self._transaction, tables.COPIES, key, row)
        self._effects.is_change = self._effects.adds = True

    def delete_copy(self, key: bytes) -> None:
        row = self._row_of_copy(key)
        self._transaction.delete_row(tables.COPIES, key)
        self._effects.is_change = True
        for segment, put_id in () if row is None else row.segments:
            self._segments.retire(Place(self._member, put_id, segment))

    def copies(self, after: bytes, limit: int) -> list[tuple[bytes, Copy]]:
        """By key, beyond that one."""

        def read(key: bytes, stored: bytes) -> Copy:
            return copy_of(tables.read_kept(tables.COPIES, key, stored).said)

        return readable(self._transaction, self._member, tables.COPIES, read, limit, after)
