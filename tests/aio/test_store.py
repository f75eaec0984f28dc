"""An AsyncStore as its users call it."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading

import pytest
import torch

import memstore
import memstore.aio
from memstore._info import StoreSummary
from memstore.aio import AsyncStore
from memstore.aio import calls as aio_calls
from tests.aio.loops import Stopper, with_store


async def test_what_is_put_is_got(store: AsyncStore) -> None:
    version = await store.put("policy", {"w": torch.arange(1000), "step": 7})
    got = await store.get("policy")
    assert torch.equal(got["w"], torch.arange(1000)) and got["step"] == 7
    assert await store.version("policy") == version
    assert (await store.info("policy")).version == version
    assert await store.contains("policy") and not await store.contains("other")
    assert await store.put_many({"a": 1, "b": 2}) == {"a": await store.version("a"), "b": await store.version("b")}
    assert await store.get_many(["b", "a"]) == {"b": 2, "a": 1}
    assert await store.count() == 3
    assert await store.delete("a") is True
    assert await store.delete_many(["a", "b"], missing_ok=True) == 1
    assert (await store.stats()).keys == 1
    assert (await store.verify()).ok


async def test_stores_of_the_machine_are_listed_and_destroyed(scratch: str) -> None:
    async with memstore.aio.open(scratch) as store:
        await store.put("key", torch.zeros(5000))
        (found,) = [one for one in await memstore.aio.stores() if one.root == scratch]
        assert isinstance(found, StoreSummary) and found.pids == (os.getpid(),)
    await memstore.aio.destroy(scratch)
    assert not os.path.exists(scratch)
    assert scratch not in {one.root for one in await memstore.aio.stores()}
    with pytest.raises(memstore.NotAStoreError, match="nothing was removed"):
        await memstore.aio.destroy(scratch, timeout=1.0)


async def test_a_key_that_is_not_there(store: AsyncStore) -> None:
    marker = object()
    assert await store.get("none", marker) is marker
    assert await store.get("none", None) is None
    with pytest.raises(memstore.KeyNotFoundError, match="none"):
        await store.get("none")
    with pytest.raises(memstore.InvalidKeyError):
        await store.get("")
    with pytest.raises(memstore.InvalidKeyError):
        await store.put("", 1)
    with pytest.raises(TypeError, match="number of seconds"):
        await store.get("none", timeout="soon")  # type: ignore[arg-type]


async def test_options_of_a_get_are_those_of_a_store(store: AsyncStore) -> None:
    await store.put("x", {"a": torch.arange(4.0)})
    out = {"a": torch.zeros(4)}
    assert await store.get("x", out=out) is out and out["a"].tolist() == [0, 1, 2, 3]
    assert (await store.get("x", dtype=torch.float16))["a"].dtype == torch.float16
    assert (await store.get("x", like={"a": torch.zeros(4, dtype=torch.float64)}))["a"].dtype == torch.float64
    assert (await store.get("x", timeout=5.0, strict=True, non_blocking=False))["a"].sum() == 6
    with pytest.raises(TypeError, match="unexpected keyword"):
        await store.get("x", nonsense=1)  # type: ignore[call-arg]


async def test_keys_come_in_order_and_in_pages(store: AsyncStore) -> None:
    await store.put_many({f"many/{number:04}": number for number in range(2500)})
    await store.put("other", 1)
    assert [key async for key in store.keys("many/")] == [f"many/{number:04}" for number in range(2500)]
    assert [key async for key in store][-1] == "other"
    await store.delete_many([f"many/{number:04}" for number in range(2498)])
    assert [pair async for pair in store.items()] == [("many/2498", 2498), ("many/2499", 2499), ("other", 1)]
    assert [value async for value in store.values()] == [2498, 2499, 1]


async def test_a_local_get_is_made_at_once_and_others_in_threads(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = memstore.Store.get

    def noted(self: memstore.Store, *arguments: object, **options: object) -> object:
        made.append(threading.current_thread().name)
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    await store.put("x", torch.arange(1000.0))
    monkeypatch.setattr("memstore.store.store.Store.get", noted)
    await store.get("x")
    assert made == []
    await store.get("x", dtype=torch.float64)
    assert made == ["memstore.aio"]


def test_a_get_of_a_store_that_verifies_or_lies_on_a_disk_is_made_in_a_thread(disk_root: str) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put("x", torch.arange(1000.0))
        assert torch.equal(await store.get("x"), torch.arange(1000.0))

    with_store(disk_root, use, durability="disk", verify=True)


async def test_opening_is_left_to_the_first_call(root: str) -> None:
    store = memstore.aio.open(root, "r+")
    assert "not opened yet" in repr(store)
    with pytest.raises(memstore.NotAStoreError):
        await store.version("x")
    with memstore.open(root) as other:
        other.put("x", 1)
    assert await store.get("x") == 1  # the store is there by now
    assert "(mode 'r+')" in repr(store)
    await store.close()
    await store.close()
    assert "closed" in repr(store)
    for call in (store.get("x"), store.put("x", 1), store.wait("x"), store.version("x")):
        with pytest.raises(memstore.StoreClosedError):
            await call


async def test_await_opens(root: str) -> None:
    store = await memstore.aio.open(root, "x")
    with pytest.raises(memstore.AlreadyExistsError):
        await memstore.aio.open(root, "x")
    await store.close()


async def test_a_store_is_pickled_by_its_root(root: str) -> None:
    unopened = pickle.loads(pickle.dumps(memstore.aio.open(root, "x", checksum=True)))
    await unopened.put("x", 1)
    async with pickle.loads(pickle.dumps(unopened)) as other:
        assert await other.get("x") == 1
        await other.put("y", 2)
    await unopened.close()
    with pytest.raises(memstore.StoreClosedError):
        pickle.dumps(unopened)
    reader = await memstore.aio.open(root, "r")
    async with pickle.loads(pickle.dumps(reader)) as other:
        with pytest.raises(memstore.ReadOnlyError):
            await other.put("z", 3)
    await reader.close()


async def test_many_first_calls_open_once(root: str) -> None:
    store = memstore.aio.open(root, "x")
    await asyncio.gather(*(store.put(f"key{number}", number) for number in range(50)))
    assert await store.count() == 50
    await store.close()


def test_loops_of_several_threads_share_a_store(root: str) -> None:
    store = memstore.aio.open(root, timeout=20.0)
    found: list[int] = []

    async def main(number: int) -> None:
        await store.put(f"from/{number}", number)
        await store.wait(f"from/{(number + 1) % 4}")
        found.append(await store.get(f"from/{number}"))

    threads = [threading.Thread(target=asyncio.run, args=(main(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3]
    asyncio.run(store.close())


async def test_the_loop_goes_on_while_a_put_waits(root: str, store: AsyncStore) -> None:
    """And the get of what is there doesn't wait at all."""
    await store.put("there", 1)
    with memstore.open(root) as blocking, Stopper(blocking) as stopper:
        waiting = asyncio.ensure_future(store.put("x", 2))
        for _ in range(20):
            assert await store.get("there") == 1
            await asyncio.sleep(0.001)
        assert not waiting.done()
        with pytest.raises(memstore.StoreTimeoutError):
            await store.put("y", 3, timeout=0.05)
        stopper.let_go()
        assert await waiting > 0


async def test_stores_that_are_not_there_yet_hold_up_no_others(root: str, store: AsyncStore) -> None:
    await store.put("x", 1)
    absent = [memstore.aio.open(f"{root}-absent{n}", "r", wait=60.0) for n in range(aio_calls.THREADS + 2)]
    opening = [asyncio.ensure_future(one.version("x")) for one in absent]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(store.put("x", 2), 25)
    assert not any(task.done() for task in opening)
    for one, task in zip(absent, opening, strict=True):
        task.cancel()
        await one.close()
    await asyncio.gather(*opening, return_exceptions=True)


async def test_a_default_that_is_a_device_is_warned_of_at_once_too(store: AsyncStore) -> None:
    await store.put("x", torch.ones(3))
    for key in ("x", "none"):
        with pytest.warns(UserWarning, match="the second argument is the default") as told:
            await store.get(key, "cuda")
        assert told[0].filename == __file__  # the line of the get


async def test_a_call_that_finds_no_thread_keeps_its_timeout(root: str, store: AsyncStore) -> None:
    await store.put("there", 1)
    with memstore.open(root) as blocking, Stopper(blocking) as stopper:
        stuck = [asyncio.ensure_future(store.put("x", number)) for number in range(10)]
        await asyncio.sleep(0.05)
        with pytest.raises(memstore.StoreTimeoutError, match="no thread had time .* within 0.1 s"):
            await store.put("y", 3, timeout=0.1)
        assert await store.get("there") == 1
        stopper.let_go()
        assert len(set(await asyncio.gather(*stuck))) == 10
    assert not await store.contains("y")
