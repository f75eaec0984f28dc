"""TypedTensorDicts. Imported with tensordicts.

["typed", class, the TensorDict inside]
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TypedTensorDict, is_tensor_collection

from memstore.engine import Path
from memstore.structure.checks import require, unpack
from memstore.structure.objects import class_name, dotted, find_class, short
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import Node, Parts, Reader, Tree, register
from memstore.structure.walk import Flattener, Walk, flattener, rule


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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, tree = unpack(payload, str, list)
        node = cls()
        node.name = name
        above, reader.locked = reader.locked, False  # a lock above doesn't reach what is inside
        node.source = reader.node(tree)
        reader.locked = above
        return node

    def build(self, parts: Parts) -> Any:
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
