"""Tasks of a store on several hosts: keys whose home is elsewhere, or moves, or is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore
from tests.aio.loops import threads_of_aio, with_store
from tests.distributed.client.hosts import Cluster, cluster_of, join_anew


@pytest.fixture
def pair(scratch: str) -> Iterator[Cluster]:
    """Two hosts, of which the second is the home of all keys."""
    with cluster_of(scratch, False, True) as made:
        yield made


def test_a_store_goes_on_beyond_this_host(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        version = await store.put("k", torch.ones(5000))
        assert await store.version("k") == version
        there.put("k", torch.zeros(5000))
        assert (await store.get("k")).sum() == 0
        assert await store.get("missing", None) is None
        assert [key async for key in store.keys("k")] == ["k"]
        assert await store.contains("k") and await store.count() == 1

    there = pair.stores[1]
    with_store(pair.stores[0].root, use)


def test_many_waits_for_keys_of_another_home_take_few_threads(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put("other", 1)
        others = set(threads_of_aio())
        keys = [f"key{number}" for number in range(200)]
        waiting = [asyncio.ensure_future(store.wait(key)) for key in keys]
        await asyncio.sleep(0.3)
        assert len(set(threads_of_aio()) - others) <= 8 + 8
        assert await store.put("other", 2)  # the others' lane is free
        versions = await asyncio.to_thread(pair.stores[1].put_many, dict.fromkeys(keys, 1))
        assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == list(versions.values())
        waiting = [asyncio.ensure_future(store.wait(f"none{number}")) for number in range(20)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True)
        )
        with pytest.raises(memstore.StoreTimeoutError, match="'missing' doesn't exist: .* within 0.3 s"):
            await store.wait("missing", timeout=0.3)

    with_store(pair.stores[0].root, use)


def test_a_wait_follows_a_key_whose_home_moves(scratch: str) -> None:
    async def use(store: AsyncStore) -> None:
        version = await store.put(key, 1)
        waiting = asyncio.ensure_future(store.wait(key, newer_than=version))
        await asyncio.sleep(0.05)
        homes.homes[0].member = msgspec.structs.replace(homes.homes[0].member, is_home=False)
        await asyncio.to_thread(join_anew, homes)
        later = await asyncio.to_thread(homes.stores[1].put, key, 2)
        assert await asyncio.wait_for(waiting, 60) == later

    with cluster_of(scratch, True, True) as homes:
        key = homes.key_at(0)
        with_store(homes.stores[0].root, use)


def test_calls_for_a_silent_home_are_left_at_once_and_hold_up_no_others(scratch: str) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put(here, torch.ones(1000))
        await store.put(there, 1)
        homes.homes[1].silent = True
        stuck = [asyncio.ensure_future(store.get(there)) for _ in range(30)]
        stuck += [asyncio.ensure_future(store.put(there, 2)) for _ in range(30)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        assert (await store.get(here)).sum() == 1000
        await store.put(here, torch.zeros(1000))
        assert time.monotonic() - started < 1.5
        with pytest.raises(TimeoutError):
            await store.get(there, timeout=0.3)
        started = time.monotonic()
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert time.monotonic() - started < 1.5
        homes.homes[1].silent = False

    with cluster_of(scratch, True, True) as homes:
        here, there = homes.key_at(0), homes.key_at(1)
        with_store(homes.stores[0].root, use, timeout=2.0)
