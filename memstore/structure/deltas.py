"""Deltas of values: which leaves of a value have the bytes that an earlier value has, and the plan of both together.

`compare_leaves` takes a flattened value apart into leaves that lie in the data section of the earlier one, and the
others, which are flattened anew. `place` gives the plan of the whole value once it is known where the others lie.
`gathered` gives the plan of a delta as a plain put of the same value has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from memstore.engine import Leaf, lay_out
from memstore.structure.flattening import FlatValue, flatten
from memstore.structure.plans import Plan, cluster_leaves, describe, plan_of, spans_of
from memstore.structure.traits import DTYPES
from memstore.structure.tree import from_msgpack

_Leaves = tuple[Leaf, ...]


class DeltaLeaves(NamedTuple):
    """The leaves of a value, beside an earlier one.

    Attributes:
        flat: the value.
        kept: by leaf, the leaf of the earlier value whose bytes it has.
        changed: the numbers of the other leaves, in the order of `part`. What is the very same tensor as an earlier
            leaf is in neither.
        part: the other leaves, flattened.
    """

    flat: FlatValue
    kept: dict[int, int]
    changed: list[int]
    part: FlatValue

    def place(self, earlier: _Leaves, ahead: int, start: int) -> Plan:
        """Returns the plan of the whole value.

        Args:
            earlier: the leaves of the earlier value.
            ahead: how many addresses lie before its data section.
            start: the address of the data section of `part`.
        """
        plan = self.flat.plan
        places = {i: earlier[j].offset + ahead for i, j in self.kept.items()}
        parts = zip(self.changed, self.part.plan.leaves, strict=True)
        places |= {i: leaf.offset + start for i, leaf in parts}
        places |= {i: places[first] for i, first in plan.same.items()}
        leaves = [msgspec.structs.replace(leaf, offset=places[i]) for i, leaf in enumerate(plan.leaves)]
        tree = from_msgpack(plan.description)[0]
        return plan_of(describe(tree, leaves, plan.traits, plan.same, False))


def compare_leaves(flat: FlatValue, earlier: Plan, is_same: Callable[[torch.Tensor, Leaf], bool]) -> DeltaLeaves | None:
    """Finds the leaves of a value that an earlier one has. Returns None where the value has tensors that share bytes.

    Args:
        is_same: compares a tensor's bytes with those of a leaf of the earlier value.
    """
    plan = flat.plan
    if any(len(cluster) > 1 for cluster in cluster_leaves(plan.leaves, plan.same)):
        return None
    known = {leaf.name: i for i, leaf in enumerate(earlier.leaves)}
    kept: dict[int, int] = {}
    changed: dict[str, torch.Tensor] = {}
    numbers: list[int] = []
    for i, (leaf, tensor) in enumerate(zip(plan.leaves, flat.tensors, strict=True)):
        if i in plan.same:
            continue
        j = known.get(leaf.name)
        may_be_same = j is not None and _is_alike(leaf, earlier.leaves[j]) and _is_plain(leaf, tensor)
        if j is not None and may_be_same and is_same(tensor, earlier.leaves[j]):
            kept[i] = j
            continue
        name = ".".join(map(str, leaf.name)) or "value"
        while name in changed:
            name += "'"
        changed[name] = tensor
        numbers.append(i)
    part = flatten(changed, inline_limit=0)
    for i, leaf in zip(numbers, part.plan.leaves, strict=True):
        if not _is_alike(plan.leaves[i], leaf):
            return None  # it is stored in another way within its container
    return DeltaLeaves(flat, kept, numbers, part)


def gathered(plan: Plan) -> Plan:
    """Returns the plan of a value whose leaves lie one behind the other, in one data section. None of them are tied."""
    spans = spans_of(plan.leaves, plan.same)
    offsets = lay_out([span for span, _ in spans]).offsets
    places = {i: offset for (_, (i,)), offset in zip(spans, offsets, strict=True)}
    places |= {i: places[first] for i, first in plan.same.items()}
    leaves = [msgspec.structs.replace(leaf, offset=places[i]) for i, leaf in enumerate(plan.leaves)]
    return plan_of(describe(from_msgpack(plan.description)[0], leaves, plan.traits, plan.same, False))


def _is_alike(one: Leaf, other: Leaf) -> bool:
    return (one.dtype, one.shape, one.stride, one.nbytes) == (other.dtype, other.shape, other.stride, other.nbytes)


def _is_plain(leaf: Leaf, tensor: torch.Tensor) -> bool:
    """Returns whether the bytes of a leaf are those that its tensor has in memory."""
    return (
        leaf.nbytes > 0
        and leaf.stride is None
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype is DTYPES[leaf.dtype]
        and tuple(tensor.shape) == leaf.shape
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
