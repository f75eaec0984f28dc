"""Tasks of a store on several hosts: keys whose home is elsewhere, or moves, or is silent."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore, opened
from memstore.aio import calls as aio_calls
from memstore.aio.waits import BatchedWakeups, RemoteWaits, Wakeup
from memstore.distributed.client import begun_wait
from memstore.distributed.client.elsewhere import OtherHosts
from memstore.distributed.rules import Wait
from memstore.engine import elsewhere_of
from tests.aio.loops import threads_of_aio, until, with_store
from tests.aio.test_results import RANKS, shard
from tests.children import in_child
from tests.distributed.client.hosts import Cluster, await_, cluster_of, join_anew
from tests.distributed.homes import Home
from tests.inside import root_of


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


LONG = 200.0  # seconds, which no wait takes that is told


def threads_of_links() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memstore links"]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_waits_for_keys_of_another_home_take_no_thread_each(
    pair: Cluster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_calls, "IDLE", 0.05)

    async def use(store: AsyncStore) -> None:
        await store.put("other", 1)
        others = set(threads_of_links())
        keys = [f"key{number}" for number in range(count)]
        waiting = [asyncio.ensure_future(store.wait(key, timeout=LONG)) for key in keys]
        await until(lambda: waits_at(pair.homes[1]) == count, LONG)
        await until(lambda: not threads_of_aio(), LONG)
        assert len(set(threads_of_links()) - others) <= 1 and threads_of_links()
        versions = await asyncio.to_thread(pair.stores[1].put_many, dict.fromkeys(keys, 1))
        assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())
        assert not store._lazy.remote_waits

    with_store(pair.stores[0].root, use)


def waits_at(home: Home) -> int:
    """Those that the home has kept, of all that came."""
    return len({request.key for request in list(home.asked) if isinstance(request, Wait)})


def test_waits_that_are_cancelled_or_whose_time_is_over_leave_nothing(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = [asyncio.ensure_future(store.wait(f"none{number}")) for number in range(20)]
        await until(lambda: waits_at(pair.homes[1]) > 10)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True)
        )
        with pytest.raises(memstore.StoreTimeoutError, match="'missing' doesn't exist: .* within 0.3 s"):
            await store.wait("missing", timeout=0.3)
        assert not store._lazy.remote_waits

    with_store(pair.stores[0].root, use)


def test_a_wait_for_a_mutable_entry_of_another_home_is_refused(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        with pytest.raises(memstore.MutableEntryError):
            await store.wait("rows")

    pair.stores[1].create_dataset("rows", ((2,), torch.float32), capacity=10)
    with_store(pair.stores[0].root, use)


def test_a_wait_is_kept_again_where_the_home_has_no_news_for_long(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked anew when an answer should be there, whatever became of it."""
    monkeypatch.setattr(begun_wait, "_LOST", 0.1)

    async def use(store: AsyncStore) -> None:
        waiting = asyncio.ensure_future(store.wait("key"))
        await until(lambda: sum(isinstance(request, Wait) for request in list(pair.homes[1].asked)) > 2)
        version = await asyncio.to_thread(pair.stores[1].put, "key", 1)
        assert await asyncio.wait_for(waiting, 60) == version

    with_store(pair.stores[0].root, use)


def test_waits_go_on_when_the_connection_breaks(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = [asyncio.ensure_future(store.wait(f"key{number}", timeout=LONG)) for number in range(30)]
        await until(lambda: waits_at(pair.homes[1]) == 30)
        assert store._lazy.opened_root is not None
        links = store._lazy.opened_root.home._links
        for link in links._links.values():
            link.current.break_off("a test does it")
        await until(lambda: sum(isinstance(request, Wait) for request in list(pair.homes[1].asked)) == 60)
        versions = await asyncio.to_thread(pair.stores[1].put_many, {f"key{number}": 1 for number in range(30)})
        assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())

    with_store(pair.stores[0].root, use)


def test_a_store_that_is_closed_ends_its_waits_for_other_homes(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        other = memstore.aio.open(store.root)
        ended, kept = (asyncio.ensure_future(one.wait(f"k{number}")) for number, one in enumerate((store, other)))
        await until(lambda: waits_at(pair.homes[1]) == 2)
        await store.close()
        with pytest.raises(memstore.StoreClosedError, match="memstore.aio.open it again"):
            await asyncio.wait_for(ended, 60)
        version = await asyncio.to_thread(pair.stores[1].put, "k1", 1)
        assert await asyncio.wait_for(kept, 60) == version
        await other.close()

    with_store(pair.stores[0].root, use)


def test_a_wait_that_comes_while_its_store_is_closed_ends_too(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look for the key's home, and its entry among the waits that are ended."""

    async def use(store: AsyncStore) -> None:
        other = memstore.aio.open(store.root)  # so that the folder stays open
        await other.contains("k")
        await store.contains("k")

        async def wait_later(*arguments: Any) -> int | None:
            await store.close()
            return await wait_elsewhere(*arguments)

        wait_elsewhere = opened.wait_elsewhere
        monkeypatch.setattr(opened, "wait_elsewhere", wait_later)
        with pytest.raises(memstore.StoreClosedError, match="memstore.aio.open it again"):
            await asyncio.wait_for(store.wait("k", timeout=LONG), 60)
        await other.close()

    with_store(pair.stores[0].root, use)


def test_waits_that_are_looked_up_now_and_then_are_told_and_end_with_their_store(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that asks other hosts by actors."""
    monkeypatch.setattr(OtherHosts, "begin_wait", lambda *_: None)

    async def use(store: AsyncStore) -> None:
        waiting = [asyncio.ensure_future(store.wait(f"k{number}", timeout=LONG)) for number in range(20)]
        ended = asyncio.ensure_future(store.wait("never", timeout=LONG))
        await store.put("other", 1)  # there is a connection from now on
        with pytest.raises(memstore.StoreTimeoutError):
            await store.wait("never", timeout=0.3)
        versions = await asyncio.to_thread(pair.stores[1].put_many, {f"k{number}": 1 for number in range(20)})
        assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())
        await store.close()
        with pytest.raises(memstore.StoreClosedError):
            await asyncio.wait_for(ended, 60)
        assert not store._lazy.remote_waits

    with_store(pair.stores[0].root, use)


def test_a_wait_that_begins_as_the_last_one_leaves_is_looked_up_too(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that left have stopped the task that looks, which has not seen that yet."""
    monkeypatch.setattr(OtherHosts, "begin_wait", lambda *_: None)

    async def use(store: AsyncStore) -> None:
        await store.put("other", 1)
        assert store._lazy.opened_root is not None
        waits, deadline = RemoteWaits(store._lazy.opened_root, "a pool of this test"), time.monotonic() + LONG
        leaves = asyncio.ensure_future(waits.wait(b"never", 0, deadline))
        await until(lambda: waits._task is not None)
        leaves.cancel()
        bell = Wakeup(BatchedWakeups())
        comes = asyncio.ensure_future(waits._look_now_and_then(b"key", 0, bell, deadline))
        await asyncio.gather(leaves, return_exceptions=True)
        version = await asyncio.to_thread(pair.stores[1].put, "key", 1)
        assert await asyncio.wait_for(comes, 60) == version

    with_store(pair.stores[0].root, use)


@pytest.mark.parametrize("home", ["this host", "another one"])
def test_many_ranks_of_one_process_put_together_in_a_served_store(scratch: str, home: str) -> None:
    """Their waits keep no part out."""

    async def use(store: AsyncStore) -> None:
        def put(rank: int) -> asyncio.Future[object]:
            return asyncio.ensure_future(store.put_sharded(key, shard(rank), attempt="a", rank=rank, world_size=RANKS))

        puts = [put(rank) for rank in range(aio_calls.THREADS)]
        await asyncio.sleep(0.3)  # by now they wait for the others
        puts += [put(rank) for rank in range(aio_calls.THREADS, RANKS)]
        versions = await asyncio.wait_for(asyncio.gather(*puts), 60)
        assert len(set(versions)) == 1
        assert (await store.get(key))[:, 0].tolist() == list(range(RANKS))

    with cluster_of(scratch, True, True) as homes:
        key = homes.key_at(0 if home == "this host" else 1)
        with_store(homes.stores[0].root, use, timeout=40.0)


def test_a_forked_child_waits_by_itself_and_its_parent_goes_on(pair: Cluster) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = asyncio.ensure_future(store.wait("parents", timeout=LONG))
        await until(lambda: waits_at(pair.homes[1]) == 1)
        child = asyncio.ensure_future(asyncio.to_thread(in_child, in_the_child, store))
        await until(lambda: waits_at(pair.homes[1]) == 2 or child.done(), LONG)
        version = await asyncio.to_thread(pair.stores[1].put, "childs", 1)
        assert await child == version
        assert not waiting.done()
        version = await asyncio.to_thread(pair.stores[1].put, "parents", 1)
        assert await asyncio.wait_for(waiting, LONG) == version

    with_store(pair.stores[0].root, use)


def in_the_child(store: AsyncStore) -> int:
    async def main() -> int:
        assert not store._lazy.remote_waits, "its parent's waits"
        version = await store.wait("childs", timeout=LONG)
        await store.close()
        return version

    return asyncio.run(main())


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


@pytest.mark.parametrize("to", ["this host", "a third one"])
def test_a_wait_for_another_home_follows_its_key(scratch: str, to: str) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = asyncio.ensure_future(store.wait(key, timeout=LONG))
        await until(lambda: waits_at(homes.homes[1]) == 1)
        for number, home in enumerate(homes.homes):
            home.member = msgspec.structs.replace(home.member, is_home=number == after)
        await asyncio.to_thread(join_anew, homes)
        version = await asyncio.to_thread(homes.stores[1].put, key, 2)
        assert await asyncio.wait_for(waiting, LONG) == version

    after = 0 if to == "this host" else 2
    with cluster_of(scratch, False, True, False) as homes:
        key = homes.key_at(1)
        with_store(homes.stores[0].root, use)


def test_waits_outlast_a_home_that_is_away(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in the middle of them, and comes back later, at its address."""

    async def use(store: AsyncStore) -> None:
        waiting = [asyncio.ensure_future(store.wait(key, timeout=LONG)) for key in keys]
        await until(lambda: waits_at(there) == len(keys))
        await asyncio.to_thread(there.close)
        monkeypatch.setattr(there, "close", lambda: None)
        assert store._lazy.opened_root is not None
        link = store._lazy.opened_root.home._links._links[there.member.address]
        await until(lambda: link._tries > 2)  # it was looked for, and not found
        assert not any(task.done() for task in waiting)
        with Home(pair.stores[1].root, there.member.address) as again:
            await until(lambda: waits_at(again) == len(keys), LONG)
            versions = await asyncio.to_thread(pair.stores[1].put_many, dict.fromkeys(keys, 1))
            assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())

    there, keys = pair.homes[1], [f"k/{number}" for number in range(40)]
    with_store(pair.stores[0].root, use)


def test_a_home_is_told_for_how_long_a_wait_is_wanted(pair: Cluster) -> None:
    home = pair.homes[1]
    home.delays = lambda request: isinstance(request, Wait)
    begun = elsewhere_of(root_of(pair.stores[0])).begin_wait(b"key", 0, lambda: None, time.monotonic() + 3)
    assert begun is not None
    begun.go_on(time.monotonic() + 20)
    await_(lambda: bool(home.delayed))
    assert home.delayed[0].deadline < time.monotonic() + 3.5  # the clocks of both ends, and a millisecond
    begun.close()


def test_a_wait_that_is_closed_while_it_goes_on_is_given_up_all_the_same(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pair.stores[0]
    store.put("other", 1)  # so that there is a connection
    elsewhere = elsewhere_of(root_of(store))
    begun = elsewhere.begin_wait(b"key", 0, lambda: None, time.monotonic() + LONG)
    assert begun is not None
    (connection,) = (link.current for link in elsewhere._links._links.values())

    class Using:
        """Its lock. Somebody closes the wait just before who goes on with it lets that go."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.acquire, self.release = self._lock.acquire, self._lock.release

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            begun.close()
            self.release()

    monkeypatch.setattr(begun, "_using", Using())
    begun.go_on(time.monotonic() + 20)
    assert not connection._keeper.begun, "its request is still under way"


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
        assert time.monotonic() - started < 9
        with pytest.raises(TimeoutError):
            await store.get(there, timeout=0.3)
        started = time.monotonic()
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert time.monotonic() - started < 9
        homes.homes[1].silent = False

    with cluster_of(scratch, True, True) as homes:
        here, there = homes.key_at(0), homes.key_at(1)
        with_store(homes.stores[0].root, use, timeout=20.0)
