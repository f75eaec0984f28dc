"""Outlines: the type of a value and its leaves by name, told from its description alone, without its classes.

A description's tree (see `structure/plans` and `structure/tree`) is walked as it is written; kinds that are no plain
containers are left to `structure`, which needs torch. The types of objects are told by how they are written, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.engine import Path, plan_bytes

# --- The types of objects --------------------------------------------------------------------------------------------


OBJECT = "object"

# Of msgpack's extensions; those of other types are called by what wrote them.
_EXTENSIONS = {
    1: "tuple",
    2: "dict",
    3: "OrderedDict",
    4: "set",
    5: "frozenset",
    10: "int",
    11: "complex",
    12: "bytearray",
    13: "range",
    14: "slice",
    20: "numpy scalar",
    21: "numpy array",
    30: "Size",
    31: "torch constant",
    32: "device",
    40: "datetime",
    41: "date",
    42: "time",
    43: "timedelta",
    44: "timezone",
    45: "path",
    46: "Decimal",
    47: "Fraction",
    48: "UUID",
    49: "enum",
    100: "pickle",
}


def object_types(written: bytes) -> list[str]:
    """Returns the type of each object: "int", "None", "pickle".

    Returns nothing if the objects aren't here: large ones lie in the segment.
    """
    if not written:
        return []
    try:
        found: Any = msgspec.msgpack.decode(written)
    except UNDECODABLE:
        return []
    return [_type_of(one) for one in found]


def _type_of(written: Any) -> str:
    if isinstance(written, msgspec.msgpack.Ext):
        return _EXTENSIONS.get(written.code, OBJECT)
    return "None" if written is None else type(written).__name__


# --- The tree of a description ---------------------------------------------------------------------------------------


_TENSOR, _OBJECT = 0, 1

# kind -> where in its tree the keys stand (None: numbered), and where the trees of its entries
_CONTAINERS: dict[str, tuple[int | None, int]] = {
    "list": (None, 1),
    "tuple": (None, 1),
    "namedtuple": (None, 2),
    "dict": (1, 2),
    "ordered": (1, 2),
    "defaultdict": (2, 3),
    "td": (5, 6),
    "lazy": (None, 5),
}
_WRAPPERS = {
    "params": 4,
    "unbatched": 2,
    "nontensor": 5,
    "metadata": 5,
    "values": 2,
}  # kind -> where the inner tree stands
_NAMES = {
    "ordered": "OrderedDict",
    "td": "TensorDict",
    "lazy": "LazyStackedTensorDict",
    "params": "TensorDictParams",
    "ndarray": "numpy array",
    "jagged": "nested tensor",
    "nested": "nested tensor",
    "sparse": "sparse tensor",
    "quantized": "quantized tensor",
    "quantized_channels": "quantized tensor",
    "namespace": "namespace",
}
_NAMED = frozenset({"tensorclass", "namedtuple", "dataclass", "mapping", "typed", "wrapper", "structseq"})
_BARE = frozenset({"ndarray", "quantized", "quantized_channels"})  # kinds of one array, whose leaf is like it


@dataclass(frozen=True, slots=True)
class OutlineLeaf:
    """A tensor of a value, or with no dtype another object, of a type."""

    name: Path
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    type: str = OBJECT


class UnknownKindError(Exception):
    """The tree has a container that only `structure` can read."""


def outline(description: bytes, objects: bytes = b"") -> tuple[str, list[OutlineLeaf]]:
    """Returns the type of a value, and its leaves in order. Raises UnknownKindError.

    Args:
        objects: as the record has them; without them their types aren't told.
    """
    tree, written, _ = msgspec.msgpack.decode(plan_bytes(description))
    leaves: list[OutlineLeaf] = []
    tensors, types = iter(written), iter(object_types(objects))
    for name, node in _walk(tree, ()):
        if node == _OBJECT:
            leaves.append(OutlineLeaf(name, type=next(types, OBJECT)))
            continue
        entry = next(tensors)
        if isinstance(entry, int):  # the same tensor as that earlier one
            entry = written[entry]
        leaves.append(OutlineLeaf(name, entry[0], tuple(entry[1])))
    return (leaves[0].type if tree == _OBJECT else type_name(tree)), leaves


def _walk(tree: Any, name: Path) -> Iterator[tuple[Path, int]]:
    if tree in (_TENSOR, _OBJECT):
        yield name, tree
        return
    kind = tree[0]
    if kind in _WRAPPERS:
        yield from _walk(tree[_WRAPPERS[kind]], name)
    elif kind in _CONTAINERS:
        at_keys, at_trees = _CONTAINERS[kind]
        keys: Sequence[object] = range(len(tree[at_trees])) if at_keys is None else tree[at_keys]
        for key, inner in zip(keys, tree[at_trees], strict=True):
            if not isinstance(key, (str, int)):
                raise UnknownKindError(kind)
            yield from _walk(inner, (*name, key))
        if kind == "ordered" and tree[3] is not None:
            yield from _walk(tree[3], (*name, "__dict__"))
    elif kind == "tensorclass":
        yield from _walk(tree[2], name)
        for key, inner in zip(tree[3], tree[4], strict=True):
            yield from _walk(inner, (*name, key))
    else:
        raise UnknownKindError(kind)


def is_one_array(tree: Any) -> bool:
    """Returns whether a value is like its only leaf."""
    return tree == _TENSOR or (tree != _OBJECT and tree[0] in _BARE)


def type_name(tree: Any) -> str:
    """Returns the name of a type as people write it: "TensorDict[3]", "sparse tensor"."""
    if tree in (_TENSOR, _OBJECT):
        return "Tensor" if tree == _TENSOR else OBJECT
    if tree[0] == "td":
        return f"TensorDict{tree[1]}"
    if tree[0] in _NAMED:
        return str(tree[1]).rpartition(":")[2]
    return _NAMES.get(tree[0], str(tree[0]))
