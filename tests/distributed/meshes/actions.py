"""What owners of meshes do, in processes of their own: this imports Monarch."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import monarch.actor
import torch
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint, this_host
from monarch.job import ProcessJob

import memstore

_meshes: dict[str, Any] = {}  # by name, of this process


class Server(Actor):
    """An actor of a job, which serves the store by an asynchronous endpoint."""

    @endpoint
    async def serves(self, root: str) -> tuple[str, ...]:
        return memstore.serve(this_host(), root).hosts

    @endpoint
    async def serves_in_a_thread(self, root: str) -> tuple[str, ...]:
        cluster = await asyncio.to_thread(memstore.serve, this_host(), root)
        return cluster.hosts


class User(Actor):
    """An actor of a job, which uses the store."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def takes(self, value: bytes) -> int:
        return len(value)

    @endpoint
    def opens(self, root: str, key: str) -> tuple[int, float]:
        """Returns its process, and the sum of what it got."""
        with memstore.open(root, timeout=30.0) as store:
            return os.getpid(), float(store.get(key)["w"].sum())

    @endpoint
    def puts(self, store: memstore.Store, key: str) -> str:
        """Into a store that came as an argument. Returns its root."""
        store.put(key, {"w": torch.ones(1000)})
        return store.root


def take_this_host() -> None:
    _meshes["mesh"] = this_host()


def attach(address: str, workers: Sequence[str], name: str = "mesh") -> None:
    """Workers that run already, by TCP, from a process at this IP."""
    if not _meshes:
        enable_transport(f"tcp://{address}:0")
    _meshes[name] = attach_to_workers(ca="trust_all_connections", workers=workers)


def start_job(hosts: int) -> None:
    """Workers on this machine, of a job of Monarch's."""
    _meshes["job"] = ProcessJob({"hosts": hosts})
    _meshes["mesh"] = _meshes["job"].state(cached_path=None).hosts


def end_job() -> None:
    _meshes["job"].kill()


def wait_for_mesh() -> None:
    _meshes["mesh"].initialized.get(60)


def shut_down() -> None:
    _meshes["mesh"].shutdown().get(30)


def serve(root: str, *names: str, **options: Any) -> tuple[str, ...]:
    """Serves meshes, "mesh" by default. Returns the hosts. May be run again."""
    meshes = [_meshes[name] for name in names or ("mesh",)]
    cluster = memstore.serve(meshes if len(names) > 1 else meshes[0], root, **options)
    _meshes["cluster"] = cluster
    return cluster.hosts


def join(root: str, *names: str, **options: Any) -> tuple[str, ...]:
    """Serves meshes as further ones of the cluster that was served last. Returns the hosts that it has told of."""
    first = _meshes["cluster"]
    found = serve(root, *names, join=first, **options)
    assert set(first.hosts) == set(found), "who has served before knows the new hosts too"
    return found


def cluster() -> memstore.Cluster:
    return _meshes["cluster"]


def spawn_procs(name: str, mesh: str = "mesh", procs: int = 1) -> None:
    """A ProcMesh, so many processes a host."""
    _meshes[name] = _meshes[mesh].spawn_procs(per_host={"procs": procs})


def slice_hosts(name: str, mesh: str, begin: int, end: int) -> None:
    _meshes[name] = _meshes[mesh].slice(hosts=slice(begin, end))


def stop_procs(name: str) -> None:
    _meshes[name].stop().get(30)


def pids_of(name: str) -> list[int]:
    """Of the processes of a ProcMesh. They are ignored when they fail."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    return list(_meshes[name].spawn("pids", User).pid.call().get(30).values())


def serve_by_an_actor(root: str, *, in_a_thread: bool) -> tuple[str, ...]:
    server = this_host().spawn_procs(per_host={"procs": 1}).spawn("server", Server)
    endpoint = server.serves_in_a_thread if in_a_thread else server.serves
    return endpoint.call_one(root).get(100)


def serve_in_a_loop(root: str, *, in_a_thread: bool) -> tuple[str, ...]:
    """As a script of asyncio does, or a notebook."""

    async def main() -> tuple[str, ...]:
        if in_a_thread:
            cluster = await asyncio.to_thread(memstore.serve, this_host(), root)
        else:
            cluster = memstore.serve(this_host(), root)
        return cluster.hosts

    return asyncio.run(main())


def status() -> memstore.ClusterStatus:
    return _meshes["cluster"].status()


def stop(**options: Any) -> None:
    _meshes["cluster"].stop(**options)


def spawn(procs: int = 1) -> None:
    """Users, so many a host."""
    made = _meshes["mesh"].spawn_procs(per_host={"procs": procs})
    _meshes["users"] = made.spawn("users", User)


def put_in_actors(root: str, key: str) -> list[str]:
    """Each of them is sent the store."""
    with memstore.open(root) as store:
        return list(_meshes["users"].puts.call(store, key).get(60).values())


def get_in_actors(root: str, key: str) -> list[tuple[int, float]]:
    return list(_meshes["users"].opens.call(root, key).get(60).values())


def send_to_actors(size: int) -> list[int]:
    """By Monarch's message."""
    return list(_meshes["users"].takes.call(bytes(size)).get(30).values())
