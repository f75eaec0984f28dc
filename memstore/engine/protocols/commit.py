"""Commits: how all changes of a batch are published at one moment. These are steps 4 and 5 of a put, see `put.py`.

4. In one hold of the store's mutex (`_commit_locked`):
   - of a store that is served to other hosts: give up if who the members are has changed since this process read it;
   - check that the keys are at the versions that were expected, and assign the new versions;
   - note the batch in the lock page;
   - write into the segments' headers that they are live, and unlock their files;
   - **commit the transaction: this is the moment of publication**; clear the note;
   - lock the file that was booked for the next put and erase its put id, or give it back if it is held (`reuse.py`);
   - write into the headers of all else that was replaced that it is retired; of a mutable entry that was deleted,
     into its control page that it is gone;
   - change the doorbell's words and the count of publications that have rung it.
   A kill before the commit leaves headers that say live: by the note, the mutex's next owner puts them back. A kill
   after it leaves old headers live, a booked file that is not locked, and the doorbell unrung: the next owner sees it
   by that count (`recovery.py`).
5. After the mutex (`commit`): wake the waiters; **look whether the path still names this store**, since what was put
   into one that was removed or moved must not be acknowledged; sweep, in another hold, if there is something to do
   (`sweep.py`).

What was replaced or deleted is *retired* in the same transaction, unless it is booked for the next put. A booking
assigns the id of that put, so put ids are not in the order of versions.

`commit_inline` publishes one inline value over whatever version its key has: the same, cut short. The new value has no
file, so nothing is claimed or filled, and no batch is noted in the lock page. Of step 4 there remain: write the record
over the one that is there, and commit; if that one had a segment, retire it in the same transaction, and mark its
header afterwards; change the doorbell's word and the count of publications that have rung it. Step 5 is the same.

`change_served` makes a change of a served store's catalog that is no put or delete of this host. The index process
answers other hosts so, and a process that lends what it has put. What the change is, its action says, which is called
in the transaction: it reads, writes rows, and notes in `Effects` which segments become live or are retired, and which
keys change. Then a file is claimed for the next put, if there is one, and steps 4 and 5 are those above. Segments that
become live say under which version: 0 for what is lent to another home, or is a copy.

- An action that raises has changed nothing, whoever made it raise: no recovery is due. Unless it was called again after
  headers were written: what that has written a recovery takes back.
- Each change counts as a publication, so a kill after the commit is made up for by the mutex's next owner, and a
  catalog that was rolled back behind it is found out. A kill before it leaves headers that say live, which `filling`
  and the note undo.
- An action is called again if the catalog has to grow, or can't: it changes nothing but through the transaction. Of the
  tenth that is kept for deletes all may take but what adds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from memstore.engine.catalog import MOST_FOR_VALUES, Counters, Transaction, tables
from memstore.engine.files import PreparedFile, SealedSegment, segment_path
from memstore.engine.format import FILLING, LIVE, PREPARED, RETIRED, HeaderSlots, Record, SegmentRow
from memstore.engine.protocols.change import SMALL, Change, MembershipChanged, check_versions, mutable_entry, record_of
from memstore.engine.protocols.recovery import mark_gone, mark_retired, say_gone
from memstore.engine.protocols.reuse import Booking, NextFile, booking_for, keep_for_grace, retire, unclaim
from memstore.engine.protocols.sweep import needs_sweep, sweep_some
from memstore.engine.root import Root
from memstore.engine.sync import Refusal, deadline_after
from memstore.errors import MemstoreError, StoreFullError

log = logging.getLogger("memstore")

SWEPT_A_PUT = 4  # files that a sweep after a commit looks at; more if the commit has retired more
SWEEP_WAIT = 0.1  # seconds that this sweep waits for the mutex: the put is done, and others sweep too
_RECENT = 64  # a large batch no longer counts as recent after about so many smaller ones


class Publication:
    """What is to be done in the transaction of a commit beside its own work. It may be called again."""

    def check(self, transaction: Transaction) -> None:
        """Before anything is changed. It raises to stop the commit."""

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        """Once the records are written; `version` is that of the first change."""


def commit(
    root: Root,
    changes: Sequence[Change],
    deadline: float,
    publication: Publication | None = None,
    *,
    membership: int = 0,
) -> list[int]:
    """Publishes all changes at one moment. Returns the new versions; for deletes the old ones, or 0.

    `membership` is the counters' number under which the home of the keys was found to be here.

    Raises MembershipChanged, VersionConflictError, KeyNotFoundError or MutableEntryError before anything is changed;
    and NotAStoreError if the store was removed or moved: nothing is acknowledged then.
    """
    # 4. Commit
    bells = {root.doorbell.bell(change.key) for change in changes if change.content is not None}
    versions, retired, _, counters = root.mutex.run(
        lambda: _commit_locked(root, changes, bells, publication, membership), deadline
    )
    # 5. After the mutex
    for bell in bells:
        root.doorbell.wake(bell)
    root.check_in_place()
    sweep_after(root, counters, len(retired))
    return versions


def sweep_after(root: Root, counters: Counters, retired: int) -> None:
    """The last part of step 5. `retired` is how many files the commit has retired."""
    try:
        if needs_sweep(root, counters):
            sweep_some(root, max(SWEPT_A_PUT, retired), deadline_after(SWEEP_WAIT))
    except (OSError, MemstoreError) as error:  # the commit stands, and later ones sweep too
        log.debug("%s: nothing swept: %s", root.path, str(error))


_Applied = tuple[list[int], list[int], list[int], Counters]
"""New versions; retired segments; of deleted mutable entries the segments; the counters afterwards."""


def _commit_locked(
    root: Root,
    changes: Sequence[Change],
    bells: Collection[int],
    publication: Publication | None,
    membership: int,
) -> _Applied:
    root.glance()  # this may have waited long for the mutex: a store that was moved meanwhile stays as it was
    page = root.mutex
    with root.guard:
        booking = _booking(root, changes)

        def apply(transaction: Transaction) -> _Applied:
            return _apply(root, transaction, changes, booking, publication, membership)

        try:
            applied = root.catalog.update(apply, is_delete=not bells, most=_most(changes))
            page.batch = 0
            is_settled = booking is None or _settle(root, booking)
        finally:
            if booking is not None:
                booking.close()
    _, retired, gone, counters = applied
    if retired:
        mark_retired(root, retired)
    for segment in gone:
        say_gone(root, segment)
    for bell in bells:
        root.doorbell.change(bell)
    if is_settled:
        page.publications_rung = counters.publications
    else:
        page.owe_recovery()
    return applied


def _most(changes: Sequence[Change]) -> int | None:
    """The size that the catalog may grow to for the sake of these changes; None: as large as it has to be."""
    inline = [change.content.inline for change in changes if change.content and change.content.inline is not None]
    return MOST_FOR_VALUES if any(len(one) > SMALL for one in inline) else None


def _booking(root: Root, changes: Sequence[Change]) -> Booking | None:
    """Only a put of one segment may book the file that it replaces."""
    change = changes[0]
    if len(changes) > 1 or len(change.segments) != 1 or (change.content and change.content.parts is not None):
        return None
    return booking_for(root, change.segments[0].used)


def _settle(root: Root, booking: Booking) -> bool:
    try:
        booking.settle()
    except (OSError, MemstoreError) as error:  # the commit stands
        log.info("%s: the file that was booked for the next put is left to a recovery: %s", root.path, str(error))
        return False
    return True


def _apply(
    root: Root,
    transaction: Transaction,
    changes: Sequence[Change],
    booking: Booking | None,
    publication: Publication | None,
    membership: int,
) -> _Applied:
    """The transaction of a commit. It is called again if the catalog's map had to grow."""
    counters = transaction.counters()
    if counters.membership != membership:
        raise MembershipChanged
    if publication is not None:
        publication.check(transaction)
    found = [transaction.record(change.key) for change in changes]
    check_versions(changes, found)
    versions = _assign_versions(changes, found, counters)
    placed = [
        (segment, version) for change, version in zip(changes, versions, strict=True) for segment in change.segments
    ]
    if placed:
        go_live(root, placed[0][0].put_id, placed, counters)
    retired: list[int] = []
    gone: list[int] = []
    for change, old, version in zip(changes, found, versions, strict=True):
        if change.content is not None:
            _write_rows(transaction, counters, change, version)
        elif old is not None:
            transaction.delete_record(change.key)
            if old.is_mutable:
                gone += [extent.segment for extent in old.segments if old.hosts is None]
        replaced = _segments_of(root, transaction, old)
        for segment in replaced:  # one file can be booked, and no more
            if not replace_segment(transaction, counters, segment, booking if len(replaced) == 1 else None):
                retired.append(segment)
    if retired and root.shared is not None:
        keep_for_grace(root, transaction, retired)
    if publication is not None:
        publication.settle(transaction, counters, versions[0])
    counters.publications += 1
    transaction.put_counters(counters)
    return versions, retired, gone, counters


def _segments_of(root: Root, transaction: Transaction, record: Record | None) -> tuple[int, ...]:
    if record is None or record.segment:
        return () if record is None else (record.segment,)
    if record.hosts is not None:
        return owe_what_lies_elsewhere(root, transaction, record)
    return tuple(extent.segment for extent in record.segments)


def owe_what_lies_elsewhere(root: Root, transaction: Transaction, record: Record) -> tuple[int, ...]:
    """Of a record that is replaced: other hosts are to be told. Returns its segments on this one.

    They are compared by put id, as all that records say which may have come from elsewhere.
    """
    member = root.member_id()
    for host, extent in record.elsewhere(member):
        tables.put_owed(transaction, host, extent.put_id, extent.segment)
    rows = {extent: transaction.segment(extent.segment) for extent in record.here(member)}
    return tuple(
        extent.segment
        for extent, row in rows.items()
        if row is not None and (row.put_id, row.state) == (extent.put_id, LIVE)
    )


def _assign_versions(changes: Sequence[Change], found: Sequence[Record | None], counters: Counters) -> list[int]:
    """Of each put the new version of its key, of each deletion the old one, or 0.

    If some values of a batch have segments and others none, it skips one version number before its first, so that a
    repair, which sees the files only, can tell that they are not all of the batch.
    """
    with_files = sum([bool(change.segments) for change in changes])
    if 0 < with_files < len(changes):
        counters.version += 1
    versions: list[int] = []
    for change, old in zip(changes, found, strict=True):
        if change.content is None:
            versions.append(old.version if old else 0)
            continue
        version = counters.version + 1
        if change.version is not None:
            version = change.version
            assert old is None or version > old.version, f"version {version} is no newer than {old.version}"
        counters.version = max(counters.version, version)
        versions.append(version)
    return versions


def go_live(root: Root, batch: int, placed: Sequence[tuple[SealedSegment, int]], counters: Counters) -> None:
    """Notes the batch in the lock page, and makes each segment live under its version."""
    root.mutex.batch = batch
    nbytes = 0
    for segment, version in placed:
        nbytes += segment.size
        segment.file.go_live(
            HeaderSlots(segment.put_id, LIVE, version, batch, len(placed)), durable=root.settings.durable
        )
    counters.recent = max(nbytes, counters.recent - counters.recent // _RECENT)


def _write_rows(transaction: Transaction, counters: Counters, change: Change, version: int) -> None:
    assert change.content is not None
    for segment in change.segments:
        transaction.put_segment(segment.segment, SegmentRow(change.key, segment.put_id, LIVE, segment.size))
        transaction.delete_number("filling", segment.segment)
        counters.filling -= segment.size
        counters.live += segment.size
    if not change.segments:
        counters.number += 1
    transaction.put_record(change.key, record_of(change.content, change.segments, version, counters.number))


def replace_segment(transaction: Transaction, counters: Counters, segment: int, booking: Booking | None = None) -> bool:
    """Retires the segment of a record that was replaced or deleted; or books it for the next put, and returns True."""
    row = transaction.segment(segment)
    if row is not None:
        counters.live -= row.nbytes
        if booking is not None and booking.book(transaction, counters, segment, row):
            return True
        transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
        retire(transaction, counters, segment, row.nbytes)
    return False


# --- one inline value ------------------------------------------------------------------------------------------------


def commit_inline(root: Root, change: Change, deadline: float, *, membership: int = 0) -> int:
    """Publishes one inline value in half the time of `commit`. Returns the new version. Raises as it does."""
    key, content = change.key, change.content
    assert content is not None and content.inline is not None
    most = MOST_FOR_VALUES if len(content.inline) > SMALL else None
    bell, page = root.doorbell.bell(key), root.mutex

    def apply(transaction: Transaction) -> tuple[tuple[int, ...], Counters]:
        counters = transaction.counters()
        if counters.membership != membership:
            raise MembershipChanged
        counters.version += 1
        counters.number += 1
        counters.publications += 1
        record = record_of(content, (), counters.version, counters.number)
        replaced = transaction.replace_record(key, record)
        if replaced.mutable is not None:
            raise mutable_entry(key, replaced.mutable)
        segments = replaced.segments
        if replaced.record is not None:
            segments = owe_what_lies_elsewhere(root, transaction, replaced.record)
        for segment in segments:
            replace_segment(transaction, counters, segment)
        transaction.put_counters(counters)
        return segments, counters

    def publish() -> tuple[tuple[int, ...], Counters]:
        root.glance()  # this may have waited long for the mutex
        replaced, counters = root.catalog.update(apply, most=most)
        if replaced:
            mark_retired(root, replaced)
        root.doorbell.change(bell)
        page.publications_rung = counters.publications
        return replaced, counters

    replaced, counters = page.run(publish, deadline)
    root.doorbell.wake(bell)
    root.check_in_place()
    if replaced or counters.retired or counters.held or counters.filling:
        sweep_after(root, counters, len(replaced))
    return counters.version


# --- a change that other hosts ask for -------------------------------------------------------------------------------


Result = TypeVar("Result")


class _ActionFailed(Refusal):
    def __init__(self, error: MemstoreError) -> None:
        self.error = error


class Effects:
    """What a change is to do beside its rows, noted while its transaction runs.

    Attributes:
        counters: the store's, to be changed in place.
        is_change: whether a row was written. Without one, the transaction writes nothing.
        adds: what it writes stays until somebody deletes it. Where the catalog is full, nothing else is done.
        keys: that have changed: who waits for them is woken.
        wakes_all: whoever waits for anything is to look again.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.counters = transaction.counters()
        self.is_change = self.wakes_all = self.adds = False
        self.keys: set[bytes] = set()
        self.live: list[tuple[SealedSegment, int]] = []
        self.prepared: list[tuple[int, SegmentRow, int]] = []
        self.retired: list[int] = []
        self.batch = 0

    def publish(self, key: bytes, segment: SealedSegment, version: int) -> None:
        """A segment that this process has filled becomes live."""
        transaction, counters = self._transaction, self.counters
        batch = transaction.number("filling", segment.segment)
        assert batch and self.batch in (0, batch), "segments of one put become live together"
        self.batch, self.is_change, self.adds = batch, True, True
        transaction.put_segment(segment.segment, SegmentRow(key, segment.put_id, LIVE, segment.size))
        transaction.delete_number("filling", segment.segment)
        counters.filling -= segment.size
        counters.live += segment.size
        self.live.append((segment, version))

    def prepare(self, key: bytes, segment: int, row: SegmentRow) -> None:
        """A segment that was filled here, or was lent, is kept by a part of a sharded put."""
        self.is_change = True
        if row.state == LIVE:
            self.counters.live -= row.nbytes
            self.counters.filling += row.nbytes
        else:
            self._transaction.delete_number("filling", segment)
        self._transaction.put_segment(segment, SegmentRow(key, row.put_id, PREPARED, row.nbytes))

    def publish_prepared(self, key: bytes, segment: int, row: SegmentRow, version: int) -> None:
        """The segment of a part becomes live."""
        self.batch, self.is_change = self.batch or row.put_id, True
        self._transaction.put_segment(segment, SegmentRow(key, row.put_id, LIVE, row.nbytes))
        self.counters.filling -= row.nbytes
        self.counters.live += row.nbytes
        self.prepared.append((segment, row, version))

    def retire(self, segment: int, row: SegmentRow) -> None:
        """Nothing names a live segment any more, or what was filled is not to be published."""
        self.is_change = True
        if row.state == PREPARED:
            self.counters.filling -= row.nbytes
            self._transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
            retire(self._transaction, self.counters, segment, row.nbytes)
        elif row.state == LIVE:
            self.counters.live -= row.nbytes
            self._transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
            retire(self._transaction, self.counters, segment, row.nbytes)
        elif row.state == FILLING:
            unclaim(self._transaction, self.counters, segment, row)
        self.retired.append(segment)


def change_served(root: Root, action: Callable[[Transaction, Effects], Result], deadline: float) -> Result:
    """Calls `action` in one transaction under the store's mutex.

    Raises what the action raises, and then nothing has changed; StoreTimeoutError; NotAStoreError if the store was
    removed or moved: nothing is acknowledged then.
    """
    bells: list[int] = []
    try:
        result, effects = root.mutex.run(lambda: _change_locked(root, action, bells), deadline)
    except _ActionFailed as failed:
        raise failed.error from None
    for bell in bells:
        root.doorbell.wake(bell)
    if effects.is_change:
        root.check_in_place()
        sweep_after(root, effects.counters, len(effects.retired))
    return result


def _change_locked(
    root: Root, action: Callable[[Transaction, Effects], Result], bells: list[int]
) -> tuple[Result, Effects]:
    root.glance()
    next_file = NextFile(root)
    is_acting = has_gone_live = False

    def apply(transaction: Transaction, full: StoreFullError | None = None) -> tuple[Result, Effects]:
        nonlocal is_acting, has_gone_live
        effects = Effects(transaction)
        is_acting = True
        result = action(transaction, effects)
        if full is not None and effects.adds:
            raise full
        is_acting = False
        live = [*effects.live, *[(_prepared(root, segment, row), at) for segment, row, at in effects.prepared]]
        if len(effects.live) == 1 and not effects.retired:  # what is retired just now may still be read here
            next_file.claim(transaction, effects.counters, effects.live[0][0].used)
        if live:
            has_gone_live = True
            go_live(root, effects.batch, live, effects.counters)
        if effects.retired:
            keep_for_grace(root, transaction, effects.retired)
        if effects.is_change:
            effects.counters.publications += 1
            transaction.put_counters(effects.counters)
        return result, effects

    with root.guard:
        try:
            try:
                result, effects = root.catalog.update(apply)
            except StoreFullError as error:  # there is room for what deletes, releases, or says that a call has failed
                full = error
                result, effects = root.catalog.update(lambda transaction: apply(transaction, full), is_delete=True)
            root.mutex.batch = 0
            next_file.keep()
        except MemstoreError as error:
            if is_acting and not has_gone_live:  # and its transaction was aborted
                raise _ActionFailed(error) from None
            raise
        finally:
            next_file.close()
    if effects.is_change:
        _tell(root, effects, bells)
    return result, effects


def _prepared(root: Root, segment: int, row: SegmentRow) -> SealedSegment:
    file = PreparedFile(segment_path(root.segments, segment), root.segments_fd)
    return SealedSegment(segment, row.put_id, row.nbytes, 0, row.nbytes, file)


def _tell(root: Root, effects: Effects, bells: list[int]) -> None:
    """Step 4."""
    mark_gone(root, effects.retired)
    if effects.wakes_all:
        root.doorbell.ring_all()
    bells += {root.doorbell.bell(key) for key in effects.keys}
    for bell in bells:
        root.doorbell.change(bell)
    root.mutex.publications_rung = effects.counters.publications
