"""The plan of a structure that was not seen before: its leaves laid out, its description, and what is copied where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from memstore.engine import ALIGNMENT, Leaf, Path, lay_out
from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError
from memstore.structure.plans import Plan, check_extent, describe, plan_of, spans_of, storage_range
from memstore.structure.put.fill import ONE_CORE, CastCopy, Copies, GatheredCopy, PlainCopy
from memstore.structure.refusals import render_path
from memstore.structure.tensors import DTYPE_NAMES, DTYPES, PLAIN, Group, Packing, Ties, has_gaps, pack, traits
from memstore.structure.tree import TensorNode, Tree, compile_tree, leaf_names, walk_names
from memstore.structure.walk import Facts


def make_plan(
    tree: Tree, facts: Facts, stored: Sequence[torch.dtype], found: Ties, inline_limit: int
) -> tuple[Plan, Copies]:
    """Args: stored: the dtypes that the leaves are stored as; see cast.py."""
    root, _ = compile_tree(tree)
    try:
        names = [name for name, leaf in leaf_names(root) if isinstance(leaf, TensorNode)]
    except MalformedError as error:
        raise UnsupportedValueError(f"value: {error}") from None
    same = dict(found.same)
    leaves, packings = _provisional_leaves(names, facts, stored, found)
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
    return plan, _copies(leaves, packings, facts, found, on_cpu)


def _check_extents(tree: Tree, leaves: Sequence[Leaf]) -> None:
    for i, leaf in enumerate(leaves):
        try:
            check_extent(leaf.shape, leaf.stride, DTYPES[leaf.dtype])
        except MalformedError as error:
            raise unsupported(tree, i, f"{error}: shape {list(leaf.shape)}, strides {leaf.stride}") from None


def unsupported(tree: Tree, leaf: int, reason: str) -> UnsupportedValueError:
    names = [name for name, node in walk_names(compile_tree(tree)[0]) if isinstance(node, TensorNode)]
    return UnsupportedValueError(f"{render_path(names[leaf])}: {reason}")


def _provisional_leaves(
    names: Sequence[Path], facts: Facts, stored: Sequence[torch.dtype], found: Ties
) -> tuple[list[Leaf], dict[int, Packing]]:
    """The leaves with provisional offsets, which only say which of them are tied; and those that are to be packed."""
    places: dict[int, tuple[int, Group | None]] = {}
    end = 0
    for group in found.groups:
        first = group.members[0][0]
        was, now = facts.dtypes[first].itemsize, stored[first].itemsize  # one is cast: then all are, from one dtype
        places |= {i: (end + offset * now // was, group) for i, offset in group.members}
        end += -(-group.nbytes * now // was // ALIGNMENT) * ALIGNMENT
    leaves: list[Leaf] = []
    packings: dict[int, Packing] = {}
    for i, (name, dtype, shape, stride) in enumerate(zip(names, stored, facts.shapes, facts.strides, strict=True)):
        reach = traits.reach(shape, stride)
        offset, group = places.get(i, (end, None))
        resolve = facts.resolve is not None and facts.resolve[i]
        if reach and (resolve or (has_gaps(shape, stride) if group is None else group.packed)):
            packings[i] = packing = pack(shape, stride)
            stride, reach = packing.kept, packing.elements
        kept = None if stride == traits.contiguous_stride(shape) else tuple(stride)
        nbytes = reach * dtype.itemsize
        leaves.append(Leaf(name, DTYPE_NAMES[dtype], tuple(shape), kept, offset, nbytes))
        if group is None:
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for i, first in found.same:
        leaves[i] = msgspec.structs.replace(leaves[first], name=names[i])
    return leaves, packings


def _copies(
    leaves: Sequence[Leaf], packings: Mapping[int, Packing], facts: Facts, found: Ties, on_cpu: Sequence[bool]
) -> Copies:
    resolve = facts.resolve or (False,) * len(leaves)
    is_cast = [DTYPES[leaf.dtype] is not dtype for leaf, dtype in zip(leaves, facts.dtypes, strict=True)]
    plain, gathered = _plain_leaves(leaves, packings, found), _packed_leaves(leaves, packings)
    return Copies(
        [PlainCopy(i, leaves[i].offset, leaves[i].nbytes) for i in plain if not is_cast[i]],
        [GatheredCopy(i, leaves[i].offset, resolve[i], packings[i]) for i in gathered if not is_cast[i]],
        [_cast_copy(i, leaves[i], packings.get(i)) for i in (*plain, *gathered) if is_cast[i]],
        on_cpu,
    )


def _plain_leaves(leaves: Sequence[Leaf], packings: Mapping[int, Packing], found: Ties) -> list[int]:
    skipped = packings.keys() | {i for i, _ in found.same}
    for group in found.groups:
        # of tied leaves, those whose bytes another one brings
        end = -1
        for i, _ in sorted(group.members, key=lambda member: (member[1], -leaves[member[0]].nbytes)):
            if leaves[i].offset + leaves[i].nbytes <= end:
                skipped.add(i)
            end = max(end, leaves[i].offset + leaves[i].nbytes)
    return [i for i, leaf in enumerate(leaves) if leaf.nbytes and i not in skipped]


def _packed_leaves(leaves: Sequence[Leaf], packings: Mapping[int, Packing]) -> list[int]:
    return list({leaves[i].offset: i for i in sorted(packings, reverse=True)}.values())


def _cast_copy(i: int, leaf: Leaf, packing: Packing | None) -> CastCopy:
    dtype = DTYPES[leaf.dtype]
    place, reach = leaf.offset // dtype.itemsize, leaf.nbytes // dtype.itemsize
    if packing is not None:
        return CastCopy(i, dtype, place, packing.shape, traits.contiguous_stride(packing.shape), packing.stride)
    if leaf.stride is None and reach <= ONE_CORE:
        return CastCopy(i, dtype, place, leaf.shape, traits.contiguous_stride(leaf.shape), None)
    # all that lies in its reach, as for a plain copy: it may be expanded, or bring the bytes of leaves in its gaps
    return CastCopy(i, dtype, place, (reach,), (1,), (1,))
