"""TensorDict and its relatives. Imported, with what it imports, when a value or a description first needs it.

    ["td", batch size, device, names, locked, keys, entries]
    ["tensorclass", class, the TensorDict inside, names of the other fields, entries]
    ["params", lock, no_convert, locked, the TensorDict inside]
    ["unbatched", batch size or nil, tensor]

Private names of tensordict are used where the public ones copy, validate or run a class's code; tests pin each of them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams, UnbatchedTensor, is_tensorclass

# These two register their containers, and their rules come before the one here.
import memstore.structure.containers.stacks  # pyright: ignore[reportUnusedImport]
import memstore.structure.containers.typed  # noqa: F401  # pyright: ignore[reportUnusedImport]
from memstore.engine import Path
from memstore.structure.checks import require, sizes, unpack
from memstore.structure.containers.non_tensors import read_batch
from memstore.structure.objects import class_name, find_class, make_bare, short
from memstore.structure.tensors import need_device
from memstore.structure.tree import Entries, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Flattener, Walk, flattens, refuse, rule

# -- TensorDict ------------------------------------------------------------------------------------------------------


@flattens(TensorDict)
def _flatten_tensordict(value: TensorDict, walk: Walk) -> Tree:
    entries = value._tensordict
    names = value._td_dim_names
    return (
        "td",
        value._batch_size,
        value._device,
        None if names is None else tuple(names),
        bool(value._is_locked),
        tuple(entries),
        walk.entries(value, entries, entries.values()),
    )


@register
class TensorDictNode(Node):
    __slots__ = ("batch", "device", "keys", "entries", "lock", "names")
    kind = "td"

    def __init__(
        self, batch: torch.Size, device: torch.device | str | None, names: Any, lock: bool, keys: Any, entries: Entries
    ):
        self.batch = batch
        self.device = device
        self.names = names
        self.lock = lock
        self.keys = keys
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        batch, device, names, locked, keys, trees = unpack(
            payload, list, (NoneType, str), (NoneType, list), bool, list, list
        )
        shape, device, names = read_batch(batch, device, names)
        require(all(type(key) is str for key in keys) and len(set(keys)) == len(keys), "malformed keys of a TensorDict")
        entries, lock = reader.lockable_entries(locked, trees)
        require(len(keys) == len(entries.nodes), "other keys than entries")
        return cls(shape, device, names, lock, tuple(keys), entries)

    def build(self, parts: Parts) -> Any:
        built = TensorDict._new_unsafe(
            dict(zip(self.keys, self.entries.build(parts), strict=True)),
            batch_size=self.batch,
            device=need_device(self.device, instead=parts.device),
            names=None if self.names is None else list(self.names),
            nested=False,
        )
        return built.lock_() if self.lock else built

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(self.keys)

    def describe(self) -> str:
        return f"TensorDict{list(self.batch)}"


@rule
def _collection_rule(kind: type) -> Flattener | None:
    if issubclass(kind, TensorDictBase):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return refuse(f"a {name} has no bytes of its own, or none that are known; put its to_tensordict()")
    return _flatten_tensorclass if is_tensorclass(kind) else None


# -- tensorclasses ---------------------------------------------------------------------------------------------------


def _flatten_tensorclass(value: Any, walk: Walk) -> Tree:
    others = value._non_tensordict or {}
    name = class_name(type(value))
    inner = walk.visit(value._tensordict)
    return ("tensorclass", name, inner, tuple(others), walk.entries(value, others, others.values()))


@register
class TensorClassNode(Node):
    __slots__ = ("inner", "keys", "entries", "name")
    kind = "tensorclass"

    def __init__(self, name: str, inner: Node, keys: tuple[str, ...], entries: Entries) -> None:
        self.name = name
        self.inner = inner
        self.keys = keys
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, inner, keys, trees = unpack(payload, str, list, list, list)
        require(inner[:1] in (["td"], ["lazy"], ["lazy0"], ["params"]), "a tensorclass around no TensorDict")
        node = reader.node(inner)
        entries = reader.entries(trees)
        require(
            all(type(key) is str for key in keys) and len(keys) == len(entries.nodes),
            "malformed fields of a tensorclass",
        )
        return cls(name, node, tuple(keys), entries)

    def build(self, parts: Parts) -> Any:
        kind = find_class(self.name, _is_plain_tensorclass, "a tensorclass")
        built = make_bare(kind)  # neither __init__ nor __post_init__ runs
        built.__dict__["_tensordict"] = self.inner.build(parts)
        built.__dict__["_non_tensordict"] = dict(zip(self.keys, self.entries.build(parts), strict=True))
        return built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.inner
        yield from self.entries.named(self.keys)

    def describe(self) -> str:
        return short(self.name)


def _is_plain_tensorclass(kind: type) -> bool:
    return is_tensorclass(kind)


# -- TensorDictParams, UnbatchedTensor -------------------------------------------------------------------------------


@flattens(TensorDictParams)
def _flatten_params(value: TensorDictParams, walk: Walk) -> Tree:
    convert = value.no_convert
    return ("params", bool(value._lock_content), str(convert), bool(value._is_locked), walk.visit(value._param_td))


_CONVERT: dict[str, Any] = {"False": False, "True": True, "skip": "skip"}


@register
class ParamsNode(Node):
    __slots__ = ("inner", "lock", "locked", "no_convert")
    kind = "params"

    def __init__(self, lock: bool, no_convert: Any, locked: bool, inner: Node) -> None:
        self.lock = lock
        self.no_convert = no_convert
        self.locked = locked
        self.inner = inner

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        lock, convert, locked, tree = unpack(payload, bool, str, bool, list)
        require(convert in _CONVERT and tree[:1] in (["td"], ["lazy"], ["tensorclass"]), "malformed TensorDictParams")
        return cls(lock, _CONVERT[convert], locked, reader.node(tree))

    def build(self, parts: Parts) -> Any:
        # "skip": the leaves are Parameters and Buffers already
        skip: Any = "skip"
        built = TensorDictParams(self.inner.build(parts), no_convert=skip, lock=self.lock)
        built.no_convert = self.no_convert
        if self.locked:
            built.lock_()
        return built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.inner

    def describe(self) -> str:
        return "TensorDictParams"


@flattens(UnbatchedTensor)
def _flatten_unbatched(value: UnbatchedTensor, walk: Walk) -> Tree:
    batch = getattr(value, "_batch_size", None)
    return ("unbatched", None if batch is None else tuple(batch), walk.visit(value._base_tensor()))


@register
class UnbatchedNode(Node):
    __slots__ = ("batch", "entry")
    kind = "unbatched"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        batch, tree = unpack(payload, (NoneType, list), (int, list))
        node = cls()
        node.batch = None if batch is None else sizes(batch)
        node.entry = reader.node(tree)
        return node

    def build(self, parts: Parts) -> Any:
        inner = self.entry.build(parts)
        require(isinstance(inner, torch.Tensor), "an UnbatchedTensor of no tensor")
        return UnbatchedTensor(inner, batch_size=self.batch)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return "UnbatchedTensor"
