"""The plan of a structure: where its leaves lie, and how they become the value again. Made once, cached, shared.

description.py makes plans of descriptions, and keeps them. What only puts, gets or views need is made by the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memstore.engine import Leaf, Path, lay_out
from memstore.structure.plans.clusters import spans_of
from memstore.structure.plans.recipe import Recipe
from memstore.structure.tensors import PLAIN, Traits
from memstore.structure.tree import Node, TensorNode

Memory = np.ndarray[Any, np.dtype[np.uint8]]  # a data section, or as much of one as a plan needs


class Plan:
    """How a value of one structure is laid out in memory and built from it. Immutable.

    Attributes:
        description: the bytes from which `plan_of` makes this plan.
        leaves: the tensors, in the order of the walk.
        traits: kind, requires_grad and device of each leaf.
        marked: whether any leaf has traits.
        same: {leaf: the earlier leaf that is the very same tensor}.
        nbytes: size of the data section.
        inline: whether the value is meant to live in its record.
        root: the compiled tree.
        fixed, host: leaves that keep their dtype, or stay on the CPU, whatever a get's dtype= or device= says.
        object_count: how many leaves are no tensors.
    """

    __slots__ = (
        "_header",
        "_loaded",
        "bare",
        "description",
        "fixed",
        "host",
        "inline",
        "leaves",
        "marked",
        "nbytes",
        "object_count",
        "object_names",
        "recipe",
        "root",
        "same",
        "traits",
    )

    def __init__(
        self,
        description: bytes,
        root: Node,
        leaves: tuple[Leaf, ...],
        leaf_traits: tuple[Traits, ...],
        same: dict[int, int],
        inline: bool,
        object_names: tuple[Path, ...],
        fixed: frozenset[int],
        host: frozenset[int],
    ) -> None:
        self.description = description
        self.root = root
        self.leaves = leaves
        self.traits = leaf_traits
        self.same = same
        self.marked = any(found is not PLAIN for found in leaf_traits)
        self.inline = inline
        self.object_names = object_names
        self.fixed = fixed
        self.host = host
        self.object_count = len(object_names)
        self.nbytes = max((leaf.offset + leaf.nbytes for leaf in leaves), default=0)
        self._loaded: frozenset[int] | None = None
        self._header: bytes | None = None
        # These two are made by the first get; see get/storage.py.
        self.recipe: Recipe | None = None
        self.bare: tuple[np.dtype[Any], tuple[int, ...]] | tuple[()] | None = None

    @property
    def header(self) -> bytes:
        """The entries of the safetensors header. Only puts need them."""
        if self._header is None:
            spans = [span for span, _ in spans_of(self.leaves, self.same)]
            self._header = lay_out(spans, aligned=not self.inline).header
        return self._header

    @property
    def loaded(self) -> frozenset[int]:
        """Leaves that a view has as plain tensors. Only views need them."""
        if self._loaded is None:
            self._loaded = frozenset(_leaves_looked_into(self.root, False))
        return self._loaded

    def __repr__(self) -> str:
        return f"Plan({len(self.leaves)} leaves, {self.nbytes} bytes)"


def _leaves_looked_into(node: Node, inside: bool) -> Iterator[int]:
    if isinstance(node, TensorNode):
        if inside:
            yield node.index
        return
    for _, child in node.children():
        yield from _leaves_looked_into(child, inside or node.reads_leaves)
