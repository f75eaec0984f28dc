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

Rules are asked in the order of this file: the one for all collections is the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, cast

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

from memstore import _compat
from memstore.structure.classes import class_name, dotted, find_class, make_bare, short
from memstore.structure.objects import join_list
from memstore.structure.refusals import RefusedError, require, sizes
from memstore.structure.traits import need_device, read_device
from memstore.structure.tree import NAMELESS, OBJECT, Container, Tree, TreeReader, reads
from memstore.structure.walk import Flattener, Walk, flattener, flattens, refuse, rule

# --- Values that are no tensors --------------------------------------------------------------------------------------


class _Dimensions(NamedTuple):
    """Batch size, device and names of dimensions, as they are stored."""

    batch: torch.Size
    device: torch.device | str | None
    names: list[str | None] | None


def _read_dimensions(batch: Any, device: Any, names: Any) -> _Dimensions:
    shape = torch.Size(sizes(batch))
    fits = names is None or len(names) == len(shape) and all(name is None or type(name) is str for name in names)
    require(fits, "malformed names")
    return _Dimensions(shape, None if device is None else read_device(device), names)


def _make_tensordict(
    entries: dict[str, Any], dimensions: _Dimensions, asked: torch.device | None, **options: Any
) -> TensorDict:
    """Makes a TensorDict on its own device, or the one that the caller asked for."""
    return _compat.new_tensordict(
        TensorDict,
        entries,
        dimensions.batch,
        device=need_device(dimensions.device, instead=asked),
        names=None if dimensions.names is None else list(dimensions.names),
        **options,
    )


# -- NonTensorData, MetaData -----------------------------------------------------------------------------------------


@flattens(NonTensorData, MetaData)
def flatten_non_tensor(value: NonTensorData | MetaData, walk: Walk) -> Tree:
    inner: Any = _compat.inner_tensordict(value)
    if type(inner) is not TensorDict or _compat.inner_tensordict(inner):
        raise RefusedError(f"a {type(value).__name__} over a {type(inner).__name__}; only plain ones are stored")
    _, *dimensions = _compat.tensordict_parts(inner)
    return ("nontensor" if type(value) is NonTensorData else "metadata", *dimensions, walk.visit(value.data))


_DIMENSIONS = (list, (NoneType, str), (NoneType, list), bool)  # types of: batch size, device, names, locked


def _read_non_tensor(
    title: str,
    find: Callable[[], Any],
    reader: TreeReader,
    batch: Any,
    device: Any,
    names: Any,
    locked: bool,
    tree: Tree,
) -> Container:
    dimensions, lock = _read_dimensions(batch, device, names), locked and not reader.locked

    def make(values: list[Any], asked: torch.device | None) -> Any:
        inner = _make_tensordict({}, dimensions, asked)
        kind = find()
        built = _compat.fill_non_tensor(kind.__new__(kind), inner, values[0])
        return built.lock_() if lock else built

    return Container(title, make, (NAMELESS,), [reader.node(tree)])


reads("nontensor", *_DIMENSIONS, (int, list))(partial(_read_non_tensor, "NonTensorData", lambda: NonTensorData))
reads("metadata", *_DIMENSIONS, (int, list))(partial(_read_non_tensor, "MetaData", lambda: MetaData))


# -- MetaData of one type --------------------------------------------------------------------------------------------


def _flatten_metadata_of(value: Any, walk: Walk) -> Tree:
    return ("metadata_of", class_name(_compat.metadata_type(type(value))), *flatten_non_tensor(value, walk)[1:])


@reads("metadata_of", str, *_DIMENSIONS, (int, list))
def _read_metadata_of(reader: TreeReader, name: str, *fields: Any) -> Container:
    def find() -> Any:
        return MetaData[find_class(name, lambda kind: True, "a class")]

    return _read_non_tensor(f"MetaData[{short(name)}]", find, reader, *fields)


@rule
def _metadata_of_rule(kind: type) -> Flattener | None:
    expected = _compat.metadata_type(kind)
    if issubclass(kind, MetaData) and isinstance(expected, type) and MetaData[expected] is kind:
        return _flatten_metadata_of
    return None


# --- Lazy stacks -----------------------------------------------------------------------------------------------------


# -- stacks of TensorDicts -------------------------------------------------------------------------------------------


@flattens(LazyStackedTensorDict)
def _flatten_lazy(value: LazyStackedTensorDict, walk: Walk) -> Tree:
    if _compat.has_hooks(value):
        raise RefusedError("a LazyStackedTensorDict with hooks (inside vmap)")
    locked = bool(_compat.is_locked(value))
    members = value.tensordicts
    if not members:
        names = _compat.empty_stack_names(value)
        batch = list(_compat.batch_size_of(value))
        del batch[value.stack_dim]
        return (
            *("lazy0", _lazy_class(value), value.stack_dim, tuple(batch), value.device),
            *(None if names is None else tuple(names), locked),
        )
    return (
        *("lazy", _lazy_class(value), value.stack_dim, _compat.stack_dim_name(value), locked),
        walk.entries(value, range(len(members)), members),
    )


_LAZY_CLASSES: dict[str, type[LazyStackedTensorDict]] = {"": LazyStackedTensorDict, "values": NonTensorStack}


def _lazy_class(value: LazyStackedTensorDict) -> str:
    return "values" if type(value) is NonTensorStack else ""


@reads("lazy", str, int, (NoneType, str), bool, list)
def _read_lazy(
    reader: TreeReader, which: str, stack_dim: int, name: str | None, locked: bool, trees: list[Tree]
) -> Container:
    require(which in _LAZY_CLASSES and stack_dim >= 0 and len(trees) > 0, "a malformed lazy stack")
    nodes, lock = reader.lockable_nodes(locked, trees)
    kind = _LAZY_CLASSES[which]

    def make(members: list[Any], _: torch.device | None) -> Any:
        require(all(map(is_tensor_collection, members)), "a lazy stack of other things than TensorDicts")
        built = kind(*members, stack_dim=stack_dim, stack_dim_name=name)
        return built.lock_() if lock else built

    return Container(kind.__name__, make, range(len(nodes)), nodes)


@reads("lazy0", str, int, *_DIMENSIONS)
def _read_empty_lazy(
    reader: TreeReader, which: str, stack_dim: int, batch: Any, device: Any, names: Any, locked: bool
) -> Container:
    require(which in _LAZY_CLASSES and stack_dim >= 0, "a malformed lazy stack")
    kind, dimensions = _LAZY_CLASSES[which], _read_dimensions(batch, device, names)
    lock = locked and not reader.locked

    def make(_: list[Any], asked: torch.device | None) -> Any:
        there, names = need_device(dimensions.device, instead=asked), cast(Any, dimensions.names)
        built: Any = kind(stack_dim=stack_dim, batch_size=dimensions.batch, device=there, names=names)
        return built.lock_() if lock else built

    return Container(kind.__name__, make, (), [])


# -- stacks of values ------------------------------------------------------------------------------------------------


@flattens(NonTensorStack)
def _flatten_values(value: NonTensorStack, walk: Walk) -> Tree:
    members, locked = value.tensordicts, bool(_compat.is_locked(value))
    plain = (
        members
        and value.stack_dim == 0
        and _compat.stack_dim_name(value) is None
        and not _compat.has_hooks(value)
        and all(map(_is_plain_value, members))
        and len({bool(_compat.is_locked(_compat.inner_tensordict(one))) for one in members} | {locked}) == 1
    )
    if plain:
        tensors, written = len(walk.tensors), len(walk.objects)
        trees = walk.entries(value, range(len(members)), [*map(_compat.non_tensor_value, members)])
        if trees.count(OBJECT) == len(trees):
            walk.objects.append(join_list(walk.take_objects(len(trees))))
            return ("values", locked, OBJECT)
        del walk.tensors[tensors:]
        del walk.objects[written:]
    return _flatten_lazy(value, walk)


def _is_plain_value(member: Any) -> bool:
    """Returns whether the member is its value and nothing else: no batch size, device or names."""
    if type(member) is not NonTensorData:
        return False
    inner: Any = _compat.inner_tensordict(member)
    if type(inner) is not TensorDict:
        return False
    entries, batch, device, names, _ = _compat.tensordict_parts(inner)
    return not entries and not batch and device is None and names is None


@reads("values", bool, int)
def _read_values(reader: TreeReader, locked: bool, tree: Tree) -> Container:
    lock = locked and not reader.locked

    def make(built: list[Any], _: torch.device | None) -> Any:
        (values,) = built
        require(type(values) is list and len(values) > 0, "malformed values of a NonTensorStack")
        members: list[Any] = []
        for value in values:
            inner = _compat.new_tensordict(TensorDict, {}, torch.Size(()))
            members.append(_compat.fill_non_tensor(NonTensorData.__new__(NonTensorData), inner, value))
        stack = NonTensorStack(*members)
        return stack.lock_() if lock else stack

    return Container("NonTensorStack", make, (NAMELESS,), [reader.node(tree)])


# --- TypedTensorDicts ------------------------------------------------------------------------------------------------


@rule
def _typed_rule(kind: type) -> Flattener | None:
    return _flatten_typed if issubclass(kind, TypedTensorDict) else None


def _flatten_typed(value: Any, walk: Walk) -> Tree:
    name = class_name(type(value))
    others = [other for other in vars(value) if not other.startswith("_")]
    if others:
        raise RefusedError(f"a {dotted(name)} with attributes that are no entries: {', '.join(others)}")
    return ("typed", name, walk.visit(_compat.typed_source(value)))


@reads("typed", str, list)
def _read_typed(reader: TreeReader, name: str, tree: Tree) -> Container:
    above, reader.locked = reader.locked, False  # a lock above doesn't reach what is inside
    node = reader.node(tree)
    reader.locked = above

    def make(values: list[Any], _: torch.device | None) -> Any:
        kind = find_class(name, lambda found: flattener(found) is _flatten_typed, "a TypedTensorDict")
        require(is_tensor_collection(values[0]), "a TypedTensorDict around no TensorDict")
        return _compat.fill_typed(object.__new__(kind), values[0])

    return Container(short(name), make, (NAMELESS,), [node])


# --- TensorDicts, tensorclasses, TensorDictParams --------------------------------------------------------------------


# -- TensorDict ------------------------------------------------------------------------------------------------------


@flattens(TensorDict)
def _flatten_tensordict(value: TensorDict, walk: Walk) -> Tree:
    entries, *dimensions = _compat.tensordict_parts(value)
    return ("td", *dimensions, tuple(entries), walk.entries(value, entries, entries.values()))


@reads("td", *_DIMENSIONS, list, list)
def _read_tensordict(
    reader: TreeReader, batch: Any, device: Any, names: Any, locked: bool, keys: list[Any], trees: list[Tree]
) -> Container:
    dimensions = _read_dimensions(batch, device, names)
    require(all(type(key) is str for key in keys) and len(set(keys)) == len(keys), "malformed keys of a TensorDict")
    nodes, lock = reader.lockable_nodes(locked, trees)

    def make(values: list[Any], asked: torch.device | None) -> Any:
        built = _make_tensordict(dict(zip(keys, values, strict=True)), dimensions, asked, nested=False)
        return built.lock_() if lock else built

    return Container(f"TensorDict{list(dimensions.batch)}", make, keys, nodes)


@rule
def _collection_rule(kind: type) -> Flattener | None:
    if issubclass(kind, TensorDictBase):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return refuse(f"a {name} has no bytes of its own, or none that are known; put its to_tensordict()")
    return _flatten_tensorclass if is_tensorclass(kind) else None


# -- tensorclasses ---------------------------------------------------------------------------------------------------


def _flatten_tensorclass(value: Any, walk: Walk) -> Tree:
    others = _compat.other_fields(value) or {}
    name = class_name(type(value))
    inner = walk.visit(_compat.inner_tensordict(value))
    return ("tensorclass", name, inner, tuple(others), walk.entries(value, others, others.values()))


@reads("tensorclass", str, list, list, list)
def _read_tensorclass(reader: TreeReader, name: str, inner: list[Any], keys: list[Any], trees: list[Tree]) -> Container:
    require(inner[:1] in (["td"], ["lazy"], ["lazy0"], ["params"]), "a tensorclass around no TensorDict")
    nodes = [reader.node(inner), *reader.nodes(trees)]
    fits = all(type(key) is str for key in keys) and len(keys) == len(trees)
    require(fits, "malformed fields of a tensorclass")

    def make(values: list[Any], _: torch.device | None) -> Any:
        kind = find_class(name, is_tensorclass, "a tensorclass")
        others = dict(zip(keys, values[1:], strict=True))
        return _compat.fill_tensorclass(make_bare(kind), values[0], others)  # neither __init__ nor __post_init__ runs

    return Container(short(name), make, (NAMELESS, *keys), nodes)


# -- TensorDictParams, UnbatchedTensor -------------------------------------------------------------------------------


@flattens(TensorDictParams)
def _flatten_params(value: TensorDictParams, walk: Walk) -> Tree:
    lock, locked = _compat.locks_content(value), bool(_compat.is_locked(value))
    return ("params", lock, str(value.no_convert), locked, walk.visit(_compat.params_inner(value)))


_CONVERT: dict[str, Any] = {"False": False, "True": True, "skip": "skip"}


@reads("params", bool, str, bool, list)
def _read_params(reader: TreeReader, lock: bool, convert: str, locked: bool, tree: Tree) -> Container:
    is_one = convert in _CONVERT and tree[:1] in (["td"], ["lazy"], ["tensorclass"])
    require(is_one, "malformed TensorDictParams")

    def make(values: list[Any], _: torch.device | None) -> Any:
        skip: Any = "skip"  # the leaves are Parameters and Buffers already
        built = TensorDictParams(values[0], no_convert=skip, lock=lock)
        built.no_convert = _CONVERT[convert]
        if locked:
            built.lock_()
        return built

    return Container("TensorDictParams", make, (NAMELESS,), [reader.node(tree)])


@flattens(UnbatchedTensor)
def _flatten_unbatched(value: UnbatchedTensor, walk: Walk) -> Tree:
    tensor, batch = _compat.unbatched_parts(value)
    return ("unbatched", batch, walk.visit(tensor))


@reads("unbatched", (NoneType, list), (int, list))
def _read_unbatched(reader: TreeReader, written: list[Any] | None, tree: Tree) -> Container:
    batch = None if written is None else sizes(written)

    def make(values: list[Any], _: torch.device | None) -> Any:
        require(isinstance(values[0], torch.Tensor), "an UnbatchedTensor of no tensor")
        return UnbatchedTensor(values[0], batch_size=batch)

    return Container("UnbatchedTensor", make, (NAMELESS,), [reader.node(tree)], reads_leaves=True)
