"""TorchStore's module-level functions: names, parameters and defaults are its own. docs/coming-from/torchstore.md."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import torch

from memstore.errors import NotAStoreError
from memstore.integrations.torchstore import folders
from memstore.integrations.torchstore.client import Client
from memstore.integrations.torchstore.finding import announcing, find
from memstore.integrations.torchstore.refusals import NoCounterpartError
from memstore.integrations.torchstore.strategy import TorchStoreStrategy
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.late_imports import between_forks

DEFAULT_TORCHSTORE_NAME = "torchstore"

_clients: dict[str, Client] = {}
_served: dict[str, Hosts] = {}


class Hosts(Protocol):
    """Hosts that serve a store."""

    async def end(self) -> None: ...


def end_with(store_name: str, hosts: Hosts) -> None:
    """The `shutdown` of this process ends them, before it removes the store."""
    _served[store_name] = hosts


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    mesh: Any = None,
) -> None:
    """Makes the store, which all processes of the job then find by its name. One process calls it.

    It is gone when `shutdown` was called, or this process ends.

    Args:
        num_storage_volumes, strategy: as TorchStore wants them; nothing follows from them, since each process puts into
            files that the others map.
        store_name: several stores of a job have several names.
        mesh: a ProcMesh of Monarch on this host, from which nothing follows; or a HostMesh, whose hosts become one
            store by `memstore.serve`.

    Raises:
        RuntimeError: several volumes, and no strategy; or a store of this name is there.
        NoCounterpartError: a ProcMesh of several hosts.
        NotServedError: a host of the HostMesh can't be a member.
    """
    if strategy is None and num_storage_volumes != 1:
        raise RuntimeError(f"num_storage_volumes is {num_storage_volumes}: more than one needs a strategy")
    is_of_hosts = hasattr(mesh, "spawn_procs")
    if mesh is not None and not is_of_hosts and getattr(mesh, "sizes", {}).get("hosts", 1) > 1:
        raise NoCounterpartError(
            "mesh is a ProcMesh of several hosts, which doesn't tell its HostMesh: give that one, whose spawn_procs "
            "made it, and the hosts become one store"
        )
    path = await asyncio.to_thread(folders.make, store_name)
    if is_of_hosts:
        with between_forks():
            from memstore.integrations.torchstore import hosts
        try:
            end_with(store_name, await hosts.serve(mesh, path))
        except BaseException:
            folders.leave(store_name)
            raise
    monarch = announcing()
    if monarch is not None:
        await monarch.announce(store_name, path)
    reset_client(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes the store, for all processes. What they got from it stays valid. Without such a store nothing happens.

    After `initialize_spmd` every rank calls it, and the first one of each host removes what is there.
    """
    reset_client(store_name)
    try:
        path = await find(store_name)
    except NotAStoreError:
        path = None
    served = _served.pop(store_name, None)
    if served is not None:
        await served.end()
    if not await asyncio.to_thread(folders.leave, store_name) and path is not None:
        await asyncio.to_thread(folders.remove, path)


async def client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> Client:
    """The client of this process for a store, with methods named as the functions here.

    Raises:
        NotInitializedError: there is no such store.
    """
    found = _clients.get(store_name)
    if found is None:
        found = Client(store_name)
        await found.store()
        _clients[store_name] = found
    return found


def reset_client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Forgets the client: the next call looks for the store anew."""
    _clients.pop(store_name, None)


async def put(key: str, value: Any, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores a tensor, or a nested value. Readers see all of it, or the version before.

    A DTensor is put by all ranks of its mesh, each its shard; the value is there when the last one has put.

    Raises:
        UnsupportedValueError: it has an object that only pickle can store; the message says what to do.
    """
    await (await client(store_name)).put(key, value)


async def put_batch(entries: dict[str, Any], store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores several values, which become visible at one moment; each DTensor among them at one of its own."""
    await (await client(store_name)).put_batch(entries)


async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
) -> Any:
    """Returns what was put, on the CPU, without a copy.

    Args:
        key: of what was put; or KEY/NAME, for a leaf of a state dict.
        inplace_tensor: filled and returned. Of a DTensor this rank's shard, from whatever mesh it was put.
        tensor_slice_spec: return, or fill `inplace_tensor` with, this part.

    Raises:
        KeyError: no such key, or parts of it are missing.
        StructureMismatchError: a shape differs.
    """
    return await (await client(store_name)).get(key, inplace_tensor, tensor_slice_spec)


async def get_batch(
    keys: list[str] | dict[str, torch.Tensor | None], store_name: str = DEFAULT_TORCHSTORE_NAME
) -> dict[str, Any]:
    """Returns several values, as they were at one moment; those with a tensor to fill, one by one.

    Raises:
        KeyError: one is missing. Nothing was filled.
    """
    return await (await client(store_name)).get_batch(keys)


async def delete(key: str, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes a key. Raises KeyError if there is none."""
    await (await client(store_name)).delete(key)


async def delete_batch(keys: list[str], *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes those of these keys that are there."""
    await (await client(store_name)).delete_batch(keys)


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> list[str]:
    """The keys, or those of a prefix: it is whole words, which dots part. "v0" has "v0" and "v0.x", and not "v01"."""
    return await (await client(store_name)).keys(prefix)


async def exists(key: str, store_name: str = DEFAULT_TORCHSTORE_NAME) -> bool:
    """Whether a get would find it."""
    return await (await client(store_name)).exists(key)


async def put_state_dict(
    state_dict: dict[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Stores a state dict as one value: readers see the whole of a version, whatever is put meanwhile.

    Args:
        state_dict: if it has DTensors, all ranks of their meshes put theirs. None, with `direct_rdma`: the one of the
            last call, as its tensors are now.
        key: what `get_state_dict` asks for.
        direct_rdma: accepted; the tensors are copied now, and changes since show at the next put.
        transfer_dtype: floating leaves are cast to it while they are copied.
    """
    cl = await client(store_name)
    await cl.put_state_dict(state_dict, key, direct_rdma=direct_rdma, transfer_dtype=transfer_dtype)


async def get_state_dict(
    key: str,
    user_state_dict: dict[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
) -> Any:
    """Returns a state dict, or fills one in place.

    Args:
        key: what it was put under.
        user_state_dict: its tensors are filled; of DTensors this rank's shards, from whatever mesh they were put. Those
            of another floating dtype are cast.
        strict: names that differ are an error, before anything is written. False: what both have is filled, and what is
            returned has the stored names.
        direct_rdma: accepted; it needs `user_state_dict`.

    Raises:
        StateDictNotFoundError: there is none; a RuntimeError and a KeyError.
        StructureMismatchError: names or shapes differ.
    """
    cl = await client(store_name)
    return await cl.get_state_dict(key, user_state_dict, strict, direct_rdma=direct_rdma)
