"""What the living do for the dead: finish or undo a change whose owner died, and give back files that nobody holds.

All of it runs under the store's mutex, on rows that the catalog names: no folder is ever listed.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from memstore.engine import syscalls
from memstore.engine.catalog import Transaction
from memstore.engine.lockfile import LockFile, OwnedFile
from memstore.engine.record import FILLING, RETIRED
from memstore.engine.segment import remove_file, segment_path, write_state

if TYPE_CHECKING:
    from memstore.engine.root import Root

log = logging.getLogger("memstore")

_SWEPT_A_HOLD = 16  # files retired, and as many filling: each is open until the hold is over
_Row = tuple[int, int]  # of `retired`: sequence and segment; of `filling`: 0 and segment


def after_death(root: Root) -> None:
    """Runs before anything else of the mutex's next owner, when the last one died or raised in the middle.

    1. A batch noted as being published: the catalog did not commit what its `filling` rows still name, so those
       headers go back to filling. (What it did commit is live, and its headers say so.)
    2. The ring sequence behind the catalog's publications: it committed and rang nobody; all are woken.
    """
    page = root.mutex
    if page.is_new:  # leases tell time by the clock of another boot
        with root.guard:
            root.catalog.update(lambda transaction: transaction.clear("leases"), is_delete=True)
    with root.guard:
        # Not `view`: after a kill between LMDB's commit and the word that tells readers of it, they see the past until
        # the next write transaction begins; and a sweep by the past would unlink what is live.
        filling, counters = root.catalog.update(
            lambda transaction: (transaction.numbers("filling", 1 << 20), transaction.counters()), is_delete=True
        )
    if page.batch:
        for segment, batch in filling:
            if batch == page.batch:
                _mark_filling(root, segment)
        page.batch = 0
    if page.ring != counters.publications:
        root.doorbell.ring_all()
        page.ring = counters.publications
    log.debug("%s: recovered after a process died or failed while it changed the store", root.path)


def _mark_filling(root: Root, segment: int) -> None:
    try:
        file = OwnedFile(segment_path(root.segments, segment), os.O_RDWR, dir_fd=root.segments_fd)
    except (FileNotFoundError, PermissionError):  # another user's, killed before it got the store's group: not live
        return
    write_state(file.fd, FILLING)
    file.close()


def sweep_all(root: Root, deadline: float) -> int:
    """Sweeps every retired and filling file once. Returns the bytes."""
    with root.guard:
        rows = root.catalog.view(lambda transaction: sum(map(transaction.count, ("retired", "filling"))))
    return sweep_some(root, rows + 1, deadline)


def sweep_some(root: Root, count: int, deadline: float) -> int:
    """Sweeps `count` files, some at a hold: others publish in between. Returns the bytes."""
    freed = after = 0
    for left in range(count, 0, -_SWEPT_A_HOLD):
        unlinked: list[LockFile] = []
        action = functools.partial(sweep, root, unlinked, limit=min(left, _SWEPT_A_HOLD), after=after)
        nbytes, after = root.mutex.run(action, deadline)
        freed += nbytes
    return freed


def sweep(root: Root, unlinked: list[LockFile], *, limit: int, after: int = 0) -> tuple[int, int]:
    """Unlinks up to `limit` retired files, and as many filling ones, that nobody locks or leases.

    Filling ones are looked at beyond segment `after`. Returns the bytes, and the last of them that was looked at:
    those in front may be live writers', or other users'.

    The files are unlinked before their rows go: a kill in between leaves rows without files, which the next sweep
    takes as done. Their blocks are freed when `unlinked` is dropped, which the caller does after the mutex: freeing
    512 MiB takes 1 ms of huge pages, and 70 ms of small ones.
    """

    def candidates(transaction: Transaction) -> tuple[list[_Row], list[_Row]]:
        retired = transaction.numbers("retired", limit)
        filling = [(0, segment) for segment, _ in transaction.numbers("filling", limit, after + 1)]
        now = boot_clock()
        leased = [row for row in retired if (transaction.number("leases", row[1]) or 0) > now]
        return [row for row in (*retired, *filling) if row not in leased], leased

    with root.guard:
        rows, refused = root.catalog.view(candidates)
    last = max((segment for sequence, segment in rows if not sequence), default=after)
    gone: list[_Row] = []
    for row in rows:
        if _take(root, row, unlinked):
            remove_file(segment_path(root.segments, row[1]), root.segments_fd)
            gone.append(row)
        elif row[0]:
            refused.append(row)
    if not gone and len(refused) < limit:
        return 0, last
    with root.guard:
        return root.catalog.update(lambda transaction: _forget(transaction, gone, refused), is_delete=True), last


def _take(root: Root, row: _Row, taken: list[LockFile]) -> bool:
    """Locks the file for good if nobody else does; a missing file counts as taken. A refused one is marked retired."""
    sequence, segment = row
    try:
        with root.guard:
            file = LockFile(segment_path(root.segments, segment), os.O_RDWR, dir_fd=root.segments_fd)
    except FileNotFoundError:
        return True
    except PermissionError:  # another user's, killed before it got the store's group: theirs to sweep
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):  # planted: a link is unlinked, what it names is not touched
            return True
        raise
    if syscalls.lock_exclusive(file.fd):
        taken.append(file)
        return True
    if sequence:
        write_state(file.fd, RETIRED)
    return False


def _forget(transaction: Transaction, gone: list[_Row], refused: list[_Row]) -> int:
    """Deletes the rows of files that are gone, and puts those that were refused behind the others."""
    nbytes = 0
    for sequence, segment in gone:
        row = transaction.segment(segment)
        nbytes += row.nbytes if row else 0
        transaction.delete_segment(segment)
        transaction.delete_number("leases", segment)
        transaction.delete_number(*(("retired", sequence) if sequence else ("filling", segment)))
    counters = transaction.counters()
    for count, (sequence, segment) in enumerate(refused, 1):
        transaction.delete_number("retired", sequence)
        transaction.put_number("retired", counters.retired + count, segment)
    transaction.put_counters(replace(counters, retired=counters.retired + len(refused)))
    return nbytes


def boot_clock() -> int:
    """Nanoseconds since boot, suspend included: leases are compared across processes."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
