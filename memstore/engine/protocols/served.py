"""Changes of a served store's catalog that are no ordinary put or delete of this host (`change_served`).

The index process answers other hosts so, and a process that lends what it has put. What the change is, its action says,
which is called in the transaction: it reads, writes rows, and notes in `Effects` which segments become live or are
retired, and which keys change. Then a file is claimed for the next put, if there is one, and the rest is steps 4 and 5
of a put (`put.py`). The header of a segment that becomes live has its version: 0 of what is lent to another owner, or
is a copy. The first put of a group is such a change, too: the grant is recorded with it.

- An action that raises has changed nothing, whoever made it raise: no recovery is due. Unless it was called again after
  headers were written: what that has written a recovery takes back.
- Each change counts as a publication, so a kill after the commit is made up for by the mutex's next owner, and a
  catalog that was rolled back behind it is found out. A kill before it leaves headers that say live, which `filling`
  and the note undo.
- An action is called again if the catalog has to grow, or can't: it changes nothing but through the transaction. Of the
  tenth that is kept for deletes all may take but what adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import PreparedFile, SealedSegment, segment_path
from memstore.engine.format.records import FILLING, LIVE, PREPARED, SegmentRow
from memstore.engine.protocols.put import finish, go_live
from memstore.engine.protocols.recovery import mark_gone, mark_retired
from memstore.engine.protocols.reuse import NextClaim, retire_row, unclaim
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import Refusal
from memstore.errors import MemstoreError, StoreFullError

Result = TypeVar("Result")


class _ActionFailed(Refusal):
    def __init__(self, error: MemstoreError) -> None:
        self.error = error


class Effects:
    """Effects of a change beside its rows, noted while its transaction runs.

    Attributes:
        counters: the store's, to be changed in place.
        is_change: whether a row was written. Without one, the transaction writes nothing.
        adds: what it writes stays until somebody deletes it. Where the catalog is full, nothing else is done.
        keys: that have changed: who waits for them is woken.
        wakes_all: whoever waits for anything is to look again.
        replaced: segments of versions that were replaced, and stay readable.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.counters = transaction.counters()
        self.is_change = self.wakes_all = self.adds = False
        self.keys: set[bytes] = set()
        self.live: list[tuple[SealedSegment, int]] = []
        self.prepared: list[tuple[int, SegmentRow, int]] = []
        self.retired: list[int] = []
        self.replaced: list[int] = []
        self.batch = 0

    def publish(self, key: bytes, segment: SealedSegment, version: int) -> None:
        """Makes a segment live that this process has filled."""
        transaction, counters = self._transaction, self.counters
        batch = transaction.number("filling", segment.segment)
        assert batch and self.batch in (0, batch), "segments of one put become live together"
        self.batch, self.is_change, self.adds = batch, True, True
        transaction.put_segment(segment.segment, SegmentRow(key, segment.put_id, LIVE, segment.size))
        transaction.delete_number("filling", segment.segment)
        counters.filling -= segment.size
        counters.live += segment.size
        self.live.append((segment, version))

    def prepare(self, key: bytes, segment: int, row: SegmentRow) -> None:
        """Lets a part of a sharded put keep a segment that was filled here, or was lent."""
        self.is_change = True
        if row.state == LIVE:
            self.counters.live -= row.nbytes
            self.counters.filling += row.nbytes
        else:
            self._transaction.delete_number("filling", segment)
        self._transaction.put_segment(segment, SegmentRow(key, row.put_id, PREPARED, row.nbytes))

    def publish_prepared(self, key: bytes, segment: int, row: SegmentRow, version: int) -> None:
        """Makes the segment of a part live."""
        self.batch, self.is_change = self.batch or row.put_id, True
        self._transaction.put_segment(segment, SegmentRow(key, row.put_id, LIVE, row.nbytes))
        self.counters.filling -= row.nbytes
        self.counters.live += row.nbytes
        self.prepared.append((segment, row, version))

    def retire(self, segment: int, row: SegmentRow) -> None:
        """Retires a live segment that nothing names any more, or one that was filled and is not to be published."""
        self.is_change = True
        if row.state == FILLING:
            unclaim(self._transaction, self.counters, segment, row)
        elif row.state in (PREPARED, LIVE):
            if row.state == PREPARED:  # it counts as live one for a moment
                self.counters.filling -= row.nbytes
                self.counters.live += row.nbytes
            retire_row(self._transaction, self.counters, segment, row)
        self.retired.append(segment)


def change_served(
    root: Root, action: Callable[[Transaction, Effects], Result], deadline: float, *, most: int | None = None
) -> Result:
    """Calls `action` in one transaction under the store's mutex.

    Args:
        most: as of `Catalog.update`, where the action writes large values.

    Raises what the action raises, and then nothing has changed; StoreTimeoutError; NotAStoreError if the store was
    removed or moved: nothing is acknowledged then; CatalogCrowded.
    """
    bells: list[int] = []
    try:
        result, effects = root.mutex.run(_change_locked, deadline, root, action, bells, most)
    except _ActionFailed as failed:
        raise failed.error from None
    if effects.is_change:
        finish(root, bells, effects.counters, len(effects.retired))
    return result


def _change_locked(
    root: Root, action: Callable[[Transaction, Effects], Result], bells: list[int], most: int | None
) -> tuple[Result, Effects]:
    root.glance()
    next_claim = NextClaim(root)
    is_acting = has_gone_live = False

    def apply(transaction: Transaction, full: StoreFullError | None = None) -> tuple[Result, Effects]:
        nonlocal is_acting, has_gone_live
        effects = Effects(transaction)
        is_acting = True
        result = action(transaction, effects)
        if full is not None and effects.adds:
            raise full
        is_acting = False
        live = [*effects.live, *[(_prepared(root, segment, row), at) for segment, row, at in effects.prepared]]
        if len(effects.live) == 1 and not effects.retired:  # what is retired just now may still be read here
            next_claim.claim(transaction, effects.counters, effects.live[0][0].used)
        if live:
            has_gone_live = True
            go_live(root, effects.batch, live, effects.counters)
        if effects.retired:
            root.storage.retire(transaction, effects.retired)
        if effects.is_change:
            effects.counters.publications += 1
            transaction.put_counters(effects.counters)
        return result, effects

    with root.guard:
        try:
            try:
                result, effects = root.catalog.update(apply, most=most)
            except StoreFullError as error:  # there is room for what deletes, releases, or says that a call has failed
                full = error
                result, effects = root.catalog.update(lambda transaction: apply(transaction, full), is_delete=True)
            root.mutex.notes.batch = 0
            next_claim.keep()
        except MemstoreError as error:
            if is_acting and not has_gone_live:  # and its transaction was aborted
                raise _ActionFailed(error) from None
            raise
        finally:
            next_claim.close()
    if effects.is_change:
        mark_retired(root, effects.replaced)
        mark_gone(root, effects.retired)
        if effects.wakes_all:
            root.doorbell.ring_all()
        bells += {root.doorbell.bell(key) for key in effects.keys}
        for bell in bells:
            root.doorbell.change(bell)
        root.mutex.notes.publications_rung = effects.counters.publications
    return result, effects


def _prepared(root: Root, segment: int, row: SegmentRow) -> SealedSegment:
    spill = None if row.nbytes else root.storage.spill_folder()  # it was lent before, and moved
    if spill is not None:
        file = PreparedFile(segment_path(spill, segment))
    else:
        file = PreparedFile(segment_path(root.segments, segment), root.segments_fd)
    return SealedSegment(segment, row.put_id, row.nbytes, 0, row.nbytes, file)
