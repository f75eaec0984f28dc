"""TensorDict and its relatives. This file is imported when a value or a description first needs it.

    ["td", batch size, device, names, locked, keys, entries]
    ["tensorclass", class, the TensorDict inside, names of the other fields, entries]
    ["params", lock, no_convert, locked, the TensorDict inside]
    ["unbatched", batch size or nil, tensor]
    ["typed", class, the TensorDict inside]
    ["lazy", class, stack dim, name of the stack dim, locked, members]
    ["lazy0", class, stack dim, batch size, device, names, locked]      without members; the batch size is a member's
    ["values", locked, object]                                          a NonTensorStack of plain values: their list
    ["nontensor", batch size, device, names, locked, entry]             NonTensorData;  "metadata": MetaData
    ["metadata_of", type, batch size, device, names, locked, entry]     MetaData[type]

Private names of tensordict are used where the public ones copy, validate or run a class's code; tests pin each of them.
Rules are asked in the order of this file: the one for all collections is the last.
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
    TensorDictBase,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    is_tensor_collection,
    is_tensorclass,
)

from memstore.engine import Path
from memstore.structure.classes import class_name, dotted, find_class, make_bare, short
from memstore.structure.objects import join_list
from memstore.structure.refusals import RefusedError, require, sizes, unpack
from memstore.structure.traits import need_device, read_device
from memstore.structure.tree import OBJECT, Entries, Node, Tree, TreeParts, TreeReader, register
from memstore.structure.walk import Flattener, Walk, flattener, flattens, refuse, rule

# --- Values that are no tensors --------------------------------------------------------------------------------------


def read_batch(
    batch: Any, device: Any, names: Any
) -> tuple[torch.Size, torch.device | str | None, list[str | None] | None]:
    """Batch size, device and names of dimensions, checked."""
    shape = torch.Size(sizes(batch))
    if names is not None:
        require(
            len(names) == len(shape) and all(name is None or type(name) is str for name in names), "malformed names"
        )
    return shape, None if device is None else read_device(device), names


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


def make_non_tensor(kind: Any, data: Any, inner: TensorDict) -> Any:
    """As the constructor makes it, except that the data, whatever it is, stays as it is."""
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        batch, device, names, locked, tree = unpack(payload, list, (NoneType, str), (NoneType, list), bool, (int, list))
        node = cls()
        node.batch, node.device, node.names = read_batch(batch, device, names)
        node.lock = locked and not reader.locked
        node.entry = reader.node(tree)
        return node

    def build(self, parts: TreeParts) -> Any:
        device = need_device(self.device, instead=parts.device)
        names = None if self.names is None else list(self.names)
        inner = TensorDict._new_unsafe({}, batch_size=self.batch, device=device, names=names)
        built = make_non_tensor(self.make_class(), self.entry.build(parts), inner)
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


# -- MetaData of one type --------------------------------------------------------------------------------------------


def _flatten_metadata_of(value: Any, walk: Walk) -> Tree:
    return ("metadata_of", class_name(type(value)._expected_type), *flatten_non_tensor(value, walk)[1:])


@register
class MetaDataOfNode(NonTensorNode):
    __slots__ = ("name",)
    kind = "metadata_of"

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        require(len(payload) > 0 and type(payload[0]) is str, "a malformed MetaData")
        node: Any = super().read(payload[1:], reader)
        node.name = payload[0]
        return node

    def make_class(self) -> Any:
        return MetaData[find_class(self.name, lambda kind: True, "a class")]

    def describe(self) -> str:
        return f"MetaData[{short(self.name)}]"


@rule
def _metadata_of_rule(kind: type) -> Flattener | None:
    expected = vars(kind).get("_expected_type")
    if issubclass(kind, MetaData) and isinstance(expected, type) and MetaData[expected] is kind:
        return _flatten_metadata_of
    return None


# --- Lazy stacks -----------------------------------------------------------------------------------------------------


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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        lazy, stack_dim, name, locked, trees = unpack(payload, str, int, (NoneType, str), bool, list)
        require(lazy in _LAZY_CLASSES and stack_dim >= 0 and len(trees) > 0, "a malformed lazy stack")
        entries, lock = reader.lockable_entries(locked, trees)
        return cls(_LAZY_CLASSES[lazy], stack_dim, name, lock, entries)

    def build(self, parts: TreeParts) -> Any:
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
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

    def build(self, parts: TreeParts) -> Any:
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        locked, tree = unpack(payload, bool, int)
        return cls(locked and not reader.locked, reader.node(tree))

    def build(self, parts: TreeParts) -> Any:
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


# --- TypedTensorDicts ------------------------------------------------------------------------------------------------


@rule
def _typed_rule(kind: type) -> Flattener | None:
    return _flatten_typed if issubclass(kind, TypedTensorDict) else None


def _flatten_typed(value: Any, walk: Walk) -> Tree:
    name = class_name(type(value))
    others = [other for other in vars(value) if not other.startswith("_")]
    if others:
        raise RefusedError(f"a {dotted(name)} with attributes that are no entries: {', '.join(others)}")
    return ("typed", name, walk.visit(value._source))


def _is_typed(kind: type) -> bool:
    return flattener(kind) is _flatten_typed


@register
class TypedNode(Node):
    __slots__ = ("name", "source")
    kind = "typed"

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        name, tree = unpack(payload, str, list)
        node = cls()
        node.name = name
        above, reader.locked = reader.locked, False  # a lock above doesn't reach what is inside
        node.source = reader.node(tree)
        reader.locked = above
        return node

    def build(self, parts: TreeParts) -> Any:
        kind = find_class(self.name, _is_typed, "a TypedTensorDict")
        source = self.source.build(parts)
        require(is_tensor_collection(source), "a TypedTensorDict around no TensorDict")
        built = object.__new__(kind)
        object.__setattr__(built, "_source", source)
        return built

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.source

    def describe(self) -> str:
        return short(self.name)


# --- TensorDicts, tensorclasses, TensorDictParams --------------------------------------------------------------------


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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        batch, device, names, locked, keys, trees = unpack(
            payload, list, (NoneType, str), (NoneType, list), bool, list, list
        )
        shape, device, names = read_batch(batch, device, names)
        require(all(type(key) is str for key in keys) and len(set(keys)) == len(keys), "malformed keys of a TensorDict")
        entries, lock = reader.lockable_entries(locked, trees)
        require(len(keys) == len(entries.nodes), "other keys than entries")
        return cls(shape, device, names, lock, tuple(keys), entries)

    def build(self, parts: TreeParts) -> Any:
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        name, inner, keys, trees = unpack(payload, str, list, list, list)
        require(inner[:1] in (["td"], ["lazy"], ["lazy0"], ["params"]), "a tensorclass around no TensorDict")
        node = reader.node(inner)
        entries = reader.entries(trees)
        require(
            all(type(key) is str for key in keys) and len(keys) == len(entries.nodes),
            "malformed fields of a tensorclass",
        )
        return cls(name, node, tuple(keys), entries)

    def build(self, parts: TreeParts) -> Any:
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        lock, convert, locked, tree = unpack(payload, bool, str, bool, list)
        require(convert in _CONVERT and tree[:1] in (["td"], ["lazy"], ["tensorclass"]), "malformed TensorDictParams")
        return cls(lock, _CONVERT[convert], locked, reader.node(tree))

    def build(self, parts: TreeParts) -> Any:
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
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        batch, tree = unpack(payload, (NoneType, list), (int, list))
        node = cls()
        node.batch = None if batch is None else sizes(batch)
        node.entry = reader.node(tree)
        return node

    def build(self, parts: TreeParts) -> Any:
        inner = self.entry.build(parts)
        require(isinstance(inner, torch.Tensor), "an UnbatchedTensor of no tensor")
        return UnbatchedTensor(inner, batch_size=self.batch)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return "UnbatchedTensor"
