"""Calls that are cancelled: at once, at any moment, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore import structure
from memstore._threads import ABANDONED
from memstore.aio import AsyncStore
from memstore.aio import calls as aio_calls
from memstore.engine import SAMPLES
from memstore.replay.sampling import Samples
from memstore.store import models
from memstore.store.model_fit import Fit
from tests.aio.loops import Stopper, end_of_calls, gated, threads_of_aio, until, with_store


async def cancelled(task: asyncio.Future[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_put_that_waits_for_the_mutex_is_left_at_once_and_never_made(root: str, store: AsyncStore) -> None:
    await store.put("x", torch.zeros(1000))
    with memstore.open(root) as blocking, Stopper(blocking) as stopper:
        task = asyncio.ensure_future(store.put("x", torch.ones(1000)))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await cancelled(task)
        assert time.monotonic() - started < 9
        stopper.let_go()
    await until(lambda: not ABANDONED)
    assert (await store.get("x")).sum() == 0  # it had not copied its bytes
    await store.put("x", torch.ones(1000))


async def test_a_put_that_waits_for_a_thread_is_never_made(root: str, store: AsyncStore) -> None:
    await store.put("x", 0)
    with memstore.open(root) as blocking, Stopper(blocking) as stopper:
        tasks = [asyncio.ensure_future(store.put("x", number + 1)) for number in range(aio_calls.THREADS)]
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(store.put("late", 1))
        await asyncio.sleep(0.01)
        await cancelled(late)
        stopper.let_go()
        await asyncio.gather(*tasks)
    assert not await store.contains("late")


async def test_a_put_that_is_cancelled_in_its_copy_is_not_made(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whoever catches the cancellation may write into the tensors again."""
    slow, copies, may_end = gated(structure.fill, after=True)
    before = await store.put("x", torch.zeros(100_000))
    monkeypatch.setattr(structure, "fill", slow)
    task = asyncio.ensure_future(store.put("x", torch.ones(100_000)))
    await until(copies.is_set)
    await cancelled(task)
    may_end.set()
    await until(lambda: not ABANDONED)
    assert await store.version("x") == before and (await store.get("x")).sum() == 0


def test_puts_cancelled_at_any_moment_are_whole_or_not_made(root: str) -> None:
    dice = random.Random(7)

    async def use(store: AsyncStore) -> None:
        tensors = {key: torch.zeros(20_000) for key in ("a", "b", "inline")}
        tensors["inline"] = torch.zeros(8)
        for number in range(1, 150):
            for tensor in tensors.values():
                tensor.fill_(number)  # what a cancelled put still reads must not become a version
            tasks = [asyncio.ensure_future(store.put(key, tensor)) for key, tensor in tensors.items()]
            await asyncio.sleep(dice.random() * 0.001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for tensor in tensors.values():
                tensor.fill_(-1)
            for key in tensors:
                found = await store.get(key, None)
                assert found is None or (found[0] == found).all() and found[0] >= 0, (key, found)

    with_store(root, use)
    end_of_calls()  # before leaks are looked for


async def test_a_get_into_memory_is_left_when_nothing_is_written_there(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, copies, may_end = gated(structure.get_into)
    await store.put("x", torch.ones(1000))
    monkeypatch.setattr(structure, "get_into", slow)
    out = torch.zeros(1000)
    task = asyncio.ensure_future(store.get("x", out=out))
    await until(copies.is_set)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()  # once more
    await asyncio.sleep(0.02)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert out.sum() == 1000  # it has ended
    monkeypatch.undo()
    assert (await store.get("x", out=out)) is out


def trained(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(30, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values_of(model: torch.nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


async def test_a_load_that_is_cancelled_while_it_waits_never_writes(store: AsyncStore) -> None:
    """Also when the version comes later that it waited for: the module is in use again."""
    version = await store.save_model("policy", trained(1.0))
    mine = trained(0.0)
    loading = asyncio.ensure_future(store.load_model("policy", mine, newer_than=version))
    await asyncio.sleep(0.1)
    await cancelled(loading)
    await store.save_model("policy", trained(2.0))
    await until(lambda: not ABANDONED)
    assert values_of(mine) == {0.0}
    assert await store.load_model("policy", mine, newer_than=version) > version
    assert values_of(mine) == {2.0}


async def test_a_load_that_is_cancelled_before_its_copy_writes_nothing(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fits, may_go_on = gated(Fit, after=True)
    await store.save_model("policy", trained(1.0))
    mine = trained(0.0)
    monkeypatch.setattr(models, "Fit", slow)
    loading = asyncio.ensure_future(store.load_model("policy", mine))
    await until(fits.is_set)
    await cancelled(loading)  # at once: it writes nothing yet
    may_go_on.set()
    await until(lambda: not ABANDONED)
    assert values_of(mine) == {0.0}


async def test_a_load_that_is_cancelled_in_its_copy_is_left_when_that_is_over(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, copies, may_end = gated(structure.get_into)
    await store.save_model("policy", trained(1.0))
    mine = trained(0.0)
    monkeypatch.setattr(structure, "get_into", slow)
    loading = asyncio.ensure_future(store.load_model("policy", mine))
    await until(copies.is_set)
    loading.cancel()
    await asyncio.sleep(0.02)
    assert not loading.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert values_of(mine) == {1.0}  # it has ended


@pytest.mark.parametrize("sampler", ["fifo", "lifo"])
async def test_a_sample_that_is_cancelled_takes_no_rows(store: AsyncStore, sampler: Any) -> None:
    queue = memstore.aio.ReplayBuffer(store, "queue", {"x": ((), torch.int64)}, capacity=100, sampler=sampler)
    await queue.opened()
    for _ in range(3):
        waiting = asyncio.ensure_future(queue.sample(4))
        await until(lambda: is_under_way(queue))
        await cancelled(waiting)
    await queue.extend({"x": torch.arange(4)})
    assert sorted((await asyncio.wait_for(queue.sample(4), 60))["x"].tolist()) == [0, 1, 2, 3]
    await until(lambda: not ABANDONED)


MOMENTS = ("before its thread is done", "before the loop has seen it", "before its task has gone on")


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "uniform"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_sample_that_is_cancelled_when_it_has_its_rows_puts_them_back(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch, moment: str, sampler: Any
) -> None:
    slow, is_there, may_end = gated(Samples.build)
    limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=1, tolerance=8.0)
    queue = memstore.aio.ReplayBuffer(
        store, "queue", {"x": ((), torch.int64)}, capacity=100, sampler=sampler, rate_limiter=limiter
    )
    ring = (await queue.opened())._ring
    await queue.extend({"x": torch.arange(4)})
    monkeypatch.setattr(Samples, "build", slow)
    task = asyncio.ensure_future(queue.sample(4))
    await until(is_there.is_set)
    assert ring.numbers.sampled == 4
    if moment == MOMENTS[0]:
        await cancelled(task)
        may_end.set()
    else:
        may_end.set()
        while is_under_way(queue):  # the loop sees nothing meanwhile
            time.sleep(0.001)
        if moment == MOMENTS[1]:
            task.cancel()
        else:
            asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: ring.numbers.sampled == 0)
    assert sorted((await queue.sample(4))["x"].tolist()) == [0, 1, 2, 3] or sampler == "uniform"
    assert ring.numbers.sampled == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_given_up_is_undone_once_or_not_at_all_if_it_fails(fails: bool) -> None:
    undone: list[object] = []

    async def use() -> None:
        def work(_: float) -> str:
            if fails:
                raise ArithmeticError
            return "found"

        held, has_begun, may_end = gated(work)
        task = asyncio.ensure_future(aio_calls.call("undo", held, undo=undone.append, settles=True))
        await until(has_begun.is_set)
        task.cancel()
        await until(lambda: bool(ABANDONED))
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await all_threads_of("undo")

    asyncio.run(use())
    assert undone == ([] if fails else ["found"])


async def all_threads_of(pool: str) -> None:
    """Returns when all threads of a pool have done what they were given before."""
    everyone = threading.Barrier(aio_calls.THREADS)
    await asyncio.gather(*(aio_calls.call(pool, lambda _: everyone.wait(60)) for _ in range(aio_calls.THREADS)))


async def test_what_is_to_be_undone_is_undone_before_the_interpreter_ends() -> None:
    """Also if all threads are busy when it is given up. Calls that wait for a thread are not made any more."""
    undone: list[str] = []
    may_end = threading.Event()
    busy = [asyncio.ensure_future(aio_calls.call("undo", lambda _: may_end.wait(60))) for _ in range(aio_calls.THREADS)]
    late = asyncio.ensure_future(aio_calls.call("undo", lambda _: undone.append("late")))
    await until(lambda: "undo" in aio_calls._pools and aio_calls._pools["undo"]._running == aio_calls.THREADS)
    pool = aio_calls._pools["undo"]
    pool.add(aio_calls.ThreadCall(lambda _: undone.append("sample"), pool.add, is_awaited=False))
    ending = threading.Thread(target=lambda: pool.end(time.monotonic() + 60))
    ending.start()
    await until(lambda: pool._jobs[0].function is None)
    may_end.set()
    ending.join()
    assert undone == ["sample"]
    await asyncio.gather(*busy)
    await cancelled(late)


def is_under_way(queue: memstore.aio.ReplayBuffer) -> bool:
    """A sample of it, in a thread."""
    pool = aio_calls._pools.get(queue._pool_of_samples())
    return pool is not None and pool._running > 0


async def test_a_sample_that_is_cancelled_counts_for_no_rate_limiter_and_leaves_its_queue(store: AsyncStore) -> None:
    limiter = memstore.RateLimiter(samples_per_insert=1.0, min_size=4, tolerance=8.0)
    spec = {"x": ((), torch.int64)}
    buffer = memstore.aio.ReplayBuffer(store, "replay", spec, capacity=100, rate_limiter=limiter)
    ring = (await buffer.opened())._ring
    waiting = asyncio.ensure_future(buffer.sample(2))
    await until(lambda: bool(ring.queue.waiting(SAMPLES)))
    await cancelled(waiting)
    await buffer.extend({"x": torch.arange(4)})
    await until(lambda: not ABANDONED)
    assert ring.numbers.sampled == 0 and not ring.queue.waiting(SAMPLES)
    assert len((await buffer.sample(2))["x"]) == 2 and ring.numbers.sampled == 2


async def test_waits_that_are_cancelled_leave_nothing(store: AsyncStore) -> None:
    for _ in range(3):
        tasks = [asyncio.ensure_future(store.wait(f"key{number}")) for number in range(300)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    from memstore.aio import waits

    (room,) = waits._wait_threads.values()
    await until(lambda: not room._waiting and not room._incoming)
    waiting = asyncio.ensure_future(store.wait("key1"))
    version = await store.put("key1", 1)
    assert await waiting == version


async def test_a_pool_has_a_few_threads_which_end_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_calls, "IDLE", 0.01)
    others = set(threads_of_aio())
    calls = [aio_calls.call("a pool of this test", lambda waited: time.sleep(0.001)) for _ in range(50)]
    await asyncio.gather(*calls)
    assert len(set(threads_of_aio()) - others) <= aio_calls.THREADS
    await until(lambda: not set(threads_of_aio()) - others)
    assert await aio_calls.call("a pool of this test", lambda waited: 7) == 7


async def test_a_timeout_of_asyncio_ends_a_wait(store: AsyncStore) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(store.wait("key", timeout=float("inf")), 0.05)


async def test_an_iteration_over_keys_may_be_left(store: AsyncStore) -> None:
    await store.put_many({f"key{number:04}": 1 for number in range(1500)})
    async for key in store.keys():
        assert key == "key0000"
        break
