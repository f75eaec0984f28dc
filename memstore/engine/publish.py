"""How entries change: the protocols of put, put_many and delete.

Put
1. *Prepare* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim*, one hold of the mutex: a row as filling under a new put id is committed, then the file is created and
   locked. A kill leaves a row with an unlocked file or none: swept by the next.
3. *Fill* (the caller): allocate, which is where a full disk shows, and copy the tensors. `seal` writes out what was
   assembled in memory, and syncs if the store is durable.
4. *Commit*, one hold of the mutex: check expected versions, assign versions; note the batch in the lock page; state
   live into the headers; unlock the files; **commit the transaction: the moment of publication**; clear the note;
   change the doorbell and the ring sequence. A kill before the commit leaves headers that say live: the note tells
   the next owner to put them back. A kill after it leaves the bell unrung: the ring sequence tells.
5. After the mutex: wake the waiters, close the files. In another hold: sweep.

Inline values skip 2 and 3. put_many claims and fills each key's segment, then commits all as one batch. A delete is
step 4 without a new record. What was replaced or deleted is *retired* in the same transaction, and unlinked by the
sweep as soon as nobody locks or leases it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.folder import adopt
from memstore.engine.pages import deadline_after
from memstore.engine.record import FILLING, LIVE, RETIRED, Record, SegmentRow
from memstore.engine.recovery import boot_clock, sweep_some
from memstore.engine.root import Root
from memstore.engine.segment import Filling, remove_file, segment_path
from memstore.errors import CorruptionError, KeyNotFoundError, MemstoreError, VersionConflictError

log = logging.getLogger("memstore")

SWEPT_A_PUT = 4  # files at most
SWEEP_WAIT = 0.1  # seconds for the mutex: the put is done, and others sweep too
_LONGEST_LEASE = 1e9  # seconds; infinity has no number of nanoseconds
CLEANUP_TIMEOUT = 5.0  # seconds to give a claimed file back after an error; else the next sweep does


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


@dataclass(slots=True)
class Change:
    """One key's part of a commit: new content, or with None its deletion."""

    key: bytes
    content: Content | None
    expect: int | None = None
    missing_ok: bool = False


def claim(root: Root, key: bytes, nbytes: int, batch: int, deadline: float) -> Filling:
    """Step 2. `nbytes` is the size of the file; `batch` 0 starts a batch, named by the put id."""

    def allot(transaction: Transaction) -> tuple[int, int]:
        counters = transaction.counters()
        segment, put_id = counters.number + 1, counters.number + 2
        transaction.put_counters(Counters(counters.version, put_id, counters.retired, counters.publications))
        transaction.put_segment(segment, SegmentRow(key, put_id, FILLING, nbytes))
        transaction.put_number("filling", segment, batch or put_id)
        return segment, put_id

    def action() -> Filling:
        with root.guard:
            segment, put_id = root.catalog.update(allot)
            path = segment_path(root.segments, segment)
            try:
                filling = Filling(path, segment, put_id, mode=root.settings.file_mode, dir_fd=root.segments_fd)
            except FileExistsError:
                root.catalog.update(lambda transaction: _drop(transaction, segment), is_delete=True)
                detail = "it is there already, and the catalog doesn't know it"
                raise CorruptionError(f"{path}: {detail}: move it away", path=path, detail=detail) from None
        if not syscalls.lock_exclusive(filling.fd):
            raise BlockingIOError(errno.EAGAIN, f"{filling.path} is new, and locked")
        adopt(filling.fd, root.settings)
        return filling

    return root.mutex.run(action, deadline)


def _drop(transaction: Transaction, segment: int) -> None:
    transaction.delete_segment(segment)
    transaction.delete_number("filling", segment)


def abandon(root: Root, fillings: Sequence[Filling]) -> None:
    """Gives claimed files back after an error, if they are still filling under our put ids."""

    def is_ours(transaction: Transaction, filling: Filling) -> bool:
        row = transaction.segment(filling.segment)
        return row is not None and row.state == FILLING and row.put_id == filling.put_id

    def forget(transaction: Transaction, ours: Sequence[Filling]) -> None:
        for filling in ours:
            _drop(transaction, filling.segment)

    def action() -> None:
        with root.guard:
            ours = root.catalog.view(lambda transaction: [f for f in fillings if is_ours(transaction, f)])
            for filling in ours:  # before their rows: a row without a file is swept, a file without a row never
                remove_file(filling.path, root.segments_fd)
            if ours:
                root.catalog.update(lambda transaction: forget(transaction, ours), is_delete=True)

    root.mutex.run(action, deadline_after(CLEANUP_TIMEOUT))


def commit(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Steps 4 and 5: publishes all changes at one moment. Returns the new versions; for deletes the old ones, or 0."""
    bells = {root.doorbell.bell(change.key) for change in changes if change.content is not None}
    versions, retired = root.mutex.run(lambda: _commit_locked(root, changes, bells), deadline)
    for bell in bells:
        root.doorbell.wake(bell)
    if retired:
        try:
            sweep_some(root, max(SWEPT_A_PUT, retired), deadline_after(SWEEP_WAIT))
        except (OSError, MemstoreError) as error:  # the commit stands; a later sweep will do
            log.debug("%s: nothing swept: %s", root.path, error)
    return versions


def _commit_locked(root: Root, changes: Sequence[Change], bells: Collection[int]) -> tuple[list[int], int]:
    page = root.mutex
    fillings = [change.content.filling for change in changes if change.content and change.content.filling]
    batch = fillings[0].put_id if fillings else 0
    with root.guard:
        versions, counters, retired = root.catalog.update(
            lambda transaction: _apply(root, transaction, changes, batch, len(fillings)), is_delete=not bells
        )
    page.batch = 0
    for bell in bells:
        root.doorbell.change(bell)
    page.ring = counters.publications
    return versions, retired


def _apply(
    root: Root, transaction: Transaction, changes: Sequence[Change], batch: int, count: int
) -> tuple[list[int], Counters, int]:
    """The transaction of a commit; it may be called again, on a map that was grown."""
    found = [transaction.record(change.key) for change in changes]
    _check(changes, found)
    root.mutex.batch = batch
    counters = transaction.counters()
    version, number, retired = counters.version, counters.number, counters.retired
    versions: list[int] = []
    for change, old in zip(changes, found, strict=True):
        content = change.content
        if content is not None:
            version += 1
            filling = content.filling
            if filling is None:
                number += 1
            else:
                filling.go_live(version, batch, count, durable=root.settings.durable)
                row = SegmentRow(change.key, filling.put_id, LIVE, filling.size)
                transaction.put_segment(filling.segment, row)
                transaction.delete_number("filling", filling.segment)
            transaction.put_record(change.key, _record(content, version, number))
        elif old is not None:
            transaction.delete_record(change.key)
        versions.append(version if content is not None else old.version if old is not None else 0)
        if old is not None and old.segment:
            row = transaction.segment(old.segment)
            if row is not None:
                retired += 1
                transaction.put_segment(old.segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
                transaction.put_number("retired", retired, old.segment)
    after = Counters(version, number, retired, counters.publications + 1)
    transaction.put_counters(after)
    return versions, after, retired - counters.retired


def _record(content: Content, version: int, number: int) -> Record:
    filling = content.filling
    return Record(
        version=version,
        put_id=filling.put_id if filling else number,
        segment=filling.segment if filling else 0,
        nbytes=content.nbytes,
        created=time.time(),
        description=content.description,
        objects=content.objects,
        inline=content.inline,
        checksums=content.checksums,
        objects_checksum=content.objects_checksum,
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


def lease(root: Root, segment: int, put_id: int, seconds: float, deadline: float) -> bool:
    """Keeps a segment from being swept for `seconds`. False if that put's contents are gone already."""
    until = boot_clock() + int(min(seconds, _LONGEST_LEASE) * 1e9)

    def write(transaction: Transaction) -> bool:
        row = transaction.segment(segment)
        if row is None or row.put_id != put_id:
            return False
        transaction.put_number("leases", segment, max(until, transaction.number("leases", segment) or 0))
        return True

    def action() -> bool:
        with root.guard:
            return root.catalog.update(write)

    return root.mutex.run(action, deadline)
