"""Leases: until when a segment is kept, even if nobody locks it. Their times are those of the clock since boot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memstore.engine.catalog import Transaction
from memstore.engine.format import SegmentExtent
from memstore.engine.root import Root
from memstore.engine.sync import boot_clock

DEFAULT_LEASE = 60.0  # seconds for the receiver of a pickled reference to arrive
_LONGEST_LEASE = 1e9  # seconds; infinity has no number of nanoseconds


def lease(root: Root, extents: Sequence[SegmentExtent], deadline: float, *, seconds: float) -> bool:
    """Keeps segments from being swept for `seconds`. False if the contents of one are gone already."""
    until = boot_clock() + int(min(seconds, _LONGEST_LEASE) * 1e9)

    def write(transaction: Transaction) -> bool:
        rows = {extent: transaction.segment(extent.segment) for extent in extents}
        if any(row is None or row.put_id != extent.put_id for extent, row in rows.items()):
            return False
        for extent in extents:
            longest = max(until, transaction.number("leases", extent.segment) or 0)
            transaction.put_number("leases", extent.segment, longest)
        return True

    return root.mutex.run(lambda: root.catalog.update(write), deadline)


def keep_for_grace(root: Root, transaction: Transaction, segments: Iterable[int]) -> None:
    """On storage that hosts share: files of what was replaced stay for a while, since readers there lock nothing."""
    if root.shared is not None:
        until = boot_clock() + int(root.shared.grace * 1e9)
        for segment in segments:
            longest = max(until, transaction.number("leases", segment) or 0)
            transaction.put_number("leases", segment, longest)


def is_leased(transaction: Transaction, segment: int, now: int) -> bool:
    return (transaction.number("leases", segment) or 0) > now
