"""Detects a rolled-back catalog: one that is older than the lock page and the segments beside it.

If the page of the newest state is damaged, LMDB silently opens the state before it; and a data.mdb may have been
restored from a copy that is older than the segments. To go on from there would give old values for new ones, and sweep
the files of acknowledged puts as if their writers had died. Three things tell, before anything is changed:

1. The two meta pages of data.mdb (`catalog/meta.py`): they must be those of two commits in a row.
2. The lock page: it counts publications after their commits, so a catalog that has fewer was rolled back. This holds
   after a reboot and in a copy too; but the page may be older than the catalog then, and prove nothing.
3. Headers of segments: none may say live under a put id and a version that are higher than any the catalog has given. A
   put whose commit was cut off has no such header: the catalog knows it as filling, under that put id. What is lent to
   another home, or is a copy, says version 0: there the put id tells by itself.
"""

from __future__ import annotations

import logging
import os
import re

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import OwnedFile, segment_path
from memstore.engine.format import HEAD_SIZE, LIVE, read_slots
from memstore.engine.root import CATALOG, LOCK, Root
from memstore.engine.sync import publications_rung
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")

LOOKED_AT = 16  # files of each kind, at an opening
ALL = 1 << 20  # files, where the lock page may prove nothing
SEGMENT_NAME = re.compile(r"([0-9a-f]{16})\.safetensors")


def check_publications(root: Root) -> None:
    """Raises CorruptionError if the lock page has counted more of them than the catalog."""
    if root.lock is not None:
        rung = root.lock.publications_rung
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
            try:
                check_header(root, file.fd, segment, put_id, counters)
            finally:
                file.close()


def _deletable(transaction: Transaction, most: int) -> tuple[Counters, dict[int, int]]:
    """Segments whose files may be deleted, with the put ids that they have by the catalog."""
    listed = [segment for segment, _ in transaction.numbers("filling", most)]
    listed += [segment for *_, segment in transaction.oldest_retired(most)]
    listed += [segment for _, segment in transaction.numbers("held", most)]
    rows = {segment: transaction.segment(segment) for segment in listed}
    return transaction.counters(), {segment: row.put_id for segment, row in rows.items() if row is not None}


def check_header(root: Root, fd: int, segment: int, put_id: int, counters: Counters) -> None:
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
