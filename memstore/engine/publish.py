"""How entries change: the protocols of put, put_many and delete.

Put
1. *Prepare* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim*, one hold of the mutex: a retired file of nearly the size that nobody locks or leases (`pool.py`): it is
   locked, **its put id is zeroed**, then its row is committed as filling under a new put id. Or a new file: its row is
   committed, then it is created and locked. A kill leaves a retired file without a put id, or a filling row with an
   unlocked file or none: claimed or swept by others.
3. *Fill* (the caller): allocate, which is where a full disk shows, and copy the tensors. `seal` writes the header, and
   what was assembled in memory, and syncs if the store is durable.
4. *Commit*, one hold of the mutex: check expected versions, assign versions; note the batch in the lock page; state
   live into the headers; unlock the files; **commit the transaction: the moment of publication**; clear the note;
   state retired into the headers of what was replaced; change the doorbell and the ring sequence. A kill before the
   commit leaves headers that say live: the note tells the next owner to put them back. A kill after it leaves
   old headers live and the bell unrung: the ring sequence tells.
5. After the mutex: wake the waiters, close the files. In another hold, if there is something to do: sweep.

Inline values skip 2 and 3. put_many claims and fills each key's segment, then commits all as one batch. A delete is
step 4 without a new record. What was replaced or deleted is *retired* in the same transaction.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memstore.engine import syscalls
from memstore.engine.folder import adopt
from memstore.engine.lockfile import LockFile
from memstore.engine.pages import deadline_after
from memstore.engine.pool import Reuse, boot_clock, free_blocks, needs_sweep, retire, size_class, sweep_some
from memstore.engine.record import FILLING, LIVE, RETIRED, Record, SegmentRow
from memstore.engine.recovery import mark_retired
from memstore.engine.root import Root
from memstore.engine.segment import Filling, remove_file, segment_path
from memstore.engine.tables import Counters, Transaction
from memstore.errors import CorruptionError, KeyNotFoundError, MemstoreError, StoreFullError, VersionConflictError

log = logging.getLogger("memstore")

SWEPT_A_PUT = 4  # files at most
_RECENT = 64  # a large batch is forgotten after about so many smaller ones
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
    adopted: bytes | None = None


@dataclass(slots=True)
class Change:
    """One key's part of a commit: new content, or with None its deletion."""

    key: bytes
    content: Content | None
    expect: int | None = None
    missing_ok: bool = False


def claim(root: Root, key: bytes, header: int, nbytes: int, batch: int, deadline: float) -> Filling:
    """Step 2: a file for a header and data of these sizes. `batch` 0 starts a batch, named by the put id."""
    found = root.mutex.run(lambda: _claim_locked(root, key, header, nbytes, batch), deadline)
    if not found.is_whole:  # new; others are of the store already, and maybe another user's
        adopt(found.fd, root.settings)
    return found


def _claim_locked(root: Root, key: bytes, header: int, nbytes: int, batch: int) -> Filling:
    reuse = Reuse(header + nbytes)

    def allot(transaction: Transaction) -> tuple[int, int, int]:
        counters = transaction.counters()
        if reuse.take(root, transaction, counters) and reuse.row is not None:
            size, _, segment = reuse.row
        else:
            size = header + size_class(nbytes)
            _check_capacity(root, counters, size)
            segment = counters.number = counters.number + 1
        counters.number += 1
        counters.filling += size
        transaction.put_segment(segment, SegmentRow(key, counters.number, FILLING, size))
        transaction.put_number("filling", segment, batch or counters.number)
        transaction.put_counters(counters)
        return segment, counters.number, size

    with root.guard:
        try:
            segment, put_id, size = root.catalog.update(allot)
        except BaseException:
            reuse.close()
            raise
        path = segment_path(root.segments, segment)
        is_new = reuse.file is None
        file = reuse.file or _create(root, path, segment)
        spare = None if is_new else root.spares.take(segment, size)
        return Filling(path, segment, put_id, size, file, is_new=is_new, dir_fd=root.segments_fd, spare=spare)


def park(root: Root, filling: Filling, deadline: float) -> None:
    """Between steps 3 and 4, for what is too many to be kept open."""
    root.mutex.run(lambda: filling.park(root.guard), deadline)


def _create(root: Root, path: str, segment: int) -> LockFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        file = LockFile(path, flags, root.settings.file_mode, root.segments_fd)
    except FileExistsError:
        root.catalog.update(lambda transaction: _drop(transaction, segment), is_delete=True)
        detail = "it is there already, and the catalog doesn't know it"
        raise CorruptionError(f"{path}: {detail}: move it away", path=path, detail=detail) from None
    if not syscalls.lock_exclusive(file.fd):
        raise BlockingIOError(errno.EAGAIN, f"{path} is new, and locked")
    return file


def _check_capacity(root: Root, counters: Counters, size: int) -> None:
    if counters.capacity and counters.allocated + root.catalog.growth + size > counters.capacity:
        raise StoreFullError(
            f"{size:,} bytes more would be {counters.allocated + root.catalog.growth + size:,}, "
            f"and its capacity is {counters.capacity:,}"
        )


def _drop(transaction: Transaction, segment: int, *, keep: bool = False) -> None:
    """Of a segment that is not to be published: its row, or with `keep` it is retired."""
    row, counters = transaction.segment(segment), transaction.counters()
    transaction.delete_number("filling", segment)
    if row is not None:
        counters.filling -= row.nbytes
        if keep:
            transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
            retire(transaction, counters, segment, row.nbytes)
        else:
            transaction.delete_segment(segment)
        transaction.put_counters(counters)


def abandon(root: Root, fillings: Sequence[Filling], *, keep: bool = False) -> None:
    """Gives claimed files back after an error, if they are still filling under our put ids.

    With `keep`, those that are allocated wholly may be used again: a lost race of compare-and-swaps costs no file.
    """
    kept = {filling.segment for filling in fillings if keep and filling.is_whole}

    def is_ours(transaction: Transaction, filling: Filling) -> bool:
        row = transaction.segment(filling.segment)
        return row is not None and row.state == FILLING and row.put_id == filling.put_id

    def forget(transaction: Transaction, ours: Sequence[Filling]) -> None:
        for filling in ours:
            _drop(transaction, filling.segment, keep=filling.segment in kept)

    def action() -> list[Filling]:
        with root.guard:
            ours = root.catalog.view(lambda transaction: [f for f in fillings if is_ours(transaction, f)])
            for filling in ours:  # before their rows: a row without a file is swept, a file without a row never
                if filling.segment in kept:
                    filling.go_back()
                else:
                    remove_file(filling.path, root.segments_fd)
            if ours:
                root.catalog.update(lambda transaction: forget(transaction, ours), is_delete=True)
            return ours

    for filling in root.mutex.run(action, deadline_after(CLEANUP_TIMEOUT)):
        if filling.segment not in kept and filling.fd >= 0:
            free_blocks(filling.fd)


def commit(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Steps 4 and 5: publishes all changes at one moment. Returns the new versions; for deletes the old ones, or 0."""
    bells = {root.doorbell.bell(change.key) for change in changes if change.content is not None}
    versions, retired, counters = root.mutex.run(lambda: _commit_locked(root, changes, bells), deadline)
    for bell in bells:
        root.doorbell.wake(bell)
    if retired and needs_sweep(root, counters):
        try:
            sweep_some(root, max(SWEPT_A_PUT, len(retired)), deadline_after(SWEEP_WAIT))
        except (OSError, MemstoreError) as error:  # the commit stands; a later sweep will do
            log.debug("%s: nothing swept: %s", root.path, str(error))
    return versions


_Applied = tuple[list[int], list[int], Counters]  # new versions; retired segments; the counters afterwards


def _commit_locked(root: Root, changes: Sequence[Change], bells: Collection[int]) -> _Applied:
    page = root.mutex
    with root.guard:
        applied = root.catalog.update(lambda transaction: _apply(root, transaction, changes), is_delete=not bells)
    page.batch = 0
    _, retired, counters = applied
    if retired:
        mark_retired(root, retired)
    for bell in bells:
        root.doorbell.change(bell)
    page.ring = counters.publications
    return applied


def _apply(root: Root, transaction: Transaction, changes: Sequence[Change]) -> _Applied:
    """The transaction of a commit; it may be called again, on a map that was grown."""
    found = [transaction.record(change.key) for change in changes]
    _check(changes, found)
    fillings = [change.content.filling for change in changes if change.content and change.content.filling]
    counters = transaction.counters()
    if fillings:
        batch = root.mutex.batch = fillings[0].put_id
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
        if old is not None and old.segment:
            _retire(transaction, counters, old.segment)
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
    transaction.put_record(key, _record(content, counters.version, counters.number))


def _retire(transaction: Transaction, counters: Counters, segment: int) -> None:
    row = transaction.segment(segment)
    if row is not None:
        counters.live -= row.nbytes
        transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
        retire(transaction, counters, segment, row.nbytes)


def _record(content: Content, version: int, number: int) -> Record:
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
