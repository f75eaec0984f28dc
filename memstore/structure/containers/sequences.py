"""Sequences beside list and tuple: namedtuples, what torch's functions return, deques.

["namedtuple", class, entries]        ["structseq", class of torch.return_types, entries]
["deque", maxlen or nil, entries]

An object of a subclass of a namedtuple (a PackedSequence) may have nothing but its entries.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from types import NoneType
from typing import Any

from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.structure.checks import require, unpack
from memstore.structure.objects import class_name, defines, dotted, find_class, short
from memstore.structure.refusals import RefusedError
from memstore.structure.tree import Entries, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Flattener, Walk, flattens, rule

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
        if walk.allow_pickle:
            return walk.object(value)
        raise RefusedError(f"a {dotted(name)} that has attributes beside its fields; put tuple(...) of it")
    return ("namedtuple", name, walk.entries(value, type(value)._fields, value))


@register
class NamedTupleNode(Node):
    __slots__ = ("entries", "name")
    kind = "namedtuple"

    def __init__(self, name: str, entries: Entries) -> None:
        self.name = name
        self.entries = entries

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, trees = unpack(payload, str, list)
        return cls(name, reader.entries(trees))

    def build(self, parts: Parts) -> Any:
        kind = find_class(self.name, _is_namedtuple, "a namedtuple")
        self.check_fields(len(kind._fields))
        return tuple.__new__(kind, self.entries.build(parts))

    def check_fields(self, count: int) -> None:
        if count != len(self.entries.nodes):
            raise UnsupportedValueError(f"the class {self.name} has other fields here than in the stored value")

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.numbered()

    def describe(self) -> str:
        return short(self.name)


# -- what torch's functions return -----------------------------------------------------------------------------------


def _is_structseq(kind: type) -> bool:
    return kind.__module__ == "torch.return_types" and kind.__bases__ == (tuple,) and hasattr(kind, "n_sequence_fields")


@rule
def _structseq_rule(kind: type) -> Flattener | None:
    return _flatten_structseq if _is_structseq(kind) else None


def _flatten_structseq(value: Any, walk: Walk) -> Tree:
    return ("structseq", class_name(type(value)), walk.entries(value, range(len(value)), value))


@register
class StructSeqNode(NamedTupleNode):
    __slots__ = ()
    kind = "structseq"

    def build(self, parts: Parts) -> Any:
        kind = find_class(self.name, _is_structseq, "one of torch.return_types")
        self.check_fields(kind.n_sequence_fields)
        return kind(self.entries.build(parts))


# -- deques ----------------------------------------------------------------------------------------------------------


@flattens(deque)
def _flatten_deque(value: deque[Any], walk: Walk) -> Tree:
    trees = walk.entries(value, range(len(value)), value)
    return walk.joined(("deque", value.maxlen, trees), trees)


@register
class DequeNode(Node):
    __slots__ = ("entries", "maxlen")
    kind = "deque"
    may_be_object = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        maxlen, trees = unpack(payload, (NoneType, int), list)
        require(maxlen is None or len(trees) <= maxlen < 1 << 63, "a malformed length of a deque")
        node = cls()
        node.maxlen = maxlen
        node.entries = reader.entries(trees)
        return node

    def build(self, parts: Parts) -> Any:
        return deque(self.entries.build(parts), self.maxlen)

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.numbered()
