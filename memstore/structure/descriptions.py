"""Descriptions of values that no put writes: those in external files, and rows in place; and texts for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import _compat
from memstore._parsing import UNDECODABLE
from memstore.engine import Leaf, Path, Span, lay_out
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import traits
from memstore.structure.classes import shown_attributes
from memstore.structure.objects import encode_objects
from memstore.structure.plans import Plan, check_extent, cluster_leaves, describe, plan_of, storage_range
from memstore.structure.refusals import MalformedError, RefusedError, render_path
from memstore.structure.traits import DTYPE_NAMES, DTYPES, PLAIN, Traits
from memstore.structure.tree import TensorNode, Tree, compile_tree, from_msgpack, leaf_names, name_of
from memstore.structure.walk import Walk, take_apart

# --- Values in external files: their leaves are where those files have them ------------------------------------------


class ExternalValue(NamedTuple):
    plan: Plan
    objects: bytes  # the leaves that are no tensors, encoded


def describe_external_tree(
    tree: Tree,
    leaves: Sequence[Leaf],
    written: Sequence[Any] = (),
    leaf_traits: Sequence[Traits] | None = None,
    same: dict[int, int] | None = None,
) -> ExternalValue:
    """Describes a value by its tree (see tree.py), the places of its tensors, and its objects as they are written.

    Raises CorruptionError for what no value is.
    """
    found = (PLAIN,) * len(leaves) if leaf_traits is None else leaf_traits
    plan = plan_of(describe(tree, leaves, found, same or {}, False))
    return ExternalValue(plan, encode_objects(list(written)))


def raw_objects(data: bytes, count: int) -> list[msgspec.Raw]:
    """Cuts a value's objects apart, and reads none of them. Raises CorruptionError if they aren't `count`."""
    if not data and not count:
        return []
    try:
        found = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except UNDECODABLE as error:
        raise CorruptionError(detail=f"the non-tensor leaves can't be read: {error}") from error
    if len(found) != count:
        raise CorruptionError(detail=f"it has {count} non-tensor leaves, but others are stored")
    return found


def join_external(keys: Sequence[str], values: Sequence[ExternalValue], places: Sequence[int]) -> ExternalValue:
    """Joins values that were described before to a dict of them, with their leaves at other places.

    Raises:
        CorruptionError: as `plan_of`, or the objects of a value aren't those that its structure has.
    """
    trees: list[Tree] = []
    leaves: list[Leaf] = []
    leaf_traits: list[Traits] = []
    same: dict[int, int] = {}
    written: list[Any] = []
    for key, value in zip(keys, values, strict=True):
        plan = value.plan
        trees.append(from_msgpack(plan.description)[0])
        same |= {i + len(leaves): first + len(leaves) for i, first in plan.same.items()}
        leaf_traits += plan.traits
        leaves += plan.leaves
        try:
            written += raw_objects(value.objects, plan.object_count)
        except CorruptionError as error:
            raise CorruptionError(detail=f"the value {key!r:.100}: {error.detail}") from error
    moved = [msgspec.structs.replace(leaf, offset=place) for leaf, place in zip(leaves, places, strict=True)]
    return describe_external_tree(("dict", list(keys), trees), moved, written, leaf_traits, same)


def describe_external_value(
    value: Any, locate: Callable[[Sequence[int]], Sequence[int]], *, allow_pickle: bool
) -> ExternalValue:
    """Describes a value whose tensors lie in mappings of files.

    Args:
        locate: from addresses of tensors to offsets in the files; for those of all tensors at once.
    """
    try:
        tree, walk, facts, addresses = take_apart(value, lambda careful: Walk(allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    if facts.resolve is not None:
        raise UnsupportedValueError(
            "it has a tensor that is stored conjugated or negated, so that its bytes are other values: attach it with "
            "copy=True"
        )
    leaves: list[Leaf] = []
    same: dict[int, int] = {}
    firsts: dict[int, int] = {}
    places = iter(locate([address for address, tensor in zip(addresses, walk.tensors, strict=True) if tensor.numel()]))
    for i, (tensor, dtype, shape, stride) in enumerate(
        zip(walk.tensors, facts.dtypes, facts.shapes, facts.strides, strict=True)
    ):
        reach = traits.reach(shape, stride)
        kept = None if stride == traits.contiguous_stride(shape) else tuple(stride)
        offset = next(places) if reach else 0
        leaves.append(Leaf((), DTYPE_NAMES[dtype], tuple(shape), kept, offset, reach * dtype.itemsize))
        first = firsts.setdefault(id(tensor), i)
        if first != i:
            same[i] = first
    return describe_external_tree(tree, leaves, walk.objects, facts.traits, same)


# --- Values whose leaves lie contiguous, in memory that is there already ---------------------------------------------


def plan_dense(value: Any, ahead: Span) -> tuple[Plan, bytes]:
    """Lays out a value of which structure, shapes and dtypes count, behind bytes of somebody else's.

    Returns the plan, and the entries of the safetensors header, with that of `ahead`. Raises UnsupportedValueError.
    """
    tree, leaves = _leaves_of(value)
    spans = [Span(leaf.name, leaf.dtype, _itemsize(leaf), leaf.shape, leaf.nbytes) for leaf in leaves]
    layout = lay_out([ahead, *spans], first=1)
    return _plan(tree, leaves, layout.offsets[1:]), layout.header


def plan_at(value: Any, offsets: Sequence[int]) -> Plan:
    """Makes the plan of a value whose leaves lie at these offsets, in their order."""
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


# --- A stored value, described for people; the tensors of a value, by name -------------------------------------------


def leaf_table(plan: Plan) -> list[tuple[Path, torch.dtype, tuple[int, ...], int]]:
    """Lists name, dtype, shape and bytes of each tensor. A nested tensor is several: values, offsets, lengths."""
    return [(leaf.name, DTYPES[leaf.dtype], leaf.shape, leaf.nbytes) for leaf in plan.leaves]


def stored_bytes(plan: Plan) -> int:
    """Bytes of the tensors; shared bytes are counted once."""
    ranges = [storage_range(plan.leaves, cluster) for cluster in cluster_leaves(plan.leaves, plan.same)]
    return sum(stop - start for start, stop in ranges)


def structure_text(plan: Plan) -> str:
    """Describes a structure: "TensorDict[3] of 12 leaves", "dict of 300 leaves and 2 objects", "Tensor"."""
    name = plan.root.title
    tensors, others = len(plan.leaves), plan.object_count
    if not any(True for _ in plan.root.children()):
        return name if tensors or others else f"empty {name}"
    text = f"{name} of {tensors} {'leaf' if tensors == 1 else 'leaves'}"
    return f"{text} and {others} {'object' if others == 1 else 'objects'}" if others else text


def iter_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Iterates over the tensors of a value, with their names. Nested and unbatched tensors are given whole."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple, deque)):
        for i, entry in enumerate(value):
            yield from iter_tensors(entry, (*path, i))
    elif hasattr(value, "tensordicts"):
        yield from iter_tensors(value.tensordicts, path)  # a lazy stack
    elif _compat.inner_tensordict(value) is not None and not isinstance(value, Mapping):
        yield from iter_tensors(_compat.inner_tensordict(value), path)  # a tensorclass
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from iter_tensors(entry, (*path, name_of(key)))
    else:
        for name, entry in (shown_attributes(value) or {}).items():
            yield from iter_tensors(entry, (*path, name))
