"""Calls of TorchStore, as they are made with a Store. Each runs in a thread; api.py has the asynchronous side.

put, get, ...               the calls
fill_common, leaf_of        state dicts that have other names than what is stored; and leaves, asked for by TorchStore's
                            names of them
read_slice                  a box of a stored tensor: only its bytes are read
plain_where_whole,          DTensors: each rank puts by itself, and the value is there when all ranks of its mesh have
next_attempt                put

The ranks' parts of a DTensor are an *attempt* (docs/decisions/012-attempts.md), which is published whole, when its last
part comes; until then readers get the version before. A rank waits for no other, and no collective is called.

1. A DTensor that each of its ranks has whole (all Replicate, or a mesh of one) is a plain tensor, as in TorchStore.
2. An attempt is put by the ranks of the meshes of all DTensors in the value.
3. Its name must be the same on all of them, and never come again. It has a name of these ranks' life in their process
   group's store (`RankStore.name_among`), and how often this rank has put this key in it. So ranks put a key equally
   often. A rank that left a put out is behind by one until its process group ends.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import memstore
from memstore import structure
from memstore._ranks import RankStore
from memstore.errors import (
    CrossHostError,
    KeyNotFoundError,
    PartialCommitError,
    StructureMismatchError,
    UnsupportedValueError,
)
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.listing import absent, opened
from memstore.sharding import Shard, sharded_leaf, whole
from memstore.store.store import ref_lazily
from memstore.structure import copy_into, why_not_filled
from memstore.view import StoredTensor, load_leaf

PICKLE_VARIABLE = "MEMSTORE_TORCHSTORE_ALLOW_PICKLE"
_EMPTY = "\x01"  # stands for "", which TorchStore takes for a key


class StateDictNotFoundError(KeyNotFoundError, RuntimeError):
    """An error of a state dict that isn't there. It is also a RuntimeError, as in TorchStore."""


def stored(key: str) -> str:
    """Returns the store's name of a key. What is no text is left to the store, which refuses it."""
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
    """Says in the error of what is no tensor that TorchStore pickles it, and unpickles it wherever it is asked for."""
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
    """Makes the error as a store says it, without the call that this API lacks."""
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
    except (CrossHostError, UnsupportedValueError):  # several owners; or from a device that this process lacks
        values = {}
    found: dict[str, Any] = {}
    for key in whole if values else ():
        value = values[stored(key)]
        found[key] = plain_tensor(value.cpu() if isinstance(value, torch.Tensor) else value)
    return {key: found[key] if key in found else get(store, key, target, None) for key, target in targets.items()}


def get_state_dict(store: memstore.Store, key: str, target: Any, strict: bool) -> Any:
    try:
        if target is None:
            return _merged(store.get(stored(key), device="cpu"), None, {})
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
    """Deletes these keys, and the parts that ranks have put of them before there is a whole value."""
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
    """Returns the keys under a prefix, of whole words that dots part: "v0" has "v0" and "v0.x", and not "v01"."""
    if prefix is None:
        return ["" if key == _EMPTY else key for key in store]
    found = [key for key in store.keys(prefix) if key == prefix or key.startswith(f"{prefix}.")]
    return ["", *found] if not prefix and _EMPTY in store else found


def exists(store: memstore.Store, key: str) -> bool:
    return stored(key) in store or has_leaf(store, key)


# --- State dicts and their leaves ------------------------------------------------------------------------------------


DELIMITER, MAPPING = "/", "MAPPING"  # as TorchStore names the entries of a state dict: KEY/NAME, and KEY/MAPPING


def fill_common(store: memstore.Store, key: str, target: Any) -> Any:
    """Fills what `target` has in common with what is stored. Returns the stored structure, with its tensors in it.

    All is of one version. A stored tensor is read only if it is filled in, or the target lacks it.
    """
    ref = ref_lazily(store, key)
    ref.get(out=target, strict=False, cast=True)
    merged = _merged(ref.view(device="cpu"), target, {})
    if any(isinstance(leaf, StoredTensor) for _, leaf in structure.iter_tensors(merged)):
        return _merged(ref.get(device="cpu"), target, {})  # in a container of another kind, as a TensorDict
    return merged


def _merged(stored: Any, target: Any, loaded: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Returns what is stored, with the target's tensors where it has some, and plain tensors elsewhere.

    Args:
        loaded: each leaf with its result, by the leaf's id; so tied ones stay one tensor.
    """
    if isinstance(stored, torch.Tensor):
        if isinstance(target, torch.Tensor | memstore.TensorShard):
            return target
        if id(stored) not in loaded:
            found = load_leaf(stored) if isinstance(stored, StoredTensor) else stored
            loaded[id(stored)] = stored, plain_tensor(found)
        return loaded[id(stored)][1]
    if isinstance(stored, dict):
        others = target if isinstance(target, dict) else {}
        for name in stored:
            stored[name] = _merged(stored[name], others.get(name), loaded)
        return stored
    if type(stored) in (list, tuple):
        alike = type(target) is type(stored) and len(stored) == len(target)
        others = target if alike else [None] * len(stored)
        return type(stored)(_merged(*both, loaded) for both in zip(stored, others, strict=True))
    return stored


# --- without gradients ------------------------------------------------------------------------------------------------


def plain_tensor(value: Any) -> Any:
    """Returns the plain tensor of a Parameter or Buffer, or of one that requires gradients. Other values stay."""
    marked = isinstance(value, torch.nn.Parameter | torch.nn.Buffer)
    return value.detach() if marked or (isinstance(value, torch.Tensor) and value.requires_grad) else value


# --- one leaf ---------------------------------------------------------------------------------------------------------


def leaf_of(store: Any, key: str) -> Any:
    """Returns the lazy leaf, or object, of a state dict that was put, by TorchStore's name of it: KEY/NAME.NAME.

    Raises:
        KeyNotFoundError: there is none.
    """
    at = key.rfind(DELIMITER)
    while at > 0:
        whole, name = key[:at], key[at + 1 :]
        if whole in store:
            found = _find_leaf(store.view(whole), name)
            if found is not None:
                return found[0]
        at = key.rfind(DELIMITER, 0, at)
    raise KeyNotFoundError(f"no such key: {key!r}", key=key)


def has_leaf(store: Any, key: str) -> bool:
    """Returns whether `leaf_of` finds it, or it names a state dict's mapping, which TorchStore writes last."""
    whole, _, name = key.rpartition(DELIMITER)
    if name == MAPPING and whole in store:
        return True
    try:
        leaf_of(store, key)
    except KeyNotFoundError:
        return False
    return True


def _find_leaf(value: Any, name: str) -> tuple[Any] | None:
    """Finds what lies under these names, which are joined with dots, and may have some themselves."""
    if not isinstance(value, dict | list | tuple):
        return None
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for own, inner in items:
        text = str(own)
        if text == name:
            return (inner,)
        if name.startswith(f"{text}.") and (found := _find_leaf(inner, name[len(text) + 1 :])) is not None:
            return found
    return None


# --- Slices ----------------------------------------------------------------------------------------------------------


def read_slice(lazy: Any, key: str, spec: TensorSlice, target: torch.Tensor | None) -> torch.Tensor:
    """Returns a copy of the box, or `target`, which it was copied into.

    A box that reaches past the tensor's end is clipped to it, as by a slice of Python.

    Args:
        lazy: the leaf, of a view.

    Raises:
        StructureMismatchError: what is stored is no tensor of `global_shape`, the box begins before it, or `target`
            has another shape than the clipped box, or can't be filled.
    """
    found: tuple[int, ...] | None = tuple(lazy.shape) if isinstance(lazy, torch.Tensor) else None
    if found is None or found != spec.global_shape:
        what = "no tensor" if found is None else f"a tensor of shape {list(found)}"
        text = f"{key!r} is {what}, and the slice is one of a tensor of shape {list(spec.global_shape)}"
        raise StructureMismatchError(text, key=key)
    if any(offset < 0 for offset in spec.offsets):
        text = f"{key!r}: a slice of shape {list(spec.local_shape)} at {list(spec.offsets)} is not in {list(found)}"
        raise StructureMismatchError(text, key=key)
    ends = [offset + size for offset, size in zip(spec.offsets, spec.local_shape, strict=True)]
    box = lazy.detach()[tuple(map(slice, spec.offsets, ends))]
    if target is None:
        return box.clone(memory_format=torch.contiguous_format)
    check_fillable(key, target)
    if target.shape != box.shape:
        clipped = "" if box.shape == spec.local_shape else f", clipped to the stored tensor's {list(found)}"
        text = f"{key!r}: inplace_tensor has shape {list(target.shape)}, and the slice {list(box.shape)}{clipped}"
        raise StructureMismatchError(text, key=key)
    copy_into(target, box)
    return target


def check_fillable(key: str, target: torch.Tensor) -> None:
    """Raises StructureMismatchError for an inplace_tensor that can't be filled."""
    leaf = sharded_leaf(target)
    for local in [target] if leaf is None else [shard.local for shard in leaf.shards]:
        why = why_not_filled(local)
        if why is not None:
            raise StructureMismatchError(f"{key!r}: inplace_tensor is {why}", key=key)


def shards_of(target: torch.Tensor) -> Sequence[Shard]:
    """Returns the parts of a tensor that are here: of a DTensor this rank's, of others all."""
    leaf = sharded_leaf(target)
    return (Shard(whole(target.shape), target),) if leaf is None else leaf.shards


# --- DTensors --------------------------------------------------------------------------------------------------------


_PREFIX = "memstore/torchstore"


class RankAttempt(NamedTuple):
    """The attempt of a rank, as `Store.put_sharded` takes it."""

    attempt: str
    rank: int
    world_size: int


def plain_where_whole(value: Any) -> tuple[Any, tuple[DeviceMesh, ...]]:
    """Returns the value with plain tensors for DTensors that this rank has whole, and the meshes of the others.

    It is the same object unless something was replaced. Looks into dicts, lists and tuples.
    """
    meshes: dict[int, DeviceMesh] = {}
    return _replaced(value, meshes), tuple(meshes.values())


def _replaced(value: Any, meshes: dict[int, DeviceMesh]) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor):
            return value
        mesh = value.device_mesh
        is_alone = id(mesh) not in meshes and mesh.size() == 1  # the size takes 10 us
        if is_alone or all(isinstance(placement, Replicate) for placement in value.placements):
            return value.to_local()
        meshes[id(mesh)] = mesh
        return value
    if isinstance(value, dict):
        changed = {name: new for name, old in value.items() if (new := _replaced(old, meshes)) is not old}
        if not changed:
            return value
        copied = value.copy()
        copied.update(changed)
        return copied
    if type(value) is list or type(value) is tuple:
        items = [_replaced(item, meshes) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    return value


def next_attempt(root: str, key: str, meshes: tuple[DeviceMesh, ...]) -> RankAttempt:
    """Returns the attempt of this rank's next put of this key, with the ranks that these meshes have."""
    ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))
    group: Any = dist.group.WORLD
    store = RankStore.of_group(group)
    name = store.name_among(_PREFIX, ranks)
    count = store.next_number((root, key, ranks))
    return RankAttempt(f"torchstore/{name}/{count}", ranks.index(store.rank), len(ranks))
