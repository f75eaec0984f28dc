"""Lazy stacks, of TensorDicts and of values that are no tensors. Imported with tensordicts.

["lazy", class, stack dim, name of the stack dim, locked, members]
["lazy0", class, stack dim, batch size, device, names, locked]      without members; the batch size is a member's
["values", locked, object]                                          a NonTensorStack of plain values: their list
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from memstore.engine import Path
from memstore.structure.checks import require, unpack
from memstore.structure.containers.non_tensors import make_non_tensor, read_batch
from memstore.structure.objects import join_list
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import need_device
from memstore.structure.tree import OBJECT, Entries, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Walk, flattens

# -- stacks of TensorDicts -------------------------------------------------------------------------------------------


@flattens(LazyStackedTensorDict)
def _flatten_lazy(value: LazyStackedTensorDict, walk: Walk) -> Tree:
    if _has_hooks(value):
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


_IS_NEW = isinstance(getattr(LazyStackedTensorDict, "hook_in", None), property)  # of tensordict 0.15
_HOOKS = ("_hook_in", "_hook_out") if _IS_NEW else ("hook_in", "hook_out")


def _has_hooks(value: LazyStackedTensorDict) -> bool:
    return any(getattr(value, name) is not None for name in _HOOKS)


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
        require(lazy in _LAZY_CLASSES and stack_dim >= 0 and len(trees) > 0, "a malformed lazy stack")
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
        require(lazy in _LAZY_CLASSES and stack_dim >= 0, "a malformed lazy stack")
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


# -- stacks of values ------------------------------------------------------------------------------------------------


@flattens(NonTensorStack)
def _flatten_values(value: NonTensorStack, walk: Walk) -> Tree:
    members = value.tensordicts
    plain = (
        members
        and value.stack_dim == 0
        and value._td_dim_name is None
        and not _has_hooks(value)
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
        require(type(values) is list and len(values) > 0, "malformed values of a NonTensorStack")
        members = [
            make_non_tensor(NonTensorData, value, TensorDict._new_unsafe({}, torch.Size(()))) for value in values
        ]
        built = NonTensorStack(*members)
        return built.lock_() if self.lock else built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.values

    def describe(self) -> str:
        return "NonTensorStack"
