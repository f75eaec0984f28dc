"""What TorchStore's calls do with a Store. Each is made in a thread; `client.py` has the asynchronous side."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

import memstore
from memstore.errors import (
    CrossHostError,
    KeyNotFoundError,
    PartialCommitError,
    StructureMismatchError,
    UnsupportedValueError,
)
from memstore.integrations.torchstore.leaves import fill_common, has_leaf, leaf_of, plain_tensor, plain_tensors
from memstore.integrations.torchstore.refusals import StateDictNotFoundError
from memstore.integrations.torchstore.shards import next_attempt, plain_where_whole
from memstore.integrations.torchstore.slices import check_fillable, read_slice, shards_of
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.listing import absent, opened
from memstore.structure import copy_into

PICKLE_VARIABLE = "MEMSTORE_TORCHSTORE_ALLOW_PICKLE"
_EMPTY = "\x01"  # stands for "", which TorchStore takes for a key


def stored(key: str) -> str:
    """The store's name of a key. What is no text is left to the store, which refuses it."""
    return _EMPTY if isinstance(key, str) and not key else key  # pyright: ignore[reportUnnecessaryIsInstance]


def put(store: memstore.Store, key: str, value: Any, dtype: torch.dtype | None) -> None:
    value, meshes = plain_where_whole(value)
    try:
        if not meshes:
            store.put(stored(key), value, dtype=dtype)
            return
        attempt = next_attempt(store.root, key, meshes)
        store.put_sharded(stored(key), value, **attempt._asdict(), dtype=dtype, wait=False)
    except UnsupportedValueError as error:
        raise _with_remedy(error) from None


def _with_remedy(error: UnsupportedValueError) -> UnsupportedValueError:
    """TorchStore pickles what is no tensor, and unpickles it wherever it is asked for."""
    if "allow_pickle=True" not in error.message:
        return error
    text = (
        f"{error.message}. Put a dict, list or dataclass of plain values in its place; or, if you trust all who write "
        f"to this store, set {PICKLE_VARIABLE}=1 in the environment of all processes of the job"
    )
    return UnsupportedValueError(text, key=error.key)


def put_batch(store: memstore.Store, entries: dict[str, Any]) -> None:
    plain: dict[str, Any] = {}
    for key, value in entries.items():
        value, meshes = plain_where_whole(value)
        if meshes:
            put(store, key, value, None)
        else:
            plain[stored(key)] = value
    try:
        store.put_many(plain, atomic=False)
    except UnsupportedValueError as error:
        raise _with_remedy(error) from None


def get(store: memstore.Store, key: str, target: Any, spec: TensorSlice | None) -> Any:
    if target is not None and not isinstance(target, torch.Tensor):
        raise TypeError(f"{key!r}: inplace_tensor is a tensor, and not {type(target)}")
    if spec is not None and not isinstance(spec, TensorSlice):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{key!r}: tensor_slice_spec is a TensorSlice(offsets, coordinates, global_shape, local_shape, "
            f"mesh_shape), and not {spec!r:.100}"
        )
    if spec is not None:
        if isinstance(target, DTensor):
            raise ValueError(f"{key!r}: a DTensor says by itself which slice it is: leave tensor_slice_spec out")
        return read_slice(_lazy(store, key), key, spec, target)
    try:
        if target is None:
            return plain_tensor(store.get(stored(key), device="cpu"))
        store.get(stored(key), out=target, cast=True)
    except KeyNotFoundError:
        leaf = _leaf(store, key)
        if target is None:
            return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        _fill_leaf(key, leaf, target)
    except PartialCommitError as error:
        error.args = (f"{key!r} is partially committed: {error.message}",)
        error.message = error.args[0]
        raise
    return target


def _lazy(store: memstore.Store, key: str) -> Any:
    try:
        return store.view(stored(key), device="cpu")
    except KeyNotFoundError:
        return _leaf(store, key)


def _leaf(store: memstore.Store, key: str) -> Any:
    try:
        return leaf_of(store, key)
    except KeyNotFoundError:
        raise _missing(store, key) from None


def _missing(store: memstore.Store, key: str) -> KeyNotFoundError:
    """As a store says it, without the call that this API lacks."""
    text, _, _ = str(absent(opened(store), stored(key).encode())).partition("; wait(")
    return KeyNotFoundError(text, key=key)


def _fill_leaf(key: str, leaf: Any, target: torch.Tensor) -> None:
    check_fillable(key, target)
    if not isinstance(leaf, torch.Tensor) or leaf.shape != target.shape:
        what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else "no tensor"
        raise StructureMismatchError(f"{key!r} is {what}, and inplace_tensor has shape {list(target.shape)}", key=key)
    for shard in shards_of(target):
        copy_into(shard.local, leaf[shard.box.slices])


def get_batch(store: memstore.Store, keys: list[str] | dict[str, torch.Tensor | None]) -> dict[str, Any]:
    targets: dict[str, torch.Tensor | None] = keys if isinstance(keys, dict) else dict.fromkeys(keys)
    for key in targets:
        if not exists(store, key):
            raise _missing(store, key)  # as a get of it would, before anything is written
    whole = [key for key, target in targets.items() if target is None and stored(key) in store]
    try:
        values = store.get_many([stored(key) for key in whole])
    except (CrossHostError, UnsupportedValueError):  # several homes; or from a device that this process lacks
        values = {}
    found = {key: plain_tensor(_on_cpu(values[stored(key)])) for key in whole if values}
    return {key: found[key] if key in found else get(store, key, target, None) for key, target in targets.items()}


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def get_state_dict(store: memstore.Store, key: str, target: Any, strict: bool) -> Any:
    try:
        if target is None:
            return plain_tensors(store.get(stored(key), device="cpu"))
        if not strict:
            return fill_common(store, stored(key), target)
        store.get(stored(key), out=target, cast=True)
        return target
    except KeyNotFoundError:
        text = f"there is no state dict {key!r}: it was not put, or was deleted"
        raise StateDictNotFoundError(text, key=key) from None


def delete(store: memstore.Store, key: str) -> None:
    try:
        store.delete(stored(key))
    except KeyNotFoundError:
        raise _missing(store, key) from None


def delete_batch(store: memstore.Store, keys: list[str]) -> None:
    """Parts that ranks have put of these keys go too, before there is a whole value."""
    names = list(dict.fromkeys(map(stored, keys)))
    try:
        store.delete_many(names, missing_ok=True)
    except CrossHostError:
        for name in names:
            store.delete(name, missing_ok=True)
    for name in names:
        for pending in store.pending(name):
            store.abort(name, pending.attempt)


def keys(store: memstore.Store, prefix: str | None) -> list[str]:
    """Prefixes are of whole words, which dots part: "v0" has "v0" and "v0.x", and not "v01"."""
    if prefix is None:
        return ["" if key == _EMPTY else key for key in store]
    found = [key for key in store.keys(prefix) if key == prefix or key.startswith(f"{prefix}.")]
    return ["", *found] if not prefix and _EMPTY in store else found


def exists(store: memstore.Store, key: str) -> bool:
    return stored(key) in store or has_leaf(store, key)
