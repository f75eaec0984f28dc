"""A value as a plan, its tensors and its objects. The plan of a structure that was seen before comes from a cache.

    1. walk the value: tree, tensors, objects
    2. take the facts of all tensors (dtypes, shapes, strides, traits), each by one map over C functions
    3. (tree, facts, what is cast) is the cache's key; tied tensors, found by their addresses, choose among the
       plans of one key
    4. check that the storages still have the bytes of all tensors
    5. only if it is new: lay the leaves out and write the description

Steps 1 and 2 are in walk/facts.py, step 5 is planning.py's. Steps 1 to 4 take 0.8 µs a leaf.
"""

from __future__ import annotations

from typing import Any

import torch

from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.structure.objects import encode_objects
from memstore.structure.plans import Plan
from memstore.structure.put.cast import check_dtype, stored_dtypes
from memstore.structure.put.fill import Copies, Flat
from memstore.structure.put.planning import make_plan, unsupported
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import FREED, NO_TIES, Footprints, Locations, Ties, locate_tensors, ties
from memstore.structure.tree import Tree
from memstore.structure.walk import Facts, Walk, take_apart

_CACHED_PLANS = 256
_CACHED_LEAVES = 1 << 18  # of all these plans


class _Structure:
    """What the cache knows of a tree and its facts: how far its tensors reach, and a plan for each way to be tied.

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
        self.plans: dict[Ties, tuple[Plan, Copies]] = {}


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
) -> Flat:
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
    flat = Flat(plan, tensors, encode_objects(walk.objects), copies)
    if type(value) is torch.Tensor and len(tensors) == 1 and tensors[0] is value:
        _remember_bare(flat, facts, footprints, inline_limit, dtype)
    return flat


_bare: dict[Any, tuple[Plan, Copies, int]] = {}  # of bare, plain tensors: plan, copies, bytes that they reach over


def _flatten_bare(tensor: torch.Tensor, inline_limit: int, dtype: torch.dtype | None) -> Flat | None:
    """A plain tensor like one that was put before, in 2 µs instead of 5. None if more must be looked at."""
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
            or hasattr(tensor, "_is_buffer")
        ):
            return None
    except (RuntimeError, NotImplementedError):  # no plain memory
        return None
    return Flat(found[0], [tensor], b"", found[1])


def _remember_bare(
    flat: Flat, facts: Facts, footprints: Footprints, inline_limit: int, dtype: torch.dtype | None
) -> None:
    nbytes = int(footprints.spans[0])
    if facts.traits is None and facts.resolve is None and nbytes:
        if len(_bare) >= _CACHED_PLANS:
            _bare.clear()
        key = (facts.dtypes[0], facts.shapes[0], facts.strides[0], inline_limit, dtype)
        _bare[key] = (flat.plan, flat.copies, nbytes)


def _remember(key: Any, structure: _Structure, found: Ties, planned: tuple[Plan, Copies]) -> None:
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
