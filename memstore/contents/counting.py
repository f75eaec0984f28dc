"""The count of what was read: through lazy leaves and by rows, out of boxes, and into shards."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_total = 0


def count_read(nbytes: int) -> None:
    global _total
    with _lock:
        _total += nbytes


def bytes_read() -> int:
    """Returns how many bytes this process has read so far of what it looks at in parts.

    These are the elements that are used of lazy leaves and by `read_rows`, each time they are (to slice, print or send
    a view uses none); and, of a sharded entry or into a DTensor, what a get copies.
    """
    return _total
