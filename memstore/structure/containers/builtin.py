"""dict, OrderedDict, defaultdict, list, tuple.

    ["dict", keys, entries]    ["ordered", keys, entries, attributes or nil]    ["defaultdict", factory, keys, entries]
    ["list", entries]          ["tuple", entries]

An OrderedDict may have attributes: `Module.state_dict()` keeps the versions of its modules in `_metadata`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import torch

from memstore.engine import Path
from memstore.structure.checks import require, unpack
from memstore.structure.objects import join_dict, join_list, join_tuple
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import Entries, Node, Parts, Reader, Tree, read_keys, register
from memstore.structure.walk import Walk, flattens

# The factories of defaultdicts that can be named without running anything.
_FACTORIES: dict[str, Any] = {
    "none": None,
    **{kind.__name__: kind for kind in (int, float, complex, str, bytes, list, dict, set, tuple, bool)},
}
_FACTORY_NAMES: dict[Any, str] = {kind: name for name, kind in _FACTORIES.items()}


# -- list, tuple -----------------------------------------------------------------------------------------------------


@flattens(list)
def _flatten_list(value: list[Any], walk: Walk) -> Tree:
    trees = walk.entries(value, range(len(value)), value)
    return walk.joined(("list", trees), trees, join_list)


@flattens(tuple)
def _flatten_tuple(value: tuple[Any, ...], walk: Walk) -> Tree:
    trees = walk.entries(value, range(len(value)), value)
    return walk.joined(("tuple", trees), trees, join_tuple)


@register
class ListNode(Node):
    __slots__ = ("entries",)
    kind = "list"
    make: Callable[[list[Any]], Any] = staticmethod(lambda entries: entries)

    def __init__(self, entries: Entries) -> None:
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        (trees,) = unpack(payload, list)
        return cls(reader.entries(trees))

    def build(self, parts: Parts) -> Any:
        return self.make(self.entries.build(parts))

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.numbered()


@register
class TupleNode(ListNode):
    __slots__ = ()
    kind = "tuple"
    make = tuple


# -- dicts -----------------------------------------------------------------------------------------------------------


@flattens(dict)
def _flatten_dict(value: dict[Any, Any], walk: Walk) -> Tree:
    trees = walk.entries(value, value, value.values())
    keys = walk.keys(value)
    return walk.joined(("dict", keys, trees), trees, lambda items: join_dict(keys, items, ordered=False))


@flattens(OrderedDict)
def _flatten_ordered(value: OrderedDict[Any, Any], walk: Walk) -> Tree:
    trees = walk.entries(value, value, value.values())
    keys = walk.keys(value)
    attributes = vars(value)
    if attributes:
        return ("ordered", keys, trees, walk.entry("__dict__", attributes))
    return walk.joined(("ordered", keys, trees, None), trees, lambda items: join_dict(keys, items, ordered=True))


@flattens(defaultdict)
def _flatten_defaultdict(value: defaultdict[Any, Any], walk: Walk) -> Tree:
    factory = value.default_factory
    if factory not in _FACTORY_NAMES:
        if walk.allow_pickle:
            return walk.object(value)
        raise RefusedError("a defaultdict whose factory is no builtin type, which only allow_pickle=True can store")
    trees = walk.entries(value, value, value.values())
    return ("defaultdict", _FACTORY_NAMES[factory], walk.keys(value), trees)


@register
class DictNode(Node):
    __slots__ = ("keys", "entries")
    kind = "dict"

    def __init__(self, keys: tuple[Any, ...], entries: Entries) -> None:
        require(len(keys) == len(entries.nodes), "other keys than entries")
        self.keys = keys
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        keys, trees = unpack(payload, list, list)
        return cls(read_keys(keys), reader.entries(trees))

    def build(self, parts: Parts) -> Any:
        return dict(zip(self.keys, self.entries.build(parts), strict=True))

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(self.keys)


@register
class OrderedNode(DictNode):
    __slots__ = ("attributes",)
    kind = "ordered"

    def __init__(self, keys: tuple[Any, ...], entries: Entries, attributes: Node | None) -> None:
        super().__init__(keys, entries)
        self.attributes = attributes

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        keys, trees, attributes = unpack(payload, list, list, (NoneType, int, list))
        entries = reader.entries(trees)
        return cls(read_keys(keys), entries, None if attributes is None else reader.node(attributes))

    def build(self, parts: Parts) -> Any:
        built: OrderedDict[Any, Any] = OrderedDict(zip(self.keys, self.entries.build(parts), strict=True))
        if self.attributes is not None:
            attributes = self.attributes.build(parts)
            require(type(attributes) is dict and all(type(key) is str for key in attributes), "malformed attributes")
            built.__dict__.update(attributes)
        return built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from self.entries.named(self.keys)
        if self.attributes is not None:
            yield ("__dict__",), self.attributes

    def describe(self) -> str:
        return "OrderedDict"


@register
class DefaultDictNode(DictNode):
    __slots__ = ("factory",)
    kind = "defaultdict"

    def __init__(self, factory: type | None, keys: tuple[Any, ...], entries: Entries) -> None:
        super().__init__(keys, entries)
        self.factory = factory

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        factory, keys, trees = unpack(payload, str, list, list)
        require(factory in _FACTORIES, "a malformed factory of a defaultdict")
        return cls(_FACTORIES[factory], read_keys(keys), reader.entries(trees))

    def build(self, parts: Parts) -> Any:
        return defaultdict(self.factory, zip(self.keys, self.entries.build(parts), strict=True))


@flattens(torch.Size)
def _flatten_size(value: torch.Size, walk: Walk) -> Tree:
    return walk.object(value)  # a subclass of tuple, but an atom
