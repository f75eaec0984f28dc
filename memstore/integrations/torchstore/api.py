"""TorchStore's module-level functions: names, parameters and defaults are its own. docs/coming-from/torchstore.md.

Client    a process's handle to a store, which the functions call. Each call runs in a thread of `memstore.aio`'s. So a
          put that is cancelled is made whole, or not at all; a call that fills the caller's tensors and is cancelled
          returns when nothing is written there any more; and both use the CUDA stream of the task that awaits them
find      which folder a name stands for, in whatever process of the job it is asked:

1. The environment says it: this process has initialized a store, or was started by one that had, or the user has set
   the variable.
2. Else Monarch does, if this process has imported it: actors may have been started before the store was made. A process
   of a host that has no part of the store yet makes its host join.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

import memstore
from memstore._arguments import encode_key, flag
from memstore._threads import between_forks
from memstore._wording import an_instance
from memstore.aio.calls import call
from memstore.aio.waits import pool_in
from memstore.errors import HomeUnavailableError, NotAStoreError
from memstore.integrations.torchstore import calls, folders
from memstore.integrations.torchstore.strategy import HostStrategy, TorchStoreStrategy, no_counterpart
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.listing import opened

# --- Functions -------------------------------------------------------------------------------------------------------


DEFAULT_TORCHSTORE_NAME = "torchstore"

_clients: dict[str, Client] = {}
_served: dict[str, HostService] = {}


class NotInitializedError(NotAStoreError, RuntimeError):
    """An error of a store that no process has called `initialize` for, or that was shut down."""


class HostService(Protocol):
    """Hosts that serve a store."""

    async def end(self) -> None: ...


def end_with(store_name: str, hosts: HostService) -> None:
    """Has the `shutdown` of this process end these hosts, before it removes the store."""
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
        strategy: as in TorchStore. Each value lies on the host that put it, as with LocalRankStrategy and HostStrategy.
        store_name: a job with several stores gives each a name.
        mesh: a ProcMesh or HostMesh of Monarch, or a list of these. Its hosts own the store's keys, as by
            `memstore.serve`. Hosts of other meshes of the job join by themselves, and may die.

    Raises:
        RuntimeError: several volumes without a strategy; or a store of this name exists.
        NoCounterpartError: the mesh is on other hosts, and the strategy wants values elsewhere than where they are put.
        NotServedError: a host of the mesh can't be a member.
        TypeError: `mesh` is none.
    """
    folders.check_name(store_name)
    if strategy is None and num_storage_volumes != 1:
        raise RuntimeError(f"num_storage_volumes is {num_storage_volumes}, and without a strategy it is 1")
    if mesh is not None and "monarch" not in sys.modules:
        raise TypeError(f"mesh is a ProcMesh or a HostMesh of Monarch, or a list of these, not {an_instance(mesh)}")
    path = await asyncio.to_thread(folders.make, store_name)
    try:
        monarch, cluster = monarch_names(), None
        if mesh is not None and monarch is not None:
            hosts = await monarch.serve(mesh, path, strategy)
            if hosts is not None:
                end_with(store_name, hosts)
                cluster = hosts.cluster
        if monarch is not None:
            await monarch.announce(store_name, path, cluster)
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
    monarch = monarch_names()
    served = _served.pop(store_name, None)
    if monarch is not None and path is not None and folders.is_owned_here(store_name):
        served = served or monarch.served_later(path)
        await monarch.forget(store_name, path)
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
    """Returns whether `get` would find this key."""
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


# --- Clients ---------------------------------------------------------------------------------------------------------


_ResultT = TypeVar("_ResultT")


class Client:
    """A handle to the store of a name, made by `client`. The module's functions of the same names call it.

    Attributes:
        store_name: the store's name.
        strategy: a HostStrategy, whatever `initialize` was given.
    """

    def __init__(self, store_name: str) -> None:
        self.store_name = store_name
        self.strategy = HostStrategy()
        self._store: memstore.Store | None = None
        self._is_announced = False  # found by Monarch, whose actors are told of its end too
        self._put_directly: dict[str, tuple[Any, torch.dtype | None]] = {}  # what put_state_dict(None) puts again

    def __getattr__(self, name: str) -> Any:
        raise no_counterpart("the client", name)

    async def store(self) -> memstore.Store:
        """Returns the Store itself, for what TorchStore doesn't have: `wait`, versions, views, references."""
        if self._store is None:
            self._is_announced = folders.known_path(self.store_name) is None
            path = await find(self.store_name)
            allow_pickle = os.environ.get(calls.PICKLE_VARIABLE, "") not in ("", "0")
            try:
                self._store = await call(
                    ("opening", path), lambda _: memstore.open(path, "r+", allow_pickle=allow_pickle)
                )
            except NotAStoreError as error:
                raise NotInitializedError(f"the store {self.store_name!r} was shut down: {error}") from None
        return self._store

    async def _call(
        self, function: Callable[..., _ResultT], *arguments: Any, key: str | None = None, fills: bool = False
    ) -> _ResultT:
        """Calls it in a thread, with the store.

        Args:
            key: that it is about; None: several.
            fills: it writes into tensors of the caller's.
        """
        with contextlib.suppress(NotAStoreError):
            return await self._call_once(function, arguments, key, fills=fills)
        self._store = None  # it was shut down, and perhaps initialized again
        return await self._call_once(function, arguments, key, fills=fills)

    async def _call_once(
        self, function: Callable[..., _ResultT], arguments: tuple[Any, ...], key: str | None, *, fills: bool
    ) -> _ResultT:
        try:
            return await _in_thread(await self.store(), function, arguments, key, fills=fills)
        except HomeUnavailableError as error:  # of a store that other hosts shut down, the folder here may go last
            monarch = monarch_names()
            if not self._is_announced or monarch is None or await monarch.find(self.store_name) is not None:
                raise
            self._store = None
            raise NotInitializedError(f"the store {self.store_name!r} was shut down: {error}") from None

    # --- values -------------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: Any) -> None:
        await self._call(calls.put, key, value, None, key=key)

    async def put_batch(self, entries: Mapping[str, Any]) -> None:
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"put_batch takes a dict with entries, and not {entries!r}")
        await self._call(calls.put_batch, entries)

    async def get(
        self, key: str, inplace_tensor: torch.Tensor | None = None, tensor_slice_spec: TensorSlice | None = None
    ) -> Any:
        return await self._call(
            calls.get, key, inplace_tensor, tensor_slice_spec, key=key, fills=inplace_tensor is not None
        )

    async def get_batch(self, keys: list[str] | dict[str, torch.Tensor | None]) -> dict[str, Any]:
        if not isinstance(keys, list | dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"get_batch takes a list of keys, or a dict of keys and tensors, and not {type(keys)}")
        _check_keys(keys)
        if not keys or len(set(keys)) != len(keys):
            raise ValueError("get_batch takes at least one key, and each of them once")
        fills = isinstance(keys, dict) and any(target is not None for target in keys.values())
        return await self._call(calls.get_batch, keys, fills=fills)

    # --- state dicts --------------------------------------------------------------------------------------------------

    async def put_state_dict(
        self, state_dict: Any, key: str, *, direct_rdma: bool = False, transfer_dtype: torch.dtype | None = None
    ) -> None:
        _check_keys([key])
        direct_rdma = flag("direct_rdma", direct_rdma)
        if state_dict is None:
            if not direct_rdma or key not in self._put_directly:
                raise ValueError(
                    f"{key!r}: state_dict is None, which means the one of an earlier put_state_dict(direct_rdma=True) "
                    "of this key by this process, and there was none"
                )
            state_dict, transfer_dtype = self._put_directly[key]
        elif direct_rdma:
            self._put_directly[key] = state_dict, transfer_dtype
        await self._call(calls.put, key, state_dict, transfer_dtype, key=key)

    async def get_state_dict(
        self, key: str, user_state_dict: Any = None, strict: bool = True, *, direct_rdma: bool = False
    ) -> Any:
        strict = flag("strict", strict)
        if flag("direct_rdma", direct_rdma) and user_state_dict is None:
            raise ValueError(f"{key!r}: direct_rdma=True fills user_state_dict, and there is none")
        return await self._call(
            calls.get_state_dict, key, user_state_dict, strict, key=key, fills=user_state_dict is not None
        )

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def delete(self, key: str) -> None:
        await self._call(calls.delete, key, key=key)

    async def delete_batch(self, keys: list[str]) -> None:
        if not isinstance(keys, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"delete_batch takes a list of keys, and not {type(keys)}")
        _check_keys(keys)
        await self._call(calls.delete_batch, keys)

    async def keys(self, prefix: str | None = None) -> list[str]:
        return await self._call(calls.keys, prefix)

    async def exists(self, key: str) -> bool:
        return await self._call(calls.exists, key, key=key)


def _check_keys(keys: Iterable[Any]) -> None:
    """Raises InvalidKeyError for what is no text, before it is looked up in a dict."""
    for key in keys:
        if not isinstance(key, str):
            encode_key(key)


async def _in_thread(
    store: memstore.Store,
    function: Callable[..., _ResultT],
    arguments: tuple[Any, ...],
    key: str | None,
    *,
    fills: bool,
) -> _ResultT:
    root = opened(store)
    pool = pool_in(root, None if key is None else calls.stored(key), fetches=True)
    return await call(pool, lambda _: function(store, *arguments), settles=fills)


# --- Names of stores -------------------------------------------------------------------------------------------------


def monarch_names() -> ModuleType | None:
    """Returns the module that tells names by Monarch; None in a process that hasn't imported Monarch: no actor's."""
    if "monarch" not in sys.modules:
        return None
    with between_forks():
        from memstore.integrations.torchstore import actors

    return actors


async def find(name: str) -> str:
    """Returns the root of a store.

    Raises:
        NotInitializedError: nobody has made it, or it was shut down.
    """
    path = folders.known_path(name)
    monarch = None if path else monarch_names()
    place = None if monarch is None else await monarch.find(name)
    if monarch is not None and place is not None:
        path = place.path
        if not folders.is_made_here(path):
            try:
                await monarch.join(name, place)
            except NotAStoreError as error:
                raise NotInitializedError(f"the store {name!r} was shut down: {error}") from None
    if path is None:
        raise NotInitializedError(
            f"no store named {name!r}: call initialize() or initialize_spmd() first, in this process or in one that "
            f"starts it, or set {folders.ROOT_VARIABLE} to the same folder in all processes of the job"
        )
    return path
