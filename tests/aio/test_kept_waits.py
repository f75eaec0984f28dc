"""Many tasks that wait for keys of another home, which keeps their waits: each is woken by a put of its key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import memstore
from memstore.aio import AsyncStore
from memstore.aio.waits import BatchedWakeups, Wakeup
from memstore.distributed.serving import waiting
from tests.aio.loops import with_store
from tests.distributed.serving.homes import AnsweringHome, answering, join
from tests.inside import root_of

LONG = 200.0  # seconds, which no wait takes that is told
MANY = [100, pytest.param(1000, marks=pytest.mark.full)]


@pytest.fixture
def home(scratch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringHome]:
    """It doesn't look at all waits each second: what it misses is missed."""
    monkeypatch.setattr(waiting, "_LOOK_EVERY", 1000.0)
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
