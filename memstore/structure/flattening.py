"""Flattening: a value becomes a plan, its tensors and its objects. A plan that was made before comes from a cache.

    1. `take_apart` (walk.py) walks the value, and takes the facts of all tensors
    2. `_Structure`: (tree, facts, what is cast) is the cache's key; tied tensors, found by their addresses, choose
       among the plans of one key
    3. check that the storages still have the bytes of all tensors
    4. `make_plan`, only if it is new: lay the leaves out and write the description

Steps 1 to 3 take 0.8 µs a leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from memstore import _modes as modes
from memstore._compat import BUFFER_MARK
from memstore._wording import an
from memstore.engine import ALIGNMENT, Leaf, Path, lay_out
from memstore.errors import UnsupportedValueError
from memstore.structure import ties, traits
from memstore.structure.copying import ONE_CORE, CastCopy, CopyPlan, GatheredCopy, PlainCopy, bytes_at, copy_tensors
from memstore.structure.objects import encode_objects
from memstore.structure.plans import Plan, check_extent, describe, plan_of, spans_of, storage_range
from memstore.structure.refusals import MalformedError, RefusedError, render_path
from memstore.structure.tensor_memory import FREED, Memory
from memstore.structure.ties import NO_TIES, Footprints, Group, Locations, Ties, locate_tensors
from memstore.structure.traits import DTYPE_NAMES, DTYPES, PLAIN, Packing, has_gaps, pack
from memstore.structure.tree import TensorNode, Tree, compile_tree, leaf_names, walk_names
from memstore.structure.walk import Facts, Walk, take_apart

# --- Flattening ------------------------------------------------------------------------------------------------------


_CACHED_PLANS = 256
_CACHED_LEAVES = 1 << 18  # of all these plans


class FlatValue:
    """A value taken apart: its plan, its tensors (no copies), its other leaves as msgpack, and what to copy where."""

    __slots__ = ("copies", "objects", "plan", "tensors")

    def __init__(self, plan: Plan, tensors: list[torch.Tensor], encoded: bytes, copies: CopyPlan) -> None:
        self.plan = plan
        self.tensors = tensors
        self.objects = encoded
        self.copies = copies


def contents(flat: FlatValue) -> bytes:
    """Returns what `fill` would write, for values of a few bytes."""
    nbytes = flat.plan.nbytes
    if flat.copies.alone == nbytes > 0:
        return bytes_at(flat.tensors[0].data_ptr(), nbytes)
    memory = np.zeros(nbytes, np.uint8)
    fill(flat, memory)
    return memory.tobytes()


def fill(flat: FlatValue, memory: Memory) -> None:
    """Copies every leaf to its place in `memory`, a writable array of `flat.plan.nbytes` bytes. Pads are left alone."""
    if memory.nbytes < flat.plan.nbytes:
        raise ValueError(f"{flat.plan.nbytes} bytes don't fit into {memory.nbytes}")
    copy_tensors(flat.copies, flat.tensors, memory)


class _Structure:
    """The cache's entry of a tree and its facts: how far its tensors reach, and a plan for each way to be tied.

    Attributes:
        stored: the dtypes that its tensors are stored as.
        kinds: the dtype that each is cast from; None: it is stored as it is.
        apart: where the tensors of the last value lay, if it was whole and had none that overlap.
    """

    __slots__ = ("apart", "footprints", "kinds", "plans", "stored")

    def __init__(self, tree: Tree, facts: Facts, dtype: torch.dtype | None, below: Path) -> None:
        self.stored = stored_dtypes(tree, facts, dtype, below)
        self.kinds = [None if has is had else had for had, has in zip(facts.dtypes, self.stored, strict=True)]
        self.footprints = Footprints(facts.dtypes, facts.shapes, facts.strides)
        self.apart: Locations | None = None
        self.plans: dict[Ties, tuple[Plan, CopyPlan]] = {}


_structures: dict[Any, _Structure] = {}
_cached_plans = 0
_cached_leaves = 0


def flatten(
    value: Any,
    *,
    allow_pickle: bool = False,
    inline_limit: int = 1536,
    dtype: torch.dtype | None = None,
    below: Path = (),
) -> FlatValue:
    """Takes a value apart, copying no tensor.

    Args:
        value: tensors, or containers of them; see docs for what can be stored.
        allow_pickle: store other objects with pickle.
        inline_limit: values up to so many bytes are laid out for living in the record.
        dtype: what floating leaves are cast to when they are copied; None: each is stored as it is.
        below: only leaves whose names start so are cast.

    Raises:
        UnsupportedValueError: something in it can't be stored; the message names the leaf.
        TypeError: `dtype` is no real floating dtype.
    """
    if dtype is not None:
        check_dtype(dtype)
    if type(value) is torch.Tensor:
        known = _flatten_bare(value, inline_limit, dtype)
        if known is not None:
            return known
    try:
        tree, walk, facts, addresses = take_apart(value, lambda careful: Walk(allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    tensors = walk.tensors
    key = (tree, facts, inline_limit, dtype, below)
    structure = _structures.get(key) or _Structure(tree, facts, dtype, below)
    footprints, locations = structure.footprints, locate_tensors(tensors, addresses)
    found = NO_TIES
    if locations != structure.apart:  # after an optimizer's step all tensors lie where they lay at the last put
        missing = footprints.missing(locations)
        if missing:
            raise unsupported(
                tree,
                missing[0],
                FREED,
            )
        overlapping = ties.overlapping(addresses, footprints.spans)
        if overlapping:
            alone = facts.resolve or (False,) * len(tensors)
            found = ties.find_ties(tensors, addresses, footprints, alone, overlapping, structure.kinds)
        structure.apart = None if overlapping else locations
    planned = structure.plans.get(found)
    if planned is None:
        planned = make_plan(tree, facts, structure.stored, found, inline_limit)
        _remember(key, structure, found, planned)
    plan, copies = planned
    flat = FlatValue(plan, tensors, encode_objects(walk.objects), copies)
    if type(value) is torch.Tensor and len(tensors) == 1 and tensors[0] is value:
        _remember_bare(flat, facts, footprints, inline_limit, dtype)
    return flat


_bare: dict[Any, tuple[Plan, CopyPlan, int]] = {}  # of bare, plain tensors: plan, copies, bytes that they reach over


def _flatten_bare(tensor: torch.Tensor, inline_limit: int, dtype: torch.dtype | None) -> FlatValue | None:
    """Flattens a plain tensor like one that was put before, in 2 µs instead of 5. None if more must be looked at."""
    try:
        found = _bare.get((tensor.dtype, tensor.shape, tensor.stride(), inline_limit, dtype))
        if (
            found is None
            or not tensor.is_cpu
            or tensor.requires_grad
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor.untyped_storage().nbytes() < found[2] + (start := tensor.storage_offset() * tensor.itemsize)
            or tensor.data_ptr() <= start  # a storage without memory has the address 0, to which torch adds the offset
            or hasattr(tensor, BUFFER_MARK)
        ):
            return None
    except (RuntimeError, NotImplementedError):  # no plain memory
        return None
    return FlatValue(found[0], [tensor], b"", found[1])


def _remember_bare(
    flat: FlatValue, facts: Facts, footprints: Footprints, inline_limit: int, dtype: torch.dtype | None
) -> None:
    nbytes = int(footprints.spans[0])
    if facts.traits is None and facts.resolve is None and nbytes:
        if len(_bare) >= _CACHED_PLANS:
            _bare.clear()
        key = (facts.dtypes[0], facts.shapes[0], facts.strides[0], inline_limit, dtype)
        _bare[key] = (flat.plan, flat.copies, nbytes)


def _remember(key: Any, structure: _Structure, found: Ties, planned: tuple[Plan, CopyPlan]) -> None:
    global _cached_plans, _cached_leaves
    # Threads may be here at once: the counts can drift by a plan, which the clear puts right.
    if _cached_plans >= _CACHED_PLANS or _cached_leaves > _CACHED_LEAVES:
        _structures.clear()
        structure.plans.clear()
        _cached_plans = _cached_leaves = 0
    structure.plans[found] = planned
    _structures[key] = structure
    _cached_plans += 1
    _cached_leaves += len(planned[0].leaves)


# --- Plans of structures that were not seen before -------------------------------------------------------------------


def make_plan(
    tree: Tree, facts: Facts, stored: Sequence[torch.dtype], found: Ties, inline_limit: int
) -> tuple[Plan, CopyPlan]:
    """Args: stored: the dtypes that the leaves are stored as; see `stored_dtypes`."""
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
    """Makes the leaves, with offsets that only say which of them are tied; and finds those that are to be packed."""
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
) -> CopyPlan:
    resolve = facts.resolve or (False,) * len(leaves)
    is_cast = [DTYPES[leaf.dtype] is not dtype for leaf, dtype in zip(leaves, facts.dtypes, strict=True)]
    plain = _plain_leaves(leaves, packings, found)
    gathered = list({leaves[i].offset: i for i in sorted(packings, reverse=True)}.values())  # the first at each place
    return CopyPlan(
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


def _cast_copy(i: int, leaf: Leaf, packing: Packing | None) -> CastCopy:
    dtype = DTYPES[leaf.dtype]
    place, reach = leaf.offset // dtype.itemsize, leaf.nbytes // dtype.itemsize
    if packing is not None:
        return CastCopy(i, dtype, place, packing.shape, traits.contiguous_stride(packing.shape), packing.stride)
    if leaf.stride is None and reach <= ONE_CORE:
        return CastCopy(i, dtype, place, leaf.shape, traits.contiguous_stride(leaf.shape), None)
    # all that lies in its reach, as for a plain copy: it may be expanded, or bring the bytes of leaves in its gaps
    return CastCopy(i, dtype, place, (reach,), (1,), (1,))


# --- Casts -----------------------------------------------------------------------------------------------------------
# dtype= of a put: which leaves it concerns. They are the ones that a get's dtype= converts: see
# structure/rebuilding.py.


def check_dtype(dtype: Any) -> None:
    """Raises TypeError for what no floating leaf can be stored as."""
    if not isinstance(dtype, torch.dtype):
        given = f"{dtype!r}, {an(type(dtype))}"
        raise TypeError(f"dtype={given}: a put casts to a torch.dtype, as torch.bfloat16")
    if not dtype.is_floating_point:
        raise TypeError(
            f"dtype={dtype}: a put casts the floating leaves only, and to a real floating dtype, as torch.bfloat16; "
            "convert other leaves before you put them"
        )


def stored_dtypes(tree: Tree, facts: Facts, dtype: torch.dtype | None, below: Path = ()) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that leaves are stored as. Raises UnsupportedValueError where torch can't cast one so.

    Args:
        below: only leaves whose names start so are cast.
    """
    if dtype is None:
        return facts.dtypes
    root, reader = compile_tree(tree)
    kept = reader.fixed
    if below:
        names = (name for name, node in leaf_names(root) if isinstance(node, TensorNode))
        kept = kept | {i for i, name in enumerate(names) if name[: len(below)] != below}
    stored = list(facts.dtypes)
    for i, found in enumerate(facts.dtypes):
        if found is not dtype and found.is_floating_point and i not in kept:
            if not _can_cast(found, dtype):
                raise unsupported(tree, i, f"torch can't convert {found} to {dtype}; put it without dtype=")
            stored[i] = dtype
    return tuple(stored)


@functools.cache
def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    with modes.put_aside():
        try:
            torch.empty(1, dtype=source, device="cpu").to(target)
        except (RuntimeError, NotImplementedError):
            return False
    return True
