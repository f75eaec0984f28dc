"""Crash recovery, run by the mutex's next owner: it finishes or undoes a change whose owner died in the middle of it.

All of it runs under the store's mutex. Files that the dead owner locked are given back by the sweep, see `sweep.py`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction, attempts
from memstore.engine.files import OwnedFile, segment_path, write_state
from memstore.engine.format import (
    FILLING,
    HEAD_SIZE,
    LIVE,
    RETIRED,
    SegmentRow,
    Slots,
    header_size,
    is_mutable,
    may_be_mutable,
    read_header,
    read_slots,
)
from memstore.engine.protocols.attempt_ends import forget_other_boots
from memstore.engine.protocols.reuse import unclaim
from memstore.engine.protocols.rollback import ALL, check_headers, compare_publications
from memstore.engine.root import Root
from memstore.engine.sync import GONE_AT
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")

_MOST = 1 << 20  # rows


def after_death(root: Root) -> None:
    """Runs before anything else of the mutex's next owner, where the last one died or failed, or there was none.

    0. A catalog that was rolled back is refused, before any file is taken for that of a dead writer.
    1. A commit may have booked a file for the next put without locking it (`ahead.py`): the row says filling, and the
       file says live under an older put. The file is retired, as all else that was replaced.
    2. A batch may be noted as being published. The catalog did not commit what its `filling` and `pending` rows still
       name, so those headers go back to filling. (What it did commit is live, and the headers say so.)
    3. Fewer publications may have rung the doorbell than the catalog has committed: the owner committed, and maybe did
       nothing more. Headers of what was replaced are marked retired, and all waiters are woken.
    """
    page = root.mutex
    if page.is_new:  # it may have been written before the catalog was
        check_headers(root, ALL)

    def read(transaction: Transaction) -> tuple[list[tuple[int, int]], list[int], Counters]:
        counters = transaction.counters()
        compare_publications(root, page.publications_rung, counters)
        if page.is_new:  # leases tell time by the clock of another boot
            transaction.clear("leases")
            if forget_other_boots(transaction, counters):
                counters.publications += 1  # so that their headers are marked retired
                transaction.put_counters(counters)
        behind = page.publications_rung != counters.publications
        if behind:
            _unbook(root, transaction, counters)
        retired = [segment for *_, segment in transaction.retired(0, _MOST << 40, _MOST)] if behind else []
        filling = transaction.numbers("filling", _MOST)
        if page.batch or page.is_new:  # a new page has lost the note
            parts = [part for part in attempts.parts_of(transaction) if not part.host]
            filling += [(part.segment, page.batch) for part in parts if part.segment]
        return filling, retired, counters

    # Not `view`: after a kill between LMDB's commit and the word that tells readers of it, they see the past until
    # the next write transaction begins; and a sweep by the past would unlink what is live.
    filling, retired, counters = root.catalog.update(read, is_delete=True)
    if page.batch or page.is_new:
        for segment, batch in filling:
            if batch == page.batch:
                _mark(root, segment, FILLING)
        page.batch = 0
    if page.publications_rung != counters.publications:
        mark_gone(root, retired)
        root.doorbell.ring_all()
        page.publications_rung = counters.publications
    if page.has_died:
        log.debug("%s: recovered after a process died while it held the store's mutex", root.path)
    elif not page.is_new:  # nobody has changed anything under a new one
        log.debug("%s: recovered after a call failed while it held the store's mutex", root.path)


def _unbook(root: Root, transaction: Transaction, counters: Counters) -> None:
    booked = False
    for segment, _ in transaction.numbers("filling", _MOST):
        row, found = transaction.segment(segment), _slots(root, segment)
        if row is None or row.state != FILLING or found is None or found.state != LIVE:
            continue
        if found.put_id not in (0, row.put_id) and found.version <= counters.version:
            unclaim(transaction, counters, segment, SegmentRow(row.key, found.put_id, RETIRED, row.nbytes))
            booked = True
    if booked:
        transaction.put_counters(counters)


def _slots(root: Root, segment: int) -> Slots | None:
    try:
        file = OwnedFile(segment_path(root.segments, segment), os.O_RDONLY, dir_fd=root.segments_fd)
        return read_slots(syscalls.read_at(file.fd, HEAD_SIZE, 0), root.settings.store)
    except OSError:  # missing, another user's, or planted
        return None


def mark_retired(root: Root, segments: Iterable[int]) -> None:
    """Headers of replaced and deleted puts say so, for a repair. Under the mutex, right after the commit."""
    for segment in segments:
        try:
            _mark(root, segment, RETIRED)
        except OSError as error:  # the commit stands
            log.info("%s: a header could not be marked retired: %s", root.path, str(error))


def mark_gone(root: Root, segments: Iterable[int]) -> None:
    """As `mark_retired`, of files that may be those of mutable entries, which say so to who has them open too.

    (One that was sealed before its sealer died is called gone too: both say that nobody writes there any more.)
    """
    for segment in segments:
        try:
            file = _open_to_mark(root, segment)
            if file is not None:
                write_state(file.fd, RETIRED)
                _say_gone(file)
        except CorruptionError:
            continue  # nothing is known of it
        except OSError as error:  # the commit stands
            log.info("%s: a header could not be marked retired: %s", root.path, str(error))


def say_gone(root: Root, segment: int) -> None:
    """If a retired file was that of a mutable entry, its control page says so. Under the mutex, after the commit."""
    try:
        file = _open_to_mark(root, segment)
        if file is not None:
            _say_gone(file)
    except CorruptionError:
        return  # nothing is known of it
    except OSError as error:  # the commit stands
        log.info("%s: a control page could not be told that its key is gone: %s", root.path, str(error))


def _say_gone(file: OwnedFile) -> None:
    size = syscalls.size_of(file.fd)
    header = syscalls.read_at(file.fd, header_size(syscalls.read_at(file.fd, HEAD_SIZE, 0), size), 0)
    if not may_be_mutable(header):
        return
    found = read_header(header, size)
    if is_mutable(found.description):
        syscalls.write_at(file.fd, (1).to_bytes(8, "little"), found.start + GONE_AT)


def _mark(root: Root, segment: int, state: int) -> None:
    file = _open_to_mark(root, segment)
    if file is None:
        return
    try:
        write_state(file.fd, state)
    finally:
        file.close()


def _open_to_mark(root: Root, segment: int) -> OwnedFile | None:
    try:
        return OwnedFile(segment_path(root.segments, segment), os.O_RDWR, dir_fd=root.segments_fd)
    except OSError as error:
        # missing; or another user's, killed before it got the store's group; or planted: not ours to mark
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            raise
        return None
