"""Sweeps: which retired segments are kept to be used again, and which are given back.

How many bytes of retired files may stay is limited (`root.storage.limit`): by what is live or twice the largest batch
lately put, and by a tenth of the free space; but as many bytes as the largest recent batch may always stay. On storage
that hosts share none may, and all are leased for a while. Later sweeps look again at a file that is *held*, by a lock
or a lease. Files that dead writers were filling are given back too.

Copies of values of other hosts are given up when there is no room, and by `gc` (`drop_copies`). They are fetched, and
named in the table `copies`, by memstore/distributed/transfers.

All of it runs under the store's mutex, on rows that the catalog names: no folder is ever listed.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from memstore._telling import tell
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import erase_put_id, segment_path
from memstore.engine.format.records import FILLING, LIVE, RETIRED, SegmentRow
from memstore.engine.protocols.attempts import end_expired, end_expired_locked
from memstore.engine.protocols.history import end_dead_pins
from memstore.engine.protocols.recovery import check_put_is_known, mark_retired
from memstore.engine.protocols.reuse import (
    claim_retired,
    give_back_kept_file,
    is_leased,
    retire,
    retire_row,
    set_aside,
)
from memstore.engine.protocols.spill import clear_away, remove_moved
from memstore.engine.root.roots import Root
from memstore.engine.root.storage import RetiredRow
from memstore.engine.sync.primitives import boot_clock
from memstore.errors import CorruptionError

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


def _may_look_at_held(root: Root, counters: Counters) -> bool:
    return counters.held > 0 and time.monotonic() > root.sweeps.looked_at_held + root.storage.look_every


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
    give_back_kept_file(root)
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
    if keep == 0 or _may_look_at_held(root, counters):
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
