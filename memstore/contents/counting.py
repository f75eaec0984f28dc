"""The count of what was read: through lazy leaves and by rows, out of boxes, and into shards."""

from __future__ import annotations

import threading

from memstore import modes

_lock = threading.Lock()
_total = 0


def count_read(nbytes: int) -> None:
    global _total
    with _lock:
        _total += nbytes


@modes.uncompiled
def bytes_read() -> int:
    """Returns how many bytes this process has read so far through views, rows and parts of tensors.

    It counts the elements of lazy leaves and of `read_rows` each time they are used (slicing, printing or sending a
    view uses none), and the bytes that a get copies from a sharded entry or into a DTensor.
    """
    return _total
