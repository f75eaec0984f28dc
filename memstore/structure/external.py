"""Values that lie in external files: descriptions whose leaves are where those files have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from memstore.engine import Leaf
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.objects import encode_objects
from memstore.structure.plans import Plan, describe, plan_of
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import DTYPE_NAMES, PLAIN, Traits, traits
from memstore.structure.tree import Tree, from_msgpack
from memstore.structure.walk import Walk, take_apart
from memstore.undecodable import UNDECODABLE


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
    """Describes a value by its tree (see tree/node.py), the places of its tensors, and its objects as they are written.

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
    """A dict of values that were described before, with their leaves at other places.

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
