"""Room for changes: a change that found none is made again, and what a failed put has claimed is given back.

`retry_after_sweep` makes a change, and where there is no room for it, makes room: it sweeps, moves values to the spill
folder, and takes out replaced versions that are kept. `clean_up` gives back rows and files of a put that failed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import SegmentWriter, remove_file
from memstore.engine.protocols.history import drop_oldest
from memstore.engine.protocols.reuse import is_filling, keep_file, unclaim
from memstore.engine.protocols.spill import make_room
from memstore.engine.protocols.sweep import close_unlinked, sweep_all
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.engine.usage import is_full, resource_errors
from memstore.errors import MemstoreError, QuotaExceededError, StoreFullError, StoreTimeoutError, VersionConflictError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

log = logging.getLogger("memstore")


def retry_after_sweep(
    make: Callable[[Root, Argument, float], Result], root: Root, change: Argument, deadline: float, key: str | None
) -> Result:
    """Makes a change; if there is no room for it, once more after a sweep of the files that are kept for reuse.

    If there is still none, values move to the spill folder, where the store has one; and then, if versions are kept
    that were replaced, the oldest of these go, some at a time.

    Args:
        key: what errors name, if the change is of a single key.

    Raises:
        StoreFullError: there is still no room.
        ResourceLimitError: the kernel refused memory, files or mappings.
    """
    try:
        return make(root, change, deadline)
    except QuotaExceededError as error:
        if not _drop_for_quota(root, error, deadline):
            raise
    except (OSError, MemoryError) as error:  # nothing is entered before: a change that succeeds pays nothing
        with resource_errors(root.path, key, root):
            if isinstance(error, MemoryError) or not is_full(error):
                raise
            sweep_all(root, deadline)  # it may find nothing, where another has swept since: try again all the same
    with resource_errors(root.path, key, root):
        while True:
            try:
                return make(root, change, deadline)
            except QuotaExceededError as error:
                if not _drop_for_quota(root, error, deadline):
                    raise
            except OSError as error:
                if not is_full(error) or not _find_room(root, error, deadline):
                    raise


def _drop_for_quota(root: Root, error: QuotaExceededError, deadline: float) -> bool:
    """Takes out kept versions of keys of a quota. Returns whether some went."""
    return drop_oldest(root, error.used + error.requested - error.quota, deadline, error.prefix.encode())


def _find_room(root: Root, error: OSError, deadline: float) -> bool:
    """Moves values to the spill folder, or takes out replaced versions that are kept. Returns whether some went."""
    needed = (error.needed if isinstance(error, StoreFullError) else None) or 0
    if make_room(root, needed, deadline):
        return True
    if not drop_oldest(root, needed, deadline):
        return False
    sweep_all(root, deadline)
    return True


# --- what a failed put has claimed -----------------------------------------------------------------------------------


CLEANUP_TIMEOUT = 0.5  # seconds to give claimed files back after an error; after that they are left to the next sweep
_GIVEN_BACK_A_HOLD = 16  # files in one hold of the mutex: they are open until it is over


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


def abandon(root: Root, writers: Sequence[SegmentWriter], *, keep: bool = False) -> None:
    """Gives claimed files back after an error, if they are still filling under our put ids.

    With `keep`, files that are wholly allocated are retired, to be used again: who loses a race of compare-and-swaps
    should not have to allocate the next file anew. All others are removed.
    """
    deadline = deadline_after(CLEANUP_TIMEOUT)
    for start in range(0, len(writers), _GIVEN_BACK_A_HOLD):
        unlinked: list[OwnedFile] = []
        some = writers[start : start + _GIVEN_BACK_A_HOLD]
        try:
            root.mutex.run(_abandon, deadline, root, some, unlinked, keep=keep)
        finally:
            close_unlinked(unlinked)


def _abandon(root: Root, writers: Sequence[SegmentWriter], unlinked: list[OwnedFile], *, keep: bool) -> None:
    with root.guard:
        ours = root.catalog.view(lambda transaction: [writer for writer in writers if is_filling(transaction, writer)])
        kept = [writer for writer in ours if keep and writer.is_reusable]
        gone = [writer for writer in ours if writer not in kept]

        def drop(transaction: Transaction) -> None:
            for writer in ours:
                drop_segment(transaction, writer.segment, keep=writer in kept)

        for writer in kept:
            writer.file.vacate()
        for writer in gone:  # before their rows: a row without a file is swept, a file without a row never
            with contextlib.suppress(OSError):  # the file is missing, or too many files are open
                unlinked.append(writer.file.open())
            remove_file(writer.file.path, root.segments_fd)
        if gone:
            root.sync_unlinked()
        if ours:
            root.catalog.update(drop, is_delete=True)


def drop_segment(transaction: Transaction, segment: int, *, keep: bool = False) -> None:
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
