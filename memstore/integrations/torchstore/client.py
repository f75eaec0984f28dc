"""What a process does with a store, in TorchStore's words. Each call runs in a thread of `memstore.aio`'s.

So a put that is cancelled is made whole, or not at all; a call that fills the caller's tensors and is cancelled returns
when nothing is written there any more; and both use the CUDA stream of the task that awaits them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

import memstore
from memstore.aio.lanes import call
from memstore.aio.opened import lane_in
from memstore.arguments import flag
from memstore.errors import NotAStoreError
from memstore.integrations.torchstore import calls
from memstore.integrations.torchstore.finding import find
from memstore.integrations.torchstore.refusals import NotInitializedError, no_counterpart
from memstore.integrations.torchstore.strategy import HostStrategy
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.keys import encode_key

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
        self._put_directly: dict[str, tuple[Any, torch.dtype | None]] = {}  # what put_state_dict(None) puts again

    def __getattr__(self, name: str) -> Any:
        raise no_counterpart("the client", name)

    async def store(self) -> memstore.Store:
        """Returns the Store itself, for what TorchStore doesn't have: `wait`, versions, views, references."""
        if self._store is None:
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
        store = await self.store() if self._store is None else self._store  # a Store is false when it is empty
        with contextlib.suppress(NotAStoreError):
            return await _in_thread(store, function, arguments, key, fills=fills)
        self._store = None  # it was shut down, and perhaps initialized again
        return await _in_thread(await self.store(), function, arguments, key, fills=fills)

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
    root = store.lend_root("any")[0]
    lane = lane_in(root, None if key is None else calls.stored(key), fetches=True)
    return await call(lane, lambda _: function(store, *arguments), settles=fills)
