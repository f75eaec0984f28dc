"""Tasks of a store on several hosts: keys that another host owns, or nobody, or that are handed over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore, waits
from memstore.aio import calls as aio_calls
from memstore.aio.waits import BatchedWakeups, Wakeup
from memstore.distributed.client import driving
from memstore.distributed.rules import Wait
from memstore.distributed.rules.messages import WatchGroup
from memstore.distributed.serving import requests
from memstore.engine import elsewhere_of
from tests.aio.loops import threads_of_aio, until, with_store
from tests.aio.test_results import RANKS, shard
from tests.children import in_child
from tests.distributed.client.hosts import Cluster, await_, cluster_of, hand_over
from tests.distributed.homes import Home
from tests.distributed.serving.homes import AnsweringHome, answering, join
from tests.inside import root_of


@pytest.fixture
def pair(scratch: str) -> Iterator[Cluster]:
    """Two hosts, of which the second owns all keys."""
    with cluster_of(scratch, False, True) as made:
        yield made


@pytest.fixture
def store(pair: Cluster) -> AsyncStore:
    """A store of the first host, which is opened and closed in the test's loop."""
    return memstore.aio.open(pair.stores[0].root, timeout=20.0)


async def test_a_store_goes_on_beyond_this_host(pair: Cluster, store: AsyncStore) -> None:
    there = pair.stores[1]
    version = await store.put("k", torch.ones(5000))
    assert await store.version("k") == version
    there.put("k", torch.zeros(5000))
    assert (await store.get("k")).sum() == 0
    assert await store.get("missing", None) is None
    assert [key async for key in store.keys("k")] == ["k"]
    assert await store.contains("k") and await store.count() == 1


LONG = 200.0  # seconds, which no wait takes that is told


def threads_of_links() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memstore links"]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
async def test_waits_for_keys_of_another_home_take_no_thread_each(
    pair: Cluster, store: AsyncStore, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_calls, "IDLE", 0.05)
    await store.put("other/k", 1)
    others = set(threads_of_links())
    keys = [f"other/{number}" for number in range(count // 2)] + [f"key{number}" for number in range(count // 2)]
    waiting = [asyncio.ensure_future(store.wait(key, timeout=LONG)) for key in keys]
    await until(lambda: waits_at(pair.homes[1]) + watches(pair) == count, LONG)
    await until(lambda: not threads_of_aio(), LONG)
    assert len(set(threads_of_links()) - others) <= 2 and threads_of_links()  # one for each host that is asked
    versions = await asyncio.to_thread(pair.stores[1].put_many, dict.fromkeys(keys, 1))
    assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())
    assert not store._lazy.remote_waits


def waits_at(home: Home) -> int:
    """Counts the keys that the host has kept waits for, of all that came."""
    return len({request.key for request in list(home.asked) if isinstance(request, Wait)})


def watches(cluster: Cluster) -> int:
    """Counts the groups that the directory has watched, of all that came."""
    asked = list(cluster.homes[0].asked)
    return len({request.group for request in asked if isinstance(request, WatchGroup)})


async def test_waits_that_are_cancelled_or_whose_time_is_over_leave_nothing(pair: Cluster, store: AsyncStore) -> None:
    pair.stores[1].put("none/k", 1)
    names = [f"none{'/'[number % 2 :]}{number}" for number in range(20)]
    waiting = [asyncio.ensure_future(store.wait(name)) for name in names]
    await until(lambda: waits_at(pair.homes[1]) + watches(pair) > 10)
    for task in waiting:
        task.cancel()
    assert all(
        isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True)
    )
    with pytest.raises(memstore.StoreTimeoutError, match="'missing' doesn't exist: .* within 0.3 s"):
        await store.wait("missing", timeout=0.3)
    assert not store._lazy.remote_waits


async def test_a_wait_for_a_mutable_entry_of_another_home_is_refused(pair: Cluster, store: AsyncStore) -> None:
    pair.stores[1].create_dataset("rows", ((2,), torch.float32), capacity=10)
    with pytest.raises(memstore.MutableEntryError):
        await store.wait("rows")


async def test_a_wait_is_kept_again_where_the_home_has_no_news_for_long(
    pair: Cluster, store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked anew when an answer should be there, whatever became of it."""
    monkeypatch.setattr(driving, "_LOST", 0.1)
    pair.stores[1].put("owned/first", 1)
    for key, kind in (("owned/key", Wait), ("nobodys/key", WatchGroup)):
        waiting = asyncio.ensure_future(store.wait(key))
        asked = pair.homes[1 if kind is Wait else 0].asked
        await until(lambda asked=asked, kind=kind: sum(isinstance(request, kind) for request in list(asked)) > 2)
        version = await asyncio.to_thread(pair.stores[1].put, key, 1)
        assert await asyncio.wait_for(waiting, 60) == version


async def test_waits_go_on_when_the_connection_breaks(pair: Cluster, store: AsyncStore) -> None:
    pair.stores[1].put("k/first", 1)
    waiting = [asyncio.ensure_future(store.wait(f"k/{number}", timeout=LONG)) for number in range(30)]
    await until(lambda: waits_at(pair.homes[1]) == 30)
    assert store._lazy.opened_root is not None
    links = store._lazy.opened_root.owners._links
    for link in links._links.values():
        link.current.break_off("a test does it")
    await until(lambda: sum(isinstance(request, Wait) for request in list(pair.homes[1].asked)) == 60)
    versions = await asyncio.to_thread(pair.stores[1].put_many, {f"k/{number}": 1 for number in range(30)})
    assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())


async def test_a_store_that_is_closed_ends_its_waits_for_other_homes(pair: Cluster, store: AsyncStore) -> None:
    other = memstore.aio.open(store.root)
    pair.stores[1].put("k/first", 1)
    ended, kept = (asyncio.ensure_future(one.wait(f"k/{number}")) for number, one in enumerate((store, other)))
    await until(lambda: waits_at(pair.homes[1]) == 2)
    await store.close()
    with pytest.raises(memstore.StoreClosedError, match="memstore.aio.open it again"):
        await asyncio.wait_for(ended, 60)
    version = await asyncio.to_thread(pair.stores[1].put, "k/1", 1)
    assert await asyncio.wait_for(kept, 60) == version
    await other.close()


async def test_a_wait_that_comes_while_its_store_is_closed_ends_too(
    pair: Cluster, store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look for the key's home, and its entry among the waits that are ended."""
    other = memstore.aio.open(store.root)  # so that the folder stays open
    await other.contains("k")
    await store.contains("k")

    async def wait_later(*arguments: Any) -> int | None:
        await store.close()
        return await wait_elsewhere(*arguments)

    wait_elsewhere = waits.wait_elsewhere
    monkeypatch.setattr(waits, "wait_elsewhere", wait_later)
    with pytest.raises(memstore.StoreClosedError, match="memstore.aio.open it again"):
        await asyncio.wait_for(store.wait("k", timeout=LONG), 60)
    await other.close()


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


async def test_a_forked_child_waits_by_itself_and_its_parent_goes_on(pair: Cluster, store: AsyncStore) -> None:
    waiting = asyncio.ensure_future(store.wait("parents", timeout=LONG))
    await until(lambda: watches(pair) == 1)
    child = asyncio.ensure_future(asyncio.to_thread(in_child, in_the_child, store))
    await until(lambda: watches(pair) == 2 or child.done(), LONG)
    version = await asyncio.to_thread(pair.stores[1].put, "childs", 1)
    assert await child == version
    assert not waiting.done()
    version = await asyncio.to_thread(pair.stores[1].put, "parents", 1)
    assert await asyncio.wait_for(waiting, LONG) == version


def in_the_child(store: AsyncStore) -> int:
    async def main() -> int:
        assert not store._lazy.remote_waits, "its parent's waits"
        version = await store.wait("childs", timeout=LONG)
        await store.close()
        return version

    return asyncio.run(main())


def test_a_wait_follows_a_key_that_is_handed_over(scratch: str) -> None:
    async def use(store: AsyncStore) -> None:
        version = await store.put(key, 1)
        waiting = asyncio.ensure_future(store.wait(key, newer_than=version))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(hand_over, homes, key, 1)
        later = await asyncio.to_thread(homes.stores[1].put, key, 2)
        assert await asyncio.wait_for(waiting, 60) == later

    with cluster_of(scratch, True, True) as homes:
        key = homes.key_at(0)
        with_store(homes.stores[0].root, use)


@pytest.mark.parametrize("to", ["this host", "a third one"])
def test_a_wait_at_another_host_follows_its_key(scratch: str, to: str) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = asyncio.ensure_future(store.wait(key, timeout=LONG))
        await until(lambda: waits_at(homes.homes[1]) == 1)
        await asyncio.to_thread(hand_over, homes, key, after)
        version = await asyncio.to_thread(homes.stores[1].put, key, 2)
        assert await asyncio.wait_for(waiting, LONG) == version

    after = 0 if to == "this host" else 2
    with cluster_of(scratch, True, True, True) as homes:
        key = homes.key_at(1)
        homes.stores[1].put(f"{key} beside", 1)
        with_store(homes.stores[0].root, use)


async def test_waits_outlast_a_home_that_is_away(
    pair: Cluster, store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the middle of them, and comes back later, at its address."""
    there, keys = pair.homes[1], [f"k/{number}" for number in range(40)]
    pair.stores[1].put("k/first", 1)
    waiting = [asyncio.ensure_future(store.wait(key, timeout=LONG)) for key in keys]
    await until(lambda: waits_at(there) == len(keys))
    await asyncio.to_thread(there.close)
    monkeypatch.setattr(there, "close", lambda: None)
    assert store._lazy.opened_root is not None
    link = store._lazy.opened_root.owners._links._links[there.member.address]
    await until(lambda: link._tries > 2)  # it was looked for, and not found
    assert not any(task.done() for task in waiting)
    with Home(pair.stores[1].root, there.member.address) as again:
        await until(lambda: waits_at(again) == len(keys), LONG)
        versions = await asyncio.to_thread(pair.stores[1].put_many, dict.fromkeys(keys, 1))
        assert await asyncio.wait_for(asyncio.gather(*waiting), LONG) == list(versions.values())


def test_a_home_is_told_for_how_long_a_wait_is_wanted(pair: Cluster) -> None:
    home = pair.homes[1]
    home.delays = lambda request: isinstance(request, Wait)
    pair.stores[1].put("k/first", 1)
    pair.stores[0].version("k/first")  # it knows the owner from here on
    begun = elsewhere_of(root_of(pair.stores[0])).begin_wait(b"k/key", 0, lambda: None, time.monotonic() + 3)
    begun.go_on(time.monotonic() + 20)
    await_(lambda: bool(home.delayed))
    assert home.delayed[0].deadline < time.monotonic() + 3.5  # the clocks of both ends, and a millisecond
    begun.close()


def test_a_wait_that_is_closed_while_it_goes_on_is_given_up_all_the_same(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pair.stores[0]
    store.put("k/first", 1)  # so that there is a connection, and it knows the owner
    elsewhere = elsewhere_of(root_of(store))
    begun = elsewhere.begin_wait(b"k/key", 0, lambda: None, time.monotonic() + LONG)
    connection = elsewhere._links._links[pair.homes[1].member.address].current

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
    assert not connection._begun.begun, "its request is still under way"


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


# --- waits that their home keeps: each is woken by a put of its key ---------------------------------------------------


MANY = [100, pytest.param(1000, marks=pytest.mark.full)]


@pytest.fixture
def home(scratch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringHome]:
    """It doesn't look at all waits each second: what it misses is missed."""
    monkeypatch.setattr(requests, "_LOOK_EVERY", 1000.0)
    with answering(f"{scratch}-home", with_waits=True) as one:
        yield one


@pytest.fixture
def there(home: AnsweringHome) -> Iterator[memstore.Store]:
    with memstore.open(home.root.path, timeout=20.0) as store:
        yield store


@pytest.fixture
def here(scratch: str, home: AnsweringHome) -> Iterator[str]:
    """The root of a host that is no home."""
    with memstore.open(f"{scratch}-here", timeout=20.0) as store:
        join(home, root_of(store))
        yield store.root


@pytest.mark.parametrize("count", MANY)
def test_each_of_many_tasks_is_woken_by_a_put_of_its_own_key(there: memstore.Store, here: str, count: int) -> None:
    keys = [f"key{number}" for number in range(count)]

    async def use(store: AsyncStore) -> None:
        waiting = {key: asyncio.ensure_future(store.wait(key, timeout=LONG)) for key in keys}
        for key, task in waiting.items():
            version = await asyncio.to_thread(there.put, key, 1)
            assert await asyncio.wait_for(task, LONG) == version
        assert not store._lazy.remote_waits

    with_store(here, use)


@pytest.mark.parametrize("count", MANY)
def test_no_put_is_missed_that_comes_while_waits_begin(there: memstore.Store, here: str, count: int) -> None:
    keys = [f"key{number}" for number in range(count)]

    async def use(store: AsyncStore) -> None:
        versions: dict[str, int] = {}

        def put() -> None:
            for key in keys:
                versions[key] = there.put(key, 1)

        putter = asyncio.ensure_future(asyncio.to_thread(put))
        told = await asyncio.wait_for(asyncio.gather(*(store.wait(key, timeout=LONG) for key in keys)), LONG)
        await putter
        assert told == list(versions.values())

    with_store(here, use)


def test_bells_that_are_rung_together_call_the_loop_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = 0
        call = loop.call_soon_threadsafe

        def count(*arguments: object) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return call(*arguments)  # pyright: ignore

        loop.call_soon_threadsafe = count  # pyright: ignore
        chime = BatchedWakeups()
        bells = [Wakeup(chime) for _ in range(100)]
        for turn in range(1, 4):
            rung = [bell.arm() for bell in bells]
            ringer = threading.Thread(target=lambda: [bell.ring() for bell in bells])
            ringer.start()
            ringer.join()  # the loop does nothing meanwhile
            assert calls == turn and not any(one.done() for one in rung)
            await asyncio.gather(*rung)
        del loop.call_soon_threadsafe

    asyncio.run(main())


async def test_no_ring_is_lost_while_the_loop_takes_others() -> None:
    loop, chime = asyncio.get_running_loop(), BatchedWakeups()

    async def ring_often() -> None:
        bell = Wakeup(chime)
        for _ in range(100):
            rung = bell.arm()
            await loop.run_in_executor(None, bell.ring)
            await rung  # nothing else rings it

    await asyncio.wait_for(asyncio.gather(*(ring_often() for _ in range(8))), LONG)
