"""Waits for keys whose home is another host.

A home answers a wait when there is a newer version, and who asks sleeps in a thread until then. So the first waits of a
store for a home take a thread each. Those beyond share one: all of their keys are looked up together, ten times a
second, by one message for each 1,024 of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Hashable

from memstore.aio.lanes import THREADS, call
from memstore.engine import Root, deadline_after, elsewhere_of
from memstore.errors import HomeUnavailableError

_EVERY = 0.1  # seconds
_TO_ANSWER = 5.0  # seconds for a home; it is asked again


class Elsewhere:
    """The waits of one store, in one loop, for one home."""

    def __init__(self, root: Root, lane: Hashable) -> None:
        self._root, self._lane = root, lane
        self._own_threads = 0
        self._shared: dict[asyncio.Future[int], tuple[bytes, int]] = {}  # name and version, newer than which
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not (self._own_threads or self._shared)

    @contextlib.contextmanager
    def own_thread(self) -> Generator[bool]:
        """Whether there is one for another wait: for as long as the wait goes on."""
        has_one = self._own_threads < THREADS
        self._own_threads += has_one
        try:
            yield has_one
        finally:
            self._own_threads -= has_one

    async def wait(self, name: bytes, newer_than: int, deadline: float) -> int | None:
        """The version; None: there was none in time. Raises what a lookup raises, but for a home that is silent."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._shared[future] = name, newer_than
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._look())
        try:
            await asyncio.wait((future,), timeout=max(deadline - time.monotonic(), 0.0))
            return future.result() if future.done() else None
        finally:
            self._shared.pop(future, None)
            if not self._shared:
                self._task.cancel()

    async def _look(self) -> None:
        while self._shared:
            try:
                await self._look_at_all()
            except HomeUnavailableError:
                pass  # it may come back before the waits' time is over
            except Exception as error:
                for future in self._shared:
                    if not future.done():
                        future.set_exception(error)
            await asyncio.sleep(_EVERY)

    async def _look_at_all(self) -> None:
        names = sorted({name for name, _ in self._shared.values()})
        root = self._root
        records = await call(self._lane, lambda _: elsewhere_of(root).records(names, deadline_after(_TO_ANSWER)))
        versions = {name: record.version for name, record in zip(names, records, strict=True) if record is not None}
        for future, (name, newer_than) in self._shared.items():
            if not future.done() and versions.get(name, 0) > newer_than:
                future.set_result(versions[name])
