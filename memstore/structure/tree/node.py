"""The tree of a value, and what it is compiled to: nodes that build the containers again.

    tree := 0                a tensor: the next of the plan's leaves
          | 1                a non-tensor leaf: the next of the objects
          | [kind, ...]      a container; the module that registers the kind says what follows

The leaves are numbered in the order of one walk, containers before their entries, so that no index is stored. While a
value is flattened the tree is made of tuples, and is the key of the cache of plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch

from memstore.engine import Path
from memstore.structure.checks import MalformedError, as_list, require
from memstore.structure.tree.dict_keys import name_of
from memstore.structure.tree.late_containers import load_late_containers

Tree = Any  # see the grammar above
TENSOR, OBJECT = 0, 1
MAX_DEPTH = 200  # levels of containers in a value
MAX_NAME_PARTS = 1 << 25  # of the names of all leaves: each repeats the keys of the containers above


class Parts:
    """What nodes build from: the leaves, in order, and the device that the caller asked for."""

    __slots__ = ("device", "objects", "tensors")

    def __init__(self, tensors: list[torch.Tensor], objects: list[Any], device: torch.device | None) -> None:
        self.tensors = tensors
        self.objects = objects
        self.device = device


class Node:
    """One container or leaf. Immutable: plans are cached and shared by threads."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    reads_leaves: ClassVar[bool] = False  # `build` needs the contents of the tensors below: a view has them loaded
    may_be_object: ClassVar[bool] = False  # without a tensor below it is one object: see objects/writing.py

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        """Makes the node from what follows the kind in the tree; raises MalformedError."""
        raise NotImplementedError

    def build(self, parts: Parts) -> Any:
        raise NotImplementedError

    def children(self) -> Iterator[tuple[Path, Node]]:
        """The nodes below, each with what it adds to the names of its leaves (a wrapper's: nothing)."""
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


class Entries:
    """The nodes of a container's entries. If all are tensors, they are one slice: 300 build in 2 µs instead of 30."""

    __slots__ = ("nodes", "start", "stop")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.start = nodes[0].index if nodes and all(type(node) is TensorNode for node in nodes) else -1  # type: ignore[attr-defined]
        self.stop = self.start + len(nodes)

    def build(self, parts: Parts) -> list[Any]:
        if self.start >= 0:
            return parts.tensors[self.start : self.stop]
        return [node.build(parts) for node in self.nodes]

    def named(self, keys: Iterable[Any]) -> Iterator[tuple[Path, Node]]:
        """The nodes, each with what its key adds to a leaf's name."""
        for key, node in zip(keys, self.nodes, strict=True):
            yield (name_of(key),), node

    def numbered(self) -> Iterator[tuple[Path, Node]]:
        return self.named(range(len(self.nodes)))


NODES: dict[str, type[Node]] = {}
_NodeClass = TypeVar("_NodeClass", bound=type[Node])


def register(node: _NodeClass) -> _NodeClass:
    """Class decorator: makes `node.kind` readable."""
    NODES[node.kind] = node
    return node


def node_class(kind: str) -> type[Node]:
    found = NODES.get(kind)
    if found is None:
        load_late_containers()
        found = NODES.get(kind)
    if found is None:
        raise MalformedError(f"no container is called {kind!r}")
    return found


class Reader:
    """Reads a tree, which may come from a hostile file: counts tensors and objects, and checks every type."""

    __slots__ = ("depth", "exact", "fixed", "host", "locked", "objects", "tensors")

    def __init__(self) -> None:
        self.exact: set[int] = (
            set()
        )  # leaves that say how others are read: in out= their contents must be equal already
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
        node = node_class(tree[0]).read(tree[1:], self)
        self.depth -= 1
        return node

    def fixed_tensor(self, tree: Any) -> Node:
        """A tensor whose dtype is a part of what it means."""
        require(tree == TENSOR, "a tensor is expected, but something else is there")
        self.fixed.add(self.tensors)
        return self.node(tree)

    def host_tensor(self, tree: Any) -> Node:
        """A fixed tensor that is always on the CPU."""
        self.host.add(self.tensors)
        return self.fixed_tensor(tree)

    def entries(self, trees: Any) -> Entries:
        return Entries([self.node(tree) for tree in as_list(trees)])

    def lockable_entries(self, locked: bool, trees: Any) -> tuple[Entries, bool]:
        """The entries of a TensorDict, and whether it has to lock itself: one above that is locked does it."""
        above = self.locked
        self.locked = above or locked
        entries = Entries(
            [self.node(tree) for tree in as_list(trees)]
        )  # not self.entries: a level of Python's stack less
        self.locked = above
        return entries, locked and not above


def walk_names(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """The leaves below `node`, tensors and objects, in order, with their names."""
    if isinstance(node, (TensorNode, ObjectNode)):
        yield prefix, node
        return
    for name, child in node.children():
        yield from walk_names(child, prefix + name)


def leaf_names(root: Node) -> Iterator[tuple[Path, Node]]:
    """As `walk_names`, for all leaves of a value. Raises MalformedError where the names would fill the memory."""
    parts = 0
    for name, node in walk_names(root):
        parts += len(name)
        require(parts <= MAX_NAME_PARTS, "too many leaves on too many levels: their names would fill the memory")
        yield name, node
