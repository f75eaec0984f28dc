"""Rows that say which they are, in each of their bytes; and what must hold of a buffer of them at any time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import memstore
from memstore.replay.ring import READABLE, STATE, WRITING, Ring

SIZE = 64
SPEC = {"number": ((), torch.int64), "copies": ((SIZE,), torch.int64)}


def rows(first: int, count: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count)
    return {"number": number, "copies": number[:, None].expand(count, size)}


def new(store: memstore.Store, capacity: int = 8, **options: Any) -> memstore.ReplayBuffer:
    return memstore.ReplayBuffer(store, "replay", SPEC, capacity=capacity, **options)


def write_data(store: memstore.Store, key: str, offset: int, data: bytes) -> None:
    """Into the data section of the file that a buffer or a dataset has."""
    (path,) = store.info(key).files
    with open(path, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + offset)
        file.write(data)


def numbers_of(sample: Any) -> list[int]:
    """Of rows that are whole, each."""
    number, copies = sample["number"], sample["copies"]
    assert torch.equal(copies, number[..., None].expand_as(copies)), "a torn row"
    return number.flatten().tolist()


def ring_of(buffer: memstore.ReplayBuffer) -> Ring:
    return buffer._ring


def writer_of(buffer: memstore.ReplayBuffer) -> Any:
    return buffer._writer


def there(store: memstore.Store, key: str) -> dict[int, int]:
    """What samplers may find: the numbers of all rows, by their positions."""
    buffer = memstore.ReplayBuffer(store, key)
    if not len(buffer):
        return {}
    sample = buffer.sample(40 * buffer.capacity)
    return dict(sorted(zip(sample["index"].tolist(), numbers_of(sample), strict=True)))


def check_priorities(buffer: memstore.ReplayBuffer) -> None:
    """A slot that isn't whole has no priority, one that is has one, and the sums are those of the leaves."""
    ring = ring_of(buffer)
    if ring.priorities is None:
        return
    tree = ring.priorities.tree
    np.testing.assert_array_equal(tree.priorities != 0, ring.words & READABLE != 0)
    assert ring.numbers.sequence % 2 == 0
    np.testing.assert_allclose(tree.sums()[-1], tree.priorities.sum())
    generator = np.random.default_rng(0)
    if len(buffer):
        drawn = np.unique(tree.draw(100 * buffer.capacity, generator))
        np.testing.assert_array_equal(drawn, np.flatnonzero(tree.priorities))


def check_whole(store: memstore.Store, buffer: memstore.ReplayBuffer, number: int = 1000) -> None:
    """Everybody who had a part in it is dead, or gone: no slot is stuck, no claim is held, and it goes on."""
    count = buffer.capacity
    index = buffer.extend(rows(number, count), timeout=10.0).tolist()
    assert len(buffer) == count
    assert there(store, buffer.key) == dict(zip(index, range(number, number + count), strict=True))
    ring = ring_of(buffer)
    assert not (ring.words & STATE == WRITING).any()
    assert ring.claims.in_use() == []
    check_priorities(buffer)


# --- something happens in the middle of a call ------------------------------------------------------------------------


class _Leaf:
    """Stands before the rows of a leaf, and calls something when they are written."""

    def __init__(self, array: Any, action: Callable[[], object]) -> None:
        self._array, self._action = array, action

    def take(self, *arguments: Any) -> Any:
        return self._array.take(*arguments)

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
    writer = writer_of(buffer)
    arrays, small_batch = ring.arrays, writer.small_batch
    ring.arrays = (*arrays[:-1], _Leaf(arrays[-1], action))
    writer.small_batch = buffer.capacity if small else 0
    try:
        yield
    finally:
        ring.arrays, writer.small_batch = arrays, small_batch
