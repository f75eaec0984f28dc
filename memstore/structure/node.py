"""The structure of a value, compiled: nodes that build its containers again. What a description's tree decodes to.

    tree := 0                a tensor: the next of the plan's leaves
          | 1                a non-tensor leaf: the next of the objects
          | [kind, ...]      a container; the module that registers the kind says what follows

Trees are numbered by one walk, containers before their entries, so that no index is ever stored. While a value is
flattened the same tree is made of tuples, and serves as the key of the plan cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from memstore.engine.record import Path

Tree = Any  # see the grammar above
TENSOR, OBJECT = 0, 1
MAX_DEPTH = 200  # levels of containers in a value


class MalformedError(Exception):
    """A description or an object that no flatten wrote. Becomes a CorruptionError where the bytes are known."""


class Parts:
    """What a node builds from: the leaves, in order, and the device that the caller asked for."""

    __slots__ = ("device", "objects", "tensors")

    def __init__(self, tensors: list[torch.Tensor], objects: list[Any], device: torch.device | None) -> None:
        self.tensors = tensors
        self.objects = objects
        self.device = device


class Node:
    """One container or leaf. Immutable: plans are cached and shared by threads."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    loads: ClassVar[bool] = False  # it looks into the tensors below, so that in a view they come loaded

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        """Makes the node from what follows the kind in the tree; raises MalformedError."""
        raise NotImplementedError

    def build(self, parts: Parts) -> Any:
        raise NotImplementedError

    def children(self) -> Iterator[tuple[Path, Node]]:
        """The nodes below, each with what its name adds to this one's (nothing, for a wrapper)."""
        return iter(())

    def describe(self) -> str:
        """The type as a user knows it: "TensorDict", "dict"."""
        return self.kind


class TensorNode(Node):
    __slots__ = ("index",)
    kind = "Tensor"

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, parts: Parts) -> Any:
        return parts.tensors[self.index]


class ObjectNode(Node):
    __slots__ = ("index",)
    kind = "object"

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, parts: Parts) -> Any:
        return parts.objects[self.index]


class Kids:
    """The entries of a container. A run of tensors is one slice: 300 of them build in 2 µs instead of 30."""

    __slots__ = ("nodes", "start", "stop")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.start = nodes[0].index if nodes and all(type(node) is TensorNode for node in nodes) else -1  # type: ignore[attr-defined]
        self.stop = self.start + len(nodes)

    def build(self, parts: Parts) -> list[Any]:
        if self.start >= 0:
            return parts.tensors[self.start : self.stop]
        return [node.build(parts) for node in self.nodes]


NODES: dict[str, type[Node]] = {}
_NodeClass = TypeVar("_NodeClass", bound=type[Node])


def register(node: _NodeClass) -> _NodeClass:
    """Class decorator: makes `node.kind` readable."""
    NODES[node.kind] = node
    return node


def node_class(kind: str) -> type[Node]:
    found = NODES.get(kind)
    if found is None:
        # tensordict takes a second to import; values without TensorDicts don't need it
        import memstore.structure.containers.tensordicts  # noqa: F401  # pyright: ignore[reportUnusedImport]

        found = NODES.get(kind)
    if found is None:
        raise MalformedError(f"no container is called {kind!r}")
    return found


class Reader:
    """Reads a tree that may come from a hostile file. Counts leaves and objects, and checks every type on the way."""

    __slots__ = ("depth", "exact", "fixed", "host", "locked", "objects", "tensors")

    def __init__(self) -> None:
        self.exact: set[int] = set()  # leaves that say how others are to be read: out= must have the same
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
        require(len(tree) > 0 and type(tree[0]) is str, "a node that is no [kind, ...]")
        require(self.depth < MAX_DEPTH, f"more than {MAX_DEPTH} levels")
        self.depth += 1
        node = node_class(tree[0]).read(tree[1:], self)
        self.depth -= 1
        return node

    def fixed_tensor(self, tree: Any) -> Node:
        """A tensor whose dtype is a part of what it means."""
        require(tree == TENSOR, "something else where a tensor must be")
        self.fixed.add(self.tensors)
        return self.node(tree)

    def host_tensor(self, tree: Any) -> Node:
        """A fixed tensor that is always on the CPU."""
        self.host.add(self.tensors)
        return self.fixed_tensor(tree)

    def kids(self, trees: Any) -> Kids:
        return Kids([self.node(tree) for tree in as_list(trees)])


def require(condition: bool, complaint: str) -> None:
    """For the shape of what was read. Never an assert: those go away under -O."""
    if not condition:
        raise MalformedError(complaint)


def as_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise MalformedError("something else where an array must be")
    return value


def unpack(payload: list[Any], *types: type | tuple[type, ...]) -> list[Any]:
    """The payload, once it is known to have exactly these types."""
    require(
        len(payload) == len(types)
        and all(
            type(item) in (kind if type(kind) is tuple else (kind,)) for item, kind in zip(payload, types, strict=True)
        ),
        "a node with other fields than its kind has",
    )
    return payload


def sizes(value: Any) -> tuple[int, ...]:
    """A shape: integers from 0 to 2**63 - 1."""
    require(type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value), "no shape")
    return tuple(value)


# -- keys of dicts ---------------------------------------------------------------------------------------------------
# str and int keys stand for themselves. The others are tagged, so that True, 1 and 1.0, which Python holds equal,
# stay three keys, in a description and in the plan cache.

Key = Any


def write_key(key: Any) -> Key:
    """The form of a dict's key in a tree; raises TypeError for a type that has none, UnicodeEncodeError for no text."""
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
        return ("tuple", *map(write_key, key))
    raise TypeError(f"a key of type {kind.__qualname__}")


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
    require(len(key) > 0 and type(key[0]) is str, "no key")
    tag = key[0]
    if tag == "tuple":
        return tuple(map(read_key, key[1:]))
    if tag == "none" and len(key) == 1:
        return None
    kind, convert = _KEY_READERS.get(tag, (None, bytes))
    require(kind is not None and len(key) == 2 and type(key[1]) is kind, "no key")
    require(tag != "int" or len(key[1]) <= 4000, "a key of too many digits")  # Python refuses more than 4300
    try:
        return convert(key[1])
    except (ValueError, struct.error):
        raise MalformedError("no key") from None


def read_keys(keys: Any) -> tuple[Any, ...]:
    found = tuple(map(read_key, as_list(keys)))
    require(len(set(found)) == len(found) or any(key != key for key in found), "a key that stands there twice")
    return found


def name_of(key: Any) -> str | int:
    """What a key is called in a leaf's name, where only str and int are allowed."""
    return key if type(key) in (str, int) and (type(key) is str or -(1 << 63) <= key < 1 << 63) else repr(key)


def walk_names(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """The leaves below `node`, tensors and objects, in order, with their names."""
    if isinstance(node, (TensorNode, ObjectNode)):
        yield prefix, node
        return
    for name, child in node.children():
        yield from walk_names(child, prefix + name)


def named(keys: Sequence[Any], kids: Kids) -> Iterator[tuple[Path, Node]]:
    for key, node in zip(keys, kids.nodes, strict=True):
        yield (name_of(key),), node
