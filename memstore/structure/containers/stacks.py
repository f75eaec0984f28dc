"""Lazy stacks, and the boxes for what is no tensor: NonTensorData, MetaData, NonTensorStack.

["lazy", class, stack dim, name of the stack dim, locked, members]
["lazy0", class, stack dim, batch size, device, names, locked]      without members; the batch size is a member's
["values", locked, object]                                          a NonTensorStack of plain values: their list
["nontensor", batch size, device, names, locked, entry]             NonTensorData;  "metadata": MetaData
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)

from memstore.engine import Path
from memstore.structure.checks import require, sizes, unpack
from memstore.structure.objects import join_list
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import need_device, read_device
from memstore.structure.tree import OBJECT, Entries, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Walk, flattens


def read_batch(
    batch: Any, device: Any, names: Any
) -> tuple[torch.Size, torch.device | str | None, list[str | None] | None]:
    """Batch size, device and names of dimensions, checked."""
    shape = torch.Size(sizes(batch))
    if names is not None:
        require(len(names) == len(shape) and all(name is None or type(name) is str for name in names), "no names")
    return shape, None if device is None else read_device(device), names


# -- lazy stacks -----------------------------------------------------------------------------------------------------


@flattens(LazyStackedTensorDict)
def _flatten_lazy(value: LazyStackedTensorDict, walk: Walk) -> Tree:
    if value._hook_in is not None or value._hook_out is not None:
        raise RefusedError("a LazyStackedTensorDict with hooks (inside vmap)")
    locked = bool(value._is_locked)
    members = value.tensordicts
    if not members:
        names = value._empty_stack_names
        batch = list(value._batch_size)
        del batch[value.stack_dim]
        return (
            *("lazy0", _lazy_class(value), value.stack_dim, tuple(batch), value.device),
            *(None if names is None else tuple(names), locked),
        )
    return (
        *("lazy", _lazy_class(value), value.stack_dim, value._td_dim_name, locked),
        walk.entries(value, range(len(members)), members),
    )


_LAZY_CLASSES: dict[str, type[LazyStackedTensorDict]] = {"": LazyStackedTensorDict, "values": NonTensorStack}


def _lazy_class(value: LazyStackedTensorDict) -> str:
    return "values" if type(value) is NonTensorStack else ""


@register
class LazyNode(Node):
    __slots__ = ("cls", "entries", "lock", "name", "stack_dim")
    kind = "lazy"

    def __init__(
        self, cls: type[LazyStackedTensorDict], stack_dim: int, name: str | None, lock: bool, entries: Entries
    ):
        self.cls = cls
        self.stack_dim = stack_dim
        self.name = name
        self.lock = lock
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        lazy, stack_dim, name, locked, trees = unpack(payload, str, int, (NoneType, str), bool, list)
        require(lazy in _LAZY_CLASSES and stack_dim >= 0 and len(trees) > 0, "no lazy stack")
        entries, lock = reader.lockable_entries(locked, trees)
        return cls(_LAZY_CLASSES[lazy], stack_dim, name, lock, entries)

    def build(self, parts: Parts) -> Any:
        members = self.entries.build(parts)
        require(all(map(is_tensor_collection, members)), "a lazy stack of other things than TensorDicts")
        built = self.cls(*members, stack_dim=self.stack_dim, stack_dim_name=self.name)
        return built.lock_() if self.lock else built

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.numbered()

    def describe(self) -> str:
        return self.cls.__name__


@register
class EmptyLazyNode(Node):
    __slots__ = ("batch", "cls", "device", "lock", "names", "stack_dim")
    kind = "lazy0"

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        lazy, stack_dim, batch, device, names, locked = unpack(
            payload, str, int, list, (NoneType, str), (NoneType, list), bool
        )
        require(lazy in _LAZY_CLASSES and stack_dim >= 0, "no lazy stack")
        node = cls()
        node.cls = _LAZY_CLASSES[lazy]
        node.stack_dim = stack_dim
        node.batch, node.device, node.names = read_batch(batch, device, names)
        node.lock = locked and not reader.locked
        return node

    def build(self, parts: Parts) -> Any:
        built: Any = self.cls(
            stack_dim=self.stack_dim,
            batch_size=self.batch,
            device=need_device(self.device, instead=parts.device),
            names=self.names,
        )
        return built.lock_() if self.lock else built

    def describe(self) -> str:
        return self.cls.__name__


@flattens(NonTensorStack)
def _flatten_values(value: NonTensorStack, walk: Walk) -> Tree:
    members = value.tensordicts
    plain = (
        members
        and value.stack_dim == 0
        and value._td_dim_name is None
        and value._hook_in is None
        and value._hook_out is None
        and all(map(_is_plain_value, members))
        and len({bool(member._tensordict._is_locked) for member in members} | {bool(value._is_locked)}) == 1
    )
    if plain:
        tensors, written = len(walk.tensors), len(walk.objects)
        trees = walk.entries(value, range(len(members)), [member._non_tensordict["data"] for member in members])
        if trees.count(OBJECT) == len(trees):
            walk.objects.append(join_list(walk.take_objects(len(trees))))
            return ("values", bool(value._is_locked), OBJECT)
        del walk.tensors[tensors:]
        del walk.objects[written:]
    return _flatten_lazy(value, walk)


def _is_plain_value(member: Any) -> bool:
    """Whether the member is its value and nothing else: no batch size, device or names."""
    if type(member) is not NonTensorData:
        return False
    inner: Any = vars(member)["_tensordict"]
    return (
        type(inner) is TensorDict
        and not inner._batch_size
        and inner._device is None
        and inner._td_dim_names is None
        and not inner._tensordict
    )


@register
class ValuesNode(Node):
    __slots__ = ("lock", "values")
    kind = "values"

    def __init__(self, lock: bool, values: Node) -> None:
        self.lock = lock
        self.values = values

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        locked, tree = unpack(payload, bool, int)
        return cls(locked and not reader.locked, reader.node(tree))

    def build(self, parts: Parts) -> Any:
        values = self.values.build(parts)
        require(type(values) is list and len(values) > 0, "no values of a NonTensorStack")
        members = [_non_tensor(NonTensorData, value, TensorDict._new_unsafe({}, torch.Size(()))) for value in values]
        built = NonTensorStack(*members)
        return built.lock_() if self.lock else built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.values

    def describe(self) -> str:
        return "NonTensorStack"


# -- NonTensorData, MetaData -----------------------------------------------------------------------------------------


@flattens(NonTensorData, MetaData)
def flatten_non_tensor(value: NonTensorData | MetaData, walk: Walk) -> Tree:
    inner: Any = vars(value)["_tensordict"]
    if type(inner) is not TensorDict or inner._tensordict:
        raise RefusedError(f"a {type(value).__name__} over a {type(inner).__name__}; only plain ones are stored")
    names = inner._td_dim_names
    return (
        "nontensor" if type(value) is NonTensorData else "metadata",
        inner._batch_size,
        inner._device,
        None if names is None else tuple(names),
        bool(inner._is_locked),
        walk.visit(value.data),
    )


def _non_tensor(kind: Any, data: Any, inner: TensorDict) -> Any:
    """As the constructor makes it, but whatever the data is, it stays as it is."""
    built = kind.__new__(kind)
    built.__dict__["_tensordict"] = inner
    built.__dict__["_non_tensordict"] = {"data": data, "_metadata": None, "_is_non_tensor": True}
    return built


@register
class NonTensorNode(Node):
    __slots__ = ("batch", "device", "entry", "lock", "names")
    kind = "nontensor"
    cls: Any = NonTensorData

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        batch, device, names, locked, tree = unpack(payload, list, (NoneType, str), (NoneType, list), bool, (int, list))
        node = cls()
        node.batch, node.device, node.names = read_batch(batch, device, names)
        node.lock = locked and not reader.locked
        node.entry = reader.node(tree)
        return node

    def build(self, parts: Parts) -> Any:
        device = need_device(self.device, instead=parts.device)
        names = None if self.names is None else list(self.names)
        inner = TensorDict._new_unsafe({}, batch_size=self.batch, device=device, names=names)
        built = _non_tensor(self.make_class(), self.entry.build(parts), inner)
        return built.lock_() if self.lock else built

    def make_class(self) -> Any:
        return self.cls

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return self.cls.__name__


@register
class MetaDataNode(NonTensorNode):
    __slots__ = ()
    kind = "metadata"
    cls = MetaData
