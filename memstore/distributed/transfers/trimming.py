"""Which copies of other hosts' values stay: those that somebody has used lately.

Who maps a copy notes that now and then, by the time of the file's last change, which nothing else looks at. When copies
take more than half of what the store may, those that nobody has used for longest are dropped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from memstore.distributed.catalog import CatalogTables, Copy, look, run
from memstore.distributed.rules import Place
from memstore.engine import Record, Root, Transaction, segment_path

_NOTED_EVERY = 30.0  # seconds
_PAGE = 256  # copies of one transaction


def drop_copy(root: Root, key: bytes, places: Sequence[Place], deadline: float) -> None:
    """Unless the key has a copy of other places by now."""

    def drop(tables: CatalogTables) -> None:
        found = tables.copy(key)
        if found is not None and found.places == tuple(places):
            tables.delete_copy(key)

    run(root, drop, deadline)


def trim(root: Root, deadline: float, *, keep: bytes | None = None) -> int:
    """Drops the copies that nobody has used for longest, until the others take at most half of what the store may.

    Args:
        keep: the key of one that stays.

    Returns:
        How many were dropped.
    """
    room = room_of(root) // 2
    if not room or root.catalog.view(Transaction.counters).live <= room:  # copies are live files, among others
        return 0
    copies = _all_copies(root, deadline)
    over = sum(copy.record.size for _, copy in copies) - room
    dropped = 0
    for key, copy in sorted(copies, key=lambda found: _last_use(root, found[1].record)):
        if over <= 0:
            break
        if key != keep:
            drop_copy(root, key, copy.places, deadline)
            over -= copy.record.size
            dropped += 1
    return dropped


def _all_copies(root: Root, deadline: float) -> list[tuple[bytes, Copy]]:
    found: list[tuple[bytes, Copy]] = []
    after = b""
    while page := look(root, lambda tables, after=after: tables.copies(after, _PAGE), deadline):
        found += page
        after = page[-1][0]
    return found


def room_of(root: Root) -> int:
    """How many bytes the store may take: its capacity, or all of the file system. 0: nobody knows."""
    capacity = root.catalog.view(Transaction.counters).capacity
    if capacity:
        return capacity
    status = os.fstatvfs(root.segments_fd)
    return status.f_blocks * status.f_frsize


def _last_use(root: Root, record: Record) -> float:
    try:
        return os.stat(segment_path(root.segments, record.segment)).st_mtime
    except OSError:
        return 0.0


def note_use(root: Root, record: Record) -> None:
    """At most twice a minute, if it was noted that long ago: a look takes a microsecond, and a get needs no write."""
    path = segment_path(root.segments, record.segment)
    with contextlib.suppress(OSError):  # another user's; or it was dropped just now
        if time.time() - os.stat(path).st_mtime > _NOTED_EVERY:
            os.utime(path)
