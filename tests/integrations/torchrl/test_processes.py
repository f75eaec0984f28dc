"""Buffers that several processes write and sample, with no lock of TorchRL's."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.children import Child, Wire, children
from tests.integrations.torchrl.whole import batch, numbers_of

data = pytest.importorskip("torchrl.data", reason="`make test-torchrl` has torchrl in an environment of its own")

from memstore.integrations.torchrl import MemstoreStorage, MemstoreWriter  # noqa: E402

ROOT = Path(__file__).parents[3]
SLOTS = 500


def buffer(store: memstore.Store, slots: int = SLOTS, **options: Any) -> Any:
    storage = MemstoreStorage(slots, store=store, key="rows")
    return data.TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter(), batch_size=32, **options)


def _write(wire: Wire, writer: int, path: str, rounds: int) -> list[list[int]]:
    rb = buffer(memstore.open(path))
    wire.send()
    wire.receive()
    return [rb.extend(batch([1000 * writer + number] * 20)).tolist() for number in range(rounds)]


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_two_writers_and_a_sampler_without_a_lock_see_whole_rows_only(root: str, rounds: int) -> None:
    """TorchRL's own shared storage, without its lock, gave 85 torn rows of 12,160 in such a test."""
    with memstore.open(root) as store:
        rb = buffer(store)
        sampled = 0
        with children(2, _write, root, rounds) as writers:
            for writer in writers:
                writer.receive()
            for writer in writers:
                writer.send()
            while not (sampled and all(writer.has_message for writer in writers)):
                if len(rb):
                    sampled += len(numbers_of(rb.sample()))
            slots = [one for writer in writers for one in writer.receive()]
        assert sampled > 100
        taken = sorted(slot for one in slots for slot in one)
        assert taken == sorted(list(range(SLOTS)) * (2 * rounds * 20 // SLOTS)), "each slot was written as often"
        assert rb.write_count == 2 * rounds * 20 and rb.writer._cursor == 0
        assert all(one == [(one[0] + i) % SLOTS for i in range(20)] for one in slots), "batches are runs"


def _create(_: Wire, number: int, path: str) -> list[int]:
    with memstore.open(path) as store:
        return buffer(store).extend(batch([number] * 10)).tolist()


def test_whoever_writes_first_makes_the_entry(root: str) -> None:
    with memstore.open(root) as store:
        with children(3, _create, root) as writers:
            slots = [slot for writer in writers for slot in writer.receive()]
        assert sorted(slots) == list(range(30))
        assert sorted(numbers_of(buffer(store)[:])) == [0] * 10 + [1] * 10 + [2] * 10


OTHER = """
import sys, memstore, torch
from torchrl.data import TensorDictReplayBuffer
from memstore.integrations.torchrl import MemstoreStorage, MemstoreWriter
storage = MemstoreStorage(500, store=memstore.open(sys.argv[1]), key="rows")
buffer = TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter(), batch_size=32)
rows = buffer.sample().exclude("index")
print(sorted(set(rows["more", "y"].tolist())), buffer.extend(rows)[0].item())
"""


def test_a_process_that_knows_the_path_alone_goes_on(root: str) -> None:
    with memstore.open(root) as store:
        rb = buffer(store)
        rb.extend(batch([7, 8, 9]))
        done = subprocess.run(
            [sys.executable, "-c", OTHER, root], cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert done.stdout.splitlines()[-1:] == ["[7, 8, 9] 3"], done.stderr
        assert len(rb) == 35


def _spawned(rb: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put((len(rb), rb.extend(batch([5, 6])).tolist(), sorted(set(numbers_of(rb.sample())))))


def test_a_spawned_process_is_sent_the_buffer_as_torchrl_sends_its_own(root: str) -> None:
    with memstore.open(root) as store:
        rb = buffer(store)
        rb.extend(batch([1, 2, 3]))
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=_spawned, args=(rb, queue))
        process.start()
        assert queue.get(timeout=100)[:2] == (3, [3, 4])
        process.join(60)
        assert process.exitcode == 0
        assert numbers_of(rb[:]) == [1, 2, 3, 5, 6]
        queue.close()
        queue.join_thread()


def _forked(_: Wire, rb: Any) -> list[int]:
    return rb.extend(batch([5, 6])).tolist()


def test_a_forked_process_goes_on_with_the_buffer(root: str) -> None:
    with memstore.open(root) as store:
        rb = buffer(store)
        rb.extend(batch([1, 2, 3]))
        with Child(_forked, rb) as child:
            assert child.receive() == [3, 4]
        assert rb.extend(batch([7])).tolist() == [5]
        assert numbers_of(rb[:]) == [1, 2, 3, 5, 6, 7]
