"""What a store holds, told from records alone: no tensor is touched, and torch is not imported.

For the command line and for `repr`s. A description's tree (see `structure/plans` and `structure/tree`) is walked here
without the classes that build it; kinds that are no plain containers are left to `structure`, which needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from memstore.engine import Path, Record, index, plan_bytes
from memstore.keys import encode_prefix
from memstore.listing.keyspace import Keyspace, opened, timeout_of
from memstore.wording import age, count_of, size

_TENSOR, _OBJECT = 0, 1
_BITS = re.compile(r"[0-9]+")  # in the name of a dtype

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
class Listed:
    """An entry, as `memstore ls` shows it."""

    key: str
    version: int
    kind: str
    nbytes: int
    created: float  # Unix seconds
    leaves: int  # tensors
    type: str  # of the value: "TensorDict[3]"; of an entry whose rows are written in place its kind
    dtype: str | None = None  # of a value that is a single array; None: it is another one
    shape: tuple[int, ...] | None = None

    @property
    def content(self) -> str:
        """ "float32 [3, 4]", or "2 leaves"."""
        if self.dtype is not None:
            return f"{self.dtype} {list(self.shape or ())}"
        return count_of(self.leaves, "leaf", "leaves") if self.leaves else ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a value, or with no dtype another object."""

    name: Path
    dtype: str | None = None
    shape: tuple[int, ...] = ()


COLUMNS = ("key", "type", "content", "size", "version", "age")


def cells(one: Listed) -> tuple[str, ...]:
    """As text, under COLUMNS."""
    return one.key, one.type, one.content, size(one.nbytes), str(one.version), age(one.created)


class UnknownKindError(Exception):
    """The tree has a container that only `structure` can read."""


def entries(store: Keyspace, prefix: str = "") -> Iterator[Listed]:
    """The entries whose keys start with `prefix`, sorted, read in pages."""
    for key, record in index.records_from(partial(opened, store), encode_prefix(prefix), timeout_of(store)):
        yield _listed(key, record)


def _listed(key: bytes, record: Record) -> Listed:
    tree, leaves, _ = msgspec.msgpack.decode(plan_bytes(record.description))
    nbytes = _nbytes(leaves) if record.boxes is not None else record.nbytes
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    if tree == _TENSOR or (tree != _OBJECT and tree[0] in _BARE):
        dtype, shape = leaves[0][0], tuple(leaves[0][1])
    kind = _type_name(tree) if not record.is_mutable else record.kind
    return Listed(key.decode(), record.version, record.kind, nbytes, record.created, len(leaves), kind, dtype, shape)


def _nbytes(leaves: list[Any]) -> int:
    """Of the leaves, by their places: the data section of an entry in boxes has headers in it, and room."""
    sizes: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, int):  # the same tensor as an earlier one
            dtype, shape, offset = leaf[:3]
            bits = _BITS.search(dtype)
            itemsize = max(int(bits[0]), 8) // 8 if bits else 1
            sizes[offset] = max(sizes.get(offset, 0), math.prod(shape) * itemsize)
    return sum(sizes.values())


def outline(description: bytes) -> tuple[str, list[Leaf]]:
    """The type of a value, and its leaves in order. Raises UnknownKindError."""
    tree, written, _ = msgspec.msgpack.decode(plan_bytes(description))
    leaves: list[Leaf] = []
    tensors = iter(written)
    for name, node in _walk(tree, ()):
        if node == _OBJECT:
            leaves.append(Leaf(name))
            continue
        entry = next(tensors)
        if isinstance(entry, int):  # the same tensor as that earlier one
            entry = written[entry]
        leaves.append(Leaf(name, entry[0], tuple(entry[1])))
    return _type_name(tree), leaves


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


def _type_name(tree: Any) -> str:
    if tree in (_TENSOR, _OBJECT):
        return "Tensor" if tree == _TENSOR else "object"
    if tree[0] == "td":
        return f"TensorDict{tree[1]}"
    if tree[0] in _NAMED:
        return str(tree[1]).rpartition(":")[2]
    return _NAMES.get(tree[0], str(tree[0]))
