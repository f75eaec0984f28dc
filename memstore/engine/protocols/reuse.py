"""Reuse of files: how a put claims a retired segment, how a commit keeps one for the next put, and what leases keep.

A put claims the smallest retired file that fits (`Reuse`), and among equal sizes the oldest, so that readers of the
last versions have time to let go; but before all others one that this process has mapped (`segments`): if the ranks of
sharded puts took each other's files, each would map its file anew, and fault it in. The storage driver has this order:
`LocalFiles.reusable` and `largest_for` in `root/storage.py`.

A file that somebody locks or leases is *held*: it is set aside, and later sweeps look at it again (`sweep.py`). A file
is never cut nor extended: a process that has it mapped would die of SIGBUS.

The file that a put replaces is kept for this process's next put of nearly its size, which then needs no claim. This is
for segments that are assembled in memory: the claim, a hold of the mutex and a transaction, is a quarter of what such a
put costs. The transaction that replaces what the file holds also claims it (`ReplacedFile`): its row becomes filling,
under the id of the next put, which takes it by `take_next_file`.

- Such a file is locked after that commit, and never before it: until then it is live, and readers lock it shared. A
  reader in mode "r", which doesn't take the mutex, would report two refusals, however short, as damage.
- If somebody else has locked it by then, a second transaction gives it back, to be retired as any other file, and for
  some puts nothing is kept: who holds one version mostly holds the next one too. If this process dies or fails before
  it has locked the file, `recovery.py` gives it back.
- Once the file is locked, its put id is erased, and it is as any file that is being filled: nobody else can have it.
  Its lock drops when its process dies, and then a sweep gives it back, so others can't free it as long as this process
  lives: it is one file, and smaller than a huge page. This process gives it back when its `gc` runs, when one of its
  puts finds no room, and when it closes the store.
- A file is kept only when two puts in a row are of nearly its size: a process that puts once, or values of many sizes
  in turn, pays nothing. The file that was kept last takes the place of the one before.
- A put whose key another host owns replaces nothing here: that host tells later what it has replaced, and
  that is retired then. So the transaction that lends its segment *claims* a retired file for the next put, if there is
  one, by the rules of any claim (`NextClaim`).

A lease keeps a segment until some time of the clock since boot, even if nobody locks it.

All of it runs under the store's mutex, but for `take_next_file`, on rows that the catalog names: no folder is ever
listed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.segments import ClaimedFile, SegmentWriter, erase_put_id, vacate, write_state
from memstore.engine.format.records import FILLING, LIVE, RETIRED, Record, SegmentExtent, SegmentRow
from memstore.engine.root.roots import NextFile, Root
from memstore.engine.root.storage import RetiredRow, largest_for
from memstore.engine.sync.primitives import boot_clock
from memstore.errors import MemstoreError


def suits(size: int, need: int) -> bool:
    """Returns whether a file of that size is used again for so many bytes."""
    return need <= size <= largest_for(need)


class Reuse:
    """Look of a claim for a file. It may be asked twice, if its transaction has to be repeated."""

    __slots__ = ("_has_chosen", "_need", "file", "refused", "row")

    def __init__(self, need: int) -> None:
        self._need, self._has_chosen = need, False
        self.file: ClaimedFile | None = None
        self.row: RetiredRow | None = None
        self.refused: list[RetiredRow] = []

    def take(self, root: Root, transaction: Transaction, counters: Counters) -> bool:
        """Locks a file, erases its put id, and claims it; sets the refused ones aside. Call it under the guard."""
        has_chosen, self._has_chosen = self._has_chosen, True
        if not has_chosen and counters.retired:
            self._choose(root, transaction)
        for row in self.refused:
            set_aside(transaction, counters, row)
        if self.row is None:
            return False
        transaction.delete_retired(self.row.size, self.row.sequence)
        counters.retired -= self.row.size
        return True

    def _choose(self, root: Root, transaction: Transaction) -> None:
        now = boot_clock()
        for row in root.storage.reusable(transaction, self._need):
            if not is_leased(transaction, row.segment, now):
                self.file = claim_retired(root, transaction, row.segment)
            if self.file is not None and syscalls.size_of(fd := self.file.lock_file.fd) == row.size:
                erase_put_id(fd)
                self.row = row
                return
            self.close()  # leased, locked, or cut to another size, which is left to the sweep
            self.refused.append(row)

    def close(self) -> None:
        """Gives the file back."""
        if self.file is not None:
            self.file.close()
        self.file = None


def set_aside(transaction: Transaction, counters: Counters, row: RetiredRow) -> None:
    """Moves a row from `retired` to the end of `held`."""
    counters.sequence += 1
    transaction.delete_retired(row.size, row.sequence)
    transaction.put_number("held", counters.sequence, row.segment)
    counters.retired -= row.size
    counters.held += row.size


def retire(transaction: Transaction, counters: Counters, segment: int, size: int) -> None:
    counters.sequence += 1
    counters.retired += size
    transaction.put_retired(size, counters.sequence, segment)


def segments_here(root: Root, transaction: Transaction, record: Record) -> list[int]:
    """Returns the segments of a record that lie on this host.

    They are compared by put id where it names other hosts, as all that records say which may have come from elsewhere.
    """
    if record.hosts is None:
        return [extent.segment for extent in record.segments]
    rows = {extent: transaction.segment(extent.segment) for extent in record.here(root.member_id())}
    return [
        extent.segment
        for extent, row in rows.items()
        if row is not None and (row.put_id, row.state) == (extent.put_id, LIVE)
    ]


def owe_what_lies_elsewhere(root: Root, transaction: Transaction, record: Record) -> list[int]:
    """Notes that other hosts are to be told of a version that nothing needs any more.

    Returns its segments on this host.
    """
    for host, extent in record.elsewhere(root.member_id()) if record.hosts is not None else ():
        tables.put_owed(transaction, host, extent.put_id, extent.segment)
    return segments_here(root, transaction, record)


def retire_live(transaction: Transaction, counters: Counters, segment: int) -> None:
    """Retires the segment of a version that nothing names any more."""
    row = transaction.segment(segment)
    if row is not None and row.state == LIVE:
        retire_row(transaction, counters, segment, row)


def retire_row(transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> None:
    """Retires a live segment, unless other versions name it too.

    One that was moved is never used again: it is held at once, for a sweep to remove.
    """
    if row.shared:
        transaction.put_segment(segment, msgspec.structs.replace(row, shared=row.shared - 1))
        return
    size = row.nbytes or tables.spilled_size(transaction, segment) or 0
    counters.live -= row.nbytes
    transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, size))
    if row.nbytes:
        retire(transaction, counters, segment, size)
        return
    counters.sequence += 1
    counters.held += size
    transaction.put_number("held", counters.sequence, segment)


def begin_filling(
    transaction: Transaction, counters: Counters, segment: int, key: bytes, size: int, batch: int = 0
) -> int:
    """Claims a file: from here on its row says so. Returns the new put id, which names the batch if that is 0."""
    put_id = counters.number = counters.number + 1
    counters.filling += size
    transaction.put_segment(segment, SegmentRow(key, put_id, FILLING, size))
    transaction.put_number("filling", segment, batch or put_id)
    return put_id


def unclaim(transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> None:
    """Retires a filling file, under the put id of the row."""
    transaction.delete_number("filling", segment)
    transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
    counters.filling -= row.nbytes
    retire(transaction, counters, segment, row.nbytes)


def claim_retired(root: Root, transaction: Transaction, segment: int) -> ClaimedFile | None:
    """Claims a retired file, if it is one, is there, and nobody holds it."""
    row = transaction.segment(segment)
    if row is None or row.state != RETIRED:
        return None
    try:
        return root.storage.claim(segment)
    except FileNotFoundError:
        return None


# --- the file that is kept for the next put --------------------------------------------------------------------------


log = logging.getLogger("memstore")

_PUTS_AFTER_A_REFUSAL = 16  # so many puts keep nothing: a refusal costs a transaction


class ReplacedFile:
    """File that one commit replaces, for the next put: `claim` it in its transaction, `keep` it once that is done."""

    __slots__ = ("_before", "_file", "_need", "_put_id", "_replaced", "_root", "_row", "_segment")

    def __init__(self, root: Root, need: int, before: int) -> None:
        """Claims nothing yet. `need` are the bytes of its file that this put has used, `before` the last put's."""
        self._root, self._need, self._before = root, need, before
        self._file: ClaimedFile | None = None
        self._row: SegmentRow | None = None
        self._segment = 0
        self._put_id = 0  # of the next put
        self._replaced: NextFile | None = None  # what was kept before: from this transaction on others may claim it

    def claim(self, transaction: Transaction, counters: Counters, segment: int, row: SegmentRow) -> bool:
        """Claims the file if that pays, else returns False. It is called again if the transaction is repeated."""
        root, size = self._root, row.nbytes
        self._row = None
        if row.shared:
            return False
        if size >= syscalls.HUGE_PAGE or size < max(self._need, self._before):
            return False
        if size > largest_for(min(self._need, self._before)):
            return False
        if is_leased(transaction, segment, boot_clock()):
            return False
        if self._file is None:
            self._file = root.storage.open_replaced(segment, size)
            if self._file is None:
                return False
        if root.next_put.file is not None:
            self._replaced, root.next_put.file = root.next_put.file, None
        if self._replaced is not None:
            _unclaim_next(transaction, counters, self._replaced)
        self._segment, self._row = segment, row
        self._put_id = begin_filling(transaction, counters, segment, row.key, size)
        return True

    def keep(self) -> bool:
        """Locks the file, or gives it back if somebody holds it. Returns False after an error: a recovery is due.

        Call it under the mutex and the guard, when the transaction is committed.
        """
        root, file, row = self._root, self._file, self._row
        if file is None or row is None:
            return True
        try:
            fd = file.lock_file.fd
            if syscalls.lock_exclusive(fd):
                vacate(fd)
                root.next_put.file = NextFile(self._segment, self._put_id, row.nbytes, file)
                self._file = None
            else:
                root.next_put.keeps_none_for = _PUTS_AFTER_A_REFUSAL
                root.catalog.update(self._return, is_delete=True)
                write_state(fd, RETIRED)
        except (OSError, MemstoreError) as error:  # the commit stands
            log.info("%s: the file that was claimed for the next put is left to a recovery: %s", root.path, str(error))
            return False
        return True

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
            _unlock_and_close(self._replaced.file)


class NextClaim:
    """Claim of a file for the next put: `claim` in a transaction, `keep` it once that is done, `close` at the end.

    Call all of it under the mutex and the guard.
    """

    __slots__ = ("_put_id", "_replaced", "_reuse", "_root")

    def __init__(self, root: Root) -> None:
        self._root = root
        self._reuse: Reuse | None = None
        self._put_id = 0
        self._replaced: NextFile | None = None  # what was kept before: from this transaction on others may claim it

    def claim(self, transaction: Transaction, counters: Counters, need: int) -> None:
        """Claims one if this put and the last one used about as many bytes. Called again with the transaction.

        Args:
            need: how many bytes of its file this put has used.
        """
        root = self._root
        if self._reuse is None:
            before, root.next_put.filled_before = root.next_put.filled_before, need
            is_as_large = before and (suits(before, need) or suits(need, before))
            if need >= syscalls.HUGE_PAGE or not is_as_large:
                return
            self._reuse = Reuse(need)
        try:
            self._reuse.take(root, transaction, counters)
        except OSError:  # too many files are open: the next put says so, if it is still the case
            return
        row = self._reuse.row
        if row is None:
            return
        if root.next_put.file is not None:
            self._replaced, root.next_put.file = root.next_put.file, None
        if self._replaced is not None:
            _unclaim_next(transaction, counters, self._replaced)
        found = transaction.segment(row.segment)
        self._put_id = begin_filling(transaction, counters, row.segment, b"" if found is None else found.key, row.size)

    def keep(self) -> None:
        """Keeps the file, once the transaction is committed."""
        if self._reuse is not None and self._reuse.row is not None and self._reuse.file is not None:
            row, file = self._reuse.row, self._reuse.file
            self._root.next_put.file = NextFile(row.segment, self._put_id, row.size, file)
            self._reuse = None

    def close(self) -> None:
        """Lets go of what was not kept, whatever became of the transaction."""
        if self._reuse is not None:
            self._reuse.close()
        if self._replaced is not None:
            _unlock_and_close(self._replaced.file)


def replaced_file(root: Root, need: int) -> ReplacedFile | None:
    """Returns the claim for a commit of one segment that uses `need` bytes, if the last put used about as many.

    Call it under the mutex, once for each commit.
    """
    before, root.next_put.filled_before = root.next_put.filled_before, need
    if not before or need >= syscalls.HUGE_PAGE:
        return None
    if root.next_put.keeps_none_for:
        root.next_put.keeps_none_for -= 1
        return None
    return ReplacedFile(root, need, before)


def take_next_file(root: Root, need: int) -> SegmentWriter | None:
    """Returns the file that was kept, if it suits: it is locked, and its row is filling, as after a claim."""
    with root.guard:
        kept = root.next_put.file
        if kept is None or not suits(kept.size, need):
            return None
        segment, put_id, size, file = kept
        try:
            status = syscalls.status(file.lock_file.fd)
            is_whole = status.st_nlink > 0 and status.st_size == size  # nobody has unlinked or cut it
        except OSError:
            is_whole = False
        if root.next_put.file is not kept:  # a signal handler has taken it for a put of its own
            return None
        root.next_put.file = None
        if not is_whole:
            file.close()  # its row is left to the sweep
            return None
        return root.storage.writer(file, segment, put_id, size, is_new=False)


def keep_file(root: Root, writers: Sequence[SegmentWriter]) -> bool:
    """Keeps a file that is filled, and could not be published because the mutex was not to be had in time.

    To give it back takes the mutex too. Returns False if the file is none to be kept: in a store on several hosts, one
    that was lent to the owner of its key belongs to this process no more.
    """
    if len(writers) != 1 or not writers[0].is_reusable:
        return False
    writer = writers[0]
    with root.guard:
        if root.next_put.file is not None or writer.size >= syscalls.HUGE_PAGE:
            return False
        if not root.catalog.view(is_filling, writer):
            return False
        root.next_put.file = NextFile(writer.segment, writer.put_id, writer.size, writer.file)
    return True


def is_filling(transaction: Transaction, writer: SegmentWriter) -> bool:
    """Returns whether the file is still being filled under the writer's put id."""
    row = transaction.segment(writer.segment)
    return row is not None and (row.state, row.put_id) == (FILLING, writer.put_id)


def give_back_next_file(root: Root) -> None:
    """Retires the file that was kept: anybody may claim or sweep it. Call it under the mutex."""

    def unclaim_it(transaction: Transaction) -> None:
        if kept is not None:
            counters = transaction.counters()
            _unclaim_next(transaction, counters, kept)
            transaction.put_counters(counters)

    with root.guard:
        kept, root.next_put.file = root.next_put.file, None
        if kept is not None:
            try:
                root.catalog.update(unclaim_it, is_delete=True)
            finally:
                _unlock_and_close(kept.file)


def close_next_file(root: Root) -> None:
    """Gives back what was kept if the mutex is free; else only unlocks it, which leaves it to the next sweep."""
    if root.next_put.file is None:
        return
    try:
        if root.is_in_place():  # a store that was removed or moved stays as it is
            root.mutex.run(give_back_next_file, 0.0, root)
    except (OSError, MemstoreError) as error:
        log.debug("%s: the file that was kept for the next put is left to the next sweep: %s", root.path, str(error))
    finally:
        _forget_next_file(root)


def _forget_next_file(root: Root) -> None:
    kept, root.next_put.file = root.next_put.file, None
    if kept is not None:  # the mutex was not free
        _unlock_and_close(kept.file)


def _unlock_and_close(file: ClaimedFile) -> None:
    """Closes a file, and unlocks it first: a subprocess has it open too until its exec, and with it the lock."""
    file.unlock()
    file.close()


def _unclaim_next(transaction: Transaction, counters: Counters, kept: NextFile) -> None:
    row = transaction.segment(kept.segment)
    if row is not None and (row.state, row.put_id) == (FILLING, kept.put_id):
        unclaim(transaction, counters, kept.segment, row)


# --- leases ----------------------------------------------------------------------------------------------------------


DEFAULT_LEASE = 60.0  # seconds for the receiver of a pickled reference to arrive
_LONGEST_LEASE = 1e9  # seconds; infinity has no number of nanoseconds


def lease_segments(root: Root, extents: Sequence[SegmentExtent], deadline: float, *, seconds: float) -> bool:
    """Keeps segments from being swept for `seconds`. Returns False if the contents of one are gone already."""
    until = boot_clock() + int(min(seconds, _LONGEST_LEASE) * 1e9)

    def write(transaction: Transaction) -> bool:
        rows = {extent: transaction.segment(extent.segment) for extent in extents}
        if any(row is None or row.put_id != extent.put_id for extent, row in rows.items()):
            return False
        for extent in extents:
            longest = max(until, transaction.number("leases", extent.segment) or 0)
            transaction.put_number("leases", extent.segment, longest)
        return True

    return root.mutex.run(root.catalog.update, deadline, write)


def is_leased(transaction: Transaction, segment: int, now: int) -> bool:
    return (transaction.number("leases", segment) or 0) > now
