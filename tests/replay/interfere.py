"""Something happens in the middle of a call, where a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import memstore
from tests.replay.rows import ring_of, writer_of


class _Leaf:
    """Stands before the rows of a leaf, and calls something when they are written."""

    def __init__(self, array: Any, action: Callable[[], object]) -> None:
        self._array, self._action = array, action

    def __setitem__(self, index: Any, rows: Any) -> None:
        half = len(rows) // 2 or 1
        self._array[index][:half] = rows[:half]
        self._action()
        self._array[index][half:] = rows[half:]


@contextmanager
def in_the_copy(buffer: memstore.ReplayBuffer, action: Callable[[], object], *, small: bool = False) -> Generator[None]:
    """In the middle of the rows of the last leaf that a write stores, inside this `with`.

    `small`: as a small batch, in a hold of the mutex; else as a large one.
    """
    ring: Any = ring_of(buffer)
    writer: Any = writer_of(buffer)
    arrays, small_batch = ring.arrays, writer.small_batch
    ring.arrays = (*arrays[:-1], _Leaf(arrays[-1], action))
    writer.small_batch = buffer.capacity if small else 0
    try:
        yield
    finally:
        ring.arrays, writer.small_batch = arrays, small_batch
