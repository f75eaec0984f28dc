"""Rows that say which they are, in each of their bytes; and what must hold of a buffer of them at any time."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

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
    np.testing.assert_allclose(tree.total(), tree.priorities.sum())
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
