"""Followers that are tasks: a module that is kept at the newest version, and requests that await."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import torch

import memstore
import memstore.aio
from tests.store.test_following import PATIENCE, Layers, put


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def run(root: str, test: Callable[[memstore.aio.AsyncStore], Awaitable[None]]) -> None:
    async def with_store() -> None:
        async with memstore.aio.open(root, timeout=PATIENCE) as store:
            await test(store)

    asyncio.run(with_store())


async def publish(store: memstore.aio.AsyncStore, number: float, width: int = 64) -> int:
    return await store.put("policy", Layers(number, width).state_dict())


@pytest.mark.parametrize("kind", ["one module", "spare", "lock"])
def test_no_task_sees_two_versions(root: str, kind: str) -> None:
    async def test(store: memstore.aio.AsyncStore) -> None:
        model, told = Layers(), []
        options = {"spare": {"spare": copy.deepcopy(model)}, "lock": {"lock": asyncio.Lock()}}.get(kind, {})

        async def tell(version: int) -> None:
            await asyncio.sleep(0)
            told.append(version)

        seen: list[tuple[int, set[float]]] = []

        async def serve(follower: memstore.aio.AsyncFollower[Layers]) -> None:
            while len(told) < 5 or follower.version < 30:
                async with follower.use() as (current, version):
                    seen.append((version, await asyncio.to_thread(current.numbers)))

        await publish(store, 1.0)
        async with memstore.aio.follow(store, "policy", model, on_version=tell, **options) as follower:
            await follower.wait()
            tasks = [asyncio.create_task(serve(follower)) for _ in range(3)]
            for number in range(2, 31):
                await publish(store, number)
                await asyncio.sleep(0.005)
            await asyncio.gather(*tasks)
        assert all(numbers == {float(version)} for version, numbers in seen)
        assert len({version for version, _ in seen}) > 2

    run(root, test)


def test_a_task_waits_for_a_copy_and_a_copy_for_tasks(root: str) -> None:
    async def test(store: memstore.aio.AsyncStore) -> None:
        await publish(store, 1.0)
        async with memstore.aio.follow(store, "policy", Layers()) as follower:
            await follower.wait()
            async with follower.use() as (model, version):
                await publish(store, 2.0)
                with pytest.raises(memstore.StoreTimeoutError):
                    await follower.wait(newer_than=1, timeout=0.3)
                with pytest.raises(memstore.StoreTimeoutError):
                    async with follower.use(timeout=0.1):
                        pass
                assert (version, model.numbers()) == (1, {1.0})
                waiting = asyncio.create_task(follower.wait(newer_than=1))
                await asyncio.sleep(0)
            assert await waiting == 2

    run(root, test)


def test_what_goes_wrong_is_told(root: str) -> None:
    async def test(store: memstore.aio.AsyncStore) -> None:
        await publish(store, 1.0)
        async with memstore.aio.follow(store, "policy", Layers()) as follower:
            await follower.wait()
            await publish(store, 2.0, width=8)
            with pytest.raises(memstore.StructureMismatchError):
                await follower.wait(newer_than=1)
            status = await follower.status()
            assert (status.version, status.newest) == (1, 2)
            assert isinstance(status.error, memstore.StructureMismatchError)
            await publish(store, 3.0)
            assert await follower.wait(newer_than=1) == 3
            await asyncio.to_thread(memstore.destroy, store.root)
            await until(lambda: isinstance(follower.error, memstore.NotAStoreError))
            async with memstore.aio.open(store.root) as another:
                await publish(another, 9.0)
                await until(lambda: follower.version == 1)
                async with follower.use() as (model, _):
                    assert model.numbers() == {9.0}

    run(root, test)


def test_the_end_of_a_follower_leaves_its_module(root: str) -> None:
    async def test(store: memstore.aio.AsyncStore) -> None:
        await publish(store, 1.0)
        follower = memstore.aio.follow(store, "policy", Layers())
        await follower.wait()
        async with follower.use() as (model, _):  # for which a copy waits, and the end doesn't
            await publish(store, 2.0)
            await asyncio.sleep(0.1)
            await follower.close()
            assert model.numbers() == {1.0}
        with pytest.raises(memstore.StoreClosedError):
            await follower.wait(newer_than=1)
        async with follower.use() as (_, version):
            assert version == 1

    run(root, test)


def test_arguments_of_another_kind_are_refused(root: str) -> None:
    async def test(store: memstore.aio.AsyncStore) -> None:
        blocking = await asyncio.to_thread(memstore.open, root)
        with pytest.raises(TypeError, match=r"memstore\.follow takes that"):
            memstore.aio.follow(blocking, "policy", Layers())  # pyright: ignore
        with pytest.raises(TypeError, match=r"asyncio\.Lock"):
            memstore.aio.follow(store, "policy", Layers(), lock=threading.Lock())  # pyright: ignore
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            memstore.aio.follow(store, "policy", torch.ones(1))  # pyright: ignore
        blocking.close()

    run(root, test)


def test_one_is_made_within_a_loop(root: str) -> None:
    with memstore.open(root) as store:
        put(store, 1.0)
    with pytest.raises(RuntimeError, match="no running event loop"):
        memstore.aio.follow(memstore.aio.open(root), "policy", Layers())
