"""Objects of classes, by name and by what they hold: namespaces, dataclasses, subclasses of dict, and UserDict.

    ["namespace", "argparse" or "types", names, entries]
    ["dataclass", class, names, names of the fields that aren't set, entries]
    ["mapping", class, names of attributes, keys, entries]

A class is looked up as objects/classes.py says. None of its code runs: no `__init__`, no `__post_init__`, no
`__setattr__`, no `__setitem__`. So only objects that are complete without it are stored: dataclasses that have nothing
but their fields, and mappings whose attributes repeat their items (each attribute is the item of its name, or None
where there is none, as in the outputs of transformers).
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.structure.checks import require, unpack
from memstore.structure.objects import (
    NAMESPACES,
    class_name,
    dotted,
    field_names,
    find_class,
    is_dataclass,
    is_made_plainly,
    read_attributes,
    short,
    slots_of,
    write_attributes,
)
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import Node, Parts, Reader, Tree, read_keys, register
from memstore.structure.walk import Flattener, Walk, flattener, flattens, rule


def _written_names(names: Any, walk: Walk) -> tuple[str, ...]:
    if any(type(name) is not str for name in names):
        raise RefusedError("an attribute whose name is no str")
    return walk.keys(names)


def _read_names(names: list[Any]) -> tuple[str, ...]:
    require(all(type(name) is str for name in names) and len(set(names)) == len(names), "malformed names of attributes")
    return tuple(names)


# -- namespaces ------------------------------------------------------------------------------------------------------


@flattens(*NAMESPACES.values())
def _flatten_namespace(value: Any, walk: Walk) -> Tree:
    attributes = vars(value)
    trees = walk.entries(value, attributes, attributes.values())
    which = "types" if type(value) is types.SimpleNamespace else "argparse"
    return walk.joined(("namespace", which, _written_names(attributes, walk), trees), trees)


@register
class NamespaceNode(Node):
    __slots__ = ("cls", "entries", "names")
    kind = "namespace"
    may_be_object = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        which, names, trees = unpack(payload, str, list, list)
        require(which in NAMESPACES and len(names) == len(trees), "a malformed namespace")
        node = cls()
        node.cls = NAMESPACES[which]
        node.names = _read_names(names)
        node.entries = reader.entries(trees)
        return node

    def build(self, parts: Parts) -> Any:
        return write_attributes(self.cls(), dict(zip(self.names, self.entries.build(parts), strict=True)))

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(self.names)

    def describe(self) -> str:
        return self.cls.__name__


# -- dataclasses -----------------------------------------------------------------------------------------------------


@rule
def _dataclass_rule(kind: type) -> Flattener | None:
    if not is_dataclass(kind) or issubclass(kind, (enum.Enum, torch.nn.Module)):
        return None
    return _flatten_dataclass if is_made_plainly(kind, object) else None


def _flatten_dataclass(value: Any, walk: Walk) -> Tree:
    try:
        name, names, attributes = class_name(type(value)), field_names(type(value)), read_attributes(value)
        others = [other for other in attributes if other not in names]
        if others:
            raise RefusedError(
                f"a dataclass {dotted(name)} that has attributes beside its fields: {', '.join(others)}; "
                "make them fields, or put a dict of what it holds"
            )
    except RefusedError:
        if walk.allow_pickle:
            return walk.object(value)
        raise
    there = tuple(one for one in names if one in attributes)
    unset = tuple(one for one in names if one not in attributes)
    trees = walk.entries(value, there, [attributes[one] for one in there])
    return walk.joined(("dataclass", name, there, unset, trees), trees)


def _is_dataclass(kind: type) -> bool:
    return flattener(kind) is _flatten_dataclass


@register
class DataclassNode(Node):
    __slots__ = ("entries", "name", "names", "unset")
    kind = "dataclass"
    may_be_object = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, names, unset, trees = unpack(payload, str, list, list, list)
        _read_names([*names, *unset])
        require(len(names) == len(trees), "a malformed dataclass")
        node = cls()
        node.name, node.names, node.unset = name, tuple(names), frozenset(unset)
        node.entries = reader.entries(trees)
        return node

    def build(self, parts: Parts) -> Any:
        kind = find_class(self.name, _is_dataclass, "a dataclass that can be made of its fields")
        stored, here = {*self.names, *self.unset}, set(field_names(kind))
        if stored != here:
            raise UnsupportedValueError(
                f"the dataclass {dotted(self.name)} has other fields here than in the stored value: "
                f"{', '.join(sorted(stored ^ here))}"
            )
        return write_attributes(object.__new__(kind), dict(zip(self.names, self.entries.build(parts), strict=True)))

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(self.names)

    def describe(self) -> str:
        return short(self.name)


# -- subclasses of dict, and UserDict --------------------------------------------------------------------------------


@rule
def _mapping_rule(kind: type) -> Flattener | None:
    return _flatten_mapping if issubclass(kind, (dict, UserDict)) and _base_of(kind) is not None else None


def _base_of(kind: type) -> Any:
    """What makes an object of the class, and holds its items; None where it may hold more."""
    for base in (OrderedDict, dict, UserDict):
        if issubclass(kind, base):
            new = object if base is UserDict else base
            plain = is_made_plainly(kind, new) and not issubclass(kind, defaultdict) and not slots_of(kind)
            return base if plain else None
    return None


def _flatten_mapping(value: Any, walk: Walk) -> Tree:
    try:
        name, items, attributes = class_name(type(value)), _items_of(value), read_attributes(value)
        if isinstance(value, UserDict):
            del attributes["data"]
        others = [other for other, held in attributes.items() if held is not items.get(other)]
        if others:
            raise RefusedError(
                f"a {dotted(name)} that has more than its items: {', '.join(map(str, others))}; put dict(...) of it"
            )
        names = _written_names(attributes, walk)
    except RefusedError:
        if walk.allow_pickle:
            return walk.object(value)
        raise
    trees = walk.entries(value, items, items.values())
    return walk.joined(("mapping", name, names, walk.keys(items), trees), trees)


def _items_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, UserDict):
        data: Any = vars(value).get("data")
        if type(data) is not dict:
            raise RefusedError(f"a {type(value).__qualname__} whose data is no dict; put dict(...) of it")
        return data
    base: Any = _base_of(type(value))
    return dict(base.items(value))


def _is_mapping(kind: type) -> bool:
    return flattener(kind) is _flatten_mapping


@register
class MappingNode(Node):
    __slots__ = ("attributes", "keys", "entries", "name")
    kind = "mapping"
    may_be_object = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, attributes, keys, trees = unpack(payload, str, list, list, list)
        require(len(keys) == len(trees), "other keys than entries")
        node = cls()
        node.name, node.attributes, node.keys = name, _read_names(attributes), read_keys(keys)
        node.entries = reader.entries(trees)
        return node

    def build(self, parts: Parts) -> Any:
        kind = find_class(self.name, _is_mapping, "a dict or UserDict that can be made of its items")
        items = dict(zip(self.keys, self.entries.build(parts), strict=True))
        attributes = {name: items.get(name) for name in self.attributes}
        base = _base_of(kind)
        if base is UserDict:
            return write_attributes(object.__new__(kind), {"data": items} | attributes | {"data": items})
        made = base.__new__(kind)
        for key, entry in items.items():
            base.__setitem__(made, key, entry)
        return write_attributes(made, attributes)

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(self.keys)

    def describe(self) -> str:
        return short(self.name)
