"""Puts and deletes: how entries change. The labels in the code are the numbers of these steps.

1. *Draft* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim* (`claim`): take a file for the segment, and lock it. If the last commit of this process has kept a file for
   this put (`reuse.py`), it is taken without the mutex. Else, in one hold of the mutex, one of these is claimed:
   - a retired file of nearly the size that nobody locks or leases (`reuse.py`): it is locked, **its put id is erased**,
     and then its row is committed as filling under a new put id;
   - a new file: its row is committed as filling, and then the file is created and locked.
   A kill leaves a retired file without a put id, or a filling row with an unlocked file or none: others claim or sweep
   it.
3. *Fill* (`write`): allocate, which is where a full disk shows, and let the caller copy its tensors. `seal` writes the
   header and what was assembled in memory, and syncs if the store is durable. A kill leaves what it leaves in step 2.
4. *Commit* (`publish`, `commit.py`): publish all drafts at one moment, in one hold of the store's mutex. If the keys
   have their home on another host, it commits them.
5. *After the mutex* (`commit.py`): wake the waiters, look whether the path still names this store, and sweep if there
   is something to do. Then close the files.

An inline value skips 2 and 3, and if it is the only one and goes over any version, its commit is a shorter one
(`commit_inline`). A put of several keys claims and fills the segment of each, then commits all as one batch. A delete
is steps 4 and 5 without a new record.

After an error, what was claimed is given back (`clean_up`). If the error is that the mutex was not to be had in time,
giving back would wait for it as well: a single small file is kept for the next put instead.

Which host is the home of a key is remembered, under the number `membership` of the catalog's counters:
`root.homes_here` has it of groups of keys (their text before the first `/`) whose home was found to be here. The
transaction of a commit compares that number, which it reads anyway, and gives up before it has changed anything where
it differs. So a store that nobody serves, whose number is 0, pays a comparison of two integers, and a served one a look
into a dict.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import msgspec

from memstore import _wording as wording
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import (
    ClaimedFile,
    ClaimedOnStorage,
    LockFile,
    OwnedFile,
    SegmentWriter,
    SharedStorageWriter,
    StorageFile,
    WritableMemory,
    remove_file,
    segment_path,
)
from memstore.engine.format import FILLING, Header
from memstore.engine.protocols.change import Change, Content, MembershipChanged, check_mutable
from memstore.engine.protocols.commit import commit, commit_inline
from memstore.engine.protocols.elsewhere import elsewhere_of
from memstore.engine.protocols.reuse import Reuse, begin_filling, keep_file, size_class, take_kept_file, unclaim
from memstore.engine.protocols.sweep import close_unlinked, sweep_all
from memstore.engine.root import Root, give_to_group
from memstore.engine.sync import deadline_after
from memstore.engine.usage import OneOfMany, is_full, one_of_many, resource_errors
from memstore.errors import CorruptionError, MemstoreError, StoreFullError, StoreTimeoutError, VersionConflictError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

log = logging.getLogger("memstore")
_logs = log.isEnabledFor

_OPEN_FILES = 16  # of a batch; the others are parked
_LARGE = 16 << 20  # bytes: to copy them takes a thousand times the look whether the commit would refuse them


class Draft(msgspec.Struct, frozen=True):
    """What a put is to store under one key. It can be put again if the first try fails.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        header: of the segment that is to hold the data; None: the content says all, and no segment is needed.
        fill: with a header: writes the data into the memory that it is given, and returns the checksums for the record,
            or None if the store has none.
        seals: as in `Change`.
    """

    key: bytes
    content: Content
    expect: int | None = None
    header: Header | None = None
    fill: Callable[[WritableMemory], bytes | None] | None = None
    seals: int = 0


def put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    """Publishes all drafts at one moment, or none of them. Returns the new versions.

    Raises:
        VersionConflictError: a key is at another version than its draft expects.
        StoreFullError, ResourceLimitError, StoreTimeoutError.
        NotAStoreError: the store was removed or moved.
        CrossHostError, HomeUnavailableError, UnknownOutcomeError, StaleMembershipError: of a store on several hosts.
    """
    first = drafts[0]
    if len(drafts) > 1:
        check_one_home(root, [draft.key for draft in drafts])
        return retry_after_sweep(_put, root, drafts, deadline, None)
    key = first.key.decode()
    if first.expect is None and first.content.inline is not None and not first.seals:
        began = perf_counter() if _logs(logging.DEBUG) else 0.0
        version = retry_after_sweep(publish_inline, root, Change(first.key, first.content), deadline, key)
        if began:
            _tell(root, drafts, [], [version], began)
        return [version]
    return retry_after_sweep(_put, root, drafts, deadline, key)


def delete(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Deletes keys at one moment, or none of them. Returns the versions that they had, or 0."""
    key = changes[0].key.decode() if len(changes) == 1 else None
    return retry_after_sweep(publish, root, changes, deadline, key)


def _put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    began = perf_counter() if _logs(logging.DEBUG) else 0.0
    writers: list[SegmentWriter] = []
    changes: list[Change] = []
    for draft in drafts:
        if draft.content.nbytes >= _LARGE:
            change = Change(draft.key, draft.content, draft.expect, seals=draft.seals)
            check_mutable(change, root.catalog.read(draft.key))
    try:
        for draft in drafts:
            changes.append(write(root, draft, writers, deadline))
        # 4. Commit, 5. After the mutex
        versions = publish(root, changes, deadline)
    except BaseException as error:
        clean_up(root, writers, error)
        if len(changes) < len(drafts) and len(drafts) > 1 and isinstance(error, OSError) and is_full(error):
            raise _no_room_for_one(root, drafts, len(changes), error) from None
        raise
    close_published(root, writers)
    if began:
        _tell(root, drafts, writers, versions, began)
    return versions


def _tell(
    root: Root, drafts: Sequence[Draft], writers: Sequence[SegmentWriter], versions: Sequence[int], began: float
) -> None:
    """Debug lines of a put: one for each key, with the time of all."""
    left, took = iter(writers), (perf_counter() - began) * 1e3
    for draft, version in zip(drafts, versions, strict=True):
        where = "in the catalog"
        if draft.header is not None:
            writer = next(left)
            where = f"in {'a new file' if writer.is_new else 'a file that is used again'}, put {writer.put_id:#x}"
        key, nbytes = draft.key.decode(), draft.content.nbytes or len(draft.content.objects)
        log.debug("%s: put %r: version %d, %d bytes %s, %.3f ms", root.path, key, version, nbytes, where, took)


def write(root: Root, draft: Draft, writers: list[SegmentWriter], deadline: float) -> Change:
    """Steps 2 and 3 for one key. `writers` are those of the batch so far; it appends its own as soon as it has it."""
    header, content = draft.header, draft.content
    if header is None:
        return Change(draft.key, content, draft.expect, seals=draft.seals)
    assert draft.fill is not None, "a header, and nothing that fills its segment"

    # 2. Claim
    batch = writers[0].put_id if writers else 0
    writer = claim(root, draft.key, header.nbytes, content.nbytes, batch, deadline, exact=content.is_mutable)
    writers.append(writer)

    # 3. Fill
    writer.allocate(header, content.nbytes, root.guard, huge_pages=root.on_tmpfs)
    checksums = draft.fill(writer)
    segment = writer.seal(checksums, durable=root.settings.durable)
    if content.is_mutable:
        writer.unmap()  # it is written through another mapping, and never again by a put
    if len(writers) > _OPEN_FILES:
        park(root, writer, deadline)

    if checksums is not None:
        content = msgspec.structs.replace(content, checksums=checksums)
    return Change(draft.key, content, draft.expect, segments=(segment,), seals=draft.seals)


def fill(root: Root, drafts: Sequence[Draft], publish: Callable[[list[Change]], Result], deadline: float) -> Result:
    """Steps 2 and 3 for what is no put: `publish` makes the segments live, all of them, in a way of its own.

    Raises what `publish` raises, and then the segments are given back; StoreFullError, StoreTimeoutError, OSError.
    """
    writers: list[SegmentWriter] = []
    try:
        published = publish([write(root, draft, writers, deadline) for draft in drafts])
    except BaseException as error:
        clean_up(root, writers, error)
        raise
    close_published(root, writers)
    return published


def clean_up(root: Root, writers: Sequence[SegmentWriter], error: BaseException) -> None:
    """Gives back the rows and files of a batch that was not published, or keeps its one small file for the next put.

    What fails here is left to the next sweep.
    """
    if isinstance(error, StoreTimeoutError) and keep_file(root, writers):
        return
    try:
        if writers:
            abandon(root, writers, keep=isinstance(error, VersionConflictError))
    except (OSError, MemstoreError) as failure:
        log.warning("%s: files of a failed put are left to the next sweep: %s", root.path, str(failure))
    finally:
        for writer in writers:
            writer.close()


def close_published(root: Root, writers: Sequence[SegmentWriter]) -> None:
    """Closes the files that were published, and keeps the mappings that the next puts can use."""
    for writer in writers:
        spare = writer.spare()
        if spare is not None:
            with root.guard:
                root.spares.keep(writer.segment, spare)
        writer.close()


# --- no room ----------------------------------------------------------------------------------------------------------


def _no_room_for_one(root: Root, drafts: Sequence[Draft], failed: int, reason: OSError) -> OneOfMany:
    """For one of several drafts. What was claimed is given back by now, so none of it is seen in the store."""
    sizes = [
        0 if draft.header is None else size_of_new(root, draft.header.nbytes, draft.content.nbytes) for draft in drafts
    ]
    return one_of_many(reason, drafts[failed].key, sizes[failed], len(drafts), sum(sizes))


def retry_after_sweep(
    make: Callable[[Root, Argument, float], Result], root: Root, change: Argument, deadline: float, key: str | None
) -> Result:
    """Makes a change; if there is no room for it, once more after a sweep of the files that are kept for reuse.

    Args:
        key: what errors name, if the change is of a single key.

    Raises:
        StoreFullError: there is still no room.
        ResourceLimitError: the kernel refused memory, files or mappings.
    """
    try:
        return make(root, change, deadline)
    except (OSError, MemoryError) as error:  # nothing is entered before: a change that succeeds pays nothing
        if isinstance(error, MemoryError) or not is_full(error):
            with resource_errors(root.path, key, root):
                raise
    with resource_errors(root.path, key, root):
        sweep_all(root, deadline)  # it may find nothing, where another process has swept since: try again all the same
        return make(root, change, deadline)


# --- step 2: a file is claimed, or given back after an error ---------------------------------------------------------


CLEANUP_TIMEOUT = 0.5  # seconds to give claimed files back after an error; after that they are left to the next sweep
_GIVEN_BACK_A_HOLD = 16  # files in one hold of the mutex: they are open until it is over


def claim(
    root: Root, key: bytes, header: int, nbytes: int, batch: int, deadline: float, *, exact: bool = False
) -> SegmentWriter:
    """Claims a file for a header and data of these sizes. `batch` 0 starts a batch, which its first put id names.

    With `exact`, it is a new one of just this size: zeros, which nobody has to write.
    """
    if root.ahead is not None and not batch and not exact:
        kept = take_kept_file(root, header + nbytes)
        if kept is not None:
            return kept
    writer = root.mutex.run(lambda: _claim_locked(root, key, header, nbytes, batch, exact=exact), deadline)
    if not writer.is_whole:  # it is new: the others have the store's group already, and may be another user's
        give_to_group(writer.file.lock_file.fd, root.settings)
    return writer


def _claim_locked(root: Root, key: bytes, header: int, nbytes: int, batch: int, *, exact: bool) -> SegmentWriter:
    reuse = Reuse(header + nbytes)
    exact = exact or root.claims is not None  # on shared storage no file is used again

    def allot(transaction: Transaction) -> tuple[int, int, int]:
        counters = transaction.counters()
        if not exact and reuse.take(root, transaction, counters) and reuse.row is not None:
            size, _, segment = reuse.row
        else:
            size = size_of_new(root, header, nbytes, exact=exact)
            _check_capacity(root, counters, size)
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
        path = segment_path(root.segments, segment)
        if root.claims is not None:
            file = _create(root, path, segment)
            claimed = ClaimedOnStorage(path, file, root.segments_fd)
            return SharedStorageWriter(claimed, segment, put_id, size, is_new=True)
        is_new = reuse.file is None
        file = reuse.file or _create(root, path, segment)
        spare = None if is_new else root.spares.take(segment, size)
        claimed = ClaimedFile(path, file, root.segments_fd)
        return SegmentWriter(claimed, segment, put_id, size, is_new=is_new, spare=spare)


def size_of_new(root: Root, header: int, nbytes: int, *, exact: bool = False) -> int:
    """Of the file that `claim` makes where none is used again."""
    return header + (nbytes if exact or root.claims is not None else size_class(nbytes))


def park(root: Root, writer: SegmentWriter, deadline: float) -> None:
    """Gives back the memory of a sealed segment of a large batch, and closes its file where a mapping keeps locks."""
    writer.unmap()
    if not root.locks_need_files:
        root.mutex.run(lambda: writer.file.park(root.guard), deadline)


def _create(root: Root, path: str, segment: int) -> LockFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        if root.claims is not None:
            file = StorageFile(root.claims, segment, path, flags, root.settings.file_mode, root.segments_fd)
        else:
            file = LockFile(path, flags, root.settings.file_mode, root.segments_fd)
    except FileExistsError:
        root.catalog.update(lambda transaction: _drop(transaction, segment), is_delete=True)
        detail = "it is there already, and the catalog doesn't know it"
        raise CorruptionError(f"{path}: {detail}: move it away", path=path, detail=detail) from None
    if not file.lock():
        raise BlockingIOError(errno.EAGAIN, f"{path} is new, and locked")
    return file


def _check_capacity(root: Root, counters: Counters, size: int) -> None:
    if counters.capacity and counters.allocated + root.catalog.growth + size > counters.capacity:
        raise _over_capacity(size, counters.allocated + root.catalog.growth, counters.capacity)


def _over_capacity(size: int, taken: int, capacity: int) -> StoreFullError:
    """Made here, so that the frame which raises it has no name for it: the two would keep each other."""
    error = StoreFullError(
        f"it takes {wording.size(size)} more, and {wording.size(taken)} of {wording.size(capacity)} are taken"
    )
    error.needed = size
    return error


def _drop(transaction: Transaction, segment: int, *, keep: bool = False) -> None:
    """Drops the row of a segment that is not to be published; with `keep`, its file is retired instead."""
    row, counters = transaction.segment(segment), transaction.counters()
    transaction.delete_number("filling", segment)
    if row is not None:
        if keep:
            unclaim(transaction, counters, segment, row)
        else:
            counters.filling -= row.nbytes
            transaction.delete_segment(segment)
            transaction.delete_number("leases", segment)  # of what the file held before
        transaction.put_counters(counters)


def abandon(root: Root, writers: Sequence[SegmentWriter], *, keep: bool = False) -> None:
    """Gives claimed files back after an error, if they are still filling under our put ids.

    With `keep`, files that are wholly allocated are retired, to be used again: who loses a race of compare-and-swaps
    should not have to allocate the next file anew. All others are removed.
    """
    deadline = deadline_after(CLEANUP_TIMEOUT)
    for start in range(0, len(writers), _GIVEN_BACK_A_HOLD):
        unlinked: list[OwnedFile] = []
        action = functools.partial(_abandon, root, writers[start : start + _GIVEN_BACK_A_HOLD], unlinked, keep=keep)
        try:
            root.mutex.run(action, deadline)
        finally:
            close_unlinked(unlinked)


def _abandon(root: Root, writers: Sequence[SegmentWriter], unlinked: list[OwnedFile], *, keep: bool) -> None:
    with root.guard:
        ours = root.catalog.view(lambda transaction: [writer for writer in writers if _is_ours(transaction, writer)])
        kept = [writer for writer in ours if keep and writer.is_whole and root.claims is None]
        gone = [writer for writer in ours if writer not in kept]
        for writer in kept:
            writer.file.vacate()
        for writer in gone:  # before their rows: a row without a file is swept, a file without a row never
            with contextlib.suppress(OSError):  # the file is missing, or too many files are open
                unlinked.append(writer.file.open())
            remove_file(writer.file.path, root.segments_fd)
        if gone:
            root.sync_unlinked()
        if ours:
            root.catalog.update(functools.partial(_drop_all, kept=kept, gone=gone), is_delete=True)


def _is_ours(transaction: Transaction, writer: SegmentWriter) -> bool:
    row = transaction.segment(writer.segment)
    return row is not None and row.state == FILLING and row.put_id == writer.put_id


def _drop_all(transaction: Transaction, *, kept: Sequence[SegmentWriter], gone: Sequence[SegmentWriter]) -> None:
    for writer in kept:
        _drop(transaction, writer.segment, keep=True)
    for writer in gone:
        _drop(transaction, writer.segment)


# --- step 4, on the host that is the home of the keys ----------------------------------------------------------------


def publish(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """As `commit`. Raises CrossHostError, HomeUnavailableError, UnknownOutcomeError and StaleMembershipError too."""
    while True:
        membership = 0
        if root.membership:
            if len(changes) == 1:
                membership = root.homes_here.get(changes[0].key.partition(b"/")[0], 0)
            membership = membership or elsewhere_of(root).home_here([change.key for change in changes], deadline)
            if not membership:
                return elsewhere_of(root).commit(changes, deadline)
        try:
            return commit(root, changes, deadline, membership=membership)
        except MembershipChanged:
            elsewhere_of(root).take_in(deadline)


def publish_inline(root: Root, change: Change, deadline: float) -> int:
    """As `commit_inline`. Raises as `publish`."""
    while True:
        membership = 0
        if root.membership:
            membership = root.homes_here.get(change.key.partition(b"/")[0], 0)
            membership = membership or elsewhere_of(root).home_here((change.key,), deadline)
            if not membership:
                return elsewhere_of(root).commit([change], deadline)[0]
        try:
            return commit_inline(root, change, deadline, membership=membership)
        except MembershipChanged:
            elsewhere_of(root).take_in(deadline)


def check_one_home(root: Root, keys: Sequence[bytes]) -> None:
    """Before anything is done for a change of several keys. Raises CrossHostError."""
    if root.membership:
        elsewhere_of(root).home_here(keys)
