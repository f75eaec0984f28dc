"""A store on several hosts: `initialize(mesh=...)` with a HostMesh of Monarch serves them, and `shutdown` ends that.

Importing this imports Monarch, which takes seconds.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, endpoint

import memstore
from memstore.integrations.torchstore import folders


class Folder(Actor):
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
    """What `initialize` has started on hosts, and `shutdown` ends."""

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
        await getattr(procs.spawn("folders", Folder), name).call(path)
    finally:
        await procs.stop()
