"""Forks, and the end of interpreters, with calls under way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore
from tests.aio.loops import Stopper
from tests.children import in_child


async def test_a_forked_child_goes_on_with_the_store(root: str, store: AsyncStore) -> None:
    """Forked while threads of the parent hold locks, and wait."""
    await store.put("x", torch.ones(1000))
    waiting = asyncio.ensure_future(store.wait("later"))
    with memstore.open(root) as blocking, Stopper(blocking) as stopper:
        put = asyncio.ensure_future(store.put("y", 1))
        await asyncio.sleep(0.02)
        child = asyncio.ensure_future(asyncio.to_thread(in_child, in_the_child, store))
        await asyncio.sleep(0.2)
        stopper.let_go()
        assert await child == "fine"
        await put
    assert await asyncio.wait_for(waiting, 60) == await store.version("later")
    assert (await store.get("x")).sum() == 0


def in_the_child(store: AsyncStore) -> str:
    async def main() -> str:
        assert (await store.get("x")).sum() == 1000
        waiting = asyncio.ensure_future(store.wait("later"))
        await store.put("x", torch.zeros(1000))
        version = await store.put("later", 1)
        assert await waiting == version
        await store.close()
        return "fine"

    return asyncio.run(main())


ENDS = """if True:
    import asyncio, sys, threading, time
    import memstore, memstore.aio, torch
    from memstore.listing import opened

    async def main():
        store = await memstore.aio.open({root!r}, timeout=100)
        await store.put("x", torch.ones(1000))
        held = threading.Event()
        mutex = opened(memstore.open({root!r})).mutex
        def hold():
            mutex.run(lambda: (held.set(), time.sleep(100)), time.monotonic() + 10)
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        calls = [asyncio.ensure_future(store.put(f"key{{number}}", 1)) for number in range(20)]
        calls += [asyncio.ensure_future(store.wait(f"other{{number}}")) for number in range(20)]
        await asyncio.sleep(0.1)
        print("leaving", flush=True)
        {leave}

    asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.parametrize("leave", ["return", "sys.exit(0)", "raise KeyboardInterrupt"])
def test_an_interpreter_ends_with_calls_under_way(scratch: str, leave: str) -> None:
    started = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-c", ENDS.format(root=scratch, leave=leave)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "leaving\n", run.communicate()
    started = time.monotonic()
    _, errors = run.communicate(timeout=90)
    assert time.monotonic() - started < 60  # of 100 that a call may wait
    assert run.returncode in (0, 1, -2, 130), errors
    assert "Fatal" not in errors and "terminate called" not in errors
    with memstore.open(scratch, timeout=20.0) as store:
        assert store.put("x", 1)
