"""The plan of a structure that was not seen before: its leaves laid out, its description, and what is copied where."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memstore.engine import ALIGNMENT, Leaf, Path, lay_out
from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError
from memstore.structure.plans import Plan, check_extent, describe, plan_of, spans_of, storage_range
from memstore.structure.put.fill import Copies, GatheredCopy, PlainCopy
from memstore.structure.refusals import render_path
from memstore.structure.tensors import DTYPE_NAMES, PLAIN, Group, Ties, traits
from memstore.structure.tree import TensorNode, Tree, compile_tree, leaf_names, walk_names
from memstore.structure.walk import Facts


def make_plan(tree: Tree, facts: Facts, found: Ties, inline_limit: int) -> tuple[Plan, Copies]:
    root, _ = compile_tree(tree)
    try:
        names = [name for name, leaf in leaf_names(root) if isinstance(leaf, TensorNode)]
    except MalformedError as error:
        raise UnsupportedValueError(f"value: {error}") from None
    same = dict(found.same)
    leaves, gathers = _provisional_leaves(names, facts, found)
    _check_extents(tree, leaves)
    spans = spans_of(leaves, same)
    layout = lay_out([span for span, _ in spans], aligned=False)
    inline = layout.nbytes <= inline_limit
    if not inline:
        layout = lay_out([span for span, _ in spans])
    for (_, members), offset in zip(spans, layout.offsets, strict=True):
        start = storage_range(leaves, members)[0]
        for i in members:
            leaves[i] = msgspec.structs.replace(leaves[i], offset=offset + leaves[i].offset - start)
    leaf_traits = facts.traits or (PLAIN,) * len(leaves)
    plan = plan_of(describe(tree, leaves, leaf_traits, same, inline))
    on_cpu = [trait.device is None for trait in leaf_traits]
    return plan, Copies(
        _plain_copies(leaves, gathers, found), _gathered_copies(leaves, gathers, facts), len(leaves), on_cpu
    )


def _check_extents(tree: Tree, leaves: Sequence[Leaf]) -> None:
    for i, leaf in enumerate(leaves):
        try:
            check_extent(leaf.shape, leaf.stride, traits.DTYPES[leaf.dtype])
        except MalformedError as error:
            raise unsupported(tree, i, f"{error}: shape {list(leaf.shape)}, strides {leaf.stride}") from None


def unsupported(tree: Tree, leaf: int, reason: str) -> UnsupportedValueError:
    names = [name for name, node in walk_names(compile_tree(tree)[0]) if isinstance(node, TensorNode)]
    return UnsupportedValueError(f"{render_path(names[leaf])}: {reason}")


def _provisional_leaves(names: Sequence[Path], facts: Facts, found: Ties) -> tuple[list[Leaf], set[int]]:
    """The leaves with provisional offsets, which only say which of them are tied; and those that are to be gathered."""
    places: dict[int, tuple[int, Group | None]] = {}
    end = 0
    for group in found.groups:
        places |= {i: (end + offset, group) for i, offset in group.members}
        end += -(-group.nbytes // ALIGNMENT) * ALIGNMENT
    leaves: list[Leaf] = []
    gathers: set[int] = set()
    for i, (name, dtype, shape, stride) in enumerate(
        zip(names, facts.dtypes, facts.shapes, facts.strides, strict=True)
    ):
        numel, reach = traits.count(shape), traits.reach(shape, stride)
        offset, group = places.get(i, (end, None))
        resolve = facts.resolve is not None and facts.resolve[i]
        if resolve or (reach > numel if group is None else group.packed):
            gathers.add(i)
            stored, reach = None, numel
        else:
            stored = None if stride == traits.contiguous_stride(shape) else tuple(stride)
        nbytes = reach * dtype.itemsize
        leaves.append(Leaf(name, DTYPE_NAMES[dtype], tuple(shape), stored, offset, nbytes))
        if group is None:
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for i, first in found.same:
        leaves[i] = msgspec.structs.replace(leaves[first], name=names[i])
    return leaves, gathers


def _plain_copies(leaves: Sequence[Leaf], gathers: set[int], found: Ties) -> list[PlainCopy]:
    skipped = gathers | {i for i, _ in found.same}
    for group in found.groups:
        # of tied leaves, those whose bytes another one brings
        end = -1
        for i, _ in sorted(group.members, key=lambda member: (member[1], -leaves[member[0]].nbytes)):
            if leaves[i].offset + leaves[i].nbytes <= end:
                skipped.add(i)
            end = max(end, leaves[i].offset + leaves[i].nbytes)
    return [PlainCopy(i, leaf.offset, leaf.nbytes) for i, leaf in enumerate(leaves) if leaf.nbytes and i not in skipped]


def _gathered_copies(leaves: Sequence[Leaf], gathers: set[int], facts: Facts) -> list[GatheredCopy]:
    resolve = facts.resolve or (False,) * len(leaves)
    chosen = {leaves[i].offset: i for i in sorted(gathers, reverse=True) if leaves[i].nbytes}
    return [GatheredCopy(i, offset, resolve[i]) for offset, i in chosen.items()]
