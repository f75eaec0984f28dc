"""Step 2 of a put, see `put.py`: claims a file for a segment, or gives it back after an error.

If the last commit of this process has kept a file for this put (`ahead.py`), it is taken without the mutex. Else, in
one hold of the mutex, one of these is claimed:
- a retired file of nearly the size that nobody locks or leases (`reuse.py`): it is locked, **its put id is erased**,
  and then its row is committed as filling under a new put id;
- a new file: its row is committed as filling, and then the file is created and locked.

A kill leaves a retired file without a put id, or a filling row with an unlocked file or none: others claim or sweep it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Sequence

from memstore import wording
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import (
    ClaimedFile,
    ClaimedOnStorage,
    LockFile,
    OwnedFile,
    SegmentWriter,
    StorageFile,
    StorageWriter,
    remove_file,
    segment_path,
)
from memstore.engine.format import FILLING
from memstore.engine.protocols import ahead
from memstore.engine.protocols.reuse import Reuse, begin_filling, size_class, unclaim
from memstore.engine.protocols.sweep import close_unlinked
from memstore.engine.root import Root, give_to_group
from memstore.engine.sync import deadline_after
from memstore.errors import CorruptionError, StoreFullError

CLEANUP_TIMEOUT = 0.5  # seconds to give claimed files back after an error; after that they are left to the next sweep
_GIVEN_BACK_A_HOLD = 16  # files in one hold of the mutex: they are open until it is over


def claim(
    root: Root, key: bytes, header: int, nbytes: int, batch: int, deadline: float, *, exact: bool = False
) -> SegmentWriter:
    """Claims a file for a header and data of these sizes. `batch` 0 starts a batch, which its first put id names.

    With `exact`, it is a new one of just this size: zeros, which nobody has to write.
    """
    if root.ahead is not None and not batch and not exact:
        kept = ahead.take(root, header + nbytes)
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
            return StorageWriter(claimed, segment, put_id, size, is_new=True)
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
        raise _no_room(size, counters.allocated + root.catalog.growth, counters.capacity)


def _no_room(size: int, taken: int, capacity: int) -> StoreFullError:
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
            root.catalog.update(functools.partial(_forget, kept=kept, gone=gone), is_delete=True)


def _is_ours(transaction: Transaction, writer: SegmentWriter) -> bool:
    row = transaction.segment(writer.segment)
    return row is not None and row.state == FILLING and row.put_id == writer.put_id


def _forget(transaction: Transaction, *, kept: Sequence[SegmentWriter], gone: Sequence[SegmentWriter]) -> None:
    for writer in kept:
        _drop(transaction, writer.segment, keep=True)
    for writer in gone:
        _drop(transaction, writer.segment)
