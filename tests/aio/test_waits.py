"""Waits of tasks: many at once, by one thread, woken by puts of any process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore, waits
from memstore.aio import calls as aio_calls
from tests.aio.loops import Stopper, threads_of_aio, until, with_store
from tests.children import Child, Wire


def waiters() -> list[threading.Thread]:
    return [thread for thread in threads_of_aio() if thread.name.endswith("waits")]


async def test_what_is_there_is_returned(store: AsyncStore) -> None:
    version = await store.put("key", 1)
    assert await store.wait("key") == version
    assert await store.wait("key", newer_than=version - 1, timeout=5) == version


async def test_what_does_not_come_is_a_timeout(store: AsyncStore) -> None:
    version = await store.put("key", 1)
    for timeout in (0.05, 0):
        with pytest.raises(memstore.StoreTimeoutError, match=f"version {version}: no.* newer than {version} "):
            await store.wait("key", newer_than=version, timeout=timeout)
    with pytest.raises(memstore.StoreTimeoutError, match="'missing' doesn't exist"):
        await store.wait("missing", timeout=0.01)
    for wrong in ("soon", float("nan"), -1):
        with pytest.raises((TypeError, ValueError)):
            await store.wait("key", timeout=wrong)  # type: ignore[arg-type]


def _put_when_told(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        while (keys := wire.receive()) is not None:
            for key in keys:
                store.put(key, 1)


def test_a_thousand_waits_take_one_thread_and_each_is_woken(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By puts of another process; no wait looks by itself."""
    monkeypatch.setattr(waits, "LOOK_EVERY", 3600.0)

    async def use(store: AsyncStore) -> None:
        keys = [f"key{number}" for number in range(1000)]
        await store.put("other", 1)
        others = set(threads_of_aio())
        waiting = [asyncio.ensure_future(store.wait(key, timeout=float("inf"))) for key in keys]
        await store.put("other", 1)  # so that all have begun
        new = [thread.name for thread in set(threads_of_aio()) - others]
        assert new.count("memstore.aio waits") == 1
        assert len(new) <= 2  # a put takes another thread where the one of the last put isn't free yet
        for key in keys[::100]:
            child.send([key])
            await asyncio.wait_for(waiting[keys.index(key)], 60)
        assert sum(task.done() for task in waiting) == 10
        child.send(keys)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)

    with memstore.open(root), Child(_put_when_told, root) as child:
        with_store(root, use)
        child.send()


async def test_a_put_of_this_process_wakes_without_a_look(store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_EVERY", 3600.0)
    version = 0
    for _ in range(20):
        waiting = asyncio.ensure_future(store.wait("key", newer_than=version))
        await asyncio.sleep(0.002)
        version = await store.put("key", torch.zeros(1000))
        assert await asyncio.wait_for(waiting, 60) == version
    await store.delete("key")


async def test_puts_between_a_wait_and_its_first_look_are_not_missed(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits that come and go, beside puts of their keys at any time."""
    monkeypatch.setattr(waits, "LOOK_EVERY", 3600.0)

    async def follow(key: str) -> None:
        version = 0
        for _ in range(100):
            version = await store.wait(key, newer_than=version, timeout=60)
        done.add(key)

    async def lead(key: str) -> None:
        while key not in done:
            await store.put(key, 1)

    done: set[str] = set()
    await asyncio.gather(*(run(f"key{number}") for number in range(5) for run in (follow, lead)))


def test_a_reader_waits_too(root: str) -> None:
    async def use(store: AsyncStore) -> None:
        waiting = [asyncio.ensure_future(store.wait(f"key{number}")) for number in range(10)]
        await asyncio.sleep(0.02)
        with memstore.open(root) as writer:
            for number in range(10):
                writer.put(f"key{number}", 1)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)

    memstore.open(root).close()
    with_store(root, use, "r")


async def test_close_ends_waits_and_their_thread(root: str) -> None:
    store, other = memstore.aio.open(root), memstore.aio.open(root)
    mine = [asyncio.ensure_future(store.wait("key", timeout=float("inf"))) for _ in range(10)]
    theirs = asyncio.ensure_future(other.wait("key"))
    await until(lambda: bool(waiters()))
    await store.close()
    for task in mine:
        with pytest.raises(memstore.StoreClosedError):
            await task
    version = await other.put("key", 1)
    assert await theirs == version
    await other.close()
    await until(lambda: not waiters())


async def test_waits_that_come_while_the_store_is_being_closed_end_too(root: str) -> None:
    """Another store object keeps the root, so that only its owner's end can tell a wait."""
    async with memstore.aio.open(root) as other:
        await other.put("other", 1)
        for turn in range(30):
            store = memstore.aio.open(root)
            waiting = [asyncio.ensure_future(store.wait("key", timeout=float("inf"))) for _ in range(5)]
            await asyncio.sleep(turn % 3 * 0.005)
            await store.close()
            ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
            assert all(isinstance(one, memstore.StoreClosedError) for one in ended), ended


async def test_the_thread_ends_when_nobody_waits(store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_LINGER", 0.01)
    with pytest.raises(memstore.StoreTimeoutError):
        await store.wait("key", timeout=0.01)
    await until(lambda: not waiters())
    waiting = asyncio.ensure_future(store.wait("key"))
    version = await store.put("key", 1)
    assert await waiting == version


def test_a_loop_that_was_closed_harms_nobody(root: str) -> None:
    store = memstore.aio.open(root)

    async def leave() -> None:
        asyncio.ensure_future(store.wait("key"))
        await asyncio.sleep(0.02)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    tasks = asyncio.all_tasks(loop)
    loop.close()  # with a task that waits

    async def go_on() -> None:
        waiting = asyncio.ensure_future(store.wait("key"))
        await asyncio.sleep(0.02)
        version = await store.put("key", 1)
        assert await waiting == version
        await store.close()

    asyncio.run(go_on())
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_folder_that_is_removed_ends_the_waits(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(waits, "LOOK_EVERY", 0.05)

    async def use(store: AsyncStore) -> None:
        waiting = asyncio.ensure_future(store.wait("key"))
        await asyncio.sleep(0.02)
        shutil.rmtree(scratch)
        with pytest.raises(memstore.NotAStoreError):
            await waiting

    with_store(scratch, use)


async def test_a_mutable_entry_is_refused(root: str, store: AsyncStore) -> None:
    with memstore.open(root) as blocking:
        blocking.create_dataset("rows", ((2,), torch.float32), capacity=10)
    with pytest.raises(memstore.MutableEntryError):
        await store.wait("rows")
    started = time.monotonic()
    assert await store.wait("key", timeout=10) if await store.put("key", 1) else True
    assert time.monotonic() - started < 9


async def test_a_wait_for_any_key_ends_in_time_where_all_threads_are_busy(root: str, store: AsyncStore) -> None:
    await store.put("key", 1)
    with memstore.open(root) as blocking, Stopper(blocking):
        puts = [asyncio.ensure_future(store.put("key", number)) for number in range(aio_calls.THREADS)]
        await asyncio.sleep(0)
        started = time.monotonic()
        with pytest.raises(memstore.StoreTimeoutError, match="no thread had time"):
            await store.wait_any(["missing"], timeout=0.1)
        assert time.monotonic() - started < 9  # and the puts take 20 s
    await asyncio.gather(*puts)


async def test_a_wait_for_any_key_is_woken_by_another_process_and_may_be_cancelled(
    root: str, store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LOOK_EVERY", 3600.0)
    await store.put("other", 1)
    with Child(_put_when_told, root) as child:
        for number in range(3):
            waiting = [
                asyncio.ensure_future(store.wait_any(prefix=f"batch{number}/")),
                asyncio.ensure_future(store.wait_any(["missing", f"batch{number}/b"])),
            ]
            left = asyncio.ensure_future(store.wait_any(prefix="never/", timeout=float("inf")))
            await until(lambda: any(len(room._waiting) >= 3 for room in waits._wait_threads.values()))
            child.send([f"batch{number}/b"])
            found = await asyncio.gather(*waiting)
            assert found == [{f"batch{number}/b": await store.version(f"batch{number}/b")}] * 2
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
        child.send(None)
    assert (await store.wait_any(prefix="")).keys() >= {"other", "batch0/b"}
    (room,) = waits._wait_threads.values()
    await until(lambda: not room._waiting and not room._incoming)
    last = asyncio.ensure_future(store.wait_any(["missing"], timeout=float("inf")))
    await until(lambda: bool(room._waiting))
    await store.close()
    with pytest.raises(memstore.errors.StoreClosedError):
        await last
