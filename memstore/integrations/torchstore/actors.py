"""Actors of Monarch. Importing this imports Monarch, which takes seconds.

announce, find    how actors find a store that was made after they were started: they ask one actor of their root client
join              what a process of a host does that has no part of the store yet: its host joins
serve             a store on several hosts: those of the mesh that `initialize` was given own its keys, and all others
                  join them. A store that was made on one host is served when a process of another one asks for it
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch.actor import (
    Actor,
    HostMesh,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)

import memstore
from memstore._wording import an_instance
from memstore.engine import boot_id
from memstore.errors import HomeUnavailableError, NotAStoreError
from memstore.integrations.torchstore import folders
from memstore.integrations.torchstore.strategy import TorchStoreStrategy, check_across_hosts

log = logging.getLogger("memstore")

# --- Names of stores -------------------------------------------------------------------------------------------------


_ACTOR = "memstore_torchstore"
_JOIN_WITHIN = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store is.

    Attributes:
        path: its root, on each of its hosts.
        cluster: of these hosts, with their secret, which goes by Monarch's messages only; None: it is on one host.
        keeper: the actor of the process that made it, which serves it to others when one asks.
    """

    path: str
    cluster: memstore.Cluster | None
    keeper: Any


class Stores(Actor):
    """One a job: `get_or_spawn_controller` makes it in the job's root client, whoever asks first."""

    def __init__(self) -> None:
        self._places: dict[str, StorePlace] = {}

    @endpoint
    async def announce(self, name: str, place: StorePlace) -> None:
        self._places[name] = place

    @endpoint
    async def forget(self, name: str, path: str) -> None:
        if name in self._places and self._places[name].path == path:
            del self._places[name]

    @endpoint
    async def find(self, name: str) -> StorePlace | None:
        return self._places.get(name)


class Keeper(Actor):
    """In the process that made a store on its host: serves it, once another host wants to join."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, asyncio.Lock()
        self._cluster: memstore.Cluster | None = None

    @concurrent_endpoint
    async def cluster(self) -> memstore.Cluster:
        async with self._lock:
            if self._cluster is None:
                self._cluster = await asyncio.to_thread(memstore.serve, this_host(), self._path)
                _served_later[self._path] = ServedHosts(self._cluster, self._path)
            return self._cluster


_served_later: dict[str, ServedHosts] = {}  # by root: what keepers of this process have served


async def _stores() -> Any:
    return await get_or_spawn_controller(_ACTOR, Stores)


async def announce(name: str, path: str, cluster: memstore.Cluster | None) -> None:
    """Tells it all actors of the job."""
    keeper: Any = this_proc().spawn("memstore_keeper", Keeper, path)
    await (await _stores()).announce.call_one(name, StorePlace(path, cluster, keeper))


async def forget(name: str, path: str) -> None:
    """Tells all actors of the job that the store is there no longer."""
    await (await _stores()).forget.call_one(name, path)


async def find(name: str) -> StorePlace | None:
    """Returns where a store is, if some process of the job has announced it; that process may have ended since."""
    return await (await _stores()).find.call_one(name)


async def join(name: str, place: StorePlace) -> None:
    """Makes this host one of the store's, which owns no keys: other hosts go on when it dies.

    Raises:
        NotAStoreError: the process that made the store has ended.
    """
    cluster = place.cluster
    if cluster is None:
        try:
            cluster = await place.keeper.cluster.call_one()
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            raise NotAStoreError(f"{place.path}: the process that made it doesn't serve it: {error}") from error
        await (await _stores()).announce.call_one(name, replace(place, cluster=cluster))
    await asyncio.to_thread(_join, place.path, cluster)


def _join(path: str, cluster: memstore.Cluster) -> memstore.Cluster:
    folders.prepare(path)
    return memstore.join(path, cluster=cluster, owner=False, timeout=_JOIN_WITHIN)


# --- Several hosts ---------------------------------------------------------------------------------------------------


class FolderActor(Actor):
    """One a process of a mesh, for the moment: what is to be done there with the store's folder."""

    @endpoint
    async def prepare(self, path: str) -> tuple[bytes, int, int]:
        """Makes the job's folder. Returns what tells it from all others."""
        folders.prepare(path)
        return _folder_of(path)

    @endpoint
    async def remove(self, path: str) -> None:
        folders.remove(path)
        with contextlib.suppress(OSError):  # on this host other stores of the job may be there, and their owners
            os.rmdir(os.path.dirname(path))


@dataclass(frozen=True, slots=True)
class ServedHosts:
    """The agents that `initialize` has started on hosts, and those of hosts that have joined. `shutdown` ends them.

    Attributes:
        cluster: all of them.
        path: the store's root.
        meshes: whose hosts have folders to remove.
    """

    cluster: memstore.Cluster
    path: str
    meshes: Sequence[Any] = ()

    async def end(self) -> None:
        """Ends the agents, which remove what they have served. Hosts that died are passed over."""
        try:
            await asyncio.to_thread(self.cluster.stop, remove=True, timeout=_STOP_WITHIN)
        except HomeUnavailableError as error:
            log.warning("%s: %s", self.path, str(error))
        for mesh in self.meshes:
            with contextlib.suppress(Exception):  # it was stopped before, or a host of it has died
                await asyncio.wait_for(_on_each(mesh, "remove", self.path), _STOP_WITHIN)


_STOP_WITHIN = 12.0  # seconds: an agent that lives ends in less


async def serve(mesh: Any, path: str, strategy: TorchStoreStrategy | None) -> ServedHosts | None:
    """Makes the hosts of a mesh, or of several, those that own the store's keys. Errors as of `memstore.serve`.

    Returns None for processes of this host alone: they share its folder.

    Raises:
        NoCounterpartError: it has other hosts, for which the strategy has no counterpart.
    """
    meshes: Sequence[Any] = mesh if isinstance(mesh, list | tuple) else (mesh,)
    for one in meshes:
        if not isinstance(one, HostMesh | ProcMesh):
            raise TypeError(f"mesh is a ProcMesh or a HostMesh of Monarch, or a list of these, not {an_instance(one)}")
    found = {folder for one in meshes for folder in await _on_each(one, "prepare", path)}
    own = _folder_of(path)
    if found == {own} and not any(isinstance(one, HostMesh) for one in meshes):
        return None
    if found != {own}:
        check_across_hosts(strategy)
    cluster = await asyncio.to_thread(memstore.serve, mesh, path)
    if own not in found:
        cluster = await asyncio.to_thread(_join, path, cluster)
    return ServedHosts(cluster, path, meshes)


def served_later(path: str) -> ServedHosts | None:
    """Returns what was served since the store was made, for a process of another host; it is to be ended once."""
    return _served_later.pop(path, None)


async def _on_each(mesh: Any, name: str, path: str) -> list[Any]:
    """Calls an endpoint of `FolderActor` in each process of a mesh, or in one of each host."""
    procs = mesh.spawn_procs(name="memstore_folders") if isinstance(mesh, HostMesh) else None
    made: Any = mesh if procs is None else procs
    actors: Any = made.spawn("memstore_folders", FolderActor)
    try:
        return [value for _, value in await getattr(actors, name).call(path)]
    finally:
        await (actors if procs is None else procs).stop()


def _folder_of(path: str) -> tuple[bytes, int, int]:
    status = os.stat(os.path.dirname(path))
    return boot_id(), status.st_dev, status.st_ino
