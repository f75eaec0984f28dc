"""Actors of Monarch. Importing this imports Monarch, which takes seconds.

announce, find    how actors find a store that was made after they were started: they ask one actor of their root client
serve             a store on several hosts: `initialize(mesh=...)` with a HostMesh serves them, and `shutdown` ends that
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, endpoint, get_or_spawn_controller

import memstore
from memstore.integrations.torchstore import folders

# --- Names of stores -------------------------------------------------------------------------------------------------


_ACTOR = "memstore_torchstore"


class Paths(Actor):
    """One a job: `get_or_spawn_controller` makes it in the job's root client, whoever asks first."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    @endpoint
    async def announce(self, name: str, path: str) -> None:
        self._paths[name] = path

    @endpoint
    async def find(self, name: str) -> str | None:
        return self._paths.get(name)


async def _paths() -> Any:
    return await get_or_spawn_controller(_ACTOR, Paths)


async def announce(name: str, path: str) -> None:
    """Tells it all actors of the job."""
    await (await _paths()).announce.call_one(name, path)


async def find(name: str) -> str | None:
    """Returns the root of a store, if some process of the job has announced it; it may have been shut down since."""
    return await (await _paths()).find.call_one(name)


# --- Several hosts ---------------------------------------------------------------------------------------------------


class FolderActor(Actor):
    """One a host, for the moment: what is to be done there with the store's folder."""

    @endpoint
    async def prepare(self, path: str) -> None:
        folders.prepare(path)

    @endpoint
    async def remove(self, path: str) -> None:
        folders.remove(path)
        with contextlib.suppress(OSError):  # on this host other stores of the job may be there, and their owners
            os.rmdir(os.path.dirname(path))


@dataclass(frozen=True, slots=True)
class ServedHosts:
    """The agents that `initialize` has started on hosts, and `shutdown` ends."""

    mesh: Any
    path: str
    cluster: memstore.Cluster

    async def end(self) -> None:
        """Ends the hosts' agents, and removes their folders, which ends agents that could not be asked."""
        try:
            await asyncio.to_thread(self.cluster.stop)
        finally:
            await _on_each(self.mesh, "remove", self.path)


async def serve(mesh: Any, path: str) -> ServedHosts:
    """Errors as of `memstore.serve`."""
    await _on_each(mesh, "prepare", path)
    return ServedHosts(mesh, path, await asyncio.to_thread(memstore.serve, mesh, path))


async def _on_each(mesh: Any, name: str, path: str) -> None:
    procs = mesh.spawn_procs(name="memstore_folders")
    try:
        await getattr(procs.spawn("folders", FolderActor), name).call(path)
    finally:
        await procs.stop()
