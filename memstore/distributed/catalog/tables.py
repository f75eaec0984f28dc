"""The rules' tables in the catalog of this host: `CatalogTables` is one transaction. See rules/tables.py."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memstore._arguments import check_encoded
from memstore.distributed.catalog.attempts import Attempts
from memstore.distributed.catalog.copies import Copies
from memstore.distributed.catalog.damage import readable, tell
from memstore.distributed.catalog.entries import Checked, entry_of, head_of, record_of
from memstore.distributed.catalog.rows import (
    encode,
    joining_of,
    last_call_of,
    places_on,
    standing_of,
)
from memstore.distributed.catalog.segments import LENT_VERSION, Segments
from memstore.distributed.rules import Entry, Joining, LastCall, Lent, Place, Standing
from memstore.engine import Effects, SealedSegment, Transaction, tables
from memstore.errors import CorruptionError

_LANES = 256
_LANE = 1  # byte
_LASTS = b"lasts"


class CatalogTables(Attempts, Copies):
    """One transaction of this host's catalog, as the rules ask for it.

    Args:
        member: the id of this host.
        effects: what the transaction does beside its rows. In a read nothing is written.
        sealed: segments that this process has filled, and still has open: `lend` and `own` may name them.
        checked: records of entries that were looked at before.

    Attributes:
        has_owed: another host is owed something by what was done here.
    """

    def __init__(
        self,
        transaction: Transaction,
        member: bytes,
        effects: Effects,
        sealed: Sequence[SealedSegment] = (),
        checked: Checked | None = None,
    ) -> None:
        self._transaction, self._member, self._effects = transaction, member, effects
        self._checked = checked or {}
        self._segments = Segments(transaction, member, effects, sealed)
        self._versions: dict[bytes, int] = {}  # of the records that were written here
        self._standing: Standing | None = None  # read once: a look at a thousand waits asks for it as often
        self.has_owed = False

    @property
    def version(self) -> int:
        """The last one that was assigned here."""
        return self._effects.counters.version

    @version.setter
    def version(self, version: int) -> None:
        self._effects.is_change = self._effects.is_change or version != self.version
        self._effects.counters.version = version

    # --- the records of the keys that are at home here ----------------------------------------------------------------

    def record(self, key: bytes) -> Entry | None:
        record = self._transaction.record(key)
        return None if record is None else entry_of(record, self._member)

    def head(self, key: bytes) -> Entry | None:
        """The record, without its body."""
        record = self._transaction.record(key)
        return None if record is None else head_of(record, self._member)

    def put_record(self, key: bytes, entry: Entry) -> None:
        """Raises InvalidKeyError, CorruptionError unless these can be a key and a record: others may have sent them."""
        check_encoded(key)
        found = self._checked.get((entry.body, entry.places)) if self._checked else None
        if found is None:
            record = record_of(entry, self._member)
        else:
            record = msgspec.structs.replace(found, version=entry.version)
        self._transaction.put_record(key, record)
        self._versions[key] = entry.version
        self._effects.adds = True
        self._note(key)

    def put_damaged(self, key: bytes) -> None:
        """A row that is there is as damaged, and says more."""
        check_encoded(key)
        if self._transaction.row("entries", key) is None:
            self._transaction.put_damaged(key)
            self._note(key)

    def delete_record(self, key: bytes) -> None:
        if self._transaction.delete_record(key):
            self._note(key)

    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        keys = self._transaction.keys(prefix, after if after >= prefix and after else None, limit)
        return [(key, self._whole_record(key)) for key in keys]

    def _whole_record(self, key: bytes) -> Entry | None:
        try:
            return self.record(key)
        except CorruptionError as error:
            self.pass_over(key, error)
            return None

    def pass_over(self, key: bytes, why: CorruptionError) -> None:
        tell(self._member, key, why)

    def _note(self, key: bytes) -> None:
        self._effects.is_change = True
        self._effects.keys.add(key)

    # --- the cluster --------------------------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """Raises CorruptionError if the host is a member, and its row was lost."""
        if self._standing is None:
            said = tables.read_body(self._transaction, tables.CLUSTER, tables.MEMBERS)
            self._standing = None if said is None else standing_of(said)
        if self._standing is None and self.membership():
            raise CorruptionError(
                "this store is served as a member of a cluster, and has lost the row that says of which: remove the "
                "host from its cluster (memstore remove), export what is here, and serve an empty store"
            )
        return self._standing

    def put_standing(self, standing: Standing) -> None:
        tables.put_body(self._transaction, tables.CLUSTER, tables.MEMBERS, encode(standing))
        self._standing = standing
        self._effects.counters.membership += 1
        self._effects.is_change = self._effects.wakes_all = True

    def membership(self) -> int:
        return self._effects.counters.membership

    # --- sessions, and the last call of each of their lanes -----------------------------------------------------------

    def new_session(self, *, lasts: bool = False) -> int:
        """Its number is that of no other session, segment or put."""
        self._effects.counters.number += 1
        session = self._effects.counters.number
        self._say(tables.SESSIONS, tables.pack_number(session), _LASTS if lasts else b"")
        return session

    def lasts(self, session: int) -> bool:
        try:
            return tables.read_body(self._transaction, tables.SESSIONS, tables.pack_number(session)) == _LASTS
        except CorruptionError:
            return True

    def has_session(self, session: int) -> bool:
        return tables.read_body(self._transaction, tables.SESSIONS, tables.pack_number(session)) is not None

    def end_session(self, session: int) -> None:
        name = tables.pack_number(session)
        self._delete(tables.SESSIONS, name)
        for key, _ in self._transaction.rows_with(tables.CALLS, name, _LANES):
            self._delete(tables.CALLS, key)

    def sessions(self, after: int, limit: int) -> list[int]:
        rows = self._transaction.rows_with(tables.SESSIONS, b"", limit, tables.pack_number(after))
        return [int.from_bytes(key, "big") for key, _ in rows]

    def last_call(self, session: int, lane: int) -> LastCall | None:
        said = tables.read_body(self._transaction, tables.CALLS, _lane(session, lane))
        return None if said is None else last_call_of(said)

    def put_last_call(self, session: int, lane: int, call: LastCall) -> None:
        self._say(tables.CALLS, _lane(session, lane), encode(call))

    # --- segments of this host ----------------------------------------------------------------------------------------

    def own(self, place: Place, key: bytes) -> None:
        version = self._versions.get(key)
        if version is None:
            record = self._transaction.record(key)
            version = LENT_VERSION if record is None else record.version
        self._segments.own(place, key, version)

    def lend(self, place: Place, lent: Lent) -> None:
        self._segments.lend(place, lent)

    def is_there(self, place: Place) -> bool:
        return self._segments.is_there(place)

    def retire(self, place: Place) -> None:
        self._segments.retire(place)

    def lent(self, place: Place) -> Lent | None:
        return self._segments.lent(place)

    def all_lent(self, after: int, limit: int) -> list[tuple[Place, Lent]]:
        return self._segments.all_lent(after, limit)

    # --- segments of other hosts that are to be told ------------------------------------------------------------------

    def owe(self, place: Place) -> None:
        if place.segment:
            tables.put_owed(self._transaction, place.host, place.put_id, place.segment)
            self._effects.is_change = self.has_owed = True

    def settle(self, place: Place) -> None:
        tables.delete_owed(self._transaction, place.host, place.put_id)
        self._effects.is_change = True

    def owed(self, limit: int) -> list[Place]:
        return [Place(*row) for row in tables.owed_rows(self._transaction, limit)]

    # --- records of a root that had keys when it was first served -----------------------------------------------------

    def put_joining(self, key: bytes, row: Joining) -> None:
        kept = tables.KeptRow(places_on(self._member, row.entry), encode(row))
        tables.put_kept(self._transaction, tables.JOINING, key, kept)
        self._effects.is_change = True

    def delete_joining(self, key: bytes) -> None:
        self._delete(tables.JOINING, key)

    def joining(self, limit: int) -> list[tuple[bytes, Joining]]:
        def read(key: bytes, stored: bytes) -> Joining:
            return joining_of(tables.read_kept(tables.JOINING, key, stored).said)

        return readable(self._transaction, self._member, tables.JOINING, read, limit)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _say(self, table: str, key: bytes, body: bytes) -> None:
        tables.put_body(self._transaction, table, key, body)
        self._effects.is_change = True

    def _delete(self, table: str, key: bytes) -> None:
        self._transaction.delete_row(table, key)
        self._effects.is_change = True


def _lane(session: int, lane: int) -> bytes:
    return tables.pack_number(session) + lane.to_bytes(_LANE, "big")
