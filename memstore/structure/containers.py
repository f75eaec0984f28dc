"""Containers of Python: dicts, lists and tuples; namespaces, dataclasses and mappings; namedtuples and deques.

    ["dict", keys, entries]             ["ordered", keys, entries, attributes or nil]
    ["list", entries]                   ["defaultdict", factory, keys, entries]
    ["tuple", entries]                  ["deque", maxlen or nil, entries]
    ["namedtuple", class, entries]      ["structseq", class of torch.return_types, entries]
    ["namespace", "argparse" or "types", names, entries]
    ["dataclass", class, names, names of the fields that aren't set, entries]
    ["mapping", class, names of attributes, keys, entries]

An OrderedDict may have attributes: `Module.state_dict()` keeps the versions of its modules in `_metadata`. An object of
a subclass of a namedtuple (a PackedSequence) may have nothing but its entries.

A class is looked up as classes.py says. None of its code runs: no `__init__`, no `__post_init__`, no `__setattr__`, no
`__setitem__`. So only objects that are complete without it are stored: dataclasses that have nothing but their fields,
and mappings whose attributes repeat their items (each attribute is the item of its name, or None where there is none,
as in the outputs of transformers).
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from types import NoneType
from typing import Any

import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.classes import (
    NAMESPACES,
    class_name,
    defines,
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
from memstore.structure.objects import join_dict, join_list, join_tuple
from memstore.structure.refusals import RefusedError, require
from memstore.structure.tree import Container, Key, Tree, TreeReader, read_keys, reads
from memstore.structure.walk import Flattener, Walk, flattener, flattens, rule

# --- Builtin containers ----------------------------------------------------------------------------------------------


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


@reads("list", list)
def _read_list(reader: TreeReader, trees: list[Tree]) -> Container:
    return Container("list", lambda values, _: values, range(len(trees)), reader.nodes(trees))


@reads("tuple", list)
def _read_tuple(reader: TreeReader, trees: list[Tree]) -> Container:
    return Container("tuple", lambda values, _: tuple(values), range(len(trees)), reader.nodes(trees))


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
        return ("ordered", keys, trees, *walk.entries(value, ("__dict__",), [attributes]))
    return walk.joined(("ordered", keys, trees, None), trees, lambda items: join_dict(keys, items, ordered=True))


@flattens(defaultdict)
def _flatten_defaultdict(value: defaultdict[Any, Any], walk: Walk) -> Tree:
    factory = value.default_factory
    if factory not in _FACTORY_NAMES:
        reason = "a defaultdict whose factory is no builtin type, which only allow_pickle=True can store"
        return walk.pickled(value, RefusedError(reason))
    trees = walk.entries(value, value, value.values())
    return ("defaultdict", _FACTORY_NAMES[factory], walk.keys(value), trees)


@reads("dict", list, list)
def _read_dict(reader: TreeReader, written: list[Key], trees: list[Tree]) -> Container:
    keys = read_keys(written)
    return Container("dict", lambda values, _: dict(zip(keys, values, strict=True)), keys, reader.nodes(trees))


@reads("ordered", list, list, (NoneType, int, list))
def _read_ordered(reader: TreeReader, written: list[Key], trees: list[Tree], about: Tree | None) -> Container:
    nodes, keys = reader.nodes(trees), read_keys(written)
    if about is None:
        return Container("OrderedDict", lambda values, _: OrderedDict(zip(keys, values, strict=True)), keys, nodes)

    def make(values: list[Any], _: torch.device | None) -> Any:
        attributes = values.pop()
        require(type(attributes) is dict and all(type(key) is str for key in attributes), "malformed attributes")
        built: OrderedDict[Any, Any] = OrderedDict(zip(keys, values, strict=True))
        built.__dict__.update(attributes)
        return built

    return Container("OrderedDict", make, (*keys, "__dict__"), [*nodes, reader.node(about)])


@reads("defaultdict", str, list, list)
def _read_defaultdict(reader: TreeReader, name: str, written: list[Key], trees: list[Tree]) -> Container:
    require(name in _FACTORIES, "a malformed factory of a defaultdict")
    factory, keys = _FACTORIES[name], read_keys(written)

    def make(values: list[Any], _: torch.device | None) -> Any:
        return defaultdict(factory, zip(keys, values, strict=True))

    return Container("defaultdict", make, keys, reader.nodes(trees))


@flattens(torch.Size)
def _flatten_size(value: torch.Size, walk: Walk) -> Tree:
    return walk.object(value)  # a subclass of tuple, but an atom


# --- Instances of classes --------------------------------------------------------------------------------------------


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


@reads("namespace", str, list, list, may_be_object=True)
def _read_namespace(reader: TreeReader, which: str, written: list[Any], trees: list[Tree]) -> Container:
    require(which in NAMESPACES and len(written) == len(trees), "a malformed namespace")
    kind, names = NAMESPACES[which], _read_names(written)

    def make(values: list[Any], _: torch.device | None) -> Any:
        return write_attributes(kind(), dict(zip(names, values, strict=True)))

    return Container(kind.__name__, make, names, reader.nodes(trees))


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
    except RefusedError as error:
        return walk.pickled(value, error)
    there = tuple(one for one in names if one in attributes)
    unset = tuple(one for one in names if one not in attributes)
    trees = walk.entries(value, there, [attributes[one] for one in there])
    return walk.joined(("dataclass", name, there, unset, trees), trees)


@reads("dataclass", str, list, list, list, may_be_object=True)
def _read_dataclass(reader: TreeReader, name: str, names: list[Any], unset: list[Any], trees: list[Tree]) -> Container:
    stored = set(_read_names([*names, *unset]))
    require(len(names) == len(trees), "a malformed dataclass")

    def make(values: list[Any], _: torch.device | None) -> Any:
        what = "a dataclass that can be made of its fields"
        kind = find_class(name, lambda found: flattener(found) is _flatten_dataclass, what)
        here = set(field_names(kind))
        if stored != here:
            raise UnsupportedValueError(
                f"the dataclass {dotted(name)} has other fields here than in the stored value: "
                f"{', '.join(sorted(stored ^ here))}"
            )
        return write_attributes(object.__new__(kind), dict(zip(names, values, strict=True)))

    return Container(short(name), make, names, reader.nodes(trees))


# -- subclasses of dict, and UserDict --------------------------------------------------------------------------------


@rule
def _mapping_rule(kind: type) -> Flattener | None:
    return _flatten_mapping if issubclass(kind, (dict, UserDict)) and _base_of(kind) is not None else None


def _base_of(kind: type) -> Any:
    """Returns the class that makes such an object and holds its items; None where the object may hold more."""
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
    except RefusedError as error:
        return walk.pickled(value, error)
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


@reads("mapping", str, list, list, list, may_be_object=True)
def _read_mapping(
    reader: TreeReader, name: str, attributes: list[Any], written: list[Key], trees: list[Tree]
) -> Container:
    require(len(written) == len(trees), "other keys than entries")
    names, keys = _read_names(attributes), read_keys(written)

    def make(values: list[Any], _: torch.device | None) -> Any:
        what = "a dict or UserDict that can be made of its items"
        kind = find_class(name, lambda found: flattener(found) is _flatten_mapping, what)
        items = dict(zip(keys, values, strict=True))
        attributes = {one: items.get(one) for one in names}
        base = _base_of(kind)
        if base is UserDict:
            return write_attributes(object.__new__(kind), {"data": items} | attributes | {"data": items})
        made = base.__new__(kind)
        for key, entry in items.items():
            base.__setitem__(made, key, entry)
        return write_attributes(made, attributes)

    return Container(short(name), make, keys, reader.nodes(trees))


# --- Other sequences -------------------------------------------------------------------------------------------------


# -- namedtuples -----------------------------------------------------------------------------------------------------


def _is_namedtuple(kind: type) -> bool:
    if not issubclass(kind, tuple) or issubclass(kind, enum.Enum) or defines(kind, "__del__"):
        return False
    fields = getattr(kind, "_fields", None)
    is_one = any(tuple in base.__bases__ and "_fields" in vars(base) for base in kind.__mro__)
    return is_one and type(fields) is tuple and all(type(field) is str for field in fields)


@rule
def _namedtuple_rule(kind: type) -> Flattener | None:
    return _flatten_namedtuple if _is_namedtuple(kind) else None


def _flatten_namedtuple(value: Any, walk: Walk) -> Tree:
    name = class_name(type(value))
    if getattr(value, "__dict__", None):
        reason = f"a {dotted(name)} that has attributes beside its fields; put tuple(...) of it"
        return walk.pickled(value, RefusedError(reason))
    return ("namedtuple", name, walk.entries(value, type(value)._fields, value))


@reads("namedtuple", str, list)
def _read_namedtuple(reader: TreeReader, name: str, trees: list[Tree]) -> Container:
    def make(values: list[Any], _: torch.device | None) -> Any:
        kind = find_class(name, _is_namedtuple, "a namedtuple")
        _check_fields(name, len(kind._fields), len(values))
        return tuple.__new__(kind, values)

    return Container(short(name), make, range(len(trees)), reader.nodes(trees))


def _check_fields(name: str, here: int, stored: int) -> None:
    if here != stored:
        raise UnsupportedValueError(f"the class {name} has other fields here than in the stored value")


# -- what torch's functions return -----------------------------------------------------------------------------------


def _is_structseq(kind: type) -> bool:
    return kind.__module__ == "torch.return_types" and kind.__bases__ == (tuple,) and hasattr(kind, "n_sequence_fields")


@rule
def _structseq_rule(kind: type) -> Flattener | None:
    return _flatten_structseq if _is_structseq(kind) else None


def _flatten_structseq(value: Any, walk: Walk) -> Tree:
    return ("structseq", class_name(type(value)), walk.entries(value, range(len(value)), value))


@reads("structseq", str, list)
def _read_structseq(reader: TreeReader, name: str, trees: list[Tree]) -> Container:
    def make(values: list[Any], _: torch.device | None) -> Any:
        kind = find_class(name, _is_structseq, "one of torch.return_types")
        _check_fields(name, kind.n_sequence_fields, len(values))
        return kind(values)

    return Container(short(name), make, range(len(trees)), reader.nodes(trees))


# -- deques ----------------------------------------------------------------------------------------------------------


@flattens(deque)
def _flatten_deque(value: deque[Any], walk: Walk) -> Tree:
    trees = walk.entries(value, range(len(value)), value)
    return walk.joined(("deque", value.maxlen, trees), trees)


@reads("deque", (NoneType, int), list, may_be_object=True)
def _read_deque(reader: TreeReader, maxlen: int | None, trees: list[Tree]) -> Container:
    require(maxlen is None or len(trees) <= maxlen < 1 << 63, "a malformed length of a deque")
    return Container("deque", lambda values, _: deque(values, maxlen), range(len(trees)), reader.nodes(trees))
