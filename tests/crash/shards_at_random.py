"""Ranks, plain writers and readers that run on and may be killed at any moment. Each tells what it has done, in time.

A sharded value's stamp tells its attempt, and a rank's part of it how often that rank was started anew in it: so a
version of two attempts, or a torn one, shows.
"""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore

KEYS = ["a", "b"]
WORLD = 3
PLAIN = 1 << 40  # stamps of plain puts are beyond it


def attempt_of(stamp: int) -> str:
    return f"attempt {stamp}"


def value_of(rank: int, stamp: int, elements: int) -> dict[str, Any]:
    row = torch.full((1, elements), stamp)
    shard = memstore.TensorShard(row, global_shape=(WORLD, elements), offsets=(rank, 0))
    return {"rows": shard, f"of {rank}": torch.full((elements // 2,), stamp)}


def stamp_of(value: Any) -> int:
    leaves = [value] if isinstance(value, torch.Tensor) else list(value.values())
    assert len(leaves) in (1, WORLD + 1), sorted(value)
    bounds = {int(bound) for leaf in leaves for bound in torch.aminmax(leaf)}
    assert len(bounds) == 1, f"a torn value, or one of several attempts: {sorted(bounds)}"
    return bounds.pop()


def be_a_rank(channel: Connection, path: str, rank: int, seed: int) -> None:
    """Puts parts of the attempts that it is told of, and sends what became of each: a version, or an error's name."""
    chance = random.Random(seed)
    store = memstore.open(path, timeout=20.0)
    while (told := channel.recv()) != "end":
        key, stamp, elements = told
        try:
            timeout = chance.choice([0.01, 0.05, 0.2, 0.5])
            put = store.put_sharded(
                *(key, value_of(rank, stamp, elements)),
                attempt=attempt_of(stamp),
                rank=rank,
                world_size=WORLD,
                wait=chance.random() < 0.5,
                timeout=timeout,
                lease=10.0,
            )
            found: int | str = put if isinstance(put, int) else _wait_or_abort(store, put, timeout)
        except memstore.MemstoreError as error:
            found = type(error).__name__
        channel.send((stamp, found))


def _wait_or_abort(store: memstore.Store, put: memstore.PendingPut, timeout: float) -> int:
    try:
        return put.wait(timeout)
    except memstore.StoreTimeoutError:
        store.abort(put.key, put.attempt)  # it waits longer for the mutex than the put may
        return put.wait(20.0)


def write_plainly(channel: Connection, path: str, seed: int) -> None:
    """Puts, deletes, aborts and sweeps, of the same keys. Sends how often."""
    chance = random.Random(seed)
    store = memstore.open(path, timeout=20.0)
    stamp = PLAIN
    while not channel.poll():
        key, what = chance.choice(KEYS), chance.random()
        stamp += 1
        if what < 0.6:
            store.put(f"{key}/plain", torch.full((chance.choice([50, 700, 9000]),), stamp))
        elif what < 0.75:
            store.put(key, torch.full((chance.choice([50, 700]),), stamp))
        elif what < 0.85:
            store.delete(key, missing_ok=True)
        elif what < 0.9:
            store.gc()
        else:
            for one in store.pending(key)[:1] if chance.random() < 0.2 else ():
                store.abort(key, one.attempt)
    channel.send(stamp - PLAIN)


def read_on(channel: Connection, path: str, seed: int) -> None:
    """Reads whole values, whose versions must grow; what it holds must not change. Sends how often it has read."""
    chance = random.Random(seed)
    store = memstore.open(path, timeout=20.0)
    last = dict.fromkeys(KEYS, 0)
    held: list[tuple[Any, int]] = []
    count = 0
    while not channel.poll():
        key = chance.choice(KEYS)
        try:
            ref = store.ref(key)
            value = ref.get()
        except (memstore.KeyNotFoundError, memstore.PartialCommitError):
            continue
        stamp = stamp_of(value)
        assert ref.version >= last[key], f"{key} went from version {last[key]} back to {ref.version}"
        last[key], count = ref.version, count + 1
        held = [*held[-2:], (value, stamp)]
        for before, was in held:
            assert stamp_of(before) == was, "a value that was held has changed"
        del ref, value
    held.clear()
    channel.send(count)
