"""A timeout, lease, wait or age is a number of seconds, 0 or more: all calls that take one refuse others at once."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

import memstore
import memstore.aio
from memstore.cli.commands import cli
from memstore.integrations import torchstore

pytestmark = pytest.mark.embedded

NAMES = {"timeout", "lease", "max_age", "rendezvous_timeout"}  # of arguments
NONSENSE = [-1, -0.001, float("-inf"), float("nan")]
SPEC = {"x": ((2,), torch.float32), "done": ((), torch.bool)}
ROWS = {"x": torch.zeros(4, 2), "done": torch.ones(4, dtype=torch.bool)}
SHARD = {"x": memstore.TensorShard(torch.ones(2), (4,), (0,))}
RANK = {"attempt": "1", "rank": 0, "world_size": 2}


class World(NamedTuple):
    """All that has calls with such an argument, opened."""

    path: str
    store: memstore.Store
    dataset: memstore.Dataset
    buffer: memstore.ReplayBuffer
    put: memstore.PendingPut
    snapshot: memstore.PendingSnapshot
    model: torch.nn.Module

    def state(self) -> tuple[list[str], dict[str, int], int, int]:
        """What none of the refused calls may change."""
        versions = {key: self.store.version(key) for key in self.store}
        return sorted(os.listdir(self.path)), versions, len(self.dataset), self.buffer.cursor


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-")
    with folder as path, memstore.open(f"{path}/s") as store:
        model = torch.nn.Linear(2, 2)
        store.put("k", {"w": torch.zeros(3)})
        store.save_model("m", model)
        dataset = store.create_dataset("d", SPEC, capacity=9)
        dataset.extend(ROWS)
        buffer = memstore.ReplayBuffer(store, "rb", SPEC, capacity=9)
        buffer.extend(ROWS)
        put = store.put_sharded("sh", SHARD, wait=False, **RANK)
        snapshot = memstore.Snapshot.async_take(f"{path}/snap", {"m": model})
        snapshot.wait()
        yield World(path, store, dataset, buffer, put, snapshot, model)
        put.abort()


# By the qualified name of each call: its calls, with the seconds that are refused.
CALLS: dict[str, list[Callable[[World, Any], Any]]] = {
    "Store.get": [lambda w, t: w.store.get("k", timeout=t), lambda w, t: w.store.get("k", max_age=t)],
    "Store.get_many": [lambda w, t: w.store.get_many(["k"], timeout=t)],
    "Store.put": [
        lambda w, t: w.store.put("n", 1, timeout=t),
        lambda w, t: w.store.put("n", torch.zeros(9000), timeout=t),
    ],
    "Store.put_many": [
        lambda w, t: w.store.put_many({"n": 1}, timeout=t),
        lambda w, t: w.store.put_many({}, timeout=t),
    ],
    "Store.delete": [lambda w, t: w.store.delete("k", timeout=t)],
    "Store.delete_many": [
        lambda w, t: w.store.delete_many(["k"], timeout=t),
        lambda w, t: w.store.delete_many([], timeout=t),
    ],
    "Store.clear": [lambda w, t: w.store.clear("k", timeout=t)],
    "Store.set_policy": [lambda w, t: w.store.set_policy("k", replicas=2, timeout=t)],
    "Store.set_quota": [lambda w, t: w.store.set_quota("k", 1 << 40, timeout=t)],
    "Store.pin": [lambda w, t: w.store.pin("k", timeout=t)],
    "Store.gc": [lambda w, t: w.store.gc(timeout=t)],
    "Store.wait": [lambda w, t: w.store.wait("k", timeout=t), lambda w, t: w.store.wait("none", timeout=t)],
    "Store.wait_any": [
        lambda w, t: w.store.wait_any(["k"], timeout=t),
        lambda w, t: w.store.wait_any(prefix="k", timeout=t),
    ],
    "Store.pending": [lambda w, t: w.store.pending(timeout=t), lambda w, t: w.store.pending("sh", timeout=t)],
    "Store.abort": [lambda w, t: w.store.abort("sh", "1", timeout=t)],
    "Store.attach": [lambda w, t: w.store.attach("n", f"{w.path}/snap", timeout=t)],
    "Store.create_dataset": [lambda w, t: w.store.create_dataset("n", SPEC, capacity=3, timeout=t)],
    "Store.create_dataset_from": [lambda w, t: w.store.create_dataset_from("n", torch.zeros(3), timeout=t)],
    "Store.open_dataset": [lambda w, t: w.store.open_dataset("d", wait=t)],
    "Store.save_model": [lambda w, t: w.store.save_model("n", w.model, timeout=t)],
    "Store.load_model": [lambda w, t: w.store.load_model("m", w.model, timeout=t)],
    "Store.put_sharded": [
        lambda w, t: w.store.put_sharded("n", SHARD, timeout=t, **RANK),
        lambda w, t: w.store.put_sharded("n", SHARD, wait=False, lease=t, **RANK),
    ],
    "Store.ref": [lambda w, t: w.store.ref("k", lease=t)],
    "Dataset.extend": [lambda w, t: w.dataset.extend(ROWS, timeout=t)],
    "Dataset.seal": [lambda w, t: w.dataset.seal(timeout=t)],
    "ReplayBuffer.add": [lambda w, t: w.buffer.add({key: rows[0] for key, rows in ROWS.items()}, timeout=t)],
    "ReplayBuffer.extend": [lambda w, t: w.buffer.extend(ROWS, timeout=t)],
    "ReplayBuffer.sample": [lambda w, t: w.buffer.sample(2, timeout=t)],
    "ReplayBuffer.sample_slices": [lambda w, t: w.buffer.sample_slices(1, 1, timeout=t)],
    "ReplayBuffer.read_rows": [lambda w, t: w.buffer.read_rows([0], timeout=t)],
    "follow": [
        lambda w, t: memstore.follow(w.store, "m", w.model, timeout=t),
        lambda w, t: memstore.follow(w.store, "m", w.model, every=t),
    ],
    "Follower.use": [lambda w, t: _followed(w, lambda follower: follower.use(timeout=t).__enter__())],
    "Follower.wait": [lambda w, t: _followed(w, lambda follower: follower.wait(timeout=t))],
    "Follower.close": [lambda w, t: _followed(w, lambda follower: follower.close(timeout=t))],
    "PendingPut.wait": [lambda w, t: w.put.wait(timeout=t)],
    "PendingPut.abort": [lambda w, t: w.put.abort(timeout=t)],
    "CheckpointManager.wait": [lambda w, t: memstore.CheckpointManager(f"{w.path}/run").wait(timeout=t)],
    "PendingSnapshot.wait": [lambda w, t: w.snapshot.wait(timeout=t)],
    "Cluster.at": [lambda w, t: memstore.Cluster.at("tcp://127.0.0.1:1", timeout=t)],
    "Cluster.remove": [lambda w, t: _cluster(w.store.root).remove("10.0.0.9", timeout=t)],
    "Cluster.drain": [lambda w, t: _cluster(w.store.root).drain("10.0.0.9", timeout=t)],
    "Cluster.cancel_drain": [lambda w, t: _cluster(w.store.root).cancel_drain("10.0.0.9", timeout=t)],
    "Cluster.promote": [lambda w, t: _cluster(w.store.root).promote("10.0.0.9", timeout=t)],
    "Cluster.set_policy": [lambda w, t: _cluster(w.store.root).set_policy(replicas=2, timeout=t)],
    "Cluster.set_quota": [lambda w, t: _cluster(w.store.root).set_quota("run/", 1, timeout=t)],
    "Cluster.stop": [lambda w, t: _cluster(w.store.root).stop(timeout=t)],
    "open": [
        lambda w, t: memstore.open(f"{w.path}/new", timeout=t),
        lambda w, t: memstore.open(w.store.root, timeout=t),
        lambda w, t: memstore.open(w.store.root, "r", wait=t),
    ],
    "destroy": [
        lambda w, t: memstore.destroy(w.store.root, timeout=t),
        lambda w, t: memstore.destroy(f"{w.path}/new", timeout=t),
    ],
    "repair": [lambda w, t: memstore.repair(w.store.root, timeout=t)],
    "iter_weights": [lambda w, t: next(memstore.iter_weights(w.store, "k", timeout=t))],
    "join": [lambda w, t: memstore.join(f"{w.path}/new", timeout=t)],
    "serve": [lambda w, t: memstore.serve(None, f"{w.path}/new", timeout=t)],
}


def _cluster(root: str) -> memstore.Cluster:
    """One of a root that nobody serves, which could not be made."""
    cluster = object.__new__(memstore.Cluster)
    cluster.root = root
    return cluster


def _takes_seconds(call: Any) -> bool:
    if not callable(call) or inspect.isclass(call):
        return False
    try:
        return not NAMES.isdisjoint(inspect.signature(call).parameters)
    except ValueError:  # of a builtin
        return False


def _with_seconds(module: ModuleType, names: list[str]) -> set[str]:
    """The public calls that take seconds, by their qualified names."""
    found: set[str] = set()
    for name in names:
        whole = getattr(module, name)
        calls = {name: whole}
        if inspect.isclass(whole):
            calls = {f"{name}.{one}": getattr(whole, one) for one in dir(whole) if not one.startswith("_")}
        for qualified, call in calls.items():
            if _takes_seconds(call):
                found.add(qualified)
    return found


def _followed(world: World, use: Callable[[memstore.Follower[Any]], Any]) -> Any:
    with memstore.follow(world.store, "m", world.model) as follower:
        return use(follower)


async def _follow_in_task(store: Any, world: World, seconds: Any) -> None:
    memstore.aio.follow(store, "m", world.model, timeout=seconds)


async def _in_follower(store: Any, world: World, use: Callable[[Any], Any]) -> Any:
    async with memstore.aio.follow(store, "m", world.model) as follower:
        return await use(follower)


def test_the_table_has_all_calls() -> None:
    assert _with_seconds(memstore, memstore.__all__) <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_seconds_that_are_none_are_refused(world: World, name: str) -> None:
    before = world.state()
    for call in CALLS[name]:
        for seconds in NONSENSE:
            with pytest.raises(ValueError, match="seconds, 0 or more"):
                call(world, seconds)
    assert world.state() == before


AWAITED: dict[str, Callable[[Any, World, Any], Any]] = {
    "AsyncStore.get": lambda a, w, t: a.get("k", timeout=t),
    "AsyncStore.get_many": lambda a, w, t: a.get_many(["k"], timeout=t),
    "AsyncStore.put": lambda a, w, t: a.put("n", 1, timeout=t),
    "AsyncStore.put_many": lambda a, w, t: a.put_many({"n": 1}, timeout=t),
    "AsyncStore.delete": lambda a, w, t: a.delete("k", timeout=t),
    "AsyncStore.delete_many": lambda a, w, t: a.delete_many(["k"], timeout=t),
    "AsyncStore.clear": lambda a, w, t: a.clear("k", timeout=t),
    "AsyncStore.pin": lambda a, w, t: a.pin("k", timeout=t),
    "AsyncStore.set_quota": lambda a, w, t: a.set_quota("k", 1 << 40, timeout=t),
    "AsyncStore.set_policy": lambda a, w, t: a.set_policy("k", replicas=2, timeout=t),
    "AsyncStore.gc": lambda a, w, t: a.gc(timeout=t),
    "AsyncStore.wait": lambda a, w, t: a.wait("none", timeout=t),
    "AsyncStore.wait_any": lambda a, w, t: a.wait_any(["none"], timeout=t),
    "AsyncStore.pending": lambda a, w, t: a.pending(timeout=t),
    "AsyncStore.abort": lambda a, w, t: a.abort("sh", "1", timeout=t),
    "AsyncStore.attach": lambda a, w, t: a.attach("n", f"{w.path}/snap", timeout=t),
    "AsyncStore.create_dataset": lambda a, w, t: a.create_dataset("n", SPEC, capacity=3, timeout=t),
    "AsyncStore.create_dataset_from": lambda a, w, t: a.create_dataset_from("n", torch.zeros(3), timeout=t),
    "AsyncStore.save_model": lambda a, w, t: a.save_model("n", w.model, timeout=t),
    "AsyncStore.load_model": lambda a, w, t: a.load_model("m", w.model, timeout=t),
    "AsyncStore.put_sharded": lambda a, w, t: a.put_sharded("n", SHARD, timeout=t, **RANK),
    "AsyncStore.ref": lambda a, w, t: a.ref("k", lease=t),
    "ReplayBuffer.add": lambda a, w, t: _buffer(a).add({key: rows[0] for key, rows in ROWS.items()}, timeout=t),
    "ReplayBuffer.extend": lambda a, w, t: _buffer(a).extend(ROWS, timeout=t),
    "ReplayBuffer.sample": lambda a, w, t: _buffer(a).sample(2, timeout=t),
    "ReplayBuffer.sample_slices": lambda a, w, t: _buffer(a).sample_slices(1, 1, timeout=t),
    "ReplayBuffer.read_rows": lambda a, w, t: _buffer(a).read_rows([0], timeout=t),
    "AsyncDataset.extend": lambda a, w, t: _in_dataset(a, lambda dataset: dataset.extend(ROWS, timeout=t)),
    "AsyncDataset.seal": lambda a, w, t: _in_dataset(a, lambda dataset: dataset.seal(timeout=t)),
    "AsyncPendingPut.wait": lambda a, w, t: _in_put(a, lambda put: put.wait(timeout=t)),
    "AsyncPendingPut.abort": lambda a, w, t: _in_put(a, lambda put: put.abort(timeout=t)),
    "open": lambda a, w, t: _opened(f"{w.path}/new", timeout=t),
    "destroy": lambda a, w, t: memstore.aio.destroy(w.store.root, timeout=t),
    "follow": lambda a, w, t: _follow_in_task(a, w, t),
    "AsyncFollower.use": lambda a, w, t: _in_follower(a, w, lambda follower: follower.use(timeout=t).__aenter__()),
    "AsyncFollower.wait": lambda a, w, t: _in_follower(a, w, lambda follower: follower.wait(timeout=t)),
    "iter_weights": lambda a, w, t: anext(memstore.aio.iter_weights(a, "k", timeout=t)),
}


def _buffer(store: memstore.aio.AsyncStore) -> memstore.aio.ReplayBuffer:
    return memstore.aio.ReplayBuffer(store, "rb")


async def _in_dataset(store: memstore.aio.AsyncStore, use: Callable[[Any], Any]) -> None:
    await use(await store.open_dataset("d"))


async def _in_put(store: memstore.aio.AsyncStore, use: Callable[[Any], Any]) -> None:
    put = await store.put_sharded("other", SHARD, wait=False, **RANK)
    try:
        await use(put)
    finally:
        await put.abort()


async def _opened(path: str, **options: Any) -> None:
    async with memstore.aio.open(path, **options):
        pass


def test_the_table_of_tasks_has_all_calls() -> None:
    inner = {"AsyncPendingPut.wait_until", "AsyncPendingPut.wait_or_give_up", "AsyncStore.open_dataset"}
    assert _with_seconds(memstore.aio, memstore.aio.__all__) - inner <= set(AWAITED)


def test_tasks_refuse_them_too(world: World) -> None:
    async def use() -> None:
        async with memstore.aio.open(world.store.root) as store:
            for name, call in AWAITED.items():
                for seconds in NONSENSE:
                    with pytest.raises(ValueError, match="seconds, 0 or more"):
                        await call(store, world, seconds)
                        pytest.fail(name)

    before = world.state()
    asyncio.run(use())
    assert world.state() == before


def test_other_arguments_of_seconds(world: World) -> None:
    before = world.state()
    for seconds in NONSENSE:
        options = {"timeout": seconds}
        with pytest.raises(ValueError, match="seconds, 0 or more"):
            memstore.Snapshot.take(f"{world.path}/other", {"m": world.model}, storage_options=options)
    with pytest.raises(ValueError, match="rendezvous_timeout is a time of 0 or more"):
        asyncio.run(torchstore.initialize_spmd(torchstore.HostStrategy(), rendezvous_timeout=timedelta(seconds=-1)))
    assert world.state() == before


@pytest.mark.parametrize(
    "words",
    [("repair", "ROOT", "--timeout"), ("watch", "ROOT", "--interval"), ("top", "ROOT", "--interval")],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("seconds", ["-1", "nan", "-inf"])
def test_commands_refuse_them(world: World, words: tuple[str, ...], seconds: str) -> None:
    command = [world.store.root if word == "ROOT" else word for word in words]
    done = CliRunner().invoke(cli, [*command, seconds])
    assert done.exit_code == 2 and words[-1] in done.output
