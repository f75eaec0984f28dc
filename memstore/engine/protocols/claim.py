"""Step 2 of a put, see `commit.py`: a file is claimed, to be filled, and given back after an error.

Where the put before has kept one (`ahead.py`), it is claimed already: a kill leaves it to the sweep, as any other.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import Filling, LockFile, OwnedFile, remove_file, segment_path
from memstore.engine.format import FILLING, SegmentRow
from memstore.engine.protocols import ahead
from memstore.engine.protocols.reuse import Reuse, size_class, unclaim
from memstore.engine.protocols.sweep import close_unlinked
from memstore.engine.root import Root, give_to_group
from memstore.engine.sync import deadline_after
from memstore.errors import CorruptionError, StoreFullError

_GIVEN_BACK_A_HOLD = 16  # files: they are open until the hold is over
CLEANUP_TIMEOUT = 5.0  # seconds to give a claimed file back after an error; else the next sweep does


def claim(root: Root, key: bytes, header: int, nbytes: int, batch: int, deadline: float) -> Filling:
    """Step 2: a file for a header and data of these sizes. `batch` 0 starts a batch, named by the put id."""
    if root.ahead is not None and not batch:
        kept = ahead.take(root, header + nbytes)
        if kept is not None:
            return kept
    found = root.mutex.run(lambda: _claim_locked(root, key, header, nbytes, batch), deadline)
    if not found.is_whole:  # new; others are of the store already, and maybe another user's
        give_to_group(found.fd, root.settings)
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
    """Between steps 3 and 4, for what is too many to be kept open; or mapped, where all have to stay open."""
    if root.locks_need_files:
        filling.unmap()
    else:
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
        if keep:
            unclaim(transaction, counters, segment, row)
        else:
            counters.filling -= row.nbytes
            transaction.delete_segment(segment)
            transaction.delete_number("leases", segment)  # of what the file held before
        transaction.put_counters(counters)


def abandon(root: Root, fillings: Sequence[Filling], *, keep: bool = False) -> None:
    """Gives claimed files back after an error, if they are still filling under our put ids.

    With `keep`, those that are allocated wholly may be used again: a lost race of compare-and-swaps costs no file.
    """
    deadline = deadline_after(CLEANUP_TIMEOUT)
    for start in range(0, len(fillings), _GIVEN_BACK_A_HOLD):
        unlinked: list[OwnedFile] = []
        action = functools.partial(_abandon, root, fillings[start : start + _GIVEN_BACK_A_HOLD], unlinked, keep=keep)
        try:
            root.mutex.run(action, deadline)
        finally:
            close_unlinked(unlinked)


def _abandon(root: Root, fillings: Sequence[Filling], unlinked: list[OwnedFile], *, keep: bool) -> None:
    with root.guard:
        ours = root.catalog.view(lambda transaction: [f for f in fillings if _is_ours(transaction, f)])
        kept = [filling for filling in ours if keep and filling.is_whole]
        gone = [filling for filling in ours if filling not in kept]
        for filling in kept:
            filling.go_back()
        for filling in gone:  # before their rows: a row without a file is swept, a file without a row never
            with contextlib.suppress(OSError):  # it is missing, or too many are open
                unlinked.append(filling.open_file())
            remove_file(filling.path, root.segments_fd)
        if gone:
            root.sync_unlinked()
        if ours:
            root.catalog.update(functools.partial(_forget, kept=kept, gone=gone), is_delete=True)


def _is_ours(transaction: Transaction, filling: Filling) -> bool:
    row = transaction.segment(filling.segment)
    return row is not None and row.state == FILLING and row.put_id == filling.put_id


def _forget(transaction: Transaction, *, kept: Sequence[Filling], gone: Sequence[Filling]) -> None:
    for filling in kept:
        _drop(transaction, filling.segment, keep=True)
    for filling in gone:
        _drop(transaction, filling.segment)
