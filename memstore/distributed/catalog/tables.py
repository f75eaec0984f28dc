"""The rules' tables in the catalog of this host. `CatalogTables` is one transaction: see `Tables` in rules/steps.py.

`run` makes one, under the store's mutex; `look` reads. Ranks of a store that nobody serves write the same rows of
sharded puts, by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from memstore import engine
from memstore._arguments import check_encoded
from memstore.distributed.catalog.entries import (
    Checked,
    entry_of,
    head_of,
    outcome_of,
    outcome_row,
    part_of,
    part_row,
    record_of,
)
from memstore.distributed.catalog.groups import GroupTables
from memstore.distributed.catalog.rows import encode, last_call_of, readable, standing_of, tell
from memstore.distributed.catalog.segments import LENT_VERSION, Copies, Segments
from memstore.distributed.rules import Entry, LastCall, Lent, Outcome, Part, Place, Standing
from memstore.engine import (
    Effects,
    Now,
    ReadOnlyTransaction,
    Root,
    SealedSegment,
    Transaction,
    boot_clock,
    boot_id,
    change_served,
    need_cluster,
    tables,
)
from memstore.errors import CorruptionError

Result = TypeVar("Result")
Row = TypeVar("Row")

_MOST_ROWS = 1 << 20
_LANES = 256
_LANE = 1  # byte


class CatalogTables(GroupTables, Copies):
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
        old = self.standing()
        self._put(tables.CLUSTER, tables.MEMBERS, encode(standing))
        self._standing = standing
        if old is None or standing.is_removed or old.is_joining != standing.is_joining:
            self._change_membership()

    def membership(self) -> int:
        return self._effects.counters.membership

    # --- sessions, and the last call of each of their lanes -----------------------------------------------------------

    def new_session(self) -> int:
        """Returns a number that no other session, segment or put has."""
        self._effects.counters.number += 1
        session = self._effects.counters.number
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
        rows = self._rows(tables.SESSIONS, limit, tables.pack_number(after))
        return [int.from_bytes(key, "big") for key, _ in rows]

    def last_call(self, session: int, lane: int) -> LastCall | None:
        said = tables.read_body(self._transaction, tables.CALLS, _lane(session, lane))
        return None if said is None else last_call_of(said)

    def put_last_call(self, session: int, lane: int, call: LastCall) -> None:
        self._put(tables.CALLS, _lane(session, lane), encode(call))

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

    # --- sharded puts -------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return boot_clock()

    def new_number(self) -> int:
        self._effects.counters.number += 1
        self._effects.is_change = True
        return self._effects.counters.number

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[Part]:
        if key is None:
            return [part_of(part, self._member) for part in self._whole(tables.PENDING, tables.read_part)]
        return [part_of(part, self._member) for part in tables.parts_of(self._transaction, key, attempt)]

    def _whole(self, table: str, read: Callable[[bytes, bytes], Row]) -> list[Row]:
        return [row for _, row in readable(self._transaction, self._member, table, read, _MOST_ROWS)]

    def content(self, part: Part) -> bytes:
        return tables.content_of(self._transaction, self._row(part))

    def put_part(self, part: Part, content: bytes | None) -> None:
        """A segment of this host is kept by it from now on. Raises InvalidKeyError of what another host has sent."""
        check_encoded(part.key)
        row = self._row(part)
        if content is None:
            tables.renew_part(self._transaction, row)
        else:
            tables.put_part(self._transaction, row, content)
            self._effects.adds = True
            for place in part.places:
                if place.host == self._member:
                    self._segments.prepare(place, part.key)
        self._ring(part.key)

    def delete_part(self, part: Part) -> None:
        tables.delete_part(self._transaction, self._row(part))
        self._effects.is_change = True

    def _row(self, part: Part) -> engine.PendingPart:
        return part_row(part, self._member)

    def outcome(self, key: bytes, attempt: str) -> Outcome | None:
        row = tables.outcome_of(self._transaction, key, attempt)
        return None if row is None else outcome_of(row)

    def outcomes(self) -> list[Outcome]:
        return [outcome_of(row) for row in self._whole(tables.OUTCOMES, tables.read_outcome)]

    def put_outcome(self, outcome: Outcome) -> None:
        """Raises InvalidKeyError of what another host has sent."""
        check_encoded(outcome.key)
        tables.put_outcome(self._transaction, outcome_row(outcome))
        self._ring(outcome.key)

    def drop_outcomes(self, limit: int) -> None:
        tables.drop_outcomes(self._transaction, Now(boot_clock(), boot_id()), limit)

    def _ring(self, key: bytes) -> None:
        self._effects.is_change = True
        self._effects.keys.add(key)


def _lane(session: int, lane: int) -> bytes:
    return tables.pack_number(session) + lane.to_bytes(_LANE, "big")


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
    member = root.member_id()
    return change_served(
        root,
        lambda transaction, effects: action(CatalogTables(transaction, member, effects, sealed, checked)),
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
    member = root.member_id()
    if not root.catalog.is_served and root.catalog.view(Transaction.counters).membership:
        if root.lock is None:  # its LMDB reads only: it opens tables as it has opened all, in a read transaction
            root.catalog.open_served()
        else:
            root.mutex.run(root.catalog.open_served, deadline)
    try:
        return root.catalog.view(lambda transaction: action(CatalogTables(transaction, member, Effects(transaction))))
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
