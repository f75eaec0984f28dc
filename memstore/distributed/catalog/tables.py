"""The rules' tables in the catalog of this host. `CatalogTables` is one transaction: see `Tables` in rules/steps.py.

`run` makes one, under the store's mutex; `look` reads. A store that nobody serves has the same rows of sharded puts, by
the engine's `TransactionRows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

import msgspec

from memstore._arguments import check_encoded
from memstore.distributed.catalog.rows import (
    Checked,
    Copy,
    batch_of,
    decode,
    encode,
    encode_lent,
    entry_of,
    head_of,
    keepers_of,
    last_call_of,
    lent_of,
    record_of,
    standing_of,
    tell,
)
from memstore.distributed.rules import (
    Backup,
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    Ownership,
    Place,
    Quota,
    Remembered,
    ReplacedRow,
    Standing,
    dispose,
    passing_over,
)
from memstore.engine import (
    FILLING,
    LIVE,
    PREPARED,
    AttemptOutcome,
    Charge,
    ClaimedFile,
    Effects,
    KeptVersion,
    Now,
    PendingPart,
    ReadOnlyTransaction,
    Record,
    Root,
    SealedSegment,
    SegmentRow,
    Transaction,
    boot_clock,
    boot_id,
    change_served,
    charge,
    held_bytes,
    need_cluster,
    note_history,
    pinned_versions,
    tables,
    used_by,
)
from memstore.errors import CorruptionError

Result = TypeVar("Result")
Row = TypeVar("Row")

_MOST_ROWS = 1 << 20
_A_PAGE = 1024  # rows
_LANES = 256
_LANE = 1  # byte
_DAMAGED = b""  # the body of a row of `given` whose record was damaged at the owner before
_HOLDS, _GOES_ON = b"\1", b"\0"  # bodies of rows of `lacking`
_LENT_VERSION = 0  # in the header of a segment whose version another host assigns, or that is a copy


class CatalogTables:
    """One transaction of this host's catalog, as the rules ask for it.

    Args:
        member: the id of this host.
        effects: what the transaction does beside its rows. In a read nothing is written.
        sealed: segments that this process has filled, and still has open: no row says that they are whole. `lend`,
            `own` and `put_copy` may name them.
        checked: records of entries that were looked at before.
        is_shared: the root lies on storage that hosts share.
        root: that it is the catalog of; None: nothing is written, or there is nothing to be noted beside it.

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
        *,
        is_shared: bool = False,
        root: Root | None = None,
    ) -> None:
        self._transaction, self._member, self._effects = transaction, member, effects
        self.is_shared, self._root = is_shared, root
        self._checked = checked or {}
        self._sealed = {(one.segment, one.put_id): one for one in sealed}
        self._versions: dict[bytes, int] = {}  # of the records that were written here
        self._held: dict[bytes, int] = {}  # what keys took that are held to their quotas, before they are changed
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

    # --- the records of the keys that this host owns ------------------------------------------------------------------

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
            record = msgspec.structs.replace(found, version=entry.version, history=entry.history)
        if entry.history is not None and self._root is not None:
            note_history(self._root)
        with self._counted(key):
            self._transaction.put_record(key, record)
        self._versions[key] = entry.version
        self._effects.adds = True
        self._note(key)

    def put_records(self, entries: Sequence[tuple[bytes, Entry]]) -> dict[bytes, CorruptionError]:
        records: list[tuple[bytes, Record]] = []
        refused: dict[bytes, CorruptionError] = {}
        for key, entry in entries:
            check_encoded(key)
            try:
                records.append((key, record_of(entry, self._member)))
            except CorruptionError as error:
                refused[key] = error
            else:
                self._versions[key] = entry.version
        if self._effects.counters.quotas:
            for key, record in records:
                with self._counted(key):
                    self._transaction.put_record(key, record)
        else:
            self._transaction.put_records(records)
        if self._root is not None and any(record.history is not None for _, record in records):
            note_history(self._root)
        self._effects.adds = self._effects.is_change = True
        return refused

    def put_damaged(self, key: bytes) -> None:
        """A row that is there is as damaged, and says more."""
        check_encoded(key)
        if self._transaction.row("entries", key) is None:
            self._transaction.put_damaged(key)
            self._note(key)

    def delete_record(self, key: bytes) -> None:
        with self._counted(key):
            is_gone = self._transaction.delete_record(key)
        if is_gone:
            self._note(key)

    # Quotas: the engine's rows, one for each that the roster has. The owner of a group counts what its keys take, so a
    # prefix lies within one group. What a hand-over or a recovery brings is counted too, and never refused.

    def hold_to_quotas(self, keys: Sequence[bytes]) -> None:
        if self._effects.counters.quotas:
            self._held |= {key: held_bytes(self._transaction, key) for key in keys}

    def charge(self) -> None:
        """Raises QuotaExceededError if keys that are held to their quotas have got more than these allow."""
        held, self._held = self._held, {}
        if held:
            taken = {key: held_bytes(self._transaction, key) - before for key, before in held.items()}
            charge(self._transaction, [Charge(key, more) for key, more in taken.items()])

    @contextlib.contextmanager
    def _counted(self, key: bytes) -> Generator[None]:
        """Counts what the body gives a key, or takes from it, unless that is held to its quotas."""
        counts = self._effects.counters.quotas > 0 and key not in self._held
        before = held_bytes(self._transaction, key) if counts else 0
        yield
        if counts:
            tables.free_in_quotas(self._transaction, key, before - held_bytes(self._transaction, key))

    def _set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Makes the rows those of the roster. A new one counts what this host has of its keys."""
        self.charge()
        limits = {one.prefix: one.limit for one in quotas}
        for row in tables.quotas(self._transaction):
            if limits.get(row.prefix) == row.limit:
                del limits[row.prefix]
            else:
                tables.delete_quota(self._transaction, row.prefix)
        for prefix, limit in limits.items():
            tables.put_quota(self._transaction, tables.QuotaRow(prefix, limit, used_by(self._transaction, prefix)))
        self._effects.counters.quotas = len(quotas)

    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        return self._page(after, limit, prefix, self.record)

    def heads(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        return self._page(after, limit, prefix, self.head)

    def _page(
        self, after: bytes, limit: int, prefix: bytes, read: Callable[[bytes], Entry | None]
    ) -> list[tuple[bytes, Entry | None]]:
        found: list[tuple[bytes, Entry | None]] = []
        for key in self._transaction.keys(prefix, after if after >= prefix and after else None, limit):
            try:
                found.append((key, read(key)))
            except CorruptionError as error:
                self.pass_over(key, error)
                found.append((key, None))
        return found

    def groups(self, start: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        return self._transaction.groups(start, limit)

    def raise_version(self, key: bytes, version: int) -> None:
        record = self._transaction.record(key)
        if record is not None:
            self._transaction.put_record(key, msgspec.structs.replace(record, version=version))
            self._versions[key] = version
            self._note(key)

    def pass_over(self, key: bytes, why: CorruptionError) -> None:
        tell(self._member, key, why)

    def _note(self, key: bytes) -> None:
        """Notes that a key is another one: who waits for it is woken, once this is committed."""
        self._effects.is_change = True
        self._effects.keys.add(key)

    # --- versions that were replaced, and stay readable ---------------------------------------------------------------

    def keep_replaced(self, key: bytes) -> None:
        """Its files here stay live. A repair must not take them for those of the present version: headers say so."""
        record = self._transaction.record(key)
        if record is None:
            return
        with self._counted(key):
            tables.put_version(self._transaction, key, record)
        self._effects.is_change = True
        for extent in record.here(self._member):
            if self._segment(Place(self._member, extent.put_id, extent.segment)) is not None:
                self._effects.replaced.append(extent.segment)

    def replaced_versions(self, key: bytes) -> list[KeptVersion]:
        return tables.kept_versions(self._transaction, key)

    def replaced_version(self, key: bytes, version: int) -> Entry | None:
        record = tables.kept_record(self._transaction, key, version)
        return None if record is None else entry_of(record, self._member)

    def put_replaced(self, key: bytes, entry: Entry) -> None:
        """Raises CorruptionError unless it can be a record, and its segments here are there."""
        record = record_of(entry, self._member)
        for place in entry.places:
            if place.host == self._member and place.segment:
                self._make_live(place, key, entry.version)
                self._end_lending(place)
                self._effects.replaced.append(place.segment)
        if self._root is not None:
            note_history(self._root)
        with self._counted(key):
            tables.put_version(self._transaction, key, record)
        self._effects.is_change = True

    def drop_replaced(self, key: bytes, version: int) -> Entry | None:
        """Raises CorruptionError, when it is dropped: its row is damaged."""
        self._effects.is_change = True
        with self._counted(key):
            record = tables.take_version(self._transaction, key, version)
        return None if record is None else head_of(record, self._member)

    def all_replaced(self, after: bytes, limit: int) -> list[ReplacedRow]:
        rows = self._readable(tables.HISTORY, tables.read_version, limit, after)
        return [ReplacedRow(name, key, head_of(record, self._member)) for name, (key, record) in rows]

    def pinned(self, key: bytes) -> frozenset[int]:
        pins = tables.pins_of(self._transaction, key)
        if self._root is None or not pins:
            return frozenset()
        self._effects.is_change = True
        return pinned_versions(self._root, self._transaction, pins)

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
        old = self.standing()
        self._put(tables.CLUSTER, tables.MEMBERS, standing)
        self._standing = standing
        before = None if old is None else (old.is_joining, old.roster.policies)
        is_other = before != (standing.is_joining, standing.roster.policies)
        if is_other or standing.is_removed or standing.is_sealed:
            self._change_membership()
        if standing.roster.quotas != (() if old is None else old.roster.quotas):
            self._set_quotas(standing.roster.quotas)

    def membership(self) -> int:
        return self._effects.counters.membership

    def _change_membership(self) -> None:
        """Makes processes of this host look anew who owns what. Those that wait here for a key are woken for it."""
        self._effects.counters.membership += 1
        self._effects.is_change = self._effects.wakes_all = True

    # --- groups: what this host owns, and what is handed over ---------------------------------------------------------
    # A group's row stands under `group_row`, so rows are in the order of groups. Records that were handed over and
    # aren't served yet stand under their keys in `given`; no row beside them keeps their bytes: what of these lies here
    # is lent.

    def owned(self, group: bytes) -> Grant | None:
        return self._read_group(tables.OWNED, group, Grant)

    def put_owned(self, group: bytes, grant: Grant) -> None:
        self._put(tables.OWNED, tables.group_row(group), grant, adds=True)

    def drop_owned(self, group: bytes) -> None:
        self._delete(tables.OWNED, tables.group_row(group))
        if self._effects.counters.membership:  # else it is no member yet, and its processes ask nobody
            self._change_membership()

    def all_owned(self, after: bytes | None, limit: int) -> list[tuple[bytes, Grant]]:
        return self._groups(tables.OWNED, Grant, limit, after)

    def leaving(self, group: bytes) -> LeavingGroup | None:
        return self._read_group(tables.LEAVING, group, LeavingGroup)

    def put_leaving(self, group: bytes, leaving: LeavingGroup) -> None:
        self._put(tables.LEAVING, tables.group_row(group), leaving)
        self._change_membership()

    def drop_leaving(self, group: bytes) -> None:
        self._delete(tables.LEAVING, tables.group_row(group))

    def all_leaving(self) -> list[tuple[bytes, LeavingGroup]]:
        return self._groups(tables.LEAVING, LeavingGroup)

    def kept(self, group: bytes) -> KeptGroup | None:
        return self._read_group(tables.KEPT, group, KeptGroup)

    def put_kept(self, group: bytes, kept: KeptGroup) -> None:
        self._put(tables.KEPT, tables.group_row(group), kept, adds=True)

    def drop_kept(self, group: bytes) -> None:
        self._delete(tables.KEPT, tables.group_row(group))
        for key, _ in self.kept_page(group, _MOST_ROWS):
            self._delete(tables.GIVEN, key)

    def all_kept(self, after: bytes | None = None, limit: int = _MOST_ROWS) -> list[tuple[bytes, KeptGroup]]:
        return self._groups(tables.KEPT, KeptGroup, limit, after)

    def keep(self, rows: Mapping[bytes, Entry | None]) -> None:
        self._put_all(tables.GIVEN, {key: _DAMAGED if entry is None else encode(entry) for key, entry in rows.items()})

    def kept_page(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
        rows: list[tuple[bytes, bytes]] = []
        if group and (stored := self._transaction.row(tables.GIVEN, group)) is not None:
            rows.append((group, stored))
        rows += self._transaction.rows_with(tables.GIVEN, group + b"/", limit)
        return [(key, _kept_entry(key, stored)) for key, stored in rows[:limit]]

    def kept_of(self, keys: Sequence[bytes]) -> dict[bytes, Entry | None]:
        rows = self._transaction.rows_of(tables.GIVEN, keys)
        return {key: _kept_entry(key, stored) for key, stored in rows.items()}

    def take_kept(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
        rows: list[tuple[bytes, bytes]] = []
        if group and (stored := self._transaction.row(tables.GIVEN, group)) is not None:
            rows.append((group, stored))
            self._delete(tables.GIVEN, group)
        rows += self._transaction.take_rows(tables.GIVEN, group + b"/", limit - len(rows))
        self._effects.is_change = True
        return [(key, _kept_entry(key, stored)) for key, stored in rows]

    def _read_group(self, table: str, group: bytes, kind: type[Row]) -> Row | None:
        said = tables.read_body(self._transaction, table, tables.group_row(group))
        return None if said is None else decode(kind, said)

    def _groups(
        self, table: str, kind: type[Row], limit: int = _MOST_ROWS, after: bytes | None = None
    ) -> list[tuple[bytes, Row]]:
        start = b"" if after is None else tables.group_row(after)
        found = self._readable(table, lambda key, stored: decode(kind, tables.body_of(key, stored)), limit, start)
        return [(key[1:], row) for key, row in found]

    # --- the directory ------------------------------------------------------------------------------------------------
    # A second table has the rows by the numbers of grants: in this order deputies are told of them.

    @property
    def granted(self) -> int:
        """The last number of a grant that was given here. A repair may have lost it, and not the rows."""
        said = tables.read_body(self._transaction, tables.CLUSTER, tables.GRANTED)
        if said is not None:
            return int.from_bytes(said, "big")
        rows = self._transaction.rows_with(tables.GRANTS, b"", _MOST_ROWS)
        return max((int.from_bytes(key[: tables.NUMBER_SIZE], "big") for key, _ in rows), default=0)

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

    @property
    def early_promise(self) -> tuple[bytes, int]:
        """A cluster, and the term that was promised to it before this root was a member."""
        said = tables.read_body(self._transaction, tables.CLUSTER, tables.PROMISED) or bytes(tables.NUMBER_SIZE)
        return said[tables.NUMBER_SIZE :], int.from_bytes(said[: tables.NUMBER_SIZE], "big")

    @early_promise.setter
    def early_promise(self, promise: tuple[bytes, int]) -> None:
        self._put(tables.CLUSTER, tables.PROMISED, tables.pack_number(promise[1]) + promise[0])

    def ownership(self, group: bytes) -> Ownership | None:
        return self._read_group(tables.DIRECTORY, group, Ownership)

    def ownerships_of(self, groups: Sequence[bytes]) -> dict[bytes, Ownership]:
        rows = self._transaction.rows_of(tables.DIRECTORY, [tables.group_row(group) for group in groups])
        return {key[1:]: decode(Ownership, tables.body_of(key, stored)) for key, stored in rows.items()}

    def put_ownerships(self, rows: Sequence[Ownership]) -> None:
        row_of = {tables.group_row(row.group): row for row in rows}
        for key in self._transaction.rows_of(tables.DIRECTORY, list(row_of)):
            self._drop_number(key[1:])
        self._put_all(tables.DIRECTORY, {key: encode(row) for key, row in row_of.items()})
        self._put_all(tables.GRANTS, {_number_row(row): b"" for row in row_of.values()})

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
        while len(rows) < limit and (found := self._transaction.rows_with(tables.GRANTS, b"", limit, last)):
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

    # --- sessions, and the last call of each of their lanes -----------------------------------------------------------

    def new_session(self) -> int:
        """Returns a number that no other session, segment or put has."""
        session = self.new_number()
        self._put(tables.SESSIONS, tables.pack_number(session), b"")
        return session

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
        self._put(tables.CALLS, _lane(session, lane), call)

    # --- segments of this host ----------------------------------------------------------------------------------------

    def own(self, place: Place, key: bytes) -> None:
        """Notes that a record here names it. Raises CorruptionError if it is another key's."""
        if not place.segment:
            return
        row = self._segment(place)
        if row is not None and row.key != key and row.state != FILLING:  # a claimed file has its old key until then
            raise _gone(key, place)
        version = self._versions.get(key)
        if version is None:
            record = self._transaction.record(key)
            version = _LENT_VERSION if record is None else record.version
        self._make_live(place, key, version)
        self._end_lending(place)

    def lend(self, place: Place, lent: Lent) -> None:
        """Notes that a record elsewhere names it, or will."""
        if place.segment:
            self._make_live(place, lent.key, _LENT_VERSION)
            row = tables.KeptRow(((place.segment, place.put_id),), encode_lent(lent))
            tables.put_kept(self._transaction, tables.LENT, tables.pack_number(place.put_id), row)
            self._effects.is_change = True

    def is_there(self, place: Place) -> bool:
        """Returns whether it is filled, and not retired. External files have no segment, and are there."""
        return not place.segment or self._segment(place) is not None

    def retire(self, place: Place) -> None:
        row = self._segment(place)
        if row is not None:
            self._end_lending(place)
            self._effects.retire(place.segment, row)

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

        return [row for _, row in self._readable(tables.LENT, read, limit, tables.pack_number(after))]

    def _said(self, place: Place, row: tables.KeptRow) -> Lent:
        if row.said:
            return lent_of(row.said)
        found = self._transaction.segment(place.segment)  # a repair has made the row, which says no more than the key
        return Lent(b"" if found is None else found.key, b"")

    def _end_lending(self, place: Place) -> None:
        if self.lent(place) is not None:
            self._delete(tables.LENT, tables.pack_number(place.put_id))

    def _make_live(self, place: Place, key: bytes, version: int) -> None:
        """Makes it live under that version, if it isn't live yet."""
        row = self._segment(place)
        if row is None:
            raise _gone(key, place)
        if row.state == FILLING:
            self._effects.publish(key, self._sealed[place.segment, place.put_id], version)
        elif row.state == PREPARED:
            self._effects.publish_prepared(key, place.segment, row, version)

    def _segment(self, place: Place) -> SegmentRow | None:
        """Returns its row, if it is live or a part's, or was filled by this process."""
        if place.host != self._member or not place.segment:
            return None
        row = self._transaction.segment(place.segment)
        if row is None or row.put_id != place.put_id:
            return None
        is_sealed = row.state == FILLING and (place.segment, place.put_id) in self._sealed
        return row if row.state in (LIVE, PREPARED) or is_sealed else None

    # --- copies of values of other hosts ------------------------------------------------------------------------------

    def copy(self, key: bytes) -> Copy | None:
        """Returns a copy. None, too, if its row is damaged: the value is fetched again."""
        row = self._row_of_copy(key)
        return None if row is None else decode(Copy, row.said)

    def _row_of_copy(self, key: bytes) -> tables.KeptRow | None:
        try:
            return tables.kept_row(self._transaction, tables.COPIES, key)
        except CorruptionError as error:
            self.pass_over(key, error)
            return None

    def put_copy(self, key: bytes, places: Sequence[Place], record: Record) -> None:
        """Writes a copy, in place of an older one. Segments of `sealed` that it names become live.

        Args:
            places: that its bytes came from.
            record: of its version, in segments of this host.
        """
        self.delete_copy(key)
        for extent in record.segments:
            self._make_live(Place(self._member, extent.put_id, extent.segment), key, _LENT_VERSION)
        segments = tuple((extent.segment, extent.put_id) for extent in record.segments)
        row = tables.KeptRow(segments, encode(Copy(tuple(places), record)))
        tables.put_kept(self._transaction, tables.COPIES, key, row)
        self._effects.is_change = self._effects.adds = True

    def delete_copy(self, key: bytes) -> None:
        row = self._row_of_copy(key)
        self._delete(tables.COPIES, key)
        for segment, put_id in () if row is None else row.segments:
            self.retire(Place(self._member, put_id, segment))

    def copies(self, after: bytes, limit: int) -> list[tuple[bytes, Copy]]:
        """Returns copies by key, beyond that one."""

        def read(key: bytes, stored: bytes) -> Copy:
            return decode(Copy, tables.read_kept(tables.COPIES, key, stored).said)

        return self._readable(tables.COPIES, read, limit, after)

    # --- what hosts keep of what others own ---------------------------------------------------------------------------

    def backup(self, key: bytes) -> Backup | None:
        """Returns what this host keeps of a key. None, too, if its row is damaged."""
        try:
            said = tables.read_body(self._transaction, tables.BACKUPS, key)
            return None if said is None else decode(Backup, said)
        except CorruptionError as error:
            self.pass_over(key, error)
            return None

    def put_backup(self, key: bytes, backup: Backup) -> None:
        check_encoded(key)
        self._put(tables.BACKUPS, key, backup, adds=True)

    def drop_backup(self, key: bytes) -> None:
        if self._transaction.row(tables.BACKUPS, key) is not None:
            self._delete(tables.BACKUPS, key)

    def backups_of(self, group: bytes, after: bytes, limit: int) -> list[tuple[bytes, Backup]]:
        found: list[tuple[bytes, Backup]] = []
        if group and after < group and (backup := self.backup(group)) is not None:
            found.append((group, backup))
        start = group + b"/"
        return found + self._readable(tables.BACKUPS, _backup_of, limit, max(after, start), prefix=start)

    def all_backups(self, after: bytes, limit: int) -> list[tuple[bytes, Backup]]:
        return self._readable(tables.BACKUPS, _backup_of, limit, after)

    def void(self, key: bytes) -> tuple[int, int]:
        """Returns a version up to which nothing of a key is to be kept, and since when; zeros: there is none."""
        try:
            said = tables.read_body(self._transaction, tables.VOIDS, key)
        except CorruptionError as error:
            self.pass_over(key, error)
            said = None
        return (0, 0) if said is None else _void_of(said)

    def put_void(self, key: bytes, version: int) -> None:
        check_encoded(key)
        self._put(tables.VOIDS, key, tables.pack_number(version) + tables.pack_number(self.now()))

    def has_voids(self, until: int) -> bool:
        return bool(self._old_voids(until, 1))

    def drop_voids(self, until: int, limit: int) -> None:
        for key in self._old_voids(until, limit):
            self._delete(tables.VOIDS, key)

    def _old_voids(self, until: int, limit: int) -> list[bytes]:
        """Returns keys of marks from before a time, or of another boot, whose processes are gone."""
        found: list[bytes] = []
        after, now = b"", self.now()
        while len(found) < limit and (rows := self._transaction.rows_with(tables.VOIDS, b"", _A_PAGE, after)):
            after = rows[-1][0]
            for key, stored in rows:
                try:
                    _, since = _void_of(tables.body_of(key, stored))
                except CorruptionError:
                    since = 0
                if since < until or since > now:
                    found.append(key)
        return found[:limit]

    def keepers(self, key: bytes) -> tuple[tuple[bytes, int], ...]:
        """Returns hosts that may keep a version of a key. None of them, if the row is damaged."""
        try:
            said = tables.read_body(self._transaction, tables.KEEPERS, key)
            return () if said is None else keepers_of(said)
        except CorruptionError as error:
            self.pass_over(key, error)
            return ()

    def put_keepers(self, key: bytes, keepers: Sequence[tuple[bytes, int]]) -> None:
        if keepers:
            self._put(tables.KEEPERS, key, encode(tuple(keepers)), adds=True)
        elif self._transaction.row(tables.KEEPERS, key) is not None:
            self._delete(tables.KEEPERS, key)

    def keepers_of(self, keys: Sequence[bytes]) -> dict[bytes, tuple[tuple[bytes, int], ...]]:
        found: dict[bytes, tuple[tuple[bytes, int], ...]] = {}
        for key, stored in self._transaction.rows_of(tables.KEEPERS, keys).items():
            try:
                found[key] = keepers_of(tables.body_of(key, stored))
            except CorruptionError as error:
                self.pass_over(key, error)
        return found

    def put_keepers_of(self, rows: Mapping[bytes, Sequence[tuple[bytes, int]]]) -> None:
        self._put_all(tables.KEEPERS, {key: encode(tuple(keepers)) for key, keepers in rows.items()})

    def all_keepers(self, after: bytes, limit: int) -> list[tuple[bytes, tuple[tuple[bytes, int], ...]]]:
        return self._readable(tables.KEEPERS, lambda key, stored: keepers_of(tables.body_of(key, stored)), limit, after)

    def is_unnoted(self, key: bytes) -> bool:
        return self._transaction.row(tables.UNNOTED, key) is not None

    def put_unnoted(self, key: bytes, unnoted: bool) -> None:
        if unnoted != self.is_unnoted(key):
            if unnoted:
                self._put(tables.UNNOTED, key, b"")
            else:
                self._delete(tables.UNNOTED, key)

    def all_unnoted(self, after: bytes, limit: int) -> list[bytes]:
        return [key for key, _ in self._transaction.rows_with(tables.UNNOTED, b"", limit, after)]

    def lacking(self, key: bytes) -> bool | None:
        """Returns whether notes wait for a replica of a key; None: it lacks none. A damaged row holds up nothing."""
        try:
            said = tables.read_body(self._transaction, tables.LACKING, key)
        except CorruptionError as error:
            self.pass_over(key, error)
            return False
        return None if said is None else said[:1] == _HOLDS

    def put_lacking(self, key: bytes, holds: bool | None, batch: int = 0) -> None:
        if holds is not None:
            body = _HOLDS if holds else _GOES_ON
            self._put(tables.LACKING, key, body + tables.pack_number(batch) if batch else body, adds=True)
        elif self._transaction.row(tables.LACKING, key) is not None:
            self._delete(tables.LACKING, key)

    def batch_of(self, key: bytes) -> int:
        try:
            said = tables.read_body(self._transaction, tables.LACKING, key)
        except CorruptionError as error:
            self.pass_over(key, error)
            return 0
        return int.from_bytes((said or b"")[1:], "big")

    def batch(self, number: int) -> tuple[bytes, ...]:
        """Returns the keys that one call has put. None, too, of a damaged row: they get their replicas one by one."""
        packed = tables.pack_number(number)
        try:
            said = tables.read_body(self._transaction, tables.BATCHES, packed)
            return () if said is None else batch_of(said)
        except CorruptionError as error:
            self.pass_over(b"batch %d" % number, error)
            return ()

    def put_batch(self, number: int, keys: Sequence[bytes]) -> None:
        packed = tables.pack_number(number)
        if keys:
            self._put(tables.BATCHES, packed, encode(tuple(keys)), adds=True)
        elif self._transaction.row(tables.BATCHES, packed) is not None:
            self._delete(tables.BATCHES, packed)

    def all_batches(self, after: int, limit: int) -> list[int]:
        rows = self._transaction.rows_with(tables.BATCHES, b"", limit, tables.pack_number(after))
        return [int.from_bytes(number, "big") for number, _ in rows]

    def all_lacking(self, after: bytes, limit: int) -> list[bytes]:
        return [key for key, _ in self._transaction.rows_with(tables.LACKING, b"", limit, after)]

    def have_more(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        noted = (tables.BACKUPS, tables.LACKING, tables.REPLICAS)
        return frozenset(key for table in noted for key in self._transaction.rows_of(table, keys))

    def replica(self, key: bytes) -> tuple[bytes, int] | None:
        """Returns a host that has said that it has a replica, and of which version. None, too, of a damaged row."""
        try:
            said = tables.read_body(self._transaction, tables.REPLICAS, key)
        except CorruptionError as error:
            self.pass_over(key, error)
            said = None
        return None if said is None else (said[tables.NUMBER_SIZE :], int.from_bytes(said[: tables.NUMBER_SIZE], "big"))

    def put_replica(self, key: bytes, replica: tuple[bytes, int] | None) -> None:
        if replica is not None:
            self._put(tables.REPLICAS, key, tables.pack_number(replica[1]) + replica[0], adds=True)
        elif self._transaction.row(tables.REPLICAS, key) is not None:
            self._delete(tables.REPLICAS, key)

    def count_lacking(self) -> int:
        return self._transaction.count(tables.LACKING)

    def note_lost(self, name: bytes, who: str) -> None:
        check_encoded(name)
        self._put(tables.LOST, name, who.encode(errors="replace"))

    def count_lost(self) -> int:
        return self._transaction.count(tables.LOST)

    def all_lost(self, limit: int) -> list[tuple[bytes, str]]:
        return self._readable(
            tables.LOST, lambda key, stored: tables.body_of(key, stored).decode(errors="replace"), limit
        )

    def drop_lost(self, name: bytes, who: str) -> None:
        try:
            said = tables.read_body(self._transaction, tables.LOST, name)
        except CorruptionError:
            said = None
        if said is not None and (not who or said.decode(errors="replace") == who):
            self._delete(tables.LOST, name)

    # --- keys that aren't there any more ------------------------------------------------------------------------------

    def remembers(self) -> bool:
        return self._transaction.row(tables.REMEMBERED, tables.REMEMBERS) is not None

    def put_remembers(self, remembers: bool) -> None:
        if remembers:
            self._put(tables.REMEMBERED, tables.REMEMBERS, b"")
        elif self._transaction.row(tables.REMEMBERED, tables.REMEMBERS) is not None:
            self._delete(tables.REMEMBERED, tables.REMEMBERS)

    def remembered(self, key: bytes) -> Remembered | None:
        try:
            said = tables.read_body(self._transaction, tables.REMEMBERED, key)
            return None if said is None else decode(Remembered, said)
        except CorruptionError as error:
            self.pass_over(key, error)
            return Remembered()

    def put_remembered(self, key: bytes, row: Remembered) -> None:
        check_encoded(key)
        self._put(tables.REMEMBERED, key, row)  # also where there is no room: it is written for a deletion

    def forget(self, key: bytes) -> None:
        if self._transaction.row(tables.REMEMBERED, key) is not None:
            self._delete(tables.REMEMBERED, key)

    def all_remembered(self, limit: int) -> list[bytes]:
        rows = self._transaction.rows_with(tables.REMEMBERED, b"", limit + 1)
        return [key for key, _ in rows if key != tables.REMEMBERS][:limit]

    def count_remembered(self) -> int:
        return self._transaction.count(tables.REMEMBERED)

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

    # --- sharded puts -------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return boot_clock()

    def new_number(self) -> int:
        self._effects.counters.number += 1
        self._effects.is_change = True
        return self._effects.counters.number

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[PendingPart]:
        if key is None:
            found = [part for _, part in self._readable(tables.PENDING, tables.read_part)]
        else:
            found = tables.parts_of(self._transaction, key, attempt)
        boot = boot_id()  # a part of another boot is over
        return [
            msgspec.structs.replace(
                part, expires=part.expires if part.boot == boot else 0, host=part.host or self._member
            )
            for part in found
        ]

    def content(self, part: PendingPart) -> bytes:
        return tables.content_of(self._transaction, part)

    def put_part(self, part: PendingPart, content: bytes | None) -> None:
        """A segment of this host is kept by it from now on. Raises InvalidKeyError of what another host has sent."""
        check_encoded(part.key)
        is_here = part.host == self._member
        row = msgspec.structs.replace(part, boot=boot_id(), host=b"" if is_here else part.host)
        if content is None:
            tables.renew_part(self._transaction, row)
        else:
            tables.put_part(self._transaction, row, content)
            self._effects.adds = True
            if is_here and part.segment:
                self._prepare(part.place, part.key)
        self._note(part.key)

    def _prepare(self, place: Place, key: bytes) -> None:
        """Notes that a part names the segment."""
        row = self._segment(place)
        if row is None:
            raise _gone(key, place)
        if row.state == PREPARED:
            return
        sealed = self._sealed.get((place.segment, place.put_id))
        if row.state == FILLING and sealed is not None and isinstance(sealed.file, ClaimedFile):
            sealed.file.unlock()  # before the commit: who reads the segment, once it is live, must not find it locked
        self._end_lending(place)
        self._effects.prepare(key, place.segment, row)

    def delete_part(self, part: PendingPart) -> None:
        tables.delete_part(self._transaction, part)
        self._effects.is_change = True

    def has_bytes(self, part: PendingPart) -> bool:
        return part.host != self._member or self.is_there(part.place)

    def drop_bytes(self, part: PendingPart) -> None:
        with passing_over(self, part.key):
            dispose(self, self.standing(), part.places)

    def outcome(self, key: bytes, attempt: str) -> AttemptOutcome | None:
        return tables.outcome_of(self._transaction, key, attempt)

    def outcomes(self) -> list[AttemptOutcome]:
        return [outcome for _, outcome in self._readable(tables.OUTCOMES, tables.read_outcome)]

    def put_outcome(self, outcome: AttemptOutcome) -> None:
        """Raises InvalidKeyError of what another host has sent."""
        check_encoded(outcome.key)
        tables.put_outcome(self._transaction, msgspec.structs.replace(outcome, boot=boot_id()))
        self._note(outcome.key)

    def drop_outcomes(self, limit: int) -> None:
        tables.drop_outcomes(self._transaction, Now(boot_clock(), boot_id()), limit)

    def tell(self, key: bytes) -> None:
        self._note(key)

    def tell_all(self) -> None:
        self._effects.wakes_all = self._effects.is_change = True

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _readable(
        self,
        table: str,
        read: Callable[[bytes, bytes], Row],
        limit: int = _MOST_ROWS,
        after: bytes = b"",
        prefix: bytes = b"",
    ) -> list[tuple[bytes, Row]]:
        """Returns rows of a table, in order, beyond `after`. Those that `read` calls damaged are passed over."""
        found: list[tuple[bytes, Row]] = []
        while len(found) < limit and (rows := self._transaction.rows_with(table, prefix, limit, after)):
            after = rows[-1][0]
            for key, stored in rows:
                try:
                    found.append((key, read(key, stored)))
                except CorruptionError as error:
                    self.pass_over(key, error)
        return found[:limit]

    def _put(self, table: str, key: bytes, row: bytes | msgspec.Struct, *, adds: bool = False) -> None:
        tables.put_body(self._transaction, table, key, row if isinstance(row, bytes) else encode(row))
        self._effects.is_change = True
        self._effects.adds |= adds

    def _put_all(self, table: str, rows: Mapping[bytes, bytes]) -> None:
        tables.put_bodies(self._transaction, table, rows)
        self._effects.is_change = self._effects.adds = True

    def _delete(self, table: str, key: bytes) -> None:
        self._transaction.delete_row(table, key)
        self._effects.is_change = True


def _backup_of(key: bytes, stored: bytes) -> Backup:
    return decode(Backup, tables.body_of(key, stored))


def _void_of(said: bytes) -> tuple[int, int]:
    return int.from_bytes(said[: tables.NUMBER_SIZE], "big"), int.from_bytes(said[tables.NUMBER_SIZE :], "big")


def _number_row(row: Ownership) -> bytes:
    return tables.pack_number(row.grant.number) + tables.group_row(row.group)


def _kept_entry(key: bytes, stored: bytes) -> Entry | None:
    """Reads a row of `given`. None: the record is damaged, here or where it came from."""
    try:
        said = tables.body_of(key, stored)
        return None if said == _DAMAGED else decode(Entry, said)
    except CorruptionError:
        return None


def _lane(session: int, lane: int) -> bytes:
    return tables.pack_number(session) + lane.to_bytes(_LANE, "big")


def _gone(key: bytes, place: Place) -> CorruptionError:
    name = key.decode(errors="backslashreplace")
    text = f"{name!r}: segment {place.segment:016x} doesn't have put {place.put_id} of this key, or not any more"
    return CorruptionError(text, key=name)


# --- transactions -----------------------------------------------------------------------------------------------------


class MustChange(Exception):
    """Raised by `look` where its action has to change something. It is never seen by users."""


def run(
    root: Root,
    action: Callable[[CatalogTables], Result],
    deadline: float,
    *,
    sealed: Sequence[SealedSegment] = (),
    checked: Checked | None = None,
    most: int | None = None,
) -> Result:
    """Calls `action` in one transaction: what it changes is there wholly or not at all, also after a kill.

    It may be called more than once, and only the last call counts. A store that was never served gets its tables.

    Args:
        deadline: monotonic, for the store's mutex.
        sealed: segments of one put that this process has filled, and still has open. Those that `lend`, `own` or
            `put_copy` names are published, and the others stay as they are.
        checked: records of entries that `action` may write, looked at before the store's mutex is taken.
        most: bytes to which the catalog may grow for the sake of large values; None: as many as it has to.

    Raises:
        CatalogCrowded: of `most`.
        StoreTimeoutError, StoreFullError.
        NotAStoreError: the store was removed or moved.
        CorruptionError: a row is damaged, or an entry can't be one. Nothing has changed.
    """
    need_cluster(root, deadline)
    member, is_shared = root.member_id(), root.storage.sees_all_hosts

    def act(transaction: Transaction, effects: Effects) -> Result:
        made = CatalogTables(transaction, member, effects, sealed, checked, is_shared=is_shared, root=root)
        result = action(made)
        made.charge()
        return result

    return change_served(
        root,
        act,
        deadline,
        most=most,
    )


def look(root: Root, action: Callable[[CatalogTables], Result], deadline: float) -> Result:
    """Calls `action` with one moment of the catalog, and without the mutex. It changes nothing.

    Args:
        deadline: monotonic; of the mutex, which is taken once a process if the store was served after it was opened.
            Who may not write the store needs none for that either.

    Raises:
        MustChange: the action has tried to write.
        CorruptionError: a row is damaged.
    """
    member, is_shared = root.member_id(), root.storage.sees_all_hosts

    def see(transaction: Transaction) -> Result:
        return action(CatalogTables(transaction, member, Effects(transaction), is_shared=is_shared))

    if not root.catalog.is_served and root.catalog.view(Transaction.counters).membership:
        if root.lock is None:  # its LMDB reads only: it opens tables as it has opened all, in a read transaction
            root.catalog.open_served()
        else:
            root.mutex.run(root.catalog.open_served, deadline)
    try:
        return root.catalog.view(see)
    except ReadOnlyTransaction:
        raise MustChange from None


def look_or_run(root: Root, action: Callable[[CatalogTables], Result], deadline: float) -> Result:
    """Calls `action` as `look` does; and once more in a transaction that changes, if it has to change something.

    Few reads have to: the first one by a new grant serves the records that were handed over.
    """
    try:
        return look(root, action, deadline)
    except MustChange:
        return run(root, action, deadline)
