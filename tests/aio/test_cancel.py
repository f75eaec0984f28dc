"""Calls that are cancelled: at once, at any moment, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch

import memstore
import memstore.aio
from memstore import structure
from memstore.abandoned import ABANDONED
from memstore.aio import AsyncStore, lanes
from tests.aio.loops import Stopper, threads_of_aio, until, with_store


async def cancelled(task: asyncio.Future[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_put_that_waits_for_the_mutex_is_left_at_once_and_never_made(root: str) -> None:
    async def use(store: AsyncStore) -> None:
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

    with_store(root, use)


def test_a_put_that_waits_for_a_thread_is_never_made(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put("x", 0)
        with memstore.open(root) as blocking, Stopper(blocking) as stopper:
            tasks = [asyncio.ensure_future(store.put("x", number + 1)) for number in range(lanes.THREADS)]
            await asyncio.sleep(0.05)
            late = asyncio.ensure_future(store.put("late", 1))
            await asyncio.sleep(0.01)
            await cancelled(late)
            stopper.let_go()
            await asyncio.gather(*tasks)
        assert not await store.contains("late")

    with_store(root, use)


def test_a_put_that_is_cancelled_in_its_copy_is_not_made(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever catches the cancellation may write into the tensors again."""
    copies, may_end = threading.Event(), threading.Event()
    original = structure.fill

    def slow(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        copies.set()
        assert may_end.wait(60)

    async def use(store: AsyncStore) -> None:
        before = await store.put("x", torch.zeros(100_000))
        monkeypatch.setattr(structure, "fill", slow)
        task = asyncio.ensure_future(store.put("x", torch.ones(100_000)))
        await until(copies.is_set)
        await cancelled(task)
        may_end.set()
        await until(lambda: not ABANDONED)
        assert await store.version("x") == before and (await store.get("x")).sum() == 0

    with_store(root, use)


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


def test_a_get_into_memory_is_left_when_nothing_is_written_there(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, may_end = threading.Event(), threading.Event()
    original = structure.get_into

    def slow(*arguments: object, **options: object) -> object:
        copies.set()
        assert may_end.wait(60)
        return original(*arguments, **options)  # type: ignore[arg-type]

    async def use(store: AsyncStore) -> None:
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

    with_store(root, use)


def test_waits_that_are_cancelled_leave_nothing(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        for _ in range(3):
            tasks = [asyncio.ensure_future(store.wait(f"key{number}")) for number in range(300)]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        from memstore.aio import waits

        (room,) = waits._rooms.values()
        await until(lambda: not room._waiting and not room._incoming)
        waiting = asyncio.ensure_future(store.wait("key1"))
        version = await store.put("key1", 1)
        assert await waiting == version

    with_store(root, use)


def test_a_lane_has_a_few_threads_which_end_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE", 0.01)
    others = set(threads_of_aio())

    async def main() -> None:
        calls = [lanes.call("a lane of this test", lambda waited: time.sleep(0.001)) for _ in range(50)]
        await asyncio.gather(*calls)
        assert len(set(threads_of_aio()) - others) <= lanes.THREADS
        await until(lambda: not set(threads_of_aio()) - others)
        assert await lanes.call("a lane of this test", lambda waited: 7) == 7

    asyncio.run(main())


def test_a_timeout_of_asyncio_ends_a_wait(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.wait("key", timeout=float("inf")), 0.05)

    with_store(root, use)


def test_an_iteration_over_keys_may_be_left(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put_many({f"key{number:04}": 1 for number in range(1500)})
        async for key in store.keys():
            assert key == "key0000"
            break

    with_store(root, use)
