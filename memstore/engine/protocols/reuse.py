"""Retired segments: how a put claims one, to use its file again.

A put claims the smallest file that fits, and among equal sizes the oldest, so that readers of the last versions have
time to let go; but before all others one that this process has mapped (`spares.py`): if the ranks of sharded puts took
each other's files, each would map its file anew, and fault it in. A file that somebody locks or leases is *held*: it is
set aside, and later sweeps look at it again (`sweep.py`). A file is never cut nor extended: a process that has it
mapped would die of SIGBUS.

All of it runs under the store's mutex, on rows that the catalog names: no folder is ever listed.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import LockFile, StorageFile, erase_put_id, segment_path
from memstore.engine.format import FILLING, RETIRED, SegmentRow
from memstore.engine.protocols.leases import is_leased
from memstore.engine.root import Root
from memstore.engine.sync import boot_clock

_CLASSES_A_DOUBLING = 8
_TRIES = 4  # files that a claim asks for
_LOOKS = 64  # rows among which it looks for files that this process has mapped


class Row(NamedTuple):
    """Of `retired`, or with size 0 of `held`."""

    size: int
    sequence: int
    segment: int


def size_class(nbytes: int) -> int:
    """Room for so much data: whole pages, eight sizes a doubling, so at most 12.5 % (or a page) are slack."""
    step = max(syscalls.PAGE, (1 << max(nbytes - 1, 0).bit_length()) // (2 * _CLASSES_A_DOUBLING))
    return -(-nbytes // step) * step


def suits(size: int, need: int) -> bool:
    """Whether a file of that size is used again for so many bytes."""
    return need <= size <= need + need // _CLASSES_A_DOUBLING + syscalls.PAGE


class Reuse:
    """A claim's look for a file. It may be asked twice, if its transaction has to be repeated."""

    __slots__ = ("_asked", "_need", "file", "refused", "row")

    def __init__(self, need: int) -> None:
        self._need, self._asked = need, False
        self.file: LockFile | None = None
        self.row: Row | None = None
        self.refused: list[Row] = []

    def take(self, root: Root, transaction: Transaction, counters: Counters) -> bool:
        """Locks a file, erases its put id, and books it; sets the refused ones aside. Call it under the guard."""
        was_asked, self._asked = self._asked, True
        if not was_asked and counters.retired:
            self._ask(root, transaction)
        for row in self.refused:
            set_aside(transaction, counters, row)
        if self.row is None:
            return False
        transaction.delete_retired(self.row.size, self.row.sequence)
        counters.retired -= self.row.size
        return True

    def _ask(self, root: Root, transaction: Transaction) -> None:
        most = self._need + self._need // _CLASSES_A_DOUBLING + syscalls.PAGE
        now = boot_clock()
        for row in _rows(root, transaction, self._need, most):
            if not is_leased(transaction, row.segment, now):
                self.file = lock_retired(root, transaction, row.segment)
            if self.file is not None and syscalls.status(self.file.fd).st_size == row.size:
                erase_put_id(self.file.fd)
                self.row = row
                return
            self.close()  # cut by somebody: left to the sweep
            self.refused.append(row)

    def close(self) -> None:
        """Gives the file back."""
        if self.file is not None:
            self.file.close()
        self.file = None


def _rows(root: Root, transaction: Transaction, need: int, most: int) -> list[Row]:
    """The files to ask for, in this order."""
    if not root.spares:
        return [Row(*found) for found in transaction.retired(need, most, _TRIES)]
    rows = [Row(*found) for found in transaction.retired(need, most, _LOOKS)]
    rows.sort(key=lambda row: not root.spares.has(row.segment, row.size))
    return rows[:_TRIES]


def set_aside(transaction: Transaction, counters: Counters, row: Row) -> None:
    """From `retired` to the end of `held`."""
    counters.sequence += 1
    transaction.delete_retired(row.size, row.sequence)
    transaction.put_number("held", counters.sequence, row.segment)
    counters.retired -= row.size
    counters.held += row.size


def retire(transaction: Transaction, counters: Counters, segment: int, size: int) -> None:
    counters.sequence += 1
    counters.retired += size
    transaction.put_retired(size, counters.sequence, segment)


def begin_filling(
    transaction: Transaction, counters: Counters, segment: int, key: bytes, size: int, batch: int = 0
) -> int:
    """A file is claimed: from here on its row says so. Returns the new put id, which names the batch if that is 0."""
    put_id = counters.number = counters.number + 1
    counters.filling += size
    transaction.put_segment(segment, SegmentRow(key, put_id, FILLING, size))
    transaction.put_number("filling", segment, batch or put_id)
    return put_id


def unclaim(transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> None:
    """A filling file is retired, under the put id of the row."""
    transaction.delete_number("filling", segment)
    transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
    counters.filling -= row.nbytes
    retire(transaction, counters, segment, row.nbytes)


def lock_retired(root: Root, transaction: Transaction, segment: int) -> LockFile | None:
    try:
        return lock_in_state(root, transaction, segment, RETIRED)
    except FileNotFoundError:
        return None


def lock_in_state(root: Root, transaction: Transaction, segment: int, state: int) -> LockFile | None:
    """The file, locked for good, if its row is in that state and nobody else locks it."""
    row = transaction.segment(segment)
    if row is None or row.state != state:
        return None
    try:
        path = segment_path(root.segments, segment)
        if root.claims is not None:
            file = StorageFile(root.claims, segment, path, os.O_RDWR, dir_fd=root.segments_fd)
        else:
            file = LockFile(path, os.O_RDWR, dir_fd=root.segments_fd)
    except PermissionError:  # another user's, killed before it got the store's group: theirs to sweep
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):  # planted: a link is unlinked, what it names is not touched
            raise FileNotFoundError(errno.ENOENT, "no file of memstore's", error.filename) from None
        raise
    return file if file.lock() else None
