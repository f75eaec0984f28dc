"""The actors of `memstore.serve`. Importing this imports Monarch, which takes seconds.

The overseer is in the process that serves: it spawns the launchers, one a host of the mesh, and hears of their
failures, which would otherwise end that process (Monarch's default for what nobody supervises).
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from monarch.actor import Actor, concurrent_endpoint, context

from memstore.distributed.meshes.launcher_address import ips_of
from memstore.distributed.meshes.launching import Launching
from memstore.distributed.meshes.messages import Failed, decode_report, last_line

_MORE = 0.3  # seconds for further failures, once there is one


class Launcher(Actor):
    """One a host of the mesh."""

    def __init__(self) -> None:
        self._launching = Launching(ips_of(str(context().actor_instance.actor_id)))

    @concurrent_endpoint
    async def take(self, order: bytes) -> bytes:
        """See `messages`."""
        return await asyncio.to_thread(self._launching.answer, order)


class Heard(NamedTuple):
    """What came of an order. `report` is empty where nothing came; `why` says why."""

    rank: int
    report: bytes
    why: str


class Overseer(Actor):
    """Spawns launchers on a host mesh, and passes orders on to them."""

    def __init__(self) -> None:
        self._procs: Any = None
        self._launchers: Any = None

    @concurrent_endpoint
    async def spawn(self, host_mesh: Any) -> int:
        """Returns how many hosts the mesh has."""
        self._procs = host_mesh.spawn_procs(name="memstore_launchers")
        self._launchers = self._procs.spawn("launchers", Launcher).flatten("rank")
        return self._launchers.size()

    @concurrent_endpoint
    async def ask(self, orders: dict[int, bytes], seconds: float) -> list[Heard]:
        """Returns when all have answered, or one has failed, or the time is over."""
        asked = {asyncio.ensure_future(self._ask(rank, order)): rank for rank, order in orders.items()}
        waiting = asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        loop, heard = asyncio.get_running_loop(), list[Heard]()
        deadline = loop.time() + seconds
        while True:
            done, rest = await waiting
            heard += [task.result() for task in done]
            if any(map(_has_failed, heard)):
                deadline = min(deadline, loop.time() + _MORE)
            if not rest or loop.time() >= deadline:
                break
            left = max(deadline - loop.time(), 0.0)
            waiting = asyncio.wait(rest, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return sorted(heard)

    async def _ask(self, rank: int, order: bytes) -> Heard:
        try:
            return Heard(rank, await self._launchers.slice(rank=rank).take.call_one(order), "")
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            return Heard(rank, b"", last_line(error))

    @concurrent_endpoint
    async def end(self) -> None:
        """Ends the launchers' processes."""
        if self._procs is not None:
            await self._procs.stop()

    def __supervise__(self, failure: Any) -> bool:
        """Whoever asks the launcher that failed hears of it."""
        return True

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Takes back an order to a launcher that could not be made, for which Monarch would end this process."""
        return True


def _has_failed(heard: Heard) -> bool:
    return not heard.report or isinstance(decode_report(heard.report), Failed)
