"""The actors of `memstore.serve`. Importing this imports Monarch, which takes seconds.

IndexActor  one in each process of the served meshes: starts its host's agent, and supervises it. It is in nobody's way:
            requests and bytes go by the agents' own sockets
Overseer    in the process that serves: spawns the index actors, and hears of their failures, which would otherwise end
            that process (Monarch's default for what nobody supervises)
Served      one a job: which clusters it has served under which root
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch.actor import Actor, HostMesh, concurrent_endpoint, context, get_or_spawn_controller

from memstore.distributed.meshes.launching import Launching, ips_in
from memstore.distributed.meshes.messages import HostFailed, decode_report, last_line
from memstore.distributed.serving import Cluster

NAME = "memstore_index"
_REGISTRY = "memstore_served"
_MORE = 0.3  # seconds for further failures, once there is one


class IndexActor(Actor):
    """One a process of the meshes. The first one that sees a host's folder is that host's."""

    def __init__(self) -> None:
        self._launching = Launching(ips_in(str(context().actor_instance.actor_id)))

    @concurrent_endpoint
    async def take(self, order: bytes) -> bytes:
        """See `messages`."""
        return await asyncio.to_thread(self._launching.answer, order)

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Ends the agent with the mesh. An actor that failed leaves it: it is found when the mesh is served again."""
        if exc is None:
            self._launching.end_agent()  # at once: where the job's script ends, this process has some milliseconds left
            await asyncio.to_thread(self._launching.close)


class Served(Actor):
    """One a job, in its root client: two stores of one root, on the hosts of two meshes, are somebody's mistake."""

    def __init__(self) -> None:
        self._clusters: dict[str, Cluster] = {}

    @concurrent_endpoint
    async def note(self, root: str, cluster: Cluster) -> None:
        self._clusters[root] = cluster

    @concurrent_endpoint
    async def find(self, root: str) -> Cluster | None:
        return self._clusters.get(root)


class Heard(NamedTuple):
    """The answer to an order. `report` is empty where nothing came; `why` says why."""

    rank: int
    report: bytes
    why: str


class Overseer(Actor):
    """Spawns index actors on meshes, and passes orders on to them. Ranks are counted through all meshes."""

    def __init__(self) -> None:
        self._procs: list[Any] = []  # that were spawned for index actors
        self._actors: list[Any] = []  # by rank
        self._meshes: list[Any] = []  # of index actors

    @concurrent_endpoint
    async def spawn(self, meshes: Sequence[Any]) -> int:
        """Returns how many index actors there are."""
        for mesh in meshes:
            if isinstance(mesh, HostMesh):
                mesh = mesh.spawn_procs(name=NAME)
                self._procs.append(mesh)
            actors = mesh.spawn(NAME, IndexActor)
            self._meshes.append(actors)
            flat = actors.flatten("rank")
            self._actors += [flat.slice(rank=rank) for rank in range(flat.size())]
        return len(self._actors)

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
            return Heard(rank, await self._actors[rank].take.call_one(order), "")
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            return Heard(rank, b"", last_line(error))

    @concurrent_endpoint
    async def find(self, root: str) -> Cluster | None:
        """Returns the cluster that this job has served under a root."""
        served: Any = await get_or_spawn_controller(_REGISTRY, Served)
        return await served.find.call_one(root)

    @concurrent_endpoint
    async def note(self, root: str, cluster: Cluster) -> None:
        served: Any = await get_or_spawn_controller(_REGISTRY, Served)
        await served.note.call_one(root, cluster)

    @concurrent_endpoint
    async def end(self) -> None:
        """Ends the index actors, and the processes that were made for them."""
        for actors in self._meshes:
            await actors.stop()
        for procs in self._procs:
            await procs.stop()

    def __supervise__(self, failure: Any) -> bool:
        """Keeps this actor alive: who asks the failed one hears of it, and a dead host is no reason to end here."""
        return True

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Takes back an order to an actor that could not be made, for which Monarch would end this process."""
        return True


def _has_failed(heard: Heard) -> bool:
    return not heard.report or isinstance(decode_report(heard.report), HostFailed)
