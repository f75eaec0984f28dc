"""DTensors, as TorchStore puts them: each rank by itself, and the value is there when all ranks of its mesh have put.

Here the ranks' parts are an *attempt* (docs/decisions/012-attempts.md), which is published whole, when its last part
comes; until then readers get the version before. A rank waits for no other, and no collective is called.

1. A DTensor that each of its ranks has whole (all Replicate, or a mesh of one) is a plain tensor, as in TorchStore.
2. Those who put an attempt are the ranks of the meshes of all DTensors in the value.
3. Its name must be the same on all of them, and never come again. It has a token of their process group's store, which
   whoever comes first makes; how many lives this rank has had in that store; and how often, in this one, it has put
   this key. So ranks put a key equally often; one that left a put out is behind by one until its process group ends.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

_PREFIX = "memstore/torchstore"


class Attempt(NamedTuple):
    """What `Store.put_sharded` takes."""

    attempt: str
    rank: int
    world_size: int


class _Life:
    """What this process knows of a process group's store: the name of its life there, for each set of ranks."""

    def __init__(self) -> None:
        self.names: dict[tuple[int, ...], str] = {}
        self.counts: dict[tuple[str, str, tuple[int, ...]], Iterator[int]] = {}


_lives: WeakKeyDictionary[Any, _Life] = WeakKeyDictionary()
_lock = threading.Lock()  # of these


def plain_where_whole(value: Any) -> tuple[Any, tuple[DeviceMesh, ...]]:
    """The value with plain tensors for DTensors that lie on this rank whole, and the meshes of those that don't.

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
        return value if all(map(_is_same, items, value)) else type(value)(items)
    return value


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def next_attempt(root: str, key: str, meshes: tuple[DeviceMesh, ...]) -> Attempt:
    """Of this rank's next put of this key, with those ranks that these meshes have."""
    ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))
    group: Any = dist.group.WORLD
    with _lock:
        life = _lives.setdefault(group, _Life())
        name = life.names.get(ranks)
        if name is None:
            name = life.names[ranks] = _name_of_life(group, ranks)
        count = next(life.counts.setdefault((root, key, ranks), itertools.count(1)))
    return Attempt(f"{name}/{count}", ranks.index(dist.get_rank()), len(ranks))


def _name_of_life(group: Any, ranks: tuple[int, ...]) -> str:
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    who = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    token = bytes(store.compare_set(f"{_PREFIX}/{who}", "", uuid.uuid4().hex)).decode()
    lives = store.add(f"{_PREFIX}/{who}/{dist.get_rank()}", 1)
    return f"torchstore/{token}/{lives}"
