"""Leases: until when a segment is kept, even if nobody locks it. Their times are those of the clock since boot."""

from __future__ import annotations

from memstore.engine.catalog import Transaction
from memstore.engine.root import Root
from memstore.engine.sync import boot_clock

DEFAULT_LEASE = 60.0  # seconds for the receiver of a pickled reference to arrive
_LONGEST_LEASE = 1e9  # seconds; infinity has no number of nanoseconds


def lease(root: Root, segment: int, deadline: float, *, put_id: int, seconds: float) -> bool:
    """Keeps a segment from being swept for `seconds`. False if that put's contents are gone already."""
    until = boot_clock() + int(min(seconds, _LONGEST_LEASE) * 1e9)

    def write(transaction: Transaction) -> bool:
        row = transaction.segment(segment)
        if row is None or row.put_id != put_id:
            return False
        transaction.put_number("leases", segment, max(until, transaction.number("leases", segment) or 0))
        return True

    return root.mutex.run(lambda: root.catalog.update(write), deadline)


def is_leased(transaction: Transaction, segment: int, now: int) -> bool:
    return (transaction.number("leases", segment) or 0) > now
