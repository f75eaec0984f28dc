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
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import Filling
from memstore.engine.format import LIVE, RETIRED, Record, SegmentRow
from memstore.engine.protocols.ahead import Booking, booking_for
from memstore.engine.protocols.recovery import mark_retired
from memstore.engine.protocols.reuse import retire
from memstore.engine.protocols.sweep import needs_sweep, sweep_some
from memstore.engine.root import Root
from memstore.engine.sync import deadline_after
from memstore.errors import KeyNotFoundError, MemstoreError, VersionConflictError

log = logging.getLogger("memstore")

SWEPT_A_PUT = 4  # files at most
_RECENT = 64  # a large batch is forgotten after about so many smaller ones
SWEEP_WAIT = 0.1  # seconds for the mutex: the put is done, and others sweep too


@dataclass(slots=True)
class Content:
    """What a record says of a value, beside where it lies."""

    description: bytes
    objects: bytes
    nbytes: int
    inline: bytes | None = None
    filling: Filling | None = None
    checksums: bytes | None = None
    objects_checksum: bytes | None = None
    adopted: bytes | None = None


@dataclass(slots=True)
class Change:
    """One key's part of a commit: new content, or with None its deletion."""

    key: bytes
    content: Content | None
    expect: int | None = None
    missing_ok: bool = False


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
        page.publications_rung = counters.publications
    else:
        page.owe_recovery()
    return applied


def _booking(root: Root, changes: Sequence[Change]) -> Booking | None:
    content = changes[0].content if len(changes) == 1 else None
    return booking_for(root, content.filling.used) if content is not None and content.filling is not None else None


def _settle(root: Root, booking: Booking) -> bool:
    try:
        booking.settle()
    except (OSError, MemstoreError) as error:  # the commit stands
        log.info("%s: what was booked ahead is left to a recovery: %s", root.path, str(error))
        return False
    return True


def _apply(root: Root, transaction: Transaction, changes: Sequence[Change], booking: Booking | None) -> _Applied:
    """The transaction of a commit; it may be called again, on a map that was grown."""
    found = [transaction.record(change.key) for change in changes]
    _check(changes, found)
    fillings = [change.content.filling for change in changes if change.content and change.content.filling]
    counters = transaction.counters()
    if fillings:
        batch = root.mutex.batch = fillings[0].put_id
        if len(fillings) < len(changes):
            counters.version += 1  # left out, see above
        counters.recent = max(sum(filling.size for filling in fillings), counters.recent - counters.recent // _RECENT)
        for filling, version in zip(fillings, _versions(changes, counters.version), strict=True):
            filling.go_live(version, batch, len(fillings), durable=root.settings.durable)
    versions: list[int] = []
    retired: list[int] = []
    for change, old in zip(changes, found, strict=True):
        if change.content is not None:
            counters.version += 1
            _publish(transaction, counters, change.key, change.content)
            versions.append(counters.version)
        else:
            versions.append(old.version if old else 0)
            if old is not None:
                transaction.delete_record(change.key)
        if old is not None and old.segment and not replace_segment(transaction, counters, old.segment, booking):
            retired.append(old.segment)
    counters.publications += 1
    transaction.put_counters(counters)
    return versions, retired, counters


def _versions(changes: Sequence[Change], last: int) -> list[int]:
    """Of the segments among the changes, in their order."""
    contents = [change.content for change in changes if change.content is not None]
    return [last + i for i, content in enumerate(contents, 1) if content.filling]


def _publish(transaction: Transaction, counters: Counters, key: bytes, content: Content) -> None:
    filling = content.filling
    if filling is None:
        counters.number += 1
    else:
        transaction.put_segment(filling.segment, SegmentRow(key, filling.put_id, LIVE, filling.size))
        transaction.delete_number("filling", filling.segment)
        counters.filling -= filling.size
        counters.live += filling.size
    transaction.put_record(key, record_of(content, counters.version, counters.number))


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


def record_of(content: Content, version: int, number: int) -> Record:
    filling = content.filling
    return Record(
        version=version,
        put_id=filling.put_id if filling else number,
        segment=filling.segment if filling else 0,
        size=filling.size if filling else 0,
        start=filling.start if filling else 0,
        nbytes=content.nbytes,
        created=time.time(),
        description=content.description,
        objects=content.objects,
        inline=content.inline,
        checksums=content.checksums,
        objects_checksum=content.objects_checksum,
        adopted=content.adopted,
    )


def _check(changes: Sequence[Change], found: Sequence[Record | None]) -> None:
    for change, old in zip(changes, found, strict=True):
        check_version(change.key, change.expect, old.version if old else 0)
        if change.content is None and old is None and not change.missing_ok:
            raise missing(change.key)


def check_version(key: bytes, expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        name = key.decode()
        is_at = f"is at version {found}" if found else "doesn't exist"
        raise VersionConflictError(
            f"{name!r} {is_at}, and version {expected} was expected: get it again and decide anew",
            key=name,
            expected=expected,
            found=found,
        )


def missing(key: bytes) -> KeyNotFoundError:
    name = key.decode()
    return KeyNotFoundError(f"no key {name!r}", key=name)
