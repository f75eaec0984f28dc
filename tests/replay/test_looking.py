"""Rows of a replay buffer without a sampler: by their age, whole, as copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.replay import sampling
from memstore.replay.sampling import copy_picked
from tests.aio.loops import with_store
from tests.replay.rows import SPEC, in_the_copy, numbers_of, rows


def test_rows_are_counted_from_the_oldest_on(store: memstore.Store) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8, sampler="fifo")
    assert len(buffer[:]) == 0 and list(buffer) == []
    for number in range(0, 12, 3):
        buffer.extend(rows(number, 3))
    assert len(buffer) == 8 and buffer[:]["index"].tolist() == list(range(4, 12))
    buffer.sample(3)  # which stay until they are overwritten
    assert numbers_of(buffer[:]) == numbers_of(torch.stack(list(buffer))) == list(range(4, 12))
    assert numbers_of(buffer[0][None]) == [4]
    assert buffer[-1]["index"] == 11 and buffer[-1].batch_size == ()
    assert numbers_of(buffer[2:-1:2]) == [6, 8, 10] and numbers_of(buffer[::-1]) == list(range(11, 3, -1))
    assert numbers_of(buffer[[1, -1, 1]]) == [5, 11, 5]
    assert numbers_of(memstore.ReplayBuffer(memstore.open(store.root, "r"), "replay")[:2]) == [4, 5]
    for wrong, error in ((8, IndexError), (-9, IndexError), ([8], IndexError), ("x", TypeError), ((0, 1), TypeError)):
        with pytest.raises(error):
            buffer[wrong]


def test_rows_that_are_overwritten_meanwhile_are_left_out(
    store: memstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8)
    buffer.extend(rows(0, 8))
    added = [8]

    def overwritten(*arguments: Any) -> Any:
        if added:
            buffer.extend(rows(added.pop(), 2))
        return copy_picked(*arguments)

    monkeypatch.setattr(sampling, "copy_picked", overwritten)
    assert numbers_of(buffer[:]) == list(range(2, 8))
    added.append(10)
    assert numbers_of(buffer[[0, -1]]) == [4, 11]  # begins anew
    added.append(12)
    assert [int(row["number"]) for row in buffer] == list(range(6, 12))
    assert numbers_of(buffer[:]) == list(range(6, 14))


def test_rows_of_a_writer_that_is_in_the_middle_are_no_rows_yet(store: memstore.Store) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8)
    buffer.extend(rows(0, 6))
    found: list[list[int]] = []
    with in_the_copy(buffer, lambda: found.append(numbers_of(buffer[:]))):
        buffer.extend(rows(6, 4))
    assert found == [list(range(2, 6))] * 2  # at the ring's end, and at its beginning
    assert numbers_of(buffer[:]) == list(range(2, 10))


def test_rows_are_read_by_tasks(root: str) -> None:
    async def use(store: Any) -> None:
        buffer = memstore.aio.ReplayBuffer(store, "replay", SPEC, capacity=8)
        assert [row async for row in buffer] == []
        await buffer.extend(rows(0, 5))
        assert [int(row["number"]) async for row in buffer] == [0, 1, 2, 3, 4]
        assert numbers_of(await buffer.read_rows(slice(-2, None))) == [3, 4]

    with_store(root, use)
