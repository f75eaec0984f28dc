"""The file that a put replaces is kept for this process's next put of nearly its size, which then needs no claim.

For files that are assembled in memory: what a claim costs, a hold of the mutex and a transaction, is a third of such a
put. The file is *booked* by the transaction that replaces what it holds: its row is filling, under the next put's id.

- It is locked after that commit, and never before: of a live file readers rely on the shared lock, and one without the
  mutex takes two refusals for damage, however short they were.
- If somebody else locks it then, a second transaction gives it back, to be retired as any other, and for some puts
  nothing is booked: who holds one version mostly holds the next one too. Whoever dies or fails before, `recovery.py`
  gives back what it booked.
- Once it is locked, its put id is erased, and it is as any file that is being filled: nobody else may have it, its lock
  drops with its process, and then a sweep gives it back. So others can't free it as long as this process lives: it is
  one file, and smaller than a huge page. Its own `gc`, its puts that find no room, and its closing of the store do.
- It is booked only when two puts in a row are of nearly its size, so that who puts once, or values of many sizes in
  turn, pays nothing for it; the last one booked takes the place of the one before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import ClaimedFile, LockFile, SegmentWriter, segment_path
from memstore.engine.format import FILLING, RETIRED, SegmentRow, vacate, write_state
from memstore.engine.protocols.leases import is_leased
from memstore.engine.protocols.reuse import suits, unclaim
from memstore.engine.root import KeptFile, Root
from memstore.engine.sync import boot_clock
from memstore.errors import MemstoreError

log = logging.getLogger("memstore")

_PUTS_AFTER_A_REFUSAL = 16  # nothing is booked for so many: a refusal costs a transaction


class Booking:
    """Of the file that one commit replaces. `book` is called in its transaction, `settle` once that is committed."""

    __slots__ = ("_before", "_file", "_need", "_put_id", "_replaced", "_root", "_row", "_segment")

    def __init__(self, root: Root, need: int, before: int) -> None:
        """`need` is what the put has filled, and `before` what the one before it had."""
        self._root, self._need, self._before = root, need, before
        self._file: LockFile | None = None
        self._row: SegmentRow | None = None
        self._segment = 0
        self._put_id = 0  # of the next put
        self._replaced: KeptFile | None = None  # what was kept before: in the same transaction it may be claimed again

    def book(self, transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> bool:
        """Whether the file is booked; else it is to be retired. It may be asked again, in a transaction repeated."""
        self._row, size = None, row.nbytes
        if size >= syscalls.HUGE_PAGE or not suits(size, self._need) or not suits(size, self._before):
            return False
        if is_leased(transaction, segment, boot_clock()) or not self._open(segment, size):
            return False
        if self._root.ahead is not None:
            self._replaced, self._root.ahead = self._root.ahead, None
        if self._replaced is not None:
            _unbook(transaction, counters, self._replaced)
        self._segment, self._row = segment, row
        self._put_id = counters.number = counters.number + 1
        counters.filling += size
        transaction.put_segment(segment, SegmentRow(row.key, self._put_id, FILLING, size))
        transaction.put_number("filling", segment, self._put_id)
        return True

    def _open(self, segment: int, size: int) -> bool:
        if self._file is None:
            try:
                file = LockFile(segment_path(self._root.segments, segment), os.O_RDWR, dir_fd=self._root.segments_fd)
                if syscalls.size_of(file.fd) != size:
                    return False
            except OSError:  # missing, another user's, planted; or too many are open
                return False
            self._file = file
        return True

    def settle(self) -> None:
        """Under the mutex and the guard, when its transaction is committed. After an error a recovery is due."""
        root, file, row = self._root, self._file, self._row
        if file is None or row is None:
            return
        if syscalls.lock_exclusive(file.fd):
            vacate(file.fd)
            root.ahead = KeptFile(self._segment, self._put_id, row.nbytes, file)
            self._file = None
        else:
            root.unbooked = _PUTS_AFTER_A_REFUSAL
            root.catalog.update(self._return, is_delete=True)
            write_state(file.fd, RETIRED)

    def _return(self, transaction: Transaction) -> None:
        assert self._row is not None
        counters = transaction.counters()
        unclaim(transaction, counters, self._segment, self._row)
        transaction.put_counters(counters)

    def close(self) -> None:
        """Also of what was kept before, whatever became of the commit: its row is another's, or left to the sweep."""
        if self._file is not None:
            self._file.close()
        if self._replaced is not None:
            _release(self._replaced.file)


def booking_for(root: Root, need: int) -> Booking | None:
    """For a commit of one segment of `need` bytes, if the one before was of its size.

    Call it under the guard, once a commit.
    """
    before, root.filled_before = root.filled_before, need
    if not before or need >= syscalls.HUGE_PAGE:
        return None
    if root.unbooked:
        root.unbooked -= 1
        return None
    return Booking(root, need, before)


def take(root: Root, need: int) -> SegmentWriter | None:
    """The file that was kept, if it suits: locked and booked as a claim would have done."""
    with root.guard:
        ahead = root.ahead
        if ahead is None or not suits(ahead.size, need):
            return None
        segment, put_id, size, file = ahead
        is_whole = _is_whole(file, size)
        if root.ahead is not ahead:  # a signal's handler has put
            return None
        root.ahead = None
        if not is_whole:
            file.close()  # its row is left to the sweep
            return None
        path = segment_path(root.segments, segment)
        return SegmentWriter(ClaimedFile(path, file, root.segments_fd), segment, put_id, size, is_new=False)


def _is_whole(file: LockFile, size: int) -> bool:
    """And not unlinked or cut by somebody."""
    try:
        status = syscalls.status(file.fd)
    except OSError:
        return False
    return status.st_nlink > 0 and status.st_size == size


def keep(root: Root, writers: Sequence[SegmentWriter]) -> bool:
    """Whether what was filled is kept, if no mutex was to be had to publish it: to give it back takes the mutex too."""
    if len(writers) != 1:
        return False
    writer = writers[0]
    with root.guard:
        if root.ahead is not None or writer.size >= syscalls.HUGE_PAGE or not writer.is_whole:
            return False
        root.ahead = KeptFile(writer.segment, writer.put_id, writer.size, writer.file.lock_file)
    return True


def give_back(root: Root) -> None:
    """What was kept may be claimed or swept by anybody. Under the mutex."""
    with root.guard:
        ahead, root.ahead = root.ahead, None
        if ahead is not None:
            try:
                root.catalog.update(lambda transaction: _give_back(transaction, ahead), is_delete=True)
            finally:
                _release(ahead.file)


def close(root: Root) -> None:
    """Gives back what was kept if nobody has to be waited for; else the lock is let go, and a sweep does it."""
    if root.ahead is None:
        return
    try:
        if root.is_in_place():  # one that was removed or moved stays as it is
            root.mutex.run(lambda: give_back(root), 0.0)
    except (OSError, MemstoreError) as error:
        log.debug("%s: a file that was kept is left to the next sweep: %s", root.path, str(error))
    finally:
        _forget(root)


def _forget(root: Root) -> None:
    ahead, root.ahead = root.ahead, None
    if ahead is not None:
        _release(ahead.file)


def _release(file: LockFile) -> None:
    """Who is just being started as a subprocess has it open too, until its exec: closed only, it stayed locked."""
    syscalls.unlock(file.fd)
    file.close()


def _give_back(transaction: Transaction, ahead: KeptFile) -> None:
    counters = transaction.counters()
    _unbook(transaction, counters, ahead)
    transaction.put_counters(counters)


def _unbook(transaction: Transaction, counters: Counters, ahead: KeptFile) -> None:
    row = transaction.segment(ahead.segment)
    if row is not None and (row.state, row.put_id) == (FILLING, ahead.put_id):
        unclaim(transaction, counters, ahead.segment, row)
