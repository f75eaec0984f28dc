"""The file that a put replaces is kept for this process's next put of nearly its size, which then needs no claim.

This is for segments that are assembled in memory: the claim, a hold of the mutex and a transaction, is a third of what
such a put costs. The transaction that replaces what the file holds *books* it: its row becomes filling, under the id of
the next put.

- A booked file is locked after that commit, and never before it: until then it is live, and readers lock it shared. A
  reader in mode "r", which doesn't take the mutex, would report two refusals, however short, as damage.
- If somebody else has locked it by then, a second transaction gives it back, to be retired as any other file, and for
  some puts nothing is booked: who holds one version mostly holds the next one too. If this process dies or fails before
  it has locked the file, `recovery.py` gives it back.
- Once the file is locked, its put id is erased, and it is as any file that is being filled: nobody else can have it.
  Its lock drops when its process dies, and then a sweep gives it back, so others can't free it as long as this process
  lives: it is one file, and smaller than a huge page. This process gives it back when its `gc` runs, when one of its
  puts finds no room, and when it closes the store.
- A file is booked only when two puts in a row are of nearly its size: a process that puts once, or values of many sizes
  in turn, pays nothing. The file that was booked last takes the place of the one before.
- A put whose key has its home on another host replaces nothing here: that host tells later what it has replaced, and
  that is retired then. So the transaction that lends its segment *claims* a retired file for the next put, if there is
  one, by the rules of any claim (`claim.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.catalog import Counters, Transaction
from memstore.engine.files import ClaimedFile, LockFile, SegmentWriter, segment_path, vacate, write_state
from memstore.engine.format import FILLING, RETIRED, SegmentRow
from memstore.engine.protocols.leases import is_leased
from memstore.engine.protocols.reuse import Reuse, begin_filling, suits, unclaim
from memstore.engine.root import KeptFile, Root
from memstore.engine.sync import boot_clock
from memstore.errors import MemstoreError

log = logging.getLogger("memstore")

_PUTS_AFTER_A_REFUSAL = 16  # so many puts book nothing: a refusal costs a transaction


class Booking:
    """The booking of the file that one commit replaces: `book` it in its transaction, `settle` it once that is done."""

    __slots__ = ("_before", "_file", "_need", "_put_id", "_replaced", "_root", "_row", "_segment")

    def __init__(self, root: Root, need: int, before: int) -> None:
        """`need` is how many bytes of its file the put has used, `before` how many the put before it used."""
        self._root, self._need, self._before = root, need, before
        self._file: LockFile | None = None
        self._row: SegmentRow | None = None
        self._segment = 0
        self._put_id = 0  # of the next put
        self._replaced: KeptFile | None = None  # what was kept before: from this transaction on others may claim it

    def book(self, transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> bool:
        """Books the file if that pays, else returns False. It is called again if the transaction is repeated."""
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
        self._put_id = begin_filling(transaction, counters, segment, row.key, size)
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
        """Locks the file, or gives it back if somebody holds it. After an error a recovery is due.

        Call it under the mutex and the guard, when the transaction is committed.
        """
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
        """Lets go of what was not kept, whatever became of the commit.

        That includes the file that was kept before: its row is retired, or left to the sweep.
        """
        if self._file is not None:
            self._file.close()
        if self._replaced is not None:
            _release(self._replaced.file)


class NextFile:
    """The claim of a file for the next put: `claim` in a transaction, `keep` it once that is done, `close` at the end.

    Call all of it under the mutex and the guard.
    """

    __slots__ = ("_put_id", "_replaced", "_reuse", "_root")

    def __init__(self, root: Root) -> None:
        self._root = root
        self._reuse: Reuse | None = None
        self._put_id = 0
        self._replaced: KeptFile | None = None  # what was kept before: from this transaction on others may claim it

    def claim(self, transaction: Transaction, counters: Counters, need: int) -> None:
        """If this put and the one before used about as many bytes. It is called again if the transaction is repeated.

        Args:
            need: how many bytes of its file this put has used.
        """
        root = self._root
        if self._reuse is None:
            before, root.filled_before = root.filled_before, need
            is_as_large = before and (suits(before, need) or suits(need, before))
            if need >= syscalls.HUGE_PAGE or not is_as_large or root.claims is not None:
                return
            self._reuse = Reuse(need)
        try:
            self._reuse.take(root, transaction, counters)
        except OSError:  # too many files are open: the next put says so, if it is still the case
            return
        row = self._reuse.row
        if row is None:
            return
        if root.ahead is not None:
            self._replaced, root.ahead = root.ahead, None
        if self._replaced is not None:
            _unbook(transaction, counters, self._replaced)
        found = transaction.segment(row.segment)
        self._put_id = begin_filling(transaction, counters, row.segment, b"" if found is None else found.key, row.size)

    def keep(self) -> None:
        """The transaction is committed."""
        if self._reuse is not None and self._reuse.row is not None and self._reuse.file is not None:
            row, file = self._reuse.row, self._reuse.file
            self._root.ahead = KeptFile(row.segment, self._put_id, row.size, file)
            self._reuse = None

    def close(self) -> None:
        """Lets go of what was not kept, whatever became of the transaction."""
        if self._reuse is not None:
            self._reuse.close()
        if self._replaced is not None:
            _release(self._replaced.file)


def booking_for(root: Root, need: int) -> Booking | None:
    """For a commit of one segment that uses `need` bytes, if the put before used about as many.

    Call it under the guard, and once for each commit.
    """
    before, root.filled_before = root.filled_before, need
    if not before or need >= syscalls.HUGE_PAGE:
        return None
    if root.unbooked:
        root.unbooked -= 1
        return None
    return Booking(root, need, before)


def take(root: Root, need: int) -> SegmentWriter | None:
    """The file that was kept, if it suits: it is locked, and its row is filling, as after a claim."""
    with root.guard:
        ahead = root.ahead
        if ahead is None or not suits(ahead.size, need):
            return None
        segment, put_id, size, file = ahead
        is_whole = _is_whole(file, size)
        if root.ahead is not ahead:  # a signal handler has taken it for a put of its own
            return None
        root.ahead = None
        if not is_whole:
            file.close()  # its row is left to the sweep
            return None
        path = segment_path(root.segments, segment)
        return SegmentWriter(ClaimedFile(path, file, root.segments_fd), segment, put_id, size, is_new=False)


def _is_whole(file: LockFile, size: int) -> bool:
    """Whether nobody has unlinked or cut the file."""
    try:
        status = syscalls.status(file.fd)
    except OSError:
        return False
    return status.st_nlink > 0 and status.st_size == size


def keep(root: Root, writers: Sequence[SegmentWriter]) -> bool:
    """Keeps a file that is filled, and could not be published because the mutex was not to be had in time.

    To give it back takes the mutex too. Returns False if the file is none to be kept: in a store on several hosts, one
    that was lent to the home of its key belongs to this process no more.
    """
    if len(writers) != 1 or root.claims is not None:
        return False
    writer = writers[0]
    with root.guard:
        if root.ahead is not None or writer.size >= syscalls.HUGE_PAGE or not writer.is_whole:
            return False
        if root.membership and not _is_filling(root, writer):
            return False
        root.ahead = KeptFile(writer.segment, writer.put_id, writer.size, writer.file.lock_file)
    return True


def _is_filling(root: Root, writer: SegmentWriter) -> bool:
    row = root.catalog.view(Transaction.segment, writer.segment)
    return row is not None and (row.state, row.put_id) == (FILLING, writer.put_id)


def give_back(root: Root) -> None:
    """Retires the file that was kept: anybody may claim or sweep it. Call it under the mutex."""
    with root.guard:
        ahead, root.ahead = root.ahead, None
        if ahead is not None:
            try:
                root.catalog.update(lambda transaction: _give_back(transaction, ahead), is_delete=True)
            finally:
                _release(ahead.file)


def close(root: Root) -> None:
    """Gives back what was kept if the mutex is free; else only unlocks it, which leaves it to the next sweep."""
    if root.ahead is None:
        return
    try:
        if root.is_in_place():  # a store that was removed or moved stays as it is
            root.mutex.run(lambda: give_back(root), 0.0)
    except (OSError, MemstoreError) as error:
        log.debug("%s: the file that was kept for the next put is left to the next sweep: %s", root.path, str(error))
    finally:
        _forget(root)


def _forget(root: Root) -> None:
    ahead, root.ahead = root.ahead, None
    if ahead is not None:
        _release(ahead.file)


def _release(file: LockFile) -> None:
    """Unlocks it first: a subprocess that is being started has it open too, until its exec, and so has its lock."""
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
