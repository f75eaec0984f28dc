"""Trees: which containers a value has, and the nodes that build them again.

    tree := 0                a tensor: the next of the plan's leaves
          | 1                a non-tensor leaf: the next of the objects
          | [kind, ...]      a container; the module that registers the kind says what follows

The leaves are numbered in the order of one walk, containers before their entries, so that no index is stored. While a
value is flattened the tree is made of tuples, and is the key of the cache of plans.

In keys of dicts, str and int stand for themselves. The others are tagged, so that True, 1 and 1.0, which Python holds
equal, stay three keys, in a description and in the cache of plans.

`merge_trees` merges the trees of one value that several processes hold in part. Dicts, and TensorDicts, merge by key: a
key that some lack is taken from those that have it, in the order in which it is first seen. All else must agree: which
containers there are, how long lists and tuples are, batch sizes. The devices of TensorDicts are left out: each process
has its own.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from memstore._threads import between_forks
from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.structure.refusals import MalformedError, as_list, require, unpack

# --- Nodes, and the reader that makes them of a tree -----------------------------------------------------------------


Tree = Any  # see the grammar above
TENSOR, OBJECT = 0, 1
MAX_DEPTH = 200  # levels of containers in a value
MAX_NAME_PARTS = 1 << 25  # of the names of all leaves: each repeats the keys of the containers above


class TreeParts:
    """The parts that nodes build from: the leaves, in order, and the device that the caller asked for."""

    __slots__ = ("device", "objects", "tensors")

    def __init__(self, tensors: list[torch.Tensor], objects: list[Any], device: torch.device | None) -> None:
        self.tensors = tensors
        self.objects = objects
        self.device = device


class Node:
    """One container or leaf. Immutable: plans are cached and shared by threads.

    Attributes:
        title: its type as a user knows it: "TensorDict[3]", "dict".
    """

    __slots__ = ()
    title: str

    def build(self, parts: TreeParts) -> Any:
        raise NotImplementedError

    def children(self) -> Iterator[tuple[Path, Node]]:
        """Iterates over the nodes below, each with what it adds to the names of its leaves."""
        return iter(())


class TensorNode(Node):
    __slots__ = ("index",)
    title = "Tensor"

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, parts: TreeParts) -> Any:
        return parts.tensors[self.index]


class ObjectNode(Node):
    __slots__ = ("index",)
    title = "object"

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, parts: TreeParts) -> Any:
        return parts.objects[self.index]


Make = Callable[[list[Any], "torch.device | None"], Any]
NAMELESS: Any = object()  # the key of an entry that adds nothing to the names of its leaves, such as what is wrapped


class Container(Node):
    """A container of any kind: its entries, and the function that makes it of them.

    Args:
        make: takes what was built of the entries, in their order, and the device that the caller asked for.
        keys: of the entries.
        nodes: of the entries, in the order in which the reader made them.
        reads_leaves: `make` needs the contents of the tensors below: a view has them loaded.
    """

    __slots__ = ("_keys", "_make", "_nodes", "_others", "_start", "_stop", "reads_leaves", "title")

    def __init__(
        self, title: str, make: Make, keys: Sequence[Any], nodes: list[Node], *, reads_leaves: bool = False
    ) -> None:
        require(len(keys) == len(nodes), "other keys than entries")
        self.title = title
        self.reads_leaves = reads_leaves
        self._make = make
        self._keys = keys
        self._nodes = nodes
        # The first entries are mostly tensors, which are one slice: 300 build in 2 µs instead of 30.
        first = next((i for i, node in enumerate(nodes) if type(node) is not TensorNode), len(nodes))
        self._start: int = nodes[0].index if first else 0  # type: ignore[attr-defined]
        self._stop = self._start + first
        self._others = nodes[first:]

    def build(self, parts: TreeParts) -> Any:
        values = parts.tensors[self._start : self._stop]
        if self._others:
            values += [node.build(parts) for node in self._others]
        return self._make(values, parts.device)

    def children(self) -> Iterator[tuple[Path, Node]]:
        for key, node in zip(self._keys, self._nodes, strict=True):
            yield () if key is NAMELESS else (name_of(key),), node


class NodeKind(NamedTuple):
    """A kind of container, as it is read from trees.

    Attributes:
        read: makes the node of the fields that follow the kind's name; raises MalformedError.
        fields: the types that these fields have.
        may_be_object: without a tensor below, the container is one object: see structure/objects.py.
    """

    read: Callable[..., Container]
    fields: tuple[type | tuple[type, ...], ...]
    may_be_object: bool


KINDS: dict[str, NodeKind] = {}
_Read = TypeVar("_Read", bound=Callable[..., Container])


def reads(name: str, *fields: type | tuple[type, ...], may_be_object: bool = False) -> Callable[[_Read], _Read]:
    """Returns a decorator for the function that reads containers of this kind: it takes the reader and the fields."""

    def register(read: _Read) -> _Read:
        KINDS[name] = NodeKind(read, fields, may_be_object)
        return read

    return register


def find_kind(name: str) -> NodeKind:
    found = KINDS.get(name)
    if found is None:
        load_late_containers()
        found = KINDS.get(name)
    if found is None:
        raise MalformedError(f"no container is called {name!r}")
    return found


class TreeReader:
    """Reads a tree, which may come from a hostile file: counts tensors and objects, and checks every type."""

    __slots__ = ("depth", "exact", "fixed", "host", "locked", "objects", "tensors")

    def __init__(self) -> None:
        # leaves that say how others are read: in out= their contents must be equal already
        self.exact: set[int] = set()
        self.fixed: set[int] = set()  # leaves that a get's dtype= doesn't concern
        self.host: set[int] = set()  # leaves that stay on the CPU, whatever device= says
        self.tensors = 0
        self.objects = 0
        self.depth = 0
        self.locked = False  # whether a container above locks those below

    def node(self, tree: Any) -> Node:
        if type(tree) is int:
            if tree == TENSOR:
                self.tensors += 1
                return TensorNode(self.tensors - 1)
            require(tree == OBJECT, "a leaf that is neither a tensor nor an object")
            self.objects += 1
            return ObjectNode(self.objects - 1)
        tree = as_list(tree)
        require(len(tree) > 0 and type(tree[0]) is str, "a node that is not [kind, ...]")
        require(self.depth < MAX_DEPTH, f"more than {MAX_DEPTH} levels")
        self.depth += 1
        kind = find_kind(tree[0])
        node = kind.read(self, *unpack(tree[1:], *kind.fields))
        self.depth -= 1
        return node

    def fixed_tensor(self, tree: Any) -> Node:
        """Reads a tensor whose dtype is a part of what it means."""
        require(tree == TENSOR, "a tensor is expected, but something else is there")
        self.fixed.add(self.tensors)
        return self.node(tree)

    def host_tensor(self, tree: Any) -> Node:
        """Reads a fixed tensor that is always on the CPU."""
        self.host.add(self.tensors)
        return self.fixed_tensor(tree)

    def nodes(self, trees: Any) -> list[Node]:
        return [self.node(tree) for tree in as_list(trees)]

    def lockable_nodes(self, locked: bool, trees: Any) -> tuple[list[Node], bool]:
        """Reads the entries of a TensorDict. Returns also whether it locks itself: one above that is locked does it."""
        above = self.locked
        self.locked = above or locked
        nodes = [self.node(tree) for tree in as_list(trees)]  # not self.nodes: a level of Python's stack less
        self.locked = above
        return nodes, locked and not above


class LeafNames(NamedTuple):
    """The names of a value's leaves, in their order."""

    tensors: tuple[Path, ...]
    objects: tuple[Path, ...]


def names_of(root: Node) -> LeafNames:
    """Returns the names of all leaves. Raises MalformedError where they would fill the memory."""
    parts = 0
    tensors: list[Path] = []
    objects: list[Path] = []
    for name, node in _walk(root, ()):
        parts += len(name)
        require(parts <= MAX_NAME_PARTS, "too many leaves on too many levels: their names would fill the memory")
        (objects if isinstance(node, ObjectNode) else tensors).append(name)
    return LeafNames(tuple(tensors), tuple(objects))


def _walk(node: Node, name: Path) -> Iterator[tuple[Path, Node]]:
    if isinstance(node, (TensorNode, ObjectNode)):
        yield name, node
    else:
        for step, child in node.children():
            yield from _walk(child, name + step)


# --- Late containers -------------------------------------------------------------------------------------------------


def load_late_containers() -> None:
    """Registers the containers of tensordict. It takes a second to import that, and most values have none of them."""
    with between_forks():
        importlib.import_module("memstore.structure.tensordicts")


# --- Keys of dicts ---------------------------------------------------------------------------------------------------


Key = Any


def write_key(key: Any) -> Key:
    """Writes a dict's key. Raises TypeError for a type that has no form, UnicodeEncodeError for what is no text."""
    kind = type(key)
    if kind is str:
        if not key.isascii():
            key.encode()
        return key
    if kind is int:
        return key if -(1 << 63) <= key < 1 << 63 else ("int", str(key))
    if kind is bool:
        return ("bool", int(key))
    if key is None:
        return ("none",)
    if kind is float:
        return ("float", struct.pack("<d", key))
    if kind is bytes:
        return ("bytes", key)
    if kind is tuple:
        if _count_parts(key) > _MAX_PARTS:
            raise TypeError(f"a key of more than {_MAX_PARTS:,} parts")
        return ("tuple", *map(write_key, key))
    raise TypeError(f"a key of type {kind.__qualname__}")


_MAX_PARTS = 1 << 12  # of a tuple: what stands in it in several places counts, and is written, for each


def _count_parts(key: tuple[Any, ...]) -> int:
    """Counts the items in a tuple, on all levels; no further than needed to see that there are too many."""
    count, left = 0, [key]
    while left and count <= _MAX_PARTS:
        one = left.pop()
        count += len(one)
        left += [part for part in one if type(part) is tuple]
    return count


_KEY_READERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "bool": (int, bool),
    "int": (str, int),
    "float": (bytes, lambda data: struct.unpack("<d", data)[0]),
    "bytes": (bytes, bytes),
}


def read_key(key: Any) -> Any:
    if type(key) is str or type(key) is int:
        return key
    key = as_list(key)
    require(len(key) > 0 and type(key[0]) is str, "a malformed key")
    tag = key[0]
    if tag == "tuple":
        return tuple(map(read_key, key[1:]))
    if tag == "none" and len(key) == 1:
        return None
    kind, convert = _KEY_READERS.get(tag, (None, bytes))
    require(kind is not None and len(key) == 2 and type(key[1]) is kind, "a malformed key")
    require(tag != "int" or len(key[1]) <= 4000, "a key of too many digits")  # Python refuses more than 4300
    try:
        return convert(key[1])
    except (ValueError, struct.error):
        raise MalformedError("a malformed key") from None


def read_keys(keys: Any) -> tuple[Any, ...]:
    found = tuple(map(read_key, as_list(keys)))
    require(len(set(found)) == len(found) or any(key != key for key in found), "a key that occurs twice")
    return found


def name_of(key: Any) -> str | int:
    """Returns what a key is called in the name of a leaf: itself, or its repr if it is neither str nor int."""
    return key if type(key) in (str, int) and (type(key) is str or -(1 << 63) <= key < 1 << 63) else repr(key)


# --- Trees as msgpack, and as nodes ----------------------------------------------------------------------------------


def _in_msgpack(value: Any) -> Any:
    """Writes what stands in trees and msgpack doesn't have."""
    if isinstance(value, torch.device):
        return str(value)
    raise NotImplementedError(f"{type(value)} in a tree")


to_msgpack = msgspec.msgpack.Encoder(enc_hook=_in_msgpack).encode
from_msgpack = msgspec.msgpack.Decoder().decode


def compile_tree(tree: Tree) -> tuple[Node, TreeReader]:
    """Makes the node that a walk's tree describes. The reader tells what it found out about the leaves."""
    reader = TreeReader()
    try:
        return reader.node(from_msgpack(to_msgpack(tree))), reader
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"value: a key with a lone surrogate, {error.object!r}: it is no Unicode text"
        ) from None


def tree_names(tree: Tree) -> LeafNames:
    """Returns the names of the leaves of a tree. Raises MalformedError."""
    return names_of(compile_tree(tree)[0])


# --- The trees of several processes, merged --------------------------------------------------------------------------


# Where keys and entries stand in the trees of containers that merge by key, and where a device does.
_KEYED = {"dict": (1, 2), "ordered": (1, 2), "defaultdict": (2, 3), "td": (5, 6), "wrapped_shards": (4, 5)}
_TENSORDICT_DEVICE = 2


class TreesDifferError(Exception):
    """Two trees that can't be merged.

    Attributes:
        path: where, from the outermost key on.
        found: the two sides, in words.
    """

    def __init__(self, found: tuple[str, str]) -> None:
        super().__init__(found)
        self.path: list[Any] = []
        self.found = found


def merge_trees(first: Tree, second: Tree) -> Tree:
    """Merges two trees, which are as msgpack gives them. Raises TreesDifferError, and MalformedError."""
    if first == second:
        return _without_devices(first)
    if type(first) is int or type(second) is int:
        raise TreesDifferError((_shown(first), _shown(second)))
    first, second = _checked(first), _checked(second)
    kind = first[0]
    if kind != second[0]:
        raise TreesDifferError((_shown(first), _shown(second)))
    if kind in _KEYED:
        return _merge_keyed(kind, first, second)
    if kind in ("list", "tuple") and len(first[1]) == len(second[1]):
        pairs = zip(first[1], second[1], strict=True)
        return [kind, [_merge_entry(i, one, other) for i, (one, other) in enumerate(pairs)]]
    raise TreesDifferError((_shown(first), _shown(second)))


def _merge_keyed(kind: str, first: list[Any], second: list[Any]) -> Tree:
    keys_at, entries_at = _KEYED[kind]
    merged = list(first)
    if kind == "td":
        merged[_TENSORDICT_DEVICE] = None
    for i, (one, other) in enumerate(zip(first, second, strict=True)):
        if kind == "ordered" and i > entries_at:  # the attributes
            merged[i] = other if one is None else one if other is None else _merge_entry("__dict__", one, other)
        elif i not in (keys_at, entries_at) and (kind, i) != ("td", _TENSORDICT_DEVICE) and one != other:
            raise TreesDifferError((_shown(first), _shown(second)))
    entries = {to_msgpack(key): (key, tree) for key, tree in _entries(first, keys_at, entries_at)}
    for key, tree in _entries(second, keys_at, entries_at):
        name = to_msgpack(key)
        entries[name] = (key, _merge_entry(read_key(key), entries[name][1], tree) if name in entries else tree)
    merged[keys_at] = [key for key, _ in entries.values()]
    merged[entries_at] = [_without_devices(tree) for _, tree in entries.values()]
    return merged


def _entries(tree: list[Any], keys_at: int, entries_at: int) -> Iterable[tuple[Any, Tree]]:
    keys, entries = as_list(tree[keys_at]), as_list(tree[entries_at])
    require(len(keys) == len(entries), "other keys than entries")
    return zip(keys, entries, strict=True)


def _merge_entry(key: Any, first: Tree, second: Tree) -> Tree:
    try:
        return merge_trees(first, second)
    except TreesDifferError as error:
        error.path.insert(0, key)
        raise


def _without_devices(tree: Tree) -> Tree:
    """Removes the devices of TensorDicts that lie in containers that merge."""
    if type(tree) is int:
        return tree
    tree = _checked(tree)
    kind = tree[0]
    if kind in _KEYED:
        _, entries_at = _KEYED[kind]
        tree = [*tree[:entries_at], [_without_devices(entry) for entry in tree[entries_at]], *tree[entries_at + 1 :]]
        if kind == "td":
            tree[_TENSORDICT_DEVICE] = None
    elif kind in ("list", "tuple"):
        tree = [kind, [_without_devices(entry) for entry in tree[1]]]
    return tree


def _checked(tree: Tree) -> list[Any]:
    """Returns a container, once its keys and entries are known to stand where they belong."""
    tree = as_list(tree)
    require(len(tree) > 0 and type(tree[0]) is str, "a node that is not [kind, ...]")
    if tree[0] in _KEYED:
        keys_at, entries_at = _KEYED[tree[0]]
        require(len(tree) > entries_at, "a node whose fields are not those of its kind")
        as_list(tree[keys_at])
        as_list(tree[entries_at])
    elif tree[0] in ("list", "tuple"):
        require(len(tree) == 2, "a node whose fields are not those of its kind")
        as_list(tree[1])
    return tree


def _shown(tree: Tree) -> str:
    if type(tree) is int:
        return "an object" if tree else "a tensor"
    try:
        kind = {"td": "TensorDict", "ordered": "OrderedDict"}.get(tree[0], tree[0])
        if tree[0] == "td":
            return f"a {kind} of batch size {list(tree[1])}"
        return f"a {kind} of {len(tree[1])}" if tree[0] in ("list", "tuple") else f"a {kind}"
    except (LookupError, TypeError):
        raise MalformedError("a malformed node") from None
