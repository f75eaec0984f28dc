"""Sharded puts that are cut short: what is put, what is done, and how others go on. Workers do it, in order to die.

The ranks of these attempts are calls with `rank=` and `world_size=`, made by whichever process: so one process may go
on for another that died, as a launcher's restart would.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore
from tests.crash.forks import fork_at_step, reap
from tests.crash.values import stamp_of, stamped
from tests.support import faults

KEY = "a"
OLD, NEW, OTHER = 1, 2, 7
WORLD = 2
ROW = 700  # elements of one rank's rows
COMMITS, MUTEX_STEPS = frozenset({faults.COMMIT}), frozenset({"mutex_unlock"})


def shard(rank: int, stamp: int, *, world: int = WORLD, elements: int = ROW) -> dict[str, Any]:
    """A leaf of which each rank holds a row, and one that only this rank has."""
    row = torch.full((1, elements), stamp)
    return {
        "rows": memstore.TensorShard(row, global_shape=(world, elements), offsets=(rank, 0)),
        f"of {rank}": torch.full((elements,), stamp),
    }


def stamp_at(store: memstore.Store, key: str = KEY, *, world: int = WORLD) -> int | None:
    """The stamp of a sharded value, or of a plain one; None if there is no such key. All ranks must have it."""
    try:
        value = store.get(key)
    except memstore.KeyNotFoundError:
        return None
    except memstore.PartialCommitError:  # parts wait, and there is no version yet
        return None
    return stamp_of_all(value, world)


def stamp_of_all(value: Any, world: int = WORLD) -> int:
    if isinstance(value, torch.Tensor):
        return stamp_of(value)
    assert sorted(value) == sorted(["rows", *(f"of {rank}" for rank in range(world))]), sorted(value)
    stamps = {stamp_of(leaf) for leaf in value.values()}
    assert len(stamps) == 1, f"a version of two attempts: {stamps}"
    return stamps.pop()


def put(
    store: memstore.Store, rank: int, stamp: int, attempt: str, *, key: str = KEY, wait: bool = False, **options: Any
) -> Any:
    value = shard(rank, stamp)
    return store.put_sharded(key, value, attempt=attempt, rank=rank, world_size=WORLD, wait=wait, **options)


def put_all(store: memstore.Store, stamp: int, attempt: str) -> int:
    """By all ranks, one after the other."""
    pending = [put(store, rank, stamp, attempt) for rank in range(WORLD)]
    return max(one.wait(10.0) for one in pending)


@dataclass(frozen=True)
class Scene:
    """`before` is done by others, `run` by the process that dies. `ends`: when it is done, the attempt has ended."""

    run: Callable[[memstore.Store, str], object]
    before: Callable[[memstore.Store, str], object] = lambda store, attempt: None
    ends: bool = False
    over: str = "plain"  # what the key has before: a plain value, a sharded one, or none

    def reset(self, store: memstore.Store, attempt: str) -> int:
        """Makes the store as it is before. Returns the version of the key."""
        store.delete(KEY, missing_ok=True)
        if self.over == "plain":
            store.put(KEY, stamped(OLD, 8 * ROW))
        elif self.over == "sharded":
            put_all(store, OLD, f"{attempt}, before")
        store.gc()
        self.before(store, attempt)
        return store.version(KEY) if self.over != "none" else 0


def _time_out(store: memstore.Store, attempt: str) -> None:
    """So long that the part is there before, on a busy machine too: else it would end without having waited."""
    with contextlib.suppress(memstore.StoreTimeoutError):
        put(store, 1, NEW, attempt, wait=True, timeout=0.5)


def _others_first(store: memstore.Store, attempt: str) -> None:
    """An older attempt of the key waits as well."""
    put(store, 1, OTHER, f"{attempt}, older")
    put(store, 0, NEW, attempt)


def _fail(store: memstore.Store, attempt: str) -> None:
    """The bytes don't agree with those of the other rank."""
    value = {"rows": torch.zeros(3)}
    with contextlib.suppress(memstore.ShardMismatchError):
        store.put_sharded(KEY, value, attempt=attempt, rank=1, world_size=WORLD, wait=True)


SCENES = {
    "first": Scene(lambda store, attempt: put(store, 0, NEW, attempt)),
    "again": Scene(
        lambda store, attempt: put(store, 0, NEW, attempt), lambda store, attempt: put(store, 0, OTHER, attempt)
    ),
    "last": Scene(
        lambda store, attempt: put(store, 1, NEW, attempt, wait=True),
        lambda store, attempt: put(store, 0, NEW, attempt),
    ),
    "last-over-sharded": Scene(
        lambda store, attempt: put(store, 1, NEW, attempt, wait=True), _others_first, over="sharded"
    ),
    "last-of-a-new-key": Scene(
        lambda store, attempt: put(store, 1, NEW, attempt, wait=True),
        lambda store, attempt: put(store, 0, NEW, attempt),
        over="none",
    ),
    "abort": Scene(
        lambda store, attempt: store.abort(KEY, attempt), lambda store, attempt: put(store, 0, NEW, attempt), ends=True
    ),
    "time-out": Scene(_time_out, ends=True, over="sharded"),
    "mismatch": Scene(_fail, lambda store, attempt: put(store, 0, NEW, attempt), ends=True),
    "expire": Scene(
        lambda store, attempt: store.gc(), lambda store, attempt: put(store, 0, NEW, attempt, lease=0.0), ends=True
    ),
}


def steps_of(channel: Connection, path: str, name: str, attempt: str) -> None:
    gc.disable()  # finalizers make system calls too: the steps would come in another order
    with memstore.open(path) as store:
        channel.send(faults.record(lambda: SCENES[name].run(store, attempt)))


def die_as_the_last(channel: Connection, path: str, key: str, commit: int, after: bool) -> None:
    """Puts the last part, and dies at a commit: that of its claim (1), of its prepare, or of the publication (3)."""
    store = memstore.open(path)
    with faults.at_step(commit, faults.die, after=after, names=COMMITS):
        put(store, 1, NEW, "first", key=key)


def die_in_an_abort(channel: Connection, path: str, key: str) -> None:
    """Right after its commit."""
    store = memstore.open(path)
    with faults.at_step(1, faults.die, after=True, names=COMMITS):
        store.abort(key, "first")


def stop_as_the_last(channel: Connection, path: str) -> None:
    """Puts the last part, and stops when it is there, before anything else. Then it sends the version."""
    store = memstore.open(path)
    with faults.at_step(2, lambda: os.kill(os.getpid(), signal.SIGSTOP), after=True, names=MUTEX_STEPS):
        channel.send(put(store, 1, NEW, "first", wait=True))
    channel.recv()


def put_on(channel: Connection, path: str, rank: int, attempt: str) -> None:
    """Puts a part, waits for the others, and sends the version."""
    store = memstore.open(path)
    channel.send("opened")
    channel.recv()
    channel.send(put(store, rank, NEW, attempt, wait=True))
    channel.recv()


def fork_at_steps(channel: Connection, path: str, stride: int) -> None:
    """Forks at each step of the last rank's put, which another thread makes: the child puts parts, and gets, too."""
    store = memstore.open(path, timeout=20.0)
    gc.disable()
    put_all(store, OLD, "old")
    put(store, 0, NEW, "steps")
    names = faults.record(lambda: put(store, 1, NEW, "steps"))
    for number in range(1, len(names) + 1, stride):
        first = put(store, 0, NEW, f"of {number}")
        _fork_at(store, first, number)
    channel.send(names)


def _fork_at(store: memstore.Store, first: memstore.PendingPut, number: int) -> None:
    def meet() -> None:
        """The child waits by what its parent has begun; and it is a rank, too."""
        version = first.wait(20.0)
        assert put_all(store, NEW, f"of {number}, in the child") > version
        assert stamp_at(store) == NEW

    pid = fork_at_step(number, lambda: put(store, 1, NEW, f"of {number}"), meet)
    version = first.wait(20.0)
    reap(pid)
    assert store.version(KEY) > version and stamp_at(store) == NEW


def die_at(channel: Connection, path: str, name: str, attempt: str, number: int, after: bool) -> None:
    gc.disable()
    store = memstore.open(path)
    with faults.at_step(number, faults.die, after=after):
        SCENES[name].run(store, attempt)


# --- ranks, plain writers and readers that run on and may be killed at any moment; each tells what it has done --------
# A sharded value's stamp tells its attempt, and a rank's part of it how often that rank was started anew in it: so a
# version of two attempts, or a torn one, shows.


KEYS = ["a", "b"]
RANKS = 3
PLAIN = 1 << 40  # stamps of plain puts are beyond it


def attempt_of(stamp: int) -> str:
    return f"attempt {stamp}"


def value_of(rank: int, stamp: int, elements: int) -> dict[str, Any]:
    row = torch.full((1, elements), stamp)
    shard = memstore.TensorShard(row, global_shape=(RANKS, elements), offsets=(rank, 0))
    return {"rows": shard, f"of {rank}": torch.full((elements // 2,), stamp)}


def stamp_of_whole(value: Any) -> int:
    leaves = [value] if isinstance(value, torch.Tensor) else list(value.values())
    assert len(leaves) in (1, RANKS + 1), sorted(value)
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
                world_size=RANKS,
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
        stamp = stamp_of_whole(value)
        assert ref.version >= last[key], f"{key} went from version {last[key]} back to {ref.version}"
        last[key], count = ref.version, count + 1
        held = [*held[-2:], (value, stamp)]
        for before, was in held:
            assert stamp_of_whole(before) == was, "a value that was held has changed"
        del ref, value
    held.clear()
    channel.send(count)
