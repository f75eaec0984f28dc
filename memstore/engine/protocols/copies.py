"""Copies of values of other hosts: the first that is given up when there is no room, and by `gc`.

They are fetched, and named in the table `copies`, by memstore/distributed/transfers.
"""

from __future__ import annotations

import logging

from memstore.engine.catalog import Counters, Transaction, served
from memstore.engine.format import LIVE, RETIRED, SegmentRow
from memstore.engine.protocols.recovery import mark_retired
from memstore.engine.protocols.reuse import retire
from memstore.engine.root import Root
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")

_DROPPED_A_HOLD = 64


def drop_copies(root: Root, deadline: float) -> None:
    """Retires the files of all copies; who has one mapped keeps it."""
    while root.catalog.is_served and root.catalog.view(lambda transaction: transaction.count(served.COPIES)):
        root.mutex.run(lambda: _drop_some(root), deadline)


def _drop_some(root: Root) -> None:
    with root.guard:
        retired, counters = root.catalog.update(_forget_some, is_delete=True)
    mark_retired(root, retired)
    root.mutex.publications_rung = counters.publications


def _forget_some(transaction: Transaction) -> tuple[list[int], Counters]:
    counters, retired = transaction.counters(), list[int]()
    for key, stored in transaction.rows_with(served.COPIES, b"", _DROPPED_A_HOLD):
        for segment, row in _rows_of(transaction, key, stored):
            counters.live -= row.nbytes
            transaction.put_segment(segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
            retire(transaction, counters, segment, row.nbytes)
            retired.append(segment)
        transaction.delete_row(served.COPIES, key)
    counters.publications += 1
    transaction.put_counters(counters)
    return retired, counters


def _rows_of(transaction: Transaction, key: bytes, stored: bytes) -> list[tuple[int, SegmentRow]]:
    """The segments of a copy. Where the row is damaged that says which, they stay until a repair."""
    try:
        rows = [
            (segment, put_id, transaction.segment(segment))
            for segment, put_id in served.read_kept(served.COPIES, key, stored).segments
        ]
    except CorruptionError as error:
        log.warning("the copy of %r can't be dropped, and keeps its bytes until a repair: %s", key, str(error))
        return []
    return [
        (segment, row) for segment, put_id, row in rows if row is not None and (row.put_id, row.state) == (put_id, LIVE)
    ]
