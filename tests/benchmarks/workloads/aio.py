"""Calls that tasks of asyncio await: what that adds to a get, and a thousand waits at once."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

import memstore
import memstore.aio
from memstore.aio import AsyncStore
from tests.benchmarks.measure import Samples, spread
from tests.benchmarks.report import Figure, Goal, Series, Spread, Workload, exactly
from tests.benchmarks.session import Session

SIZES = {"1 KiB": 256, "1 MiB": 1 << 18}  # floats
WAITS = 1000
BURST = 64
BLOCKING, AWAITED = "Store", "memstore.aio"
BETWEEN_PUTS = 0.002  # seconds


class Laps(NamedTuple):
    """Blocking and awaited calls, of one kind, in turns."""

    blocking: Samples
    awaited: Samples


class Waits(NamedTuple):
    threads: int  # that they added
    wakes: list[float]  # seconds from the start of each put in another process to the wake
    all_at_once: list[float]  # the same of one put_many for all of them


def measure(session: Session) -> Workload:
    root = str(session.root / "aio")
    laps, waits = asyncio.run(_measure(root, session.rounds))
    series = [_calls(id, title, lap) for (id, title), lap in laps.items()]
    one_by_one = Figure("woken one by one", "memstore", spread(waits.wakes), len(waits.wakes))
    at_once = Figure("woken by one put_many", "memstore", spread(waits.all_at_once), len(waits.all_at_once))
    p99 = sorted(waits.wakes)[int(len(waits.wakes) * 0.99)]
    adds = {title.partition(",")[0]: _added(lap) for (_, title), lap in laps.items() if title.startswith("get")}
    return Workload(
        id="aio",
        title="Calls that tasks of asyncio await",
        text="A blocking call and an awaited one take turns, in the thread of the loop. Then a thousand tasks wait, "
        "each for a key of its own, while another process puts one after the other; a wake counts from the start of "
        "the put to the task's next line. At last one put_many of that process wakes all. The tasks are those of a "
        "process of their own: it is no actor of Monarch's, and this host owns the keys.",
        series=[*series, Series("aio", f"{WAITS:,} waits at once: a wake", "s", [one_by_one, at_once])],
        goals=[
            *(Goal(f"what awaiting adds to a {what}", added, "<=", 100e-6, "s") for what, added in adds.items()),
            Goal(f"{WAITS:,} waits: threads", exactly(float(waits.threads)), "<=", 1, "n"),
            Goal(f"{WAITS:,} waits: a wake, 99th of a hundred", exactly(p99), "<=", 5e-3, "s"),
            Goal(f"{WAITS:,} waits, all woken by one put_many", spread(waits.all_at_once), "<=", 5e-3, "s"),
        ],
    )


def _calls(id: str, title: str, laps: Laps) -> Series:
    figures = [
        Figure(name, "memstore", spread(samples.all()), len(samples.all()), ratio=samples.ratio_to(laps.blocking))
        for name, samples in ((BLOCKING, laps.blocking), (AWAITED, laps.awaited))
    ]
    return Series(id, title, "s", figures, reference=BLOCKING)


def _added(laps: Laps) -> Spread:
    pairs = zip(laps.awaited.rounds, laps.blocking.rounds, strict=True)
    return spread([(sorted(own)[len(own) // 2] - sorted(other)[len(other) // 2]) * 1e-9 for own, other in pairs])


async def _measure(root: str, rounds: int) -> tuple[dict[tuple[str, str], Laps], Waits]:
    laps: dict[tuple[str, str], Laps] = {}
    with memstore.open(root) as blocking:
        async with memstore.aio.open(root) as store:
            for size, floats in SIZES.items():
                value, id = torch.rand(floats), size.replace(" ", "-")
                await store.put(size, value)
                laps[f"get-{id}", f"get of {size}, awaited"] = await _take_turns(
                    lambda size=size: blocking.get(size), lambda size=size: store.get(size), rounds
                )
                laps[f"put-{id}", f"put of {size}, awaited"] = await _take_turns(
                    lambda size=size, value=value: blocking.put(size, value),
                    lambda size=size, value=value: store.put(size, value),
                    rounds,
                )
            return laps, await _wait(store, root)


async def _take_turns(blocking: Callable[[], object], awaited: Callable[[], Awaitable[object]], rounds: int) -> Laps:
    laps = Laps(Samples(), Samples())
    for turn in range(-1, rounds):
        gc.collect()
        bursts: tuple[list[int], list[int]] = [], []
        for _ in range(BURST):
            start = time.perf_counter_ns()
            value = blocking()
            bursts[0].append(time.perf_counter_ns() - start)
            del value
            start = time.perf_counter_ns()
            value = await awaited()
            bursts[1].append(time.perf_counter_ns() - start)
            del value
        if turn >= 0:
            laps.blocking.rounds.append(bursts[0])
            laps.awaited.rounds.append(bursts[1])
    return laps


# --- waits ------------------------------------------------------------------------------------------------------------


async def _wait(store: AsyncStore, root: str) -> Waits:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    putter = context.Process(target=_put_keys, args=(theirs, root))
    putter.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)
        versions = [0] * WAITS
        before = threading.active_count()
        tasks = [asyncio.ensure_future(_woken(store, number, versions)) for number in range(WAITS)]
        await asyncio.sleep(0.2)
        threads = threading.active_count() - before
        ours.send("one by one")
        woken = await asyncio.gather(*tasks)
        starts: list[float] = await asyncio.to_thread(ours.recv)
        tasks = [asyncio.ensure_future(_woken(store, number, versions)) for number in range(WAITS)]
        await asyncio.sleep(0.2)
        ours.send("at once")
        together = await asyncio.gather(*tasks)
        (start,) = await asyncio.to_thread(ours.recv)
        wakes = [at - one for at, one in zip(woken, starts, strict=True)]
        return Waits(threads, wakes, [at - start for at in together])
    finally:
        putter.kill()
        await asyncio.to_thread(putter.join)


async def _woken(store: AsyncStore, number: int, versions: list[int]) -> float:
    versions[number] = await store.wait(f"wait/{number}", newer_than=versions[number], timeout=100.0)
    return time.perf_counter()  # one clock for all processes


def _put_keys(pipe: Connection, root: str) -> None:
    value = torch.rand(256)
    with memstore.open(root) as store:
        pipe.send("ready")
        pipe.recv()
        starts: list[float] = []
        for number in range(WAITS):
            starts.append(time.perf_counter())
            store.put(f"wait/{number}", value)
            time.sleep(BETWEEN_PUTS)
        pipe.send(starts)
        pipe.recv()
        start = time.perf_counter()
        store.put_many({f"wait/{number}": number for number in range(WAITS)})
        pipe.send([start])
        pipe.recv()
