"""Tasks for tests: they run in a loop of their own, on a store that is closed afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any, TypeVar

import memstore.aio
from memstore.aio import AsyncStore
from memstore.aio import calls as aio_calls
from memstore.listing import opened

T = TypeVar("T")


def with_store(root: str, use: Callable[[AsyncStore], Coroutine[Any, Any, T]], mode: Any = "a", **options: Any) -> T:
    """What `use(store)` gives."""

    async def main() -> T:
        async with memstore.aio.open(root, mode, **{"timeout": 20.0, **options}) as store:
            return await use(store)

    return asyncio.run(main())


def end_of_calls() -> None:
    """Returns when no thread makes a call any more: one that was cancelled may go on for a moment."""
    for pool in list(aio_calls._pools.values()):
        pool.end(time.monotonic() + 20.0)


def threads_of_aio() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memstore.aio")]


def gated(function: Callable[..., T], *, after: bool = False) -> tuple[Callable[..., T], Event, Event]:
    """As the function, held before or after it: the first event tells that it is there, the second lets it go on."""
    is_there, may_go_on = Event(), Event()

    def wait() -> None:
        is_there.set()
        assert may_go_on.wait(60)

    def held(*arguments: Any, **options: Any) -> T:
        if not after:
            wait()
        found = function(*arguments, **options)
        if after:
            wait()
        return found

    return held, is_there, may_go_on


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Awaits that something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold in time"
        await asyncio.sleep(0.005)


class Stopper:
    """Holds the store's mutex in a thread, as a writer does that was stopped under it."""

    def __init__(self, store: memstore.Store) -> None:
        self._holds, self._may_end = Event(), Event()
        mutex = opened(store).mutex
        self._thread = threading.Thread(target=lambda: mutex.run(self._hold, time.monotonic() + 30))

    def _hold(self) -> None:
        self._holds.set()
        self._may_end.wait(60)

    def __enter__(self) -> Stopper:
        self._thread.start()
        assert self._holds.wait(30)
        return self

    def let_go(self) -> None:
        self._may_end.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.let_go()
