"""Recovery after a crash, run by the mutex's next owner; and the detection of a catalog that was rolled back.

The next owner finishes or undoes a change whose owner died in the middle of it (`after_death`). All of that runs under
the store's mutex. Files that the dead owner locked are given back by the sweep, see `sweep.py`.

A rolled-back catalog is older than the lock page and the segments beside it. If the page of the newest state is
damaged, LMDB silently opens the state before it; and a data.mdb may have been restored from a copy that is older than
the segments. To go on from there would give old values for new ones, and sweep the files of acknowledged puts as if
their writers had died. Three things tell, before anything is changed:

1. The two meta pages of data.mdb (in the catalog's room): they must be those of two commits in a row.
2. The lock page (`check_publications`): it counts publications after their commits, so a catalog that has fewer was
   rolled back. This holds after a reboot and in a copy too; but the page may be older than the catalog then, and prove
   nothing.
3. Headers of segments (`check_headers`): none may say live under a put id and a version that are higher than any the
   catalog has given. A put whose commit was cut off has no such header: the catalog knows it as filling, under that put
   id. What is lent to another owner, or is a copy, says version 0: there the put id tells by itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable

from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import segment_path, write_state
from memstore.engine.format.headers import HEAD_SIZE, HeaderSlots, header_size, may_be_mutable, read_header, read_slots
from memstore.engine.format.records import FILLING, LIVE, RETIRED, SegmentRow, is_mutable
from memstore.engine.protocols.attempts import forget_other_boots
from memstore.engine.protocols.reuse import segments_here, unclaim
from memstore.engine.root.folder import CATALOG, LOCK
from memstore.engine.root.roots import Root
from memstore.engine.sync.pages import GONE_AT, publications_rung
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")

_MOST = 1 << 20  # rows


def after_death(root: Root) -> None:
    """Recovers before anything else of the mutex's next owner, where the last one died or failed, or there was none.

    0. A catalog that was rolled back is refused, before any file is taken for that of a dead writer.
    1. A commit may have claimed a file for the next put without locking it (`reuse.py`): the row says filling, and the
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
        compare_publications(root, page.notes.publications_rung, counters)
        if page.is_new:  # leases tell time by the clock of another boot
            transaction.clear("leases")
            if forget_other_boots(transaction, counters):
                counters.publications += 1  # so that their headers are marked retired
                transaction.put_counters(counters)
        behind = page.notes.publications_rung != counters.publications
        if behind:
            _unclaim(root, transaction, counters)
        retired = [segment for *_, segment in transaction.retired(0, _MOST << 40, _MOST)] if behind else []
        if behind:  # of versions that were replaced, and are kept, headers say the same; so do those that were moved
            held = [segment for _, segment in transaction.numbers("held", _MOST)]
            retired += [segment for segment in held if tables.spilled_size(transaction, segment) is not None]
            retired += kept_segments(root, transaction)
        filling = transaction.numbers("filling", _MOST)
        if page.notes.batch or page.is_new:  # a new page has lost the note
            parts = [part for part in tables.parts_of(transaction) if not part.host]
            filling += [(part.segment, page.notes.batch) for part in parts if part.segment]
        return filling, retired, counters

    # Not `view`: after a kill between LMDB's commit and the word that tells readers of it, they see the past until
    # the next write transaction begins; and a sweep by the past would unlink what is live.
    filling, retired, counters = root.catalog.update(read, is_delete=True)
    if page.notes.batch or page.is_new:
        for segment, batch in filling:
            if batch == page.notes.batch:
                _mark(root, segment, FILLING)
        page.notes.batch = 0
    if page.notes.publications_rung != counters.publications:
        mark_gone(root, retired)
        root.doorbell.ring_all()
        page.notes.publications_rung = counters.publications
    if page.has_died:
        log.debug("%s: recovered after a process died while it held the store's mutex", root.path)
    elif not page.is_new:  # nobody has changed anything under a new one
        log.debug("%s: recovered after a call failed while it held the store's mutex", root.path)


def kept_segments(root: Root, transaction: Transaction) -> list[int]:
    """Returns the segments here of all versions that were replaced and are kept. A verify reports damaged rows."""
    found: list[int] = []
    for name, stored in transaction.rows_with(tables.HISTORY, b"", _MOST):
        with contextlib.suppress(CorruptionError):
            found += segments_here(root, transaction, tables.read_version(name, stored)[1])
    return found


def _unclaim(root: Root, transaction: Transaction, counters: Counters) -> None:
    has_unclaimed = False
    for segment, _ in transaction.numbers("filling", _MOST):
        row, found = transaction.segment(segment), _slots(root, segment)
        if row is None or row.state != FILLING or found is None or found.state != LIVE:
            continue
        if found.put_id not in (0, row.put_id) and found.version <= counters.version:
            unclaim(transaction, counters, segment, SegmentRow(row.key, found.put_id, RETIRED, row.nbytes))
            has_unclaimed = True
    if has_unclaimed:
        transaction.put_counters(counters)


def _slots(root: Root, segment: int) -> HeaderSlots | None:
    try:
        file = OwnedFile(segment_path(root.segments, segment), os.O_RDONLY, dir_fd=root.segments_fd)
        return read_slots(syscalls.read_at(file.fd, HEAD_SIZE, 0), root.settings.store)
    except OSError:  # missing, another user's, or planted
        return None


def mark_retired(root: Root, segments: Iterable[int]) -> None:
    """Lets headers of replaced and deleted puts say so, for a repair. Under the mutex, right after the commit."""
    for segment in segments:
        try:
            _mark(root, segment, RETIRED)
        except OSError as error:  # the commit stands
            log.info("%s: a header could not be marked retired: %s", root.path, str(error))


def mark_gone(root: Root, segments: Iterable[int]) -> None:
    """Marks files retired that may be those of mutable entries, and tells who has these open.

    (One that was sealed before its sealer died is called gone too: both say that nobody writes there any more.)
    """
    for segment in segments:
        try:
            file = _open_to_mark(root, segment)
            if file is not None:
                write_state(file.fd, RETIRED)
                _sync_for_others(root, file)
                _say_gone(file)
        except CorruptionError:
            continue  # nothing is known of it
        except OSError as error:  # the commit stands
            log.info("%s: a header could not be marked retired: %s", root.path, str(error))


def say_gone(root: Root, segment: int) -> None:
    """Lets the control page say so if a retired file was a mutable entry's. Under the mutex, after the commit."""
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
        _sync_for_others(root, file)
    finally:
        file.close()


def _sync_for_others(root: Root, file: OwnedFile) -> None:
    """Syncs a header, where other hosts go by it after this one's death: see `distributed/rules/recovery.py`."""
    if root.storage.sees_all_hosts:
        syscalls.sync_data(file.fd)


def _open_to_mark(root: Root, segment: int) -> OwnedFile | None:
    try:
        return OwnedFile(segment_path(root.segments, segment), os.O_RDWR, dir_fd=root.segments_fd)
    except FileNotFoundError:  # or it was moved
        return root.storage.open_spilled(segment)
    except OSError as error:
        # another user's, killed before it got the store's group; or planted: not ours to mark
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            raise
        return None


# --- a catalog that was rolled back ----------------------------------------------------------------------------------


LOOKED_AT = 16  # files of each kind, at an opening
ALL = 1 << 20  # files, where the lock page may prove nothing
SEGMENT_NAME = re.compile(r"([0-9a-f]{16})\.safetensors")


def check_publications(root: Root) -> None:
    """Raises CorruptionError if the lock page has counted more of them than the catalog."""
    if root.lock is not None:
        rung = root.lock.notes.publications_rung
    else:
        try:
            rung = publications_rung(f"{root.state}/{LOCK}")
        except PermissionError:
            return
    compare_publications(root, rung, root.catalog.view(Transaction.counters))  # the page first: both are growing


def compare_publications(root: Root, rung: int, counters: Counters) -> None:
    if rung > counters.publications:
        raise rolled_back(root, f"it has {counters.publications:,} publications, and {rung:,} were made")


def check_headers(root: Root, most: int) -> None:
    """Raises CorruptionError if a file holds a put that the catalog doesn't know. Under the mutex, after a recovery.

    It looks at up to `most` files of each kind that may be written or unlinked; with `ALL`, also at those that the
    catalog has no number for.
    """
    with root.guard:
        try:
            counters, put_ids = root.catalog.view(_deletable, most)
        except CorruptionError as error:  # a row: who needs it will say it
            log.debug("%s: headers were not compared with the catalog: %s", root.path, str(error))
            return
        if most >= ALL:
            numbers = [
                int(match[1], 16) for match in map(SEGMENT_NAME.fullmatch, os.listdir(root.segments_fd)) if match
            ]
            put_ids.update(dict.fromkeys((number for number in numbers if number > counters.number), 0))
        for segment, put_id in put_ids.items():
            try:
                file = OwnedFile(segment_path(root.segments, segment), os.O_RDONLY, dir_fd=root.segments_fd)
            except OSError:  # missing, or planted, or another user's
                continue
            with file:
                check_put_is_known(root, file.fd, segment, put_id, counters)


def _deletable(transaction: Transaction, most: int) -> tuple[Counters, dict[int, int]]:
    """Returns the segments whose files may be deleted, with the put ids that they have by the catalog."""
    listed = [segment for segment, _ in transaction.numbers("filling", most)]
    listed += [segment for *_, segment in transaction.oldest_retired(most)]
    listed += [segment for _, segment in transaction.numbers("held", most)]
    rows = {segment: transaction.segment(segment) for segment in listed}
    return transaction.counters(), {segment: row.put_id for segment, row in rows.items() if row is not None}


def check_put_is_known(root: Root, fd: int, segment: int, put_id: int, counters: Counters) -> None:
    """Raises CorruptionError if the file holds a later put than that one, and than all that the catalog knows of."""
    try:
        slots = read_slots(syscalls.read_at(fd, HEAD_SIZE, 0), root.settings.store)
    except OSError:  # a folder
        return
    if slots is None or slots.state != LIVE or slots.put_id in (0, put_id):
        return
    if slots.put_id > counters.number and (slots.version > counters.version or not slots.version):
        path = segment_path(root.segments, segment)
        what, last = f"version {slots.version:,}", counters.version
        if not slots.version:
            what, last = f"put {slots.put_id:,}", counters.number
        raise rolled_back(root, f"{path} has {what}, and the last one that it knows is {last:,}")


def rolled_back(root: Root, what: str) -> CorruptionError:
    path = f"{root.state}/{CATALOG}/data.mdb"
    detail = (
        f"the catalog is older than what lies beside it: {what}: close the store everywhere, and run memstore.repair"
    )
    return CorruptionError(path=path, detail=detail)
