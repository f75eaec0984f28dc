"""What methods of an AsyncStore return, and what is read by it: references, rows, puts of several ranks, weights."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncDataset, AsyncPendingPut, AsyncRef, AsyncStore
from memstore.aio import ReplayBuffer as AsyncReplayBuffer
from memstore.aio import calls as aio_calls
from tests.aio.loops import until, with_store


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (AsyncRef, memstore.Ref),
        (AsyncPendingPut, memstore.PendingPut),
        (AsyncDataset, memstore.Dataset),
        (AsyncReplayBuffer, memstore.ReplayBuffer),
    ],
    ids=["Ref", "PendingPut", "Dataset", "ReplayBuffer"],
)
def test_each_method_has_a_twin(ours: type, theirs: type) -> None:
    names = {name for name in dir(theirs) if not name.startswith("_") and inspect.isfunction(getattr(theirs, name))}
    assert names, "this tests nothing"
    for name in names:
        assert inspect.iscoroutinefunction(getattr(ours, name)), name
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name)), name


async def test_references(store: AsyncStore) -> None:
    version = await store.put("x", {"a": torch.arange(1000)})
    ref = await store.ref("x")
    await store.put("x", 0)
    other = pickle.loads(pickle.dumps(ref))
    assert ref.version == version and other == ref
    assert (await other.get())["a"][-1] == 999
    assert (await ref.view())["a"][10:12].tolist() == [10, 11]
    view = await store.view("x")
    assert view == 0


def test_rows_are_read_and_weights_iterated_over(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put("rows", {"a": torch.arange(20).view(10, 2)})
        view = await store.view("rows")
        assert (await memstore.aio.read_rows(view, [3, 1]))["a"].tolist() == [[6, 7], [2, 3]]
        out = {"a": torch.zeros(1, 2, dtype=torch.int64)}
        assert await memstore.aio.read_rows(view, [9], out=out) is out and out["a"].tolist() == [[18, 19]]
        coming = asyncio.ensure_future(names_of(store))
        await asyncio.sleep(0.01)
        await store.put("policy", {"model": {"w": torch.ones(2), "b": torch.zeros(1)}})
        assert await coming == ["w", "b"]

    async def names_of(store: AsyncStore) -> list[str]:
        weights = memstore.aio.iter_weights(store, "policy", newer_than=0, prefix="model.")
        return [name async for name, _ in weights]

    with_store(root, use)


def test_reads_of_rows_that_wait_for_another_host_hold_up_no_others(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def slow(source: Any, index: Any, **options: Any) -> Any:
        """As where the bytes are those of a host that is silent for now."""
        assert answers.wait(60)
        return memstore.read_rows(source, index, **options)

    async def use(store: AsyncStore) -> None:
        await store.put_many({"rows": {"a": [torch.arange(20).view(10, 2)]}, "others": torch.zeros(3, 1)})
        view, others = await store.view("rows"), await store.view("others")
        reads = [asyncio.ensure_future(memstore.aio.read_rows(view, [3])) for _ in range(aio_calls.THREADS + 2)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(store.put("other", 1), 25)
        monkeypatch.undo()
        assert (await asyncio.wait_for(memstore.aio.read_rows(others, [0]), 25)).tolist() == [[0]]
        assert not any(read.done() for read in reads)
        answers.set()
        assert all(found["a"][0].tolist() == [[6, 7]] for found in await asyncio.gather(*reads))

    monkeypatch.setattr("memstore.aio.store.read_rows_blocking", slow)
    with_store(root, use)


async def test_datasets(store: AsyncStore) -> None:
    coming = asyncio.ensure_future(store.open_dataset("rows", wait=30))
    made = await store.create_dataset("rows", {"x": ((2,), torch.float32)}, capacity=10)
    data = await coming
    assert await made.extend({"x": torch.ones(3, 2)}) == range(3)
    assert len(data) == 3 and data[1:3]["x"].sum() == 4 and data.batch_size == (3,)
    await data.write_rows(0, {"x": torch.zeros(2)})
    assert (await made.read_rows([0, 1]))["x"].tolist() == [[0, 0], [1, 1]]
    assert made["x"].shape == made["x",].shape == (3, 2)
    with pytest.raises(TypeError, match="await read_rows"):
        made[[0, 1]]  # type: ignore[index]
    assert len(pickle.loads(pickle.dumps(made))) == 3
    await made.flush()
    version = await made.seal()
    assert await store.wait("rows", newer_than=version - 1) == version
    other = await store.create_dataset_from("numbers", torch.arange(5))
    assert other[4] == 4


async def test_a_sample_that_a_rate_limiter_holds_stops_nobody(store: AsyncStore) -> None:
    limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=4, tolerance=8.0)
    spec = {"x": ((2,), torch.float32)}
    buffer = memstore.aio.ReplayBuffer(store, "replay", spec, capacity=100, rate_limiter=limiter)
    waiting = asyncio.ensure_future(buffer.sample(2))
    assert await store.put("other", 1)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    indices = await buffer.extend({"x": torch.ones(4, 2)})
    assert indices.tolist() == [0, 1, 2, 3]
    assert (await asyncio.wait_for(waiting, 60))["x"].sum() == 4
    assert len(await buffer.opened()) == len(buffer) == buffer.cursor == 4
    assert buffer.capacity == 100 and buffer.spec == spec and "4 of 100 rows" in repr(buffer)
    assert await buffer.add({"x": torch.zeros(2)}) == 4


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "not yet"])
@pytest.mark.parametrize("kind", COPIES)
async def test_a_buffer_is_pickled_by_reference(root: str, store: AsyncStore, kind: str, is_opened: bool) -> None:
    spec = {"x": ((), torch.int64)}
    options: dict[str, Any] = {"sampler": "prioritized", "alpha": 0.9, "seed": 1}
    buffer = AsyncReplayBuffer(store, "replay", spec, capacity=100, **options)
    if is_opened:
        await buffer
    other = COPIES[kind](buffer)
    assert type(other) is AsyncReplayBuffer and other is not buffer
    assert (other.key, other.timeout) == (buffer.key, buffer.timeout)
    assert ("not opened yet" in repr(other)) is not is_opened and root in repr(other)
    await buffer.extend({"x": torch.arange(50)})
    samples = [(await one.sample(40)) for one in (other, buffer)]
    assert all(sample.get("weight", None) is not None for sample in samples), "it has the same sampler"
    if kind != "copy" or not is_opened:
        assert not torch.equal(samples[0]["index"], samples[1]["index"]), "and other random numbers"
    await other.add({"x": torch.tensor(7)})
    assert len(buffer) == len(other) == 51 and other.spec == spec and other.capacity == 100
    again = COPIES[kind](other)
    assert len(await again) == 51


async def test_a_copied_buffer_of_a_closed_store_that_was_opened_goes_on(root: str) -> None:
    async with memstore.aio.open(root) as store:
        buffer = await AsyncReplayBuffer(store, "replay", ((), torch.int64), capacity=8)
        unopened = AsyncReplayBuffer(store, "replay")
    assert await pickle.loads(pickle.dumps(buffer)).add(torch.tensor(7)) == 0
    with pytest.raises(memstore.StoreClosedError):
        pickle.dumps(unopened)


async def test_what_can_be_pickled_can_be_copied_and_a_put_under_way_says_why_not(store: AsyncStore) -> None:
    await store.put("key", torch.arange(3))
    shard = memstore.TensorShard(torch.ones(1, 4), global_shape=(2, 4), offsets=(0, 0))
    pending = await store.put_sharded("halves", shard, attempt="first", rank=0, world_size=2, wait=False)
    assert isinstance(pending, AsyncPendingPut)
    for made in COPIES.values():
        assert (await made(store).get("key")).tolist() == [0, 1, 2]
        assert (await made(await store.ref("key")).get()).tolist() == [0, 1, 2]
        with pytest.raises(TypeError, match=r"AsyncPendingPut can't be pickled: .* in store.pending\(key\)"):
            made(pending)


async def test_a_buffer_that_is_not_opened_yet_says_so(store: AsyncStore) -> None:
    buffer = memstore.aio.ReplayBuffer(store, "replay", ((), torch.int64), capacity=8)
    assert buffer and "not opened yet" in repr(buffer)
    with pytest.raises(memstore.MemstoreError, match="await the buffer first"):
        len(buffer)
    await buffer
    assert len(buffer) == 0


async def test_samples_that_wait_keep_nobody_out_who_adds_rows_nor_other_stores(root: str, store: AsyncStore) -> None:
    async with memstore.aio.open(f"{root}-other", timeout=20.0) as other:
        queue, same_name = (
            memstore.aio.ReplayBuffer(one, "queue", torch.zeros(()), capacity=100, sampler="fifo")
            for one in (store, other)
        )
        await queue.opened()
        waiting = [asyncio.ensure_future(queue.sample(1, timeout=60)) for _ in range(aio_calls.THREADS + 4)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(same_name.extend(torch.ones(3)), 30)
        assert len((await asyncio.wait_for(same_name.sample(3), 30))["data"]) == 3
        await asyncio.wait_for(queue.extend(torch.arange(float(len(waiting)))), 30)
        rows = [row for found in await asyncio.gather(*waiting) for row in found["data"].tolist()]
        assert sorted(rows) == list(range(len(waiting)))


# --- puts of several ranks --------------------------------------------------------------------------------------------

RANKS = 12  # more than a pool has threads


def shard(rank: int) -> memstore.TensorShard:
    return memstore.TensorShard(torch.full((1, 3), float(rank)), global_shape=(RANKS, 3), offsets=(rank, 0))


async def test_many_ranks_of_one_process_put_together(store: AsyncStore) -> None:
    puts = [
        asyncio.ensure_future(store.put_sharded("w", shard(rank), attempt="a", rank=rank, world_size=RANKS))
        for rank in range(RANKS)
    ]
    versions = await asyncio.wait_for(asyncio.gather(*puts), 60)
    assert len(set(versions)) == 1
    assert (await store.get("w"))[:, 0].tolist() == list(range(RANKS))


async def test_a_part_that_finds_no_thread_keeps_its_timeout(store: AsyncStore) -> None:
    await store.contains("w")
    may_end = threading.Event()
    pool = store._lazy.pool_of_ranks("w")
    calls = [asyncio.ensure_future(aio_calls.call(pool, lambda _: may_end.wait(60))) for _ in range(aio_calls.THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(memstore.StoreTimeoutError, match="no thread had time for this call within 0.2 s"):
        await store.put_sharded("w", shard(0), attempt="a", rank=0, world_size=RANKS, timeout=0.2)
    may_end.set()
    await asyncio.gather(*calls)
    assert await store.pending() == ()


async def test_a_rank_that_waits_in_vain_gives_up_for_all(store: AsyncStore) -> None:
    with pytest.raises(memstore.StoreTimeoutError, match="ranks 1, 2, 3.* of 12 had put nothing within 0.2 s"):
        await store.put_sharded("w", shard(0), attempt="a", rank=0, world_size=RANKS, timeout=0.2)
    assert await store.pending() == ()
    pending = await store.put_sharded("w", shard(0), attempt="b", rank=0, world_size=RANKS, wait=False)
    assert isinstance(pending, AsyncPendingPut)
    assert not await pending.done()
    with pytest.raises(memstore.StoreTimeoutError):
        await pending.wait(0.05)
    assert len(await store.pending("w")) == 1
    await pending.abort()
    with pytest.raises(memstore.PartialCommitError):
        await pending.wait()
    assert not await store.abort("w", "b")


async def test_a_sharded_put_that_is_cancelled_is_given_up_for_all(root: str, store: AsyncStore) -> None:
    put = asyncio.ensure_future(store.put_sharded("w", shard(0), attempt="a", rank=0, world_size=RANKS))
    with memstore.open(root) as blocking:
        await until(lambda: bool(blocking.pending()))
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        await until(lambda: not blocking.pending())
    others = [
        asyncio.ensure_future(store.put_sharded("w", shard(rank), attempt="a", rank=rank, world_size=RANKS))
        for rank in range(1, RANKS)
    ]
    for one in others:
        with pytest.raises(memstore.PartialCommitError, match="abort was called"):
            await one


async def test_loads_that_wait_for_a_newer_version_take_no_threads(store: AsyncStore) -> None:
    """So the put that they wait for may come from the same process."""
    version = await store.save_model("policy", torch.nn.Linear(2, 1))
    models = [torch.nn.Linear(2, 1) for _ in range(aio_calls.THREADS + 4)]
    loads = [asyncio.ensure_future(store.load_model("policy", one, newer_than=version)) for one in models]
    await asyncio.sleep(0.05)
    trained = torch.nn.Linear(2, 1)
    later = await asyncio.wait_for(store.save_model("policy", trained), 25)
    assert await asyncio.wait_for(store.put("other", 1), 25)
    assert await asyncio.gather(*loads) == [later] * len(models)
    assert all(torch.equal(trained.weight, one.weight) for one in models)
    with pytest.raises(memstore.StoreTimeoutError, match="within 0.1 s"):
        await store.load_model("policy", models[0], newer_than=later, timeout=0.1)
    with pytest.raises(memstore.KeyNotFoundError):
        await store.load_model("none", models[0])


async def test_models_are_saved_and_loaded(store: AsyncStore) -> None:
    trained, fresh = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    before = threading.active_count()  # other tests have left some, for seconds
    version = await store.save_model("policy", trained)
    assert await store.load_model("policy", fresh) == version
    assert torch.equal(trained.weight, fresh.weight)
    half = torch.nn.Linear(2, 1).bfloat16()
    with pytest.raises(memstore.StructureMismatchError, match="cast=True casts it"):
        await store.load_model("policy", half)
    with pytest.raises(TypeError, match="cast"):
        await store.load_model("policy", half, cast="yes")  # type: ignore[arg-type]
    assert await store.load_model("policy", half, cast=True) == version
    assert half.weight.dtype == torch.bfloat16 and torch.equal(half.weight, trained.weight.bfloat16())
    assert threading.active_count() < before + 8
