"""Plans of values that nobody puts: their leaves lie contiguous, and in memory that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memstore.engine import Leaf, Span, lay_out
from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError
from memstore.structure.plans import Plan, check_extent, describe, plan_of
from memstore.structure.refusals import RefusedError, render_path
from memstore.structure.tensors import DTYPE_NAMES, PLAIN, traits
from memstore.structure.tree import TensorNode, Tree, compile_tree, leaf_names
from memstore.structure.walk import Walk, take_apart


def plan_dense(value: Any, ahead: Span) -> tuple[Plan, bytes]:
    """Lays out a value of which structure, shapes and dtypes count, behind bytes of somebody else's.

    Returns the plan, and the entries of the safetensors header, with that of `ahead`. Raises UnsupportedValueError.
    """
    tree, leaves = _leaves_of(value)
    spans = [Span(leaf.name, leaf.dtype, _itemsize(leaf), leaf.shape, leaf.nbytes) for leaf in leaves]
    layout = lay_out([ahead, *spans], first=1)
    return _plan(tree, leaves, layout.offsets[1:]), layout.header


def plan_at(value: Any, offsets: Sequence[int]) -> Plan:
    """The plan of a value whose leaves lie at these offsets, in their order."""
    tree, leaves = _leaves_of(value)
    return _plan(tree, leaves, offsets)


def _leaves_of(value: Any) -> tuple[Tree, list[Leaf]]:
    try:
        tree, walk, facts, _ = take_apart(value, lambda careful: Walk(False, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    root, _ = compile_tree(tree)
    names = [name for name, node in leaf_names(root) if isinstance(node, TensorNode)]
    if walk.objects:
        raise UnsupportedValueError("rows are of tensors, and nothing else")
    leaves: list[Leaf] = []
    for name, dtype, shape in zip(names, facts.dtypes, facts.shapes, strict=True):
        try:
            nbytes = check_extent(shape, None, dtype) * dtype.itemsize
        except MalformedError as error:
            raise UnsupportedValueError(f"{render_path(name)}: {error}: shape {list(shape)}") from None
        leaves.append(Leaf(name, DTYPE_NAMES[dtype], tuple(shape), None, 0, nbytes))
    return tree, leaves


def _itemsize(leaf: Leaf) -> int:
    return leaf.nbytes // max(traits.count(leaf.shape), 1) or 1


def _plan(tree: Tree, leaves: Sequence[Leaf], offsets: Sequence[int]) -> Plan:
    placed = [
        Leaf(leaf.name, leaf.dtype, leaf.shape, None, offset, leaf.nbytes)
        for leaf, offset in zip(leaves, offsets, strict=True)
    ]
    return plan_of(describe(tree, placed, [PLAIN] * len(placed), {}, False))
