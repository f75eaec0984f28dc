"""Sweeps: which retired segments are kept to be used again, and which are given back; and room for changes.

How many bytes of retired files may stay is limited (`root.storage.limit`): by what is live or twice the largest batch
lately put, and by a tenth of the free space; but as many bytes as the largest recent batch may always stay. On storage
that hosts share none may, and all are leased for a while. Later sweeps look again at a file that is *held*, by a lock
or a lease. Files that dead writers were filling are given back too.

Copies of values of other hosts are given up when there is no room, and by `gc` (`drop_copies`). They are fetched, and
named in the table `copies`, by memstore/distributed/transfers.

All of it runs under the store's mutex, on rows that the catalog names: no folder is ever listed.

`make_room_and_retry` makes a change, and where there is no room for it, makes room: it sweeps, moves values to the
spill folder, and takes out replaced versions that are kept. `clean_up` gives back rows and files of a put that failed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from memstore._telling import tell
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import SegmentWriter, erase_put_id, remove_file, segment_path
from memstore.engine.format.records import FILLING, LIVE, RETIRED, SegmentRow
from memstore.engine.protocols.attempts import end_expired, end_expired_locked
from memstore.engine.protocols.history import drop_oldest, end_dead_pins
from memstore.engine.protocols.recovery import check_put_is_known, mark_retired
from memstore.engine.protocols.reuse import (
    claim_retired,
    give_back_next_file,
    is_filling,
    is_leased,
    keep_file,
    retire,
    retire_row,
    set_aside,
    unclaim,
)
from memstore.engine.protocols.spill import clear_away, make_room, remove_moved
from memstore.engine.root.roots import Root
from memstore.engine.root.storage import RetiredRow
from memstore.engine.sync.primitives import boot_clock, deadline_after
from memstore.engine.usage import VERSIONS_WENT, is_full, resource_errors
from memstore.errors import (
    CorruptionError,
    MemstoreError,
    QuotaExceededError,
    StoreFullError,
    StoreTimeoutError,
    VersionConflictError,
)

log = logging.getLogger("memstore")

_SWEPT_A_HOLD = 16  # files of each kind: they are open until the hold is over
_HELD_A_SWEEP = 16  # files that a put looks at again; 8 us each
_LOOK_FOR_DEAD = 1.0  # seconds between two looks of a process for dead writers, at filling rows


def needs_sweep(root: Root, counters: Counters) -> bool:
    """Returns whether a commit should be followed by a sweep."""
    storage, looks, now = root.storage, root.sweeps, time.monotonic()
    is_over = counters.retired > 0 and counters.retired > storage.limit(counters)
    if is_over and now > looks.looked_at_held + storage.sweep_every:
        return True
    if counters.held > 0 and now > looks.looked_at_held + storage.look_every:
        return True
    ours = root.next_put.file.size if root.next_put.file is not None else 0
    return counters.filling > ours and now > looks.looked_for_dead + _LOOK_FOR_DEAD


def _may_look_for_dead(root: Root, counters: Counters) -> bool:
    ours = root.next_put.file.size if root.next_put.file is not None else 0
    return counters.filling > ours and time.monotonic() > root.sweeps.looked_for_dead + _LOOK_FOR_DEAD


def sweep_all(root: Root, deadline: float, *, keep: int | None = 0) -> int:
    """Looks at everything once, this process's file for its next put and dead readers too. As `sweep` otherwise.

    With `keep` 0, copies of what lies on other hosts go too.
    """
    root.mutex.run(_give_up_what_is_kept, deadline, root)
    if keep == 0:
        drop_copies(root, deadline)
    end_expired(root, deadline)
    end_dead_pins(root, deadline)
    clear_away(root, deadline)
    tables = ("retired", "held", "filling")
    rows = root.catalog.view(lambda transaction: sum(map(transaction.count, tables)))
    root.sweeps.looked_for_dead, root.sweeps.last_filling = 0.0, 0
    return sweep_some(root, rows + 1, deadline, keep=keep)


def _give_up_what_is_kept(root: Root) -> None:
    give_back_next_file(root)
    root.catalog.forget_dead_readers()


def sweep_if_due(root: Root, deadline: float) -> None:
    """Sweeps now and then, where a sweep comes due by time: nobody may put for long."""
    if root.storage.sweep_every and needs_sweep(root, root.catalog.view(Transaction.counters)):
        sweep_some(root, _SWEPT_A_HOLD, deadline)


def sweep_some(root: Root, files: int, deadline: float, *, keep: int | None = None) -> int:
    """Sweeps in several holds: others publish in between, and few files are open at once. `keep` as in `sweep`."""
    freed, began = 0, time.perf_counter()
    for left in range(files, 0, -_SWEPT_A_HOLD):
        unlinked: list[OwnedFile] = []
        try:
            freed += root.mutex.run(sweep, deadline, root, unlinked, files=min(left, _SWEPT_A_HOLD), keep=keep)
        finally:  # after an error too: no later sweep would find what is unlinked already
            close_unlinked(unlinked)
    if freed:
        took = (time.perf_counter() - began) * 1e3
        tell("sweep", root.path, (), freed, began)
        log.debug("%s: swept %d bytes of files that nobody holds, %.3f ms", root.path, freed, took)
    return freed


def close_unlinked(files: Iterable[OwnedFile]) -> None:
    """Frees the blocks of files that nobody can open any more: they may be mapped, for their writer's next put."""
    for file in files:
        try:
            if syscalls.status(file.fd).st_nlink == 0:
                syscalls.free_blocks(file.fd, syscalls.size_of(file.fd))
        except OSError as error:  # a file system without holes
            log.debug("an unlinked file keeps its blocks until it is unmapped: %s", str(error))
        file.close()


class _Sweep(NamedTuple):
    """Rows that one hold looks at."""

    surplus: list[RetiredRow]
    held: list[RetiredRow]
    dead: list[int]


def sweep(root: Root, unlinked: list[OwnedFile], *, files: int, keep: int | None = None) -> int:
    """Unlinks retired files beyond what may stay (`keep` bytes; None: the limit), and what dead writers left.

    It looks at up to `files` of each kind, and returns the bytes that it gave back. Files are unlinked before their
    rows go, and if the store is durable, that is synced: a kill in between leaves rows without files, which the next
    sweep takes as done. Their blocks are freed by the caller, after the mutex: 512 MiB of small pages take 70 ms.
    """
    files = max(files, root.storage.swept_at_least)
    if _may_look_for_dead(root, root.catalog.view(Transaction.counters)):
        for bell in end_expired_locked(root):
            root.doorbell.wake(bell)
    chosen = root.catalog.view(lambda transaction: _choose(root, transaction, files, keep))
    if not any(chosen):
        return 0
    action = functools.partial(_give_back, root, chosen=chosen, unlinked=unlinked, keep=keep)
    return root.catalog.update(action, is_delete=True)


def _choose(root: Root, transaction: Transaction, files: int, keep: int | None) -> _Sweep:
    counters = transaction.counters()
    over = counters.retired - (root.storage.limit(counters) if keep is None else keep)
    surplus: list[RetiredRow] = []
    if over > 0:
        for row in transaction.oldest_retired(files):
            if over <= 0:
                break
            surplus.append(RetiredRow(*row))
            over -= row[0]
    held: list[RetiredRow] = []
    if keep == 0 or (counters.held > 0 and time.monotonic() > root.sweeps.looked_at_held + root.storage.look_every):
        count = files if keep == 0 else max(_HELD_A_SWEEP, root.storage.swept_at_least)
        held = [RetiredRow(0, *row) for row in transaction.numbers("held", count)]
        root.sweeps.looked_at_held = time.monotonic()
    dead: list[int] = []
    if _may_look_for_dead(root, counters):
        dead = [segment for segment, _ in transaction.numbers("filling", files, root.sweeps.last_filling)]
        root.sweeps.last_filling = dead[-1] if len(dead) == files else 0
        root.sweeps.looked_for_dead = time.monotonic() if root.sweeps.last_filling == 0 else root.sweeps.looked_for_dead
    return _Sweep(surplus, held, dead)


def _give_back(
    root: Root, transaction: Transaction, chosen: _Sweep, unlinked: list[OwnedFile], keep: int | None
) -> int:
    counters, freed, now = transaction.counters(), 0, boot_clock()
    rows = transaction.count("segments")
    before = msgspec.structs.astuple(counters)
    rotate = transaction.count("held") > len(chosen.held)  # else the next look sees them all again
    for row in chosen.surplus:
        if not _unlink(root, transaction, counters, row.segment, RETIRED, unlinked, now):
            set_aside(transaction, counters, row)
            continue
        transaction.delete_retired(row.size, row.sequence)
        counters.retired -= row.size
        freed += row.size
    held, stays = counters.held, keep != 0 and bool(chosen.held) and root.storage.limit(counters) > 0
    for row in chosen.held:
        freed += _look_again(root, transaction, counters, row, unlinked, now, stays=stays, rotate=rotate)
    if counters.held < held:  # somebody let go, maybe of more: the next put looks on
        root.sweeps.looked_at_held = 0.0
    for segment in chosen.dead:
        found = transaction.segment(segment)
        if _unlink(root, transaction, counters, segment, FILLING, unlinked, now):
            transaction.delete_number("filling", segment)
            size = found.nbytes if found else 0
            counters.filling -= size
            freed += size
    if msgspec.structs.astuple(counters) != before:  # a look that changed nothing writes nothing: on a disk, no sync
        transaction.put_counters(counters)
    if transaction.count("segments") < rows:  # also of a file that was missing: who unlinked it may not have synced
        root.sync_unlinked()
    return freed


def _look_again(
    root: Root,
    transaction: Transaction,
    counters: Counters,
    row: RetiredRow,
    unlinked: list[OwnedFile],
    now: int,
    *,
    stays: bool,
    rotate: bool,
) -> int:
    """Unlinks a held file that nobody holds any more, or with `stays` retires it. Returns the bytes that it gave back.

    With `rotate`, a file that is still held goes behind the others.
    """
    found = transaction.segment(row.segment)
    size = found.nbytes if found else 0
    if not stays or not _is_usable(root, row.segment, size):
        if _unlink(root, transaction, counters, row.segment, RETIRED, unlinked, now):
            transaction.delete_number("held", row.sequence)
            counters.held -= size
            return size
    elif not is_leased(transaction, row.segment, now) and claim_retired(root, transaction, row.segment):
        transaction.delete_number("held", row.sequence)
        counters.held -= size
        retire(transaction, counters, row.segment, size)
        return 0
    if rotate:
        transaction.delete_number("held", row.sequence)
        counters.sequence += 1
        transaction.put_number("held", counters.sequence, row.segment)
    return 0


def _is_usable(root: Root, segment: int, size: int) -> bool:
    """Returns False if a sweep that died before its commit has unlinked it, or it was cut: no claim would take it."""
    try:
        name = os.path.basename(segment_path(root.segments, segment))
        found = os.stat(name, dir_fd=root.segments_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return size > 0 and found.st_size == size


def _unlink(
    root: Root,
    transaction: Transaction,
    counters: Counters,
    segment: int,
    state: int,
    unlinked: list[OwnedFile],
    now: int,
) -> bool:
    """Unlinks a file that nobody locks or leases, and drops its row. True also where file or row is missing."""
    row = transaction.segment(segment)
    if row is not None:
        if row.state != state:  # a damaged table names the file, which may be live: it is not touched
            return True
        if is_leased(transaction, segment, now):
            return False
        if tables.spilled_size(transaction, segment) is not None and not remove_moved(root, transaction, segment):
            return False
        try:
            file = root.storage.claim(segment)
        except FileNotFoundError:
            file = None
        else:
            if file is None:
                return False
            fd = file.lock_file.fd
            check_put_is_known(root, fd, segment, row.put_id, counters)
            if state == RETIRED:  # a reader may have opened it, to lock it when we are done: it must not know it then
                erase_put_id(fd)
        removed = root.storage.unlink(segment, file)
        if removed is not None:
            unlinked.append(removed)
        transaction.delete_segment(segment)
    transaction.delete_number("leases", segment)
    return True


# --- copies of values of other hosts ---------------------------------------------------------------------------------


_DROPPED_A_HOLD = 64


def drop_copies(root: Root, deadline: float) -> None:
    """Retires the files of all copies; who has one mapped keeps it."""
    while root.catalog.is_served and root.catalog.view(lambda transaction: transaction.count(tables.COPIES)):
        root.mutex.run(_drop_some, deadline, root)


def _drop_some(root: Root) -> None:
    with root.guard:
        retired, counters = root.catalog.update(_forget_some, is_delete=True)
    mark_retired(root, retired)
    root.mutex.notes.publications_rung = counters.publications


def _forget_some(transaction: Transaction) -> tuple[list[int], Counters]:
    counters, retired = transaction.counters(), list[int]()
    for key, stored in transaction.rows_with(tables.COPIES, b"", _DROPPED_A_HOLD):
        for segment, row in _rows_of(transaction, key, stored):
            retire_row(transaction, counters, segment, row)
            retired.append(segment)
        transaction.delete_row(tables.COPIES, key)
    counters.publications += 1
    transaction.put_counters(counters)
    return retired, counters


def _rows_of(transaction: Transaction, key: bytes, stored: bytes) -> list[tuple[int, SegmentRow]]:
    """Returns the segments of a copy. Where the row is damaged that says which, they stay until a repair."""
    try:
        rows = [
            (segment, put_id, transaction.segment(segment))
            for segment, put_id in tables.read_kept(tables.COPIES, key, stored).segments
        ]
    except CorruptionError as error:
        log.warning("the copy of %r can't be dropped, and keeps its bytes until a repair: %s", key, str(error))
        return []
    return [
        (segment, row) for segment, put_id, row in rows if row is not None and (row.put_id, row.state) == (put_id, LIVE)
    ]


# --- Room for changes ------------------------------------------------------------------------------------------------


Argument = TypeVar("Argument")
Result = TypeVar("Result")


def make_room_and_retry(
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
    errors = resource_errors(root.path, key, root)
    with errors:
        while True:
            try:
                return make(root, change, deadline)
            except QuotaExceededError as error:
                if not _drop_for_quota(root, error, deadline):
                    raise
            except OSError as error:
                if not is_full(error) or not _find_room(root, error, errors, deadline):
                    raise


def _drop_for_quota(root: Root, error: QuotaExceededError, deadline: float) -> bool:
    """Takes out kept versions of keys of a quota. Returns whether some went."""
    return drop_oldest(root, error.used + error.requested - error.quota, deadline, error.prefix.encode())


def _find_room(root: Root, error: OSError, errors: resource_errors, deadline: float) -> bool:
    """Moves values to the spill folder, or takes out replaced versions that are kept. Returns whether some went."""
    needed = (error.needed if isinstance(error, StoreFullError) else None) or 0
    if make_room(root, needed, deadline):
        return True
    if not drop_oldest(root, needed, deadline):
        return False
    errors.outcome = VERSIONS_WENT  # on a full disk nobody can tell beforehand whether that will be enough
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
