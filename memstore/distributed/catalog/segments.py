"""The segments of this host in one transaction: which are there, owned, lent, copies, or nobody's any more.

Of values of other hosts that were fetched there are rows, too. A damaged one is as none: the value is fetched again.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed.catalog.rows import Copy, copy_of, encode, encode_lent, lent_of, readable, tell
from memstore.distributed.rules import Lent, Place
from memstore.engine import (
    FILLING,
    LIVE,
    PREPARED,
    ClaimedFile,
    Effects,
    Record,
    SealedSegment,
    SegmentRow,
    Transaction,
    tables,
)
from memstore.errors import CorruptionError

LENT_VERSION = 0  # in the header of a segment whose version another host assigns, or that is a copy


class Segments:
    """Segments in one transaction.

    Args:
        sealed: segments that this process has filled, and has open: no row says that they are whole.
    """

    def __init__(
        self, transaction: Transaction, member: bytes, effects: Effects, sealed: Sequence[SealedSegment]
    ) -> None:
        self._transaction, self._member, self._effects = transaction, member, effects
        self._sealed = {(one.segment, one.put_id): one for one in sealed}

    def is_there(self, place: Place) -> bool:
        """Returns whether it is filled, and not retired. External files have no segment, and are there."""
        return not place.segment or self._row(place) is not None

    def own(self, place: Place, key: bytes, version: int) -> None:
        """Notes that a record here names it. Raises CorruptionError if it is another key's."""
        if place.segment:
            row = self._row(place)
            if row is not None and row.key != key and row.state != FILLING:  # a claimed file has its old key until then
                raise _gone(key, place)
            self.hold(place.segment, place.put_id, key, version)
            self._end_lending(place)

    def lend(self, place: Place, lent: Lent) -> None:
        """Notes that a record elsewhere names it, or will."""
        if place.segment:
            self.hold(place.segment, place.put_id, lent.key, LENT_VERSION)
            row = tables.KeptRow(((place.segment, place.put_id),), encode_lent(lent))
            tables.put_kept(self._transaction, tables.LENT, tables.pack_number(place.put_id), row)
            self._effects.is_change = True

    def hold(self, segment: int, put_id: int, key: bytes, version: int) -> None:
        """Makes it live under that version, if it isn't live yet."""
        row = self._row(Place(self._member, put_id, segment))
        if row is None:
            raise _gone(key, Place(self._member, put_id, segment))
        if row.state == FILLING:
            self._effects.publish(key, self._sealed[segment, put_id], version)
        elif row.state == PREPARED:
            self._effects.publish_prepared(key, segment, row, version)

    def prepare(self, place: Place, key: bytes) -> None:
        """Notes that a part of a sharded put names it."""
        row = self._row(place)
        if row is None:
            raise _gone(key, place)
        if row.state == PREPARED:
            return
        sealed = self._sealed.get((place.segment, place.put_id))
        if row.state == FILLING and sealed is not None and isinstance(sealed.file, ClaimedFile):
            sealed.file.unlock()  # before the commit: who reads the segment, once it is live, must not find it locked
        self._end_lending(place)
        self._effects.prepare(key, place.segment, row)

    def retire(self, place: Place) -> None:
        row = self._row(place)
        if row is not None:
            self._end_lending(place)
            self._effects.retire(place.segment, row)

    def _row(self, place: Place) -> SegmentRow | None:
        """Returns its row, if it is live or a part's, or was filled by this process."""
        if place.host != self._member or not place.segment:
            return None
        row = self._transaction.segment(place.segment)
        if row is None or row.put_id != place.put_id:
            return None
        is_sealed = row.state == FILLING and (place.segment, place.put_id) in self._sealed
        return row if row.state in (LIVE, PREPARED) or is_sealed else None

    # --- what is lent -------------------------------------------------------------------------------------------------

    def lent(self, place: Place) -> Lent | None:
        if place.host != self._member or not place.segment:
            return None
        row = tables.kept_row(self._transaction, tables.LENT, tables.pack_number(place.put_id))
        if row is None or row.segments != ((place.segment, place.put_id),):
            return None
        return self._said(place, row)

    def all_lent(self, after: int, limit: int) -> list[tuple[Place, Lent]]:
        """Returns what is lent, by put id, beyond that one."""

        def read(key: bytes, stored: bytes) -> tuple[Place, Lent]:
            row = tables.read_kept(tables.LENT, key, stored)
            place = Place(self._member, int.from_bytes(key, "big"), row.segments[0][0])
            return place, self._said(place, row)

        found = readable(self._transaction, self._member, tables.LENT, read, limit, tables.pack_number(after))
        return [row for _, row in found]

    def _said(self, place: Place, row: tables.KeptRow) -> Lent:
        if row.said:
            return lent_of(row.said, b"")
        found = self._transaction.segment(place.segment)
        return lent_of(b"", b"" if found is None else found.key)

    def _end_lending(self, place: Place) -> None:
        if self.lent(place) is not None:
            self._transaction.delete_row(tables.LENT, tables.pack_number(place.put_id))
            self._effects.is_change = True


def _gone(key: bytes, place: Place) -> CorruptionError:
    name = key.decode(errors="backslashreplace")
    text = f"{name!r}: segment {place.segment:016x} doesn't have put {place.put_id} of this key, or not any more"
    return CorruptionError(text, key=name)


# --- copies -----------------------------------------------------------------------------------------------------------


class Copies:
    """Values of other hosts that were fetched, in one transaction. `CatalogTables` is one."""

    _transaction: Transaction
    _member: bytes
    _effects: Effects
    _segments: Segments

    def copy(self, key: bytes) -> Copy | None:
        """Returns a copy. None, too, if its row is damaged."""
        row = self._row_of_copy(key)
        return None if row is None else copy_of(row.said)

    def _row_of_copy(self, key: bytes) -> tables.KeptRow | None:
        try:
            return tables.kept_row(self._transaction, tables.COPIES, key)
        except CorruptionError as error:
            tell(self._member, key, error)
            return None

    def put_copy(self, key: bytes, places: Sequence[Place], record: Record) -> None:
        """Writes a copy, in place of an older one. Segments of `sealed` that it names become live.

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
        """Returns copies by key, beyond that one."""

        def read(key: bytes, stored: bytes) -> Copy:
            return copy_of(tables.read_kept(tables.COPIES, key, stored).said)

        return readable(self._transaction, self._member, tables.COPIES, read, limit, after)
