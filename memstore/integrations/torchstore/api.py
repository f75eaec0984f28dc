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
    """Creates the store, which all processes of the job then find by its name. One process calls it.

    The store is removed by `shutdown`, or when this process ends.

    Args:
        num_storage_volumes: as in TorchStore. It has no effect, because each process puts into files that the others
            map.
        strategy: as in TorchStore. It has no effect either.
        store_name: a job with several stores gives each a name.
        mesh: a ProcMesh of Monarch on this host, which has no effect; or a HostMesh, whose hosts share one store, as by
            `memstore.serve`.

    Raises:
        RuntimeError: several volumes without a strategy; or a store of this name exists.
        NoCounterpartError: a ProcMesh of several hosts.
        NotServedError: a host of the HostMesh can't be a member.
    """
    folders.check_name(store_name)
    if strategy is None and num_storage_volumes != 1:
        raise RuntimeError(f"num_storage_volumes is {num_storage_volumes}, and without a strategy it is 1")
    is_of_hosts = hasattr(mesh, "spawn_procs")
    if mesh is not None and not is_of_hosts and getattr(mesh, "sizes", {}).get("hosts", 1) > 1:
        raise NoCounterpartError(
            "mesh is a ProcMesh of several hosts, which doesn't tell its HostMesh: give that one, whose spawn_procs "
            "made it, and the hosts become one store"
        )
    path = await asyncio.to_thread(folders.make, store_name)
    try:
        if is_of_hosts:
            with between_forks():
                from memstore.integrations.torchstore import hosts
            end_with(store_name, await hosts.serve(mesh, path))
        monarch = announcing()
        if monarch is not None:
            await monarch.announce(store_name, path)
    except BaseException:
        await shutdown(store_name)
        raise
    reset_client(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes the store, for all processes. Values that they got stay valid. Without such a store nothing happens.

    After `initialize_spmd` every rank calls it, and the first rank of each host removes the store's files there.
    """
    reset_client(store_name)
    try:
        path = await find(store_name)
    except NotAStoreError:
        path = None
    served = _served.pop(store_name, None)
    try:
        if served is not None:
            await served.end()
    finally:
        if not await asyncio.to_thread(folders.leave, store_name) and path is not None:
            await asyncio.to_thread(folders.remove, path)


async def client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> Client:
    """Returns this process's client of a store. Its methods have the names of the functions here.

    Raises:
        NotInitializedError: there is no such store.
    """
    folders.check_name(store_name)
    found = _clients.get(store_name)
    if found is None:
        found = Client(store_name)
        await found.store()
        _clients[store_name] = found
    return found


def reset_client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Forgets the client, so that the next call looks for the store again."""
    folders.check_name(store_name)
    _clients.pop(store_name, None)


async def put(key: str, value: Any, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores a tensor or a nested value. Readers see all of it, or the previous version.

    All ranks of a DTensor's mesh call it, and each puts its shard. The value appears when the last rank has put.

    Raises:
        UnsupportedValueError: the value has an object that only pickle can store; the message says what to do.
    """
    await (await client(store_name)).put(key, value)


async def put_batch(entries: dict[str, Any], store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores several values, which become visible at one moment. Each DTensor becomes visible separately."""
    await (await client(store_name)).put_batch(entries)


async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
) -> Any:
    """Returns what was put, on the CPU, without a copy. A Parameter comes back as a plain tensor, without gradients.

    Args:
        key: the key of a put; or KEY/NAME, for a leaf of a state dict.
        inplace_tensor: a tensor to fill and return. Of a DTensor, this rank's shard is filled, whatever mesh it was put
            from.
        tensor_slice_spec: the part to return, or to fill `inplace_tensor` with. What reaches past the tensor's end is
            clipped.

    Raises:
        KeyError: there is no such key, or parts of its value are missing.
        StructureMismatchError: a shape differs, or `inplace_tensor` has no memory of its own to fill.
        TypeError: `inplace_tensor` is no tensor, or `tensor_slice_spec` no TensorSlice.
    """
    return await (await client(store_name)).get(key, inplace_tensor, tensor_slice_spec)


async def get_batch(
    keys: list[str] | dict[str, torch.Tensor | None], store_name: str = DEFAULT_TORCHSTORE_NAME
) -> dict[str, Any]:
    """Returns several values as of one moment; values with a tensor to fill are read one by one.

    Raises:
        KeyError: a key is missing. Nothing was filled.
    """
    return await (await client(store_name)).get_batch(keys)


async def delete(key: str, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes a key. Raises KeyError if it doesn't exist."""
    await (await client(store_name)).delete(key)


async def delete_batch(keys: list[str], *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Removes these keys. Keys that don't exist are ignored."""
    await (await client(store_name)).delete_batch(keys)


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> list[str]:
    """Returns all keys, or those with a prefix of whole words between dots: "v0" matches "v0" and "v0.x", not "v01"."""
    return await (await client(store_name)).keys(prefix)


async def exists(key: str, store_name: str = DEFAULT_TORCHSTORE_NAME) -> bool:
    """Whether `get` would find this key."""
    return await (await client(store_name)).exists(key)


async def put_state_dict(
    state_dict: dict[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Stores a state dict as one value: readers see one complete version, whatever is put at the same time.

    Args:
        state_dict: if it has DTensors, all ranks of their meshes put theirs. None, with `direct_rdma`, puts the state
            dict of the last call again, with the present values of its tensors.
        key: the key for `get_state_dict`.
        direct_rdma: accepted. The tensors are copied now; readers see later changes after the next put.
        transfer_dtype: the dtype to which floating-point leaves are cast while they are copied.
    """
    if isinstance(state_dict, str):
        raise TypeError(f"the state dict comes first, and then the key: put_state_dict(state_dict, {state_dict!r})")
    cl = await client(store_name)
    await cl.put_state_dict(state_dict, key, direct_rdma=direct_rdma, transfer_dtype=transfer_dtype)


async def get_state_dict(
    key: str,
    user_state_dict: dict[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
) -> Any:
    """Returns a state dict of plain tensors, without gradients, or fills one in place.

    Args:
        key: the key of the put.
        user_state_dict: a state dict whose tensors are filled. Of DTensors, this rank's shards are filled, whatever
            mesh they were put from. Stored tensors of another floating-point dtype are cast.
        strict: whether different names are an error, before anything is written. If False, the names that both have are
            filled, and the result has the stored names.
        direct_rdma: accepted; it needs `user_state_dict`.

    Raises:
        StateDictNotFoundError: there is no such state dict. It is a RuntimeError and a KeyError.
        StructureMismatchError: names or shapes differ.
    """
    cl = await client(store_name)
    return await cl.get_state_dict(key, user_state_dict, strict, direct_rdma=direct_rdma)
