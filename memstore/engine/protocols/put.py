"""Puts and deletes: how entries change. The labels in the code are the numbers of these steps.

1. *Draft* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim* (`claim`): take a file for the segment, and lock it. If the last commit of this process has kept a file for
   this put (`reuse.py`), it is taken without the mutex. Else, in one hold of the mutex, one of these is claimed:
   - a retired file of nearly the size that nobody locks or leases (`reuse.py`): it is locked, **its put id is erased**,
     and then its row is committed as filling under a new put id;
   - a new file: its row is committed as filling, and then the file is created and locked.
   A kill leaves a retired file without a put id, or a filling row with an unlocked file or none: others claim or sweep
   it.
3. *Fill* (`fill_segment`): allocate, and let the caller copy its tensors. `seal` writes the header and what was
   assembled in memory, and syncs if the store is durable. A full disk shows in the first of them for a file that is
   mapped, in `seal` for a smaller one. A kill leaves what it leaves in step 2.
4. *Commit* (`commit`): publish all changes at one moment, in one hold of the store's mutex (`_commit_locked`):
   - of a store that is served to other hosts: give up if groups have left this host since this process read who owns
     them;
   - check that the keys are at the versions that were expected, and assign the new versions;
   - note the batch in the lock page;
   - write into the segments' headers that they are live, and unlock their files;
   - **commit the transaction: this is the moment of publication**; clear the note;
   - lock the file that was claimed for the next put and erase its put id, or give it back if it is held (`reuse.py`);
   - write into the headers of all else that was replaced that it is retired; of a mutable entry that was deleted,
     into its control page that it is gone;
   - change the doorbell's words and the count of publications that have rung it.
   A kill before the commit leaves headers that say live: by the note, the mutex's next owner puts them back. A kill
   after it leaves old headers live, a claimed file that is not locked, and the doorbell unrung: the next owner sees it
   by that count (`recovery.py`).
5. *After the mutex* (`finish`): wake the waiters; **look whether the path still names this store**, since what was put
   into one that was removed or moved must not be acknowledged; sweep, in another hold, if there is something to do
   (`sweep.py`). Then close the files.

An inline value skips 2 and 3. If it is the only one and goes over any version, step 4 has a short form
(`_commit_inline_locked`). A put of several keys claims and fills the segment of each, then commits all as one batch. A
delete is steps 4 and 5 without a new record.

What was replaced or deleted is *retired* in the same transaction, unless it is claimed for the next put. Such a
claim assigns the id of that put, so put ids are not in the order of versions.

After an error, what was claimed is given back (`clean_up`). If the error is that the mutex was not to be had in time,
giving back would wait for it as well: a single small file is kept for the next put instead.

Whether this host owns a key is known to `root.owners`, under the number `membership` of the catalog's counters. The
transaction of a commit compares that number, which it reads anyway, and gives up before it has changed anything where
it differs. So a store that nobody serves, whose number is 0, pays a comparison of two integers, and a served one a look
into a set. `Elsewhere.commit` makes the other changes: of keys that another host owns, and the first one of a group,
which claims it, and records the grant in the transaction that makes the change; of keys of which another host keeps a
version, which is told of the change before it is acknowledged; and of keys whose values are to lie on a second host.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from time import monotonic, perf_counter
from typing import TypeVar

import msgspec

from memstore import _wording as wording
from memstore._telling import listening, tell
from memstore.engine.catalog.catalog import MOST_FOR_VALUES
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.segments import ClaimedFile, SealedSegment, SegmentWriter, WritableMemory
from memstore.engine.format.headers import Header, HeaderSlots
from memstore.engine.format.records import LIVE, Record, SegmentRow
from memstore.engine.protocols.change import (
    SMALL,
    Change,
    Content,
    KeptElsewhere,
    MembershipChanged,
    check_mutable,
    check_versions,
    mutable_entry,
    record_of,
)
from memstore.engine.protocols.deltas import BaseGone, DeltaDraft, share
from memstore.engine.protocols.elsewhere import elsewhere_of
from memstore.engine.protocols.history import charge, charges_of, keep_replaced, with_history
from memstore.engine.protocols.recovery import mark_retired, say_gone
from memstore.engine.protocols.reuse import (
    ReplacedFile,
    Reuse,
    begin_filling,
    owe_what_lies_elsewhere,
    replaced_file,
    retire_row,
    segments_here,
    take_next_file,
)
from memstore.engine.protocols.sweep import clean_up, drop_segment, make_room_and_retry, needs_sweep, sweep_some
from memstore.engine.root.folder import give_to_group
from memstore.engine.root.roots import Root
from memstore.engine.sync.pages import LockPage
from memstore.engine.sync.primitives import deadline_after
from memstore.engine.usage import OneOfMany, is_full, one_of_many
from memstore.errors import CorruptionError, MemstoreError, StoreFullError

Result = TypeVar("Result")

log = logging.getLogger("memstore")
_logs = log.isEnabledFor

_OPEN_FILES = 16  # of a batch; the others are parked
_LARGE = 16 << 20  # bytes: whether a commit would refuse so many is looked up before they are copied, in a thousandth


class Draft(msgspec.Struct, frozen=True):
    """Value of one key that a put is to store. It can be put again if the first try fails.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        header: of the segment that is to hold the data; None: the content says all, and no segment is needed.
        fill: with a header: writes the data into the memory that it is given, and returns the checksums for the record,
            or None if the store has none.
        sealed_put_id, history: as in `Change`.
        size: of the file, which is a new one then; 0: the data may have one that is kept for reuse.
        delta: of a value that shares the files of earlier versions.
    """

    key: bytes
    content: Content
    expect: int | None = None
    header: Header | None = None
    fill: Callable[[WritableMemory], bytes | None] | None = None
    sealed_put_id: int = 0
    size: int = 0
    history: tuple[int, int] | None = None
    delta: DeltaDraft | None = None


def put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    """Publishes all drafts at one moment, or none of them. Returns the new versions.

    Raises:
        VersionConflictError: a key is at another version than its draft expects.
        StoreFullError, ResourceLimitError, StoreTimeoutError.
        NotAStoreError: the store was removed or moved.
        CrossHostError, HomeUnavailableError, UnknownOutcomeError, StaleMembershipError: of a store on several hosts.
    """
    if len(drafts) == 1:
        return make_room_and_retry(_put, root, drafts, deadline, drafts[0].key.decode())
    root.owners.check_one_owner([draft.key for draft in drafts], deadline)  # before anything is copied
    return make_room_and_retry(_put, root, drafts, deadline, None)


def delete(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Deletes keys at one moment, or none of them. Returns the versions that they had, or 0."""
    key = changes[0].key.decode() if len(changes) == 1 else None
    return make_room_and_retry(publish, root, changes, deadline, key)


def _put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    """Takes steps 2 to 5. After an error, it gives back what it has claimed."""
    began = perf_counter() if listening.observer is not None or _logs(logging.DEBUG) else 0.0
    writers: list[SegmentWriter] = []
    changes: list[Change] = []
    for draft in drafts:  # before anything is claimed or copied
        if draft.content.nbytes >= _LARGE:
            change = Change(draft.key, draft.content, draft.expect, sealed_put_id=draft.sealed_put_id)
            check_mutable(change, root.catalog.read(draft.key))
    try:
        # Steps 2 and 3, claim and fill, for each key. An inline value has no header, and needs neither.
        for draft in drafts:
            if draft.header is None:
                change = Change(
                    draft.key, draft.content, draft.expect, sealed_put_id=draft.sealed_put_id, history=draft.history
                )
                changes.append(change)
            else:
                changes.append(fill_segment(root, draft, writers, deadline))
        # 4. Commit, of all keys at one moment; and 5. what follows.
        versions = publish(root, changes, deadline)
    except BaseException as error:
        if writers:
            clean_up(root, writers, error)
        if len(changes) < len(drafts) and len(drafts) > 1 and isinstance(error, OSError) and is_full(error):
            raise _no_room_for_one(root, drafts, len(changes), error) from None
        raise
    # 5. The files are closed.
    if writers:
        close_published(root, writers)
    if began:
        _tell(root, drafts, writers, versions, began)
    return versions


# --- steps 2 and 3: a file is claimed and filled ---------------------------------------------------------------------


def fill_segment(root: Root, draft: Draft, writers: list[SegmentWriter], deadline: float) -> Change:
    """Takes steps 2 and 3 for one key. It appends to the batch's `writers` as soon as it has claimed a file."""
    header, content = draft.header, draft.content
    if header is None:
        return Change(draft.key, content, draft.expect, sealed_put_id=draft.sealed_put_id, history=draft.history)
    assert draft.fill is not None, "a header, and nothing that fills its segment"

    # 2. Claim. A kill leaves a file without a put id, or a filling row: others claim or sweep it.
    batch, is_mutable = writers[0].put_id if writers else 0, content.is_mutable
    size = header.nbytes + content.nbytes if is_mutable else draft.size
    nbytes = content.nbytes if draft.delta is None else draft.delta.nbytes
    writer = claim(root, draft.key, header.nbytes, nbytes, batch, deadline, size=size)
    writers.append(writer)

    # 3. Fill. A full disk shows in `allocate` or in `seal`. A kill leaves a filling row, and the file unlocked.
    writer.allocate(header, nbytes, root.guard, on_tmpfs=root.on_tmpfs)
    checksums = draft.fill(writer)
    segment = writer.seal(checksums, durable=root.storage.durable)
    if is_mutable:
        writer.unmap()  # it is written through another mapping, and never again by a put
    if len(writers) > _OPEN_FILES:
        park(root, writer, deadline)

    if checksums is not None:
        content = msgspec.structs.replace(content, checksums=checksums)
    if draft.delta is not None:
        content, shares = draft.delta.placed(content, segment), draft.delta.shares
        return Change(draft.key, content, draft.expect, segments=(segment,), history=draft.history, shares=shares)
    return Change(
        draft.key, content, draft.expect, segments=(segment,), sealed_put_id=draft.sealed_put_id, history=draft.history
    )


def fill_and_publish(
    root: Root, drafts: Sequence[Draft], make_live: Callable[[list[Change]], Result], deadline: float
) -> Result:
    """Takes steps 2 and 3 for another change than a put: `make_live` publishes the segments in a way of its own.

    Raises what `make_live` raises, and then the segments are given back; StoreFullError, StoreTimeoutError, OSError.
    """
    writers: list[SegmentWriter] = []
    try:
        published = make_live([fill_segment(root, draft, writers, deadline) for draft in drafts])
    except BaseException as error:
        clean_up(root, writers, error)
        raise
    close_published(root, writers)
    return published


def claim(
    root: Root, key: bytes, header: int, nbytes: int, batch: int, deadline: float, *, size: int = 0
) -> SegmentWriter:
    """Claims a file for a header and data of these sizes. `batch` 0 starts a batch, which its first put id names.

    With a `size`, it is a new one of just that size: zeros, which nobody has to write.
    """
    if root.next_put.file is not None and not batch and not size:
        kept = take_next_file(root, header + nbytes)
        if kept is not None:
            return kept
    writer = root.mutex.run(_claim_locked, deadline, root, key, header, nbytes, batch, size)
    if not writer.is_whole:  # it is new: the others have the store's group already, and may be another user's
        give_to_group(writer.file.lock_file.fd, root.settings)
    return writer


def _claim_locked(root: Root, key: bytes, header: int, nbytes: int, batch: int, fixed: int) -> SegmentWriter:
    reuse, storage = Reuse(header + nbytes), root.storage

    def allot(transaction: Transaction) -> tuple[int, int, int]:  # called again if the catalog's map had to grow
        counters = transaction.counters()
        if not fixed and reuse.take(root, transaction, counters) and reuse.row is not None:
            size, _, segment = reuse.row
        else:
            size = fixed or header + storage.room_for(nbytes)
            if counters.capacity and (taken := counters.allocated + root.catalog.growth) + size > counters.capacity:
                raise _over_capacity(size, taken, counters.capacity)
            segment = counters.number = counters.number + 1
        put_id = begin_filling(transaction, counters, segment, key, size, batch)
        transaction.put_counters(counters)
        return segment, put_id, size

    with root.guard:
        try:
            segment, put_id, size = root.catalog.update(allot)
        except BaseException:
            reuse.close()
            raise
        file = reuse.file or _create(root, segment)
        return storage.writer(file, segment, put_id, size, is_new=reuse.file is None)


def park(root: Root, writer: SegmentWriter, deadline: float) -> None:
    """Gives back the memory of a sealed segment of a large batch, and closes its file where that can be claimed so."""
    writer.unmap()
    root.mutex.run(writer.file.park, deadline, root.guard)


def _create(root: Root, segment: int) -> ClaimedFile:
    try:
        return root.storage.create(segment)
    except FileExistsError as error:
        root.catalog.update(lambda transaction: drop_segment(transaction, segment), is_delete=True)
        path, detail = error.filename, "it is there already, and the catalog doesn't know it"
        raise CorruptionError(f"{path}: {detail}: move it away", path=path, detail=detail) from None


def _over_capacity(size: int, taken: int, capacity: int) -> StoreFullError:
    """Makes the error here, and not in the frame that raises it: frame and traceback would be a reference cycle."""
    error = StoreFullError(
        f"it takes {wording.size(size)} more, and {wording.size(taken)} of {wording.size(capacity)} are taken"
    )
    error.needed = size
    return error


# --- steps 4 and 5: all changes are published at one moment -----------------------------------------------------------


SWEPT_A_PUT = 4  # files that a sweep after a commit looks at; more if the commit has retired more
SWEEP_WAIT = 0.1  # seconds that this sweep waits for the mutex: the put is done, and others sweep too
_RECENT = 64  # a large batch no longer counts as recent after about so many smaller ones


class ExtraRows:
    """Rows beside a commit's own: its transaction checks and writes them. Called again if that is repeated."""

    def check(self, transaction: Transaction) -> None:
        """Raises to stop the commit, before anything is changed."""

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        """Writes more rows, once the records are written. `version` is that of the first change."""


class CommitResult(msgspec.Struct):
    """Result of a commit's transaction.

    Attributes:
        versions: the new ones; of deletions the old ones, or 0.
        counters: the store's, as they are now.
        retired: the segments that nothing names any more, but for one that was claimed for the next put.
        gone: the segments of mutable entries that were deleted.
    """

    versions: list[int]
    counters: Counters
    retired: Sequence[int] = ()
    gone: Sequence[int] = ()


def publish(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Commits changes at their owner, which may be another host. Returns as `commit`, and raises what it raises.

    Raises CrossHostError, HomeUnavailableError, UnknownOutcomeError, FencedError and StaleMembershipError too.
    """
    keys = (changes[0].key,) if len(changes) == 1 else tuple([change.key for change in changes])
    while True:
        if root.host_lease[0]:
            root.check_lease()
        membership = 0 if root.owners.is_alone else root.owners.membership_for(keys, deadline)
        if membership != 0 and any(change.shares for change in changes):  # it is served since it was compared
            raise BaseGone
        try:
            if membership is None or (membership and root.owners.replicates(keys)):
                versions = elsewhere_of(root).commit(changes, deadline)
            else:
                versions = commit(root, changes, deadline, membership=membership)
        except MembershipChanged:
            elsewhere_of(root).take_in(deadline)
            continue
        except KeptElsewhere:
            versions = elsewhere_of(root).commit(changes, deadline)
        if root.host_lease[0]:  # this process may have been stopped since it looked
            root.confirm_lease(keys[0])
        return versions


def commit(
    root: Root,
    changes: Sequence[Change],
    deadline: float,
    extra: ExtraRows | None = None,
    *,
    membership: int = 0,
) -> list[int]:
    """Publishes all changes at one moment. Returns the new versions; for deletes the old ones, or 0.

    `membership` is the counters' number under which this host was found to own the keys.

    Raises MembershipChanged, KeptElsewhere, VersionConflictError, KeyNotFoundError or MutableEntryError before anything
    is changed; and NotAStoreError if the store was removed or moved: nothing is acknowledged then.
    """
    first, mutex, bell = changes[0], root.mutex, root.doorbell.bell
    content, is_alone = first.content, len(changes) == 1 and extra is None
    goes_over_any = is_alone and first.expect is None and first.version is None and first.history is None
    goes_over_any = goes_over_any and not first.sealed_put_id
    # 4. Commit. A kill before its transaction is committed leaves headers that say live; one after it, the values.
    if goes_over_any and content is not None and content.inline is not None:
        bells = {bell(first.key)}
        done = mutex.run(_commit_inline_locked, deadline, root, mutex, first.key, content, bells, membership)
    else:
        bells = set[int]()
        for change in changes:
            if change.content is not None:  # nobody waits for deletions
                bells.add(bell(change.key))
        done = mutex.run(_commit_locked, deadline, root, mutex, changes, bells, extra, membership)
    # 5. After the mutex. A kill leaves waiters asleep, who look again after a second.
    finish(root, bells, done.counters, len(done.retired))
    return done.versions


def _commit_locked(
    root: Root,
    mutex: LockPage,
    changes: Sequence[Change],
    bells: Collection[int],
    extra: ExtraRows | None,
    membership: int,
) -> CommitResult:
    """Takes step 4, under the mutex."""
    root.glance()  # the wait for the mutex may have been long: in a store that was moved meanwhile nothing is changed
    first, next_file = changes[0], None
    if len(changes) == 1 and len(first.segments) == 1 and first.content is not None and first.content.parts is None:
        next_file = replaced_file(root, first.segments[0].used)  # no other change keeps what it replaces
    most = None  # bytes to which the catalog may grow for the sake of these values; None: as many as it has to
    for change in changes:
        if change.content is not None and change.content.inline is not None and len(change.content.inline) > SMALL:
            most = MOST_FOR_VALUES

    make_changes = functools.partial(_write_changes, root, changes, membership, next_file, extra)

    is_locked = True
    with root.guard:
        try:
            # A kill before this commit leaves headers that say live, and the note of them, by which recovery undoes it.
            done = root.catalog.update(make_changes, is_delete=not bells, most=most)
            # From here on the values are there. Whatever a kill leaves, recovery sees by the count of publications.
            mutex.notes.batch = 0
            if next_file is not None:
                is_locked = next_file.keep()
        finally:
            if next_file is not None:
                next_file.close()
    if done.retired:  # a repair without a catalog sees only the files, and must not take these for live ones
        mark_retired(root, done.retired)
    for segment in done.gone:
        say_gone(root, segment)
    for bell in bells:
        root.doorbell.change(bell)
    if is_locked:
        mutex.notes.publications_rung = done.counters.publications
    else:
        mutex.owe_recovery()
    return done


def _commit_inline_locked(
    root: Root, mutex: LockPage, key: bytes, content: Content, bells: Collection[int], membership: int
) -> CommitResult:
    """Takes step 4 for one inline value that goes over whatever its key has, in two thirds of the general form's time.

    No file becomes live, so no batch is noted, and of the record that is replaced only the segments are read.
    """
    if monotonic() > root.look_again:  # as `Root.glance`: the wait may have been long, as in `_commit_locked`
        root.check_in_place()
    inline = content.inline

    def apply(transaction: Transaction) -> CommitResult:
        counters = transaction.counters()
        if counters.membership != membership:
            raise MembershipChanged
        if membership and (transaction.has_keepers(key) or transaction.is_remembered(key, is_delete=False)):
            raise KeptElsewhere
        if counters.quotas:
            changes, found = [Change(key, content)], [transaction.record(key)]
            check_versions(changes, found)
            charge(transaction, charges_of(root, transaction, changes, found))
        counters.version += 1
        counters.number += 1
        counters.publications += 1
        record = record_of(content, (), counters.version, counters.number)
        replaced = transaction.replace_record(key, record)
        if replaced.mutable is not None:
            raise mutable_entry(key, replaced.mutable)
        segments: Sequence[int]
        segments = marked = replaced.segments
        old = replaced.record
        if old is not None and old.history is not None:
            kept = keep_replaced(root, transaction, key, old, old.history)
            transaction.put_record(key, with_history(record, old.history, kept))
            segments, marked = kept.gone, segments_here(root, transaction, old)
        elif old is not None:
            segments = marked = owe_what_lies_elsewhere(root, transaction, old)
        for segment in segments:
            replace_segment(transaction, counters, segment)
        transaction.put_counters(counters)
        return CommitResult([counters.version], counters, marked)

    done = root.catalog.update(apply, most=MOST_FOR_VALUES if inline is not None and len(inline) > SMALL else None)
    if done.retired:
        mark_retired(root, done.retired)
    for bell in bells:
        root.doorbell.change(bell)
    mutex.notes.publications_rung = done.counters.publications
    return done


# --- the transaction of a commit -------------------------------------------------------------------------------------


def _write_changes(
    root: Root,
    changes: Sequence[Change],
    membership: int,
    next_file: ReplacedFile | None,
    extra: ExtraRows | None,
    transaction: Transaction,
) -> CommitResult:
    """Checks the versions, makes the segments live, and writes the rows. Raises as `commit`.

    It is called again if the catalog's map had to grow.
    """
    counters = transaction.counters()
    if counters.membership != membership:
        raise MembershipChanged
    if membership and any(map(functools.partial(_is_noted, transaction), changes)):
        raise KeptElsewhere
    if extra is not None:
        extra.check(transaction)
    found = [transaction.record(change.key) for change in changes]
    check_versions(changes, found)
    for change in changes:
        if change.shares:
            share(root, transaction, change.shares)
    if counters.quotas:
        charge(transaction, charges_of(root, transaction, changes, found))
    versions = _assign_versions(changes, found, counters)
    placed: list[tuple[SealedSegment, int]] = []
    for change, version in zip(changes, versions, strict=True):
        for segment in change.segments:
            placed.append((segment, version))
    if placed:  # before the commit: the value that a row names is live, whoever opens its file
        go_live(root, placed[0][0].put_id, placed, counters)
    retired: list[int] = []
    gone: list[int] = []
    for change, old, version in zip(changes, found, versions, strict=True):
        history = change.history
        if old is not None and old.history is not None and history is None and change.content is not None:
            history = old.history
        kept = None
        if old is not None and (history is not None or old.history is not None):
            kept = keep_replaced(root, transaction, change.key, old, history)
        if change.content is not None:
            for segment in change.segments:
                transaction.put_segment(segment.segment, SegmentRow(change.key, segment.put_id, LIVE, segment.size))
                transaction.delete_number("filling", segment.segment)
                counters.filling -= segment.size
                counters.live += segment.size
            if not change.segments:
                counters.number += 1
            record = record_of(change.content, change.segments, version, counters.number)
            if history is not None:
                record = with_history(record, history, kept)
            transaction.put_record(change.key, record)
        elif old is not None:
            transaction.delete_record(change.key)
            if old.is_mutable:
                gone += [extent.segment for extent in old.segments if old.hosts is None]
        if old is None:
            continue
        if kept is not None:
            replaced: Sequence[int] = kept.gone
            retired += segments_here(root, transaction, old)
        elif old.segment:
            replaced = (old.segment,)
        elif old.hosts is not None:
            replaced = owe_what_lies_elsewhere(root, transaction, old)
        else:
            replaced = [extent.segment for extent in old.segments]
        for number in replaced:  # one file can be kept, and no more
            is_kept = replace_segment(transaction, counters, number, next_file if len(replaced) == 1 else None)
            if not is_kept and kept is None:
                retired.append(number)
    if retired:
        root.storage.retire(transaction, retired)
    if extra is not None:
        extra.settle(transaction, counters, versions[0])
    counters.publications += 1
    transaction.put_counters(counters)
    return CommitResult(versions, counters, retired, gone)


def _is_noted(transaction: Transaction, change: Change) -> bool:
    """Returns whether more is to be noted of a change than this way does: for hosts that keep its key, or come back."""
    is_delete = change.content is None
    return transaction.has_keepers(change.key) or transaction.is_remembered(change.key, is_delete=is_delete)


def _assign_versions(changes: Sequence[Change], found: Sequence[Record | None], counters: Counters) -> list[int]:
    """Returns the new version of each key that is put; of each that is deleted the old one, or 0.

    If some values of a batch have segments and others none, it skips one version number before its first, so that a
    repair, which sees the files only, can tell that they are not all of the batch.
    """
    if len(changes) > 1 and 0 < sum([bool(change.segments) for change in changes]) < len(changes):
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
    root.mutex.notes.batch = batch
    nbytes = 0
    for segment, version in placed:
        nbytes += segment.size
        slots = HeaderSlots(segment.put_id, LIVE, version, batch, len(placed))
        segment.file.go_live(slots, durable=root.storage.durable)
    # How many bytes of retired files stay depends on the largest batch lately: it fades by a 64th a batch.
    counters.recent = max(nbytes, counters.recent - counters.recent // _RECENT)


def replace_segment(
    transaction: Transaction, counters: Counters, segment: int, next_file: ReplacedFile | None = None
) -> bool:
    """Retires the segment of a record that was replaced or deleted; or claims it for the next put, and returns True."""
    row = transaction.segment(segment)
    if row is not None:
        if next_file is not None and next_file.claim(transaction, counters, segment, row):
            counters.live -= row.nbytes
            return True
        retire_row(transaction, counters, segment, row)
    return False


# --- step 5: after the mutex ------------------------------------------------------------------------------------------


def finish(root: Root, bells: Collection[int], counters: Counters, retired: int) -> None:
    """Takes step 5, after the mutex: wakes waiters, looks whether the store is still in its place, and sweeps.

    A process of a store that nobody is known to serve looks now and then whether somebody does by now.

    Args:
        retired: how many files the commit has retired.

    Raises NotAStoreError if the store was removed or moved: nothing is acknowledged then.
    """
    for bell in bells:
        root.doorbell.wake(bell)
    root.check_in_place()
    if root.owners.is_alone and monotonic() > root.look_for_agent:
        root.expect_others()
    if not (counters.retired or counters.held or counters.filling):
        return
    try:
        if needs_sweep(root, counters):
            sweep_some(root, max(SWEPT_A_PUT, retired), deadline_after(SWEEP_WAIT))
    except (OSError, MemstoreError) as error:  # the commit stands, and later ones sweep too
        log.debug("%s: nothing swept: %s", root.path, str(error))


def close_published(root: Root, writers: Sequence[SegmentWriter]) -> None:
    """Closes the files that were published, and keeps the mappings that the next puts can use."""
    for writer in writers:
        spare = writer.spare()
        if spare is not None:
            with root.guard:
                root.storage.mappings.keep(writer.segment, spare)
        writer.close()


# --- what is said of a put -------------------------------------------------------------------------------------------


def _no_room_for_one(root: Root, drafts: Sequence[Draft], failed: int, reason: OSError) -> OneOfMany:
    """Makes the error for one of several drafts, once what was claimed is given back and not seen in the store."""
    room_for = root.storage.room_for
    sizes = [0 if draft.header is None else draft.header.nbytes + room_for(draft.content.nbytes) for draft in drafts]
    return one_of_many(reason, drafts[failed].key, sizes[failed], len(drafts), sum(sizes))


def _tell(
    root: Root, drafts: Sequence[Draft], writers: Sequence[SegmentWriter], versions: Sequence[int], began: float
) -> None:
    """Tells of a put: to the log in one line for each key, with the time of all."""
    left, took = iter(writers), (perf_counter() - began) * 1e3
    if listening.observer is not None:
        keys = tuple([draft.key.decode() for draft in drafts])
        tell(
            "put", root.path, keys, sum([draft.content.nbytes or len(draft.content.objects) for draft in drafts]), began
        )
    for draft, version in zip(drafts, versions, strict=True):
        where = "in the catalog"
        if draft.header is not None:
            writer = next(left)
            where = f"in {'a new file' if writer.is_new else 'a file that is used again'}, put {writer.put_id:#x}"
        key, nbytes = draft.key.decode(), draft.content.nbytes or len(draft.content.objects)
        log.debug("%s: put %r: version %d, %d bytes %s, %.3f ms", root.path, key, version, nbytes, where, took)
