"""Replay buffers as users call them: rows round and round, sampled by all processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import memstore
from tests.children import in_child

SPEC = {"x": ((3,), torch.float32), "more": {"y": ((), torch.int64), "z": ((2, 2), torch.bfloat16)}}


def batch(start: int, count: int) -> dict[str, Any]:
    """Rows that say which position they have."""
    number = torch.arange(start, start + count)
    return {
        "x": number[:, None].float().expand(count, 3),
        "more": {"y": number, "z": number[:, None, None].bfloat16().expand(count, 2, 2)},
    }


def row(number: int) -> dict[str, Any]:
    return {
        "x": torch.full((3,), float(number)),
        "more": {"y": torch.tensor(number), "z": torch.full((2, 2), float(number)).bfloat16()},
    }


def check(sample: Any) -> list[int]:
    """That each row is that of its index. Returns the indices."""
    index = sample["index"]
    assert torch.equal(sample["more", "y"], index)
    assert torch.equal(sample["x"], index[:, None].float().expand(-1, 3))
    assert torch.equal(sample["more", "z"], index[:, None, None].bfloat16().expand(-1, 2, 2))
    return index.tolist()


def new(store: memstore.Store, capacity: int = 10, **options: Any) -> memstore.ReplayBuffer:
    return memstore.ReplayBuffer(store, "replay", SPEC, capacity=capacity, **options)


def test_rows_go_round_and_are_sampled_with_their_index(store: memstore.Store) -> None:
    buffer = new(store)
    assert (len(buffer), buffer.cursor, buffer.spec, buffer.capacity) == (0, 0, SPEC, 10)
    assert buffer.extend(batch(0, 7)).tolist() == list(range(7))
    assert buffer.add(row(7)) == 7
    assert buffer.extend(batch(8, 6)).tolist() == list(range(8, 14))
    assert (len(buffer), buffer.cursor) == (10, 14)
    sample = buffer.sample(500)
    assert isinstance(sample, TensorDict) and sample.batch_size == torch.Size([500])
    assert set(check(sample)) == set(range(4, 14))


def test_all_who_open_it_have_one_buffer(store: memstore.Store) -> None:
    buffer = new(store)
    other = memstore.ReplayBuffer(store, "replay")
    sent = pickle.loads(pickle.dumps(buffer))
    buffer.extend(batch(0, 2))
    other.extend(batch(2, 2))
    sent.extend(batch(4, 2))
    assert len(buffer) == len(other) == len(sent) == 6
    for one in (buffer, other, sent):
        assert set(check(one.sample(200))) == set(range(6))


@pytest.mark.full
def test_a_process_that_has_nothing_but_the_path(root: str) -> None:
    script = f"""
import memstore, torch
buffer = memstore.ReplayBuffer(memstore.open({root!r}), "replay", (( ), torch.int64), capacity=8)
print(buffer.extend(torch.arange(5)).tolist(), flush=True)
"""
    with memstore.open(root) as store:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        assert done.stdout.strip() == "[0, 1, 2, 3, 4]", done.stderr
        sample = memstore.ReplayBuffer(store, "replay", mode="r+").sample(100)
        assert torch.equal(sample["data"], sample["index"])
        assert set(sample["index"].tolist()) == set(range(5))


def test_a_forked_child_goes_on_with_it(store: memstore.Store) -> None:
    buffer = new(store)
    buffer.extend(batch(0, 2))

    def child() -> list[int]:
        buffer.extend(batch(2, 2))
        return check(buffer.sample(4))

    assert set(in_child(child)) <= set(range(4))
    assert set(check(buffer.sample(100))) == set(range(4))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampler": "prioritized"}, "made without priorities"),
        ({"rate_limiter": memstore.RateLimiter(1.0, 1, 2.0)}, "its rate limiter is None, and not RateLimiter"),
    ],
)
def test_another_buffer_than_it_was_made_as_is_told(store: memstore.Store, asked: Any, message: str) -> None:
    new(store)
    with pytest.raises(memstore.StructureMismatchError, match=message):
        memstore.ReplayBuffer(store, "replay", **asked)


@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo", "prioritized"])
def test_another_alpha_is_told_with_each_sampler(store: memstore.Store, sampler: Any) -> None:
    new(store, sampler="prioritized", alpha=0.9)
    with pytest.raises(memstore.StructureMismatchError, match="its alpha is 0.9, and not 0.7: say the same, or leave"):
        new(store, sampler=sampler, alpha=0.7)
    assert len(new(store, sampler=sampler, alpha=0.9)) == 0
    assert len(new(store, sampler=sampler, alpha=0.6)) == 0, "the default means as created"


@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo"])
def test_alpha_has_no_effect_without_priorities(store: memstore.Store, sampler: Any) -> None:
    for _ in range(2):  # it is made, and opened
        assert len(new(store, sampler=sampler, alpha=0.7)) == 0
    with pytest.raises(memstore.StructureMismatchError, match="and it was made without priorities: leave sampler= out"):
        new(store, sampler="prioritized", alpha=0.7)


def test_modes_say_whether_it_has_to_be_there(store: memstore.Store) -> None:
    with pytest.raises(memstore.KeyNotFoundError, match="with spec= and capacity="):
        memstore.ReplayBuffer(store, "replay")
    with pytest.raises(memstore.KeyNotFoundError, match="mode 'a' makes it"):
        memstore.ReplayBuffer(store, "replay", SPEC, capacity=2, mode="r+")
    new(store, mode="x")
    with pytest.raises(memstore.AlreadyExistsError, match="'replay' is there already"):
        new(store, mode="x")
    store.create_dataset("data", SPEC, capacity=2)
    with pytest.raises(memstore.MutableEntryError, match="is a dataset"):
        memstore.ReplayBuffer(store, "data")


def test_what_does_not_fit_changes_nothing(store: memstore.Store) -> None:
    buffer = new(store)
    with pytest.raises(memstore.StoreFullError, match="10 slots, and a batch of 11"):
        buffer.extend(batch(0, 11))
    with pytest.raises(memstore.StructureMismatchError, match=r"value\['x'\] is missing"):
        buffer.add({"more": row(0)["more"]})
    assert (len(buffer), buffer.cursor) == (0, 0)
    assert buffer.extend(batch(0, 0)).tolist() == []
    with pytest.raises(memstore.StoreTimeoutError, match="no rows to sample"):
        buffer.sample(1, timeout=0.01)


def test_a_deleted_buffer_is_written_no_more(store: memstore.Store) -> None:
    buffer = new(store)
    buffer.extend(batch(0, 3))
    store.delete("replay")
    with pytest.raises(memstore.MutableEntryError, match="was deleted"):
        buffer.add(row(3))
    assert len(check(buffer.sample(3))) == 3
    with pytest.raises(memstore.VersionGoneError):
        pickle.loads(pickle.dumps(buffer))


def test_it_survives_the_death_of_all(root: str) -> None:
    def fill() -> None:
        new(memstore.open(root)).extend(batch(0, 10))
        os._exit(0)

    pid = os.fork()
    if not pid:
        fill()
    assert os.waitpid(pid, 0)[1] == 0
    with memstore.open(root) as store:
        buffer = memstore.ReplayBuffer(store, "replay")
        assert buffer.cursor == 10
        assert set(check(buffer.sample(200))) == set(range(10))
