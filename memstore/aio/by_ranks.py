"""Values that several ranks hold in part: the methods of `store/by_ranks.py`, awaited.

Calls that wait for other ranks take threads of a lane that their key alone has; a wait for a newer version takes none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from memstore.aio.awaited import awaited, called_as
from memstore.aio.lanes import call, start
from memstore.aio.news import Waits
from memstore.aio.results import AsyncPendingPut, Part
from memstore.arguments import flag
from memstore.engine import deadline_after
from memstore.store.by_ranks import begin_load
from memstore.store.sharded import OUTLIVES
from memstore.store.store import Store

if TYPE_CHECKING:
    import torch


class ByRanks(Waits):
    """What `AsyncStore` inherits."""

    save_model = awaited(Store.save_model, lane=Waits.lane_of_ranks)
    abort = awaited(Store.abort)

    @called_as(Store.load_model)
    async def load_model(
        self,
        key: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        newer_than: int | None = None,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> int:
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        strict, cast = flag("strict", strict), flag("cast", cast)
        load = await call(
            self.lane_of(key), lambda _: begin_load(self.blocking(), key, process_group, seconds), seconds
        )
        lane = self.lane_of(key, fetches=True) if load.is_alone else self.lane_of_ranks(key)
        wait: Callable[[], object] | None = None
        if newer_than is not None and load.leads:
            try:
                await self._wait_until(key, newer_than, deadline, seconds)
            except asyncio.CancelledError:
                if not load.is_alone:
                    start(lane, load.give_up)
                raise
            except Exception as error:
                if load.is_alone:
                    raise
                wait = partial(_raise, error)

        def fill(_: float) -> int:
            return load.fill(model, optimizer, strict=strict, cast=cast, wait=wait, deadline=deadline, timeout=seconds)

        return await call(lane, fill, max(deadline - time.monotonic(), 0.0), settles=True, asks=True)

    @overload
    async def put_sharded(
        self,
        key: str,
        value: Any,
        *,
        attempt: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        wait: Literal[True] = True,
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> int: ...
    @overload
    async def put_sharded(
        self,
        key: str,
        value: Any,
        *,
        attempt: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        wait: Literal[False],
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> AsyncPendingPut: ...
    @overload
    async def put_sharded(
        self,
        key: str,
        value: Any,
        *,
        attempt: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        wait: bool = True,
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> int | AsyncPendingPut: ...
    @called_as(Store.put_sharded)
    async def put_sharded(self, key: str, value: Any, *, wait: bool = True, **options: Any) -> int | AsyncPendingPut:
        timeout = options.get("timeout")
        seconds = self.timeout if timeout is None else timeout
        deadline, lane = deadline_after(seconds), self.lane_of_ranks(key)
        if flag("wait", wait):
            options["lease"] = seconds + OUTLIVES
        part = Part(key, value, {**options, "wait": False, "timeout": seconds})
        try:
            pending = await call(lane, lambda waited: part.put(self.blocking(), waited), seconds)
            assert self.opened_root is not None, "it has made a put"
            found = AsyncPendingPut(pending, self.opened_root, lane, self, self.timeout)
            return await found.wait_or_give_up(deadline, seconds) if wait else found
        except asyncio.CancelledError:
            part.is_given_up = True
            if part.pending is not None:
                start(lane, part.pending.abort)
            raise


def _raise(error: Exception) -> NoReturn:
    raise error
