"""How entries change: the protocols of put, put_many and delete.

Put
1. *Prepare* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim* (`claim.py`): what the last commit of this process kept for it (`ahead.py`), without the mutex. Else, in one
   hold of the mutex: a retired file of nearly the size that nobody locks or leases: it is
   locked, **its put id is zeroed**, then its row is committed as filling under a new put id. Or a new file: its row is
   committed, then it is created and locked. A kill leaves a retired file without a put id, or a filling row with an
   unlocked file or none: claimed or swept by others.
3. *Fill* (the caller): allocate, which is where a full disk shows, and copy the tensors. `seal` writes the header, and
   what was assembled in memory, and syncs if the store is durable.
4. *Commit*, one hold of the mutex: check expected versions, assign versions; note the batch in the lock page; state
   live into the headers; unlock the files; **commit the transaction: the moment of publication**; clear the note;
   lock what it booked for the next put and zero its put id, or commit that it is retired (`ahead.py`); state retired
   into the headers of all else that was replaced; change the doorbell and the ring sequence. A kill before the
   commit leaves headers that say live: the note tells the next owner to put them back. A kill after it leaves
   old headers live, a file that is booked and not zeroed, and the bell unrung: the ring sequence tells.
5. After the mutex: wake the waiters; **look whether the path still names this store**, since what was put into one
   that was removed or moved must not be acknowledged; close the files. In another hold, if there is something to do:
   `sweep.py`.

Inline values skip 2 and 3. put_many claims and fills each key's segment, then commits all as one batch. Where some of
its values are inline, no file tells of these: the batch leaves out one version before its first, by which a repair sees
that the files are not all of it. A delete is step 4 without a new record. What was replaced or deleted is *retired* in
the same transaction, unless it is booked for the next put: put ids are given then, so they are not in the order of
versions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import SealedSegment
from memstore.engine.format import LIVE, RETIRED, Record, SegmentRow, Slots
from memstore.engine.protocols.ahead import Booking, booking_for
from memstore.engine.protocols.change import Change, check_versions, record_of
from memstore.engine.protocols.recovery import mark_retired
from memstore.engine.protocols.reuse import retire
from memstore.engine.protocols.sweep import needs_sweep, sweep_some
from memstore.engine.root import Root
from memstore.engine.sync import deadline_after
from memstore.errors import MemstoreError

log = logging.getLogger("memstore")

SWEPT_A_PUT = 4  # files at most
_RECENT = 64  # a large batch is forgotten after about so many smaller ones
SWEEP_WAIT = 0.1  # seconds for the mutex: the put is done, and others sweep too


def commit(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Steps 4 and 5: publishes all changes at one moment. Returns the new versions; for deletes the old ones, or 0.

    Raises NotAStoreError if the store was removed or moved: nothing is acknowledged then.
    """
    bells = {root.doorbell.bell(change.key) for change in changes if change.content is not None}
    versions, retired, counters = root.mutex.run(lambda: _commit_locked(root, changes, bells), deadline)
    for bell in bells:
        root.doorbell.wake(bell)
    root.check_in_place()
    sweep_after(root, counters, len(retired))
    return versions


def sweep_after(root: Root, counters: Counters, retired: int) -> None:
    """The last part of step 5."""
    try:
        if needs_sweep(root, counters):
            sweep_some(root, max(SWEPT_A_PUT, retired), deadline_after(SWEEP_WAIT))
    except (OSError, MemstoreError) as error:  # the commit stands; a later sweep will do
        log.debug("%s: nothing swept: %s", root.path, str(error))


_Applied = tuple[list[int], list[int], Counters]  # new versions; retired segments; the counters afterwards


def _commit_locked(root: Root, changes: Sequence[Change], bells: Collection[int]) -> _Applied:
    root.glance()  # it may have waited long for the mutex; a store that was moved meanwhile stays as it was
    page = root.mutex
    with root.guard:
        booking = _booking(root, changes)
        try:
            applied = root.catalog.update(
                lambda transaction: _apply(root, transaction, changes, booking), is_delete=not bells
            )
            page.batch = 0
            is_settled = booking is None or _settle(root, booking)
        finally:
            if booking is not None:
                booking.close()
    _, retired, counters = applied
    if retired:
        mark_retired(root, retired)
    for bell in bells:
        root.doorbell.change(bell)
    if is_settled:
        page.ring = counters.publications
    else:
        page.owe_recovery()
    return applied


def _booking(root: Root, changes: Sequence[Change]) -> Booking | None:
    segments = changes[0].segments if len(changes) == 1 else ()
    return booking_for(root, segments[0].used) if len(segments) == 1 else None


def _settle(root: Root, booking: Booking) -> bool:
    try:
        booking.settle()
    except (OSError, MemstoreError) as error:  # the commit stands
        log.info("%s: what was booked ahead is left to a recovery: %s", root.path, str(error))
        return False
    return True


def _apply(root: Root, transaction: Transaction, changes: Sequence[Change], booking: Booking | None) -> _Applied:
    """The transaction of a commit. It is called again if the catalog's map had to grow."""
    found = [transaction.record(change.key) for change in changes]
    check_versions(changes, found)
    counters = transaction.counters()
    versions = _assign_versions(changes, found, counters)
    placed = [
        (segment, version) for change, version in zip(changes, versions, strict=True) for segment in change.segments
    ]
    if placed:
        _go_live(root, placed, counters)
    retired: list[int] = []
    for change, old, version in zip(changes, found, versions, strict=True):
        if change.content is not None:
            _write_rows(transaction, counters, change, version)
        elif old is not None:
            transaction.delete_record(change.key)
        if old is not None and old.segment and not replace_segment(transaction, counters, old.segment, booking):
            retired.append(old.segment)
    counters.publications += 1
    transaction.put_counters(counters)
    return versions, retired, counters


def _assign_versions(changes: Sequence[Change], found: Sequence[Record | None], counters: Counters) -> list[int]:
    """The version that each change gives its key; for a deletion the one that it had, or 0.

    Where some of a batch's values have files and others none, one version number is skipped before the first, so that a
    repair can tell by the files alone that they are not all of the batch.
    """
    with_files = sum([bool(change.segments) for change in changes])
    if 0 < with_files < len(changes):
        counters.version += 1
    versions: list[int] = []
    for change, old in zip(changes, found, strict=True):
        if change.content is None:
            versions.append(old.version if old else 0)
            continue
        versions.append(counters.version + 1 if change.version is None else change.version)
        counters.version = max(counters.version, versions[-1])
    return versions


def _go_live(root: Root, placed: Sequence[tuple[SealedSegment, int]], counters: Counters) -> None:
    """Notes the batch, and writes into the header of each segment that it is live, and under which version."""
    batch = root.mutex.batch = placed[0][0].put_id
    nbytes = 0
    for segment, version in placed:
        nbytes += segment.size
        segment.file.go_live(Slots(segment.put_id, LIVE, version, batch, len(placed)), durable=root.settings.durable)
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
    """Retires what was replaced; or books it for the next put, and returns True."""
    row = transaction.segment(segment)
    if row is not None:
        counters.live -= row.nbytes
        if booking is not None and booking.book(transaction, counters, segment, row):
            return True
        transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
        retire(transaction, counters, segment, row.nbytes)
    return False
