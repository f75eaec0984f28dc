"""Several processes at one dataset: writers and a seal, writers and a reader, writers that are killed."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch

import memstore
from tests.children import Child, Wire, children
from tests.crash.leftovers import left_after_gc

SPEC = {"x": ((4096,), torch.int64), "y": ((), torch.int64)}  # 32 KiB a row: long enough to be torn


def batch(*numbers: int) -> dict[str, torch.Tensor]:
    y = torch.tensor(numbers)
    return {"x": y[:, None].expand(-1, 4096), "y": y}


def check_whole(rows: dict[str, torch.Tensor]) -> list[int]:
    assert torch.equal(rows["x"], rows["y"][:, None].expand(-1, 4096)), "a torn row"
    return rows["y"].tolist()


# --- a seal -----------------------------------------------------------------------------------------------------------


def _overwrite(wire: Wire, row: int, path: str, rounds: int) -> None:
    """Writes growing numbers to its row until that is refused. Sends the last that was acknowledged."""
    with memstore.open(path) as store:
        for _ in range(rounds):
            wire.receive()
            data = store.open_dataset("data")
            wire.send()
            done = 0
            with contextlib.suppress(memstore.MutableEntryError):
                while True:
                    data[row : row + 1] = batch(done + 1)
                    done += 1
            wire.send(done)
            del data


@pytest.mark.parametrize("rounds", [15, pytest.param(300, marks=pytest.mark.full)])
def test_a_seal_has_every_write_that_was_acknowledged(root: str, rounds: int) -> None:
    with memstore.open(root, timeout=60.0) as store, children(2, _overwrite, root, rounds) as writers:
        for number in range(rounds):
            data = store.create_dataset("data", SPEC, capacity=2, length=2)
            for writer in writers:
                writer.send()
            for writer in writers:
                writer.receive()
            while min(data[:]["y"].tolist()) < 1 + number % 5:
                time.sleep(0)
            data.seal()
            acknowledged = [writer.receive() for writer in writers]
            sealed = store.get("data")["y"].tolist()
            # what was refused may be there
            assert all(done <= there <= done + 1 for done, there in zip(acknowledged, sealed, strict=True))
            del data
            store.delete("data")


# --- a reader ---------------------------------------------------------------------------------------------------------


def _extend(wire: Wire, number: int, path: str, count: int) -> list[int]:
    chance = random.Random(number)
    data = memstore.open(path).open_dataset("data", wait=60.0)
    first = number << 32
    while first % (1 << 32) < count:
        size = min(chance.randrange(1, 6), count - first % (1 << 32))
        data.extend(batch(*range(first, first + size)))
        first += size
    return [number << 32, first]


def test_a_reader_sees_whole_rows_that_stay(root: str) -> None:
    count = 150
    with memstore.open(root, timeout=60.0) as store, children(2, _extend, root, count) as writers:
        data = store.create_dataset("data", SPEC, capacity=2 * count)
        seen: list[int] = []
        while len(seen) < 2 * count:
            length = len(data)
            assert length >= len(seen)
            found = seen + check_whole(data[len(seen) : length])
            assert len(found) == length and found[: len(seen)] == seen
            view = store.view("data")
            assert len(view["y"]) >= length
            seen = found
        for writer in writers:
            first, end = writer.receive()
            assert [row for row in seen if first <= row < end] == list(range(first, end))
        assert check_whole(data[:]) == seen


# --- kills ------------------------------------------------------------------------------------------------------------


def _extend_on(wire: Wire, path: str, first: int) -> None:
    data = memstore.open(path, timeout=60.0).open_dataset("data")
    while True:
        added = data.extend(batch(first, first + 1))
        wire.send((added.start, first))
        first += 2
        if added.stop > data.capacity - 8:
            wire.receive()  # until it is killed


def _acknowledged(child: Child) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    with contextlib.suppress(RuntimeError):  # it ended
        while True:
            found.append(child.receive())
    return found


@pytest.mark.parametrize("rounds", [12, pytest.param(100, marks=pytest.mark.full)])
def test_rows_of_writers_that_are_killed_at_random_are_whole_or_absent(root: str, rounds: int) -> None:
    chance = random.Random(rounds)
    with memstore.open(root, timeout=60.0) as store:
        for _ in range(rounds):
            data = store.create_dataset("data", SPEC, capacity=1000)
            with Child(_extend_on, root, 0) as one, Child(_extend_on, root, 1 << 32) as other:
                expected = [child.receive() for child in (one, other)]
                time.sleep(chance.random() / 100)  # long enough for nothing: any moment will do
                for child in (one, other):
                    child.kill()
                for child in (one, other):
                    expected += _acknowledged(child)
            rows = check_whole(data[:])
            assert all(rows[at : at + 2] == [first, first + 1] for at, first in expected)
            assert rows[::2] == [row - 1 for row in rows[1::2]], "half a batch"
            assert data.extend(batch(7, 8)) == range(len(rows), len(rows) + 2)
            del data
            store.delete("data")
        assert left_after_gc(store) == []
