"""Flattening: a value becomes a plan, its tensors and its objects. A plan that was made before comes from a cache.

    1. `take_apart` (walk.py) walks the value, and takes the facts of all tensors
    2. `_Structure`: (tree, facts, what is cast) is the cache's key; tied tensors, found by their addresses, choose
       among the plans of one key
    3. check that the storages still have the bytes of all tensors
    4. `make_plan`, only if it is new: lay the leaves out and write the description

Steps 1 to 3 take 0.8 µs a leaf. What one rank holds of a sharded value is taken apart here too (`take_shards_apart`),
and values are described that no put writes: those in external files, and rows in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from memstore import _compat
from memstore import _modes as modes
from memstore._compat import BUFFER_MARK, PARAMETER_MARK
from memstore._parsing import UNDECODABLE
from memstore._wording import an
from memstore.engine import ALIGNMENT, Leaf, Path, Span, lay_out
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.sharding import MOST_DIMENSIONS, Shard, ShardedLeaf, TensorShard, sharded_leaf, whole
from memstore.structure import traits
from memstore.structure.classes import shown_attributes
from memstore.structure.memory import (
    FREED,
    NO_TIES,
    ONE_CORE,
    PLAIN_TYPES,
    CastCopy,
    CopyPlan,
    Footprints,
    GatheredCopy,
    Group,
    Locations,
    Memory,
    PlainCopy,
    StackedCopies,
    Ties,
    are_stacked,
    bytes_at,
    copy_tensors,
    find_ties,
    locate_tensors,
    overlapping,
    why_no_memory,
)
from memstore.structure.objects import encode_objects
from memstore.structure.plans import Plan, check_extent, describe, plan_of, runs_of, spans_of, storage_range
from memstore.structure.refusals import MalformedError, RefusedError, render_path
from memstore.structure.tensors import flatten_wrapped_shards
from memstore.structure.traits import DTYPE_NAMES, DTYPES, PLAIN, Packing, Traits, has_gaps, pack
from memstore.structure.tree import TENSOR, Tree, compile_tree, from_msgpack, name_of, names_of, tree_names
from memstore.structure.walk import Facts, TakenApart, Walk, take_apart

# --- Flattening ------------------------------------------------------------------------------------------------------


_WalkT = TypeVar("_WalkT", bound=Walk)
_CACHED_PLANS = 256
_CACHED_LEAVES = 1 << 18  # of all these plans


class FlatValue(msgspec.Struct, eq=False):
    """A value taken apart: its plan, its tensors (no copies), its other leaves as msgpack, and what to copy where."""

    plan: Plan
    tensors: list[torch.Tensor]
    objects: bytes
    copies: CopyPlan


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
            raise _unsupported(tree, missing[0], FREED)
        candidates = overlapping(addresses, footprints.spans)
        if candidates:
            alone = facts.resolve or (False,) * len(tensors)
            found = find_ties(tensors, addresses, footprints, alone, candidates, structure.kinds)
        structure.apart = None if candidates else locations
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
    """Lays the leaves out, and plans their copies. `stored` is of `stored_dtypes`."""
    same = dict(found.same)
    leaves, packings = _provisional_leaves(_tensor_names(tree), facts, stored, found)
    for leaf in leaves:
        try:
            check_extent(leaf.shape, leaf.stride, DTYPES[leaf.dtype])
        except MalformedError as error:
            about = f"{error}: shape {list(leaf.shape)}, strides {leaf.stride}"
            raise UnsupportedValueError(f"{render_path(leaf.name)}: {about}") from None
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
    return plan, _copies(leaves, packings, facts, found, [trait.device is None for trait in leaf_traits])


def _tensor_names(tree: Tree) -> tuple[Path, ...]:
    """Returns the names of a value's tensors. Raises UnsupportedValueError where they would fill the memory."""
    try:
        return tree_names(tree).tensors
    except MalformedError as error:
        raise UnsupportedValueError(f"value: {error}") from None


def _unsupported(tree: Tree, leaf: int, reason: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"{render_path(_tensor_names(tree)[leaf])}: {reason}")


def _leaf(name: Path, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Leaf:
    kept = None if stride == traits.contiguous_stride(shape) else tuple(stride)
    return Leaf(name, DTYPE_NAMES[dtype], tuple(shape), kept, offset, traits.reach(shape, stride) * dtype.itemsize)


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
        offset, group = places.get(i, (end, None))
        resolve = facts.resolve is not None and facts.resolve[i]
        if 0 not in shape and (resolve or (has_gaps(shape, stride) if group is None else group.packed)):
            packings[i] = pack(shape, stride)
            stride = packings[i].kept
        leaves.append(_leaf(name, dtype, shape, stride, offset))
        if group is None:
            end += -(-leaves[i].nbytes // ALIGNMENT) * ALIGNMENT
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
    raw = [PlainCopy(i, leaves[i].offset, leaves[i].nbytes) for i in plain if not is_cast[i]]
    rows = runs_of(leaves, [copy.leaf for copy in raw if leaves[copy.leaf].stride is None and on_cpu[copy.leaf]])
    stacked = [
        StackedCopies(tuple(run), facts.dtypes[run[0]], (len(run), *first.shape), first.offset)
        for run in rows
        if are_stacked(len(run), facts.dtypes[run[0]], (first := leaves[run[0]]).nbytes)
    ]
    in_stacks = {i for one in stacked for i in one.leaves}
    return CopyPlan(
        [copy for copy in raw if copy.leaf not in in_stacks],
        [GatheredCopy(i, leaves[i].offset, resolve[i], packings[i]) for i in gathered if not is_cast[i]],
        [_cast_copy(i, leaves[i], packings.get(i)) for i in (*plain, *gathered) if is_cast[i]],
        on_cpu,
        stacked,
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
    kept = compile_tree(tree)[1].fixed
    if below:
        kept |= {i for i, name in enumerate(_tensor_names(tree)) if name[: len(below)] != below}
    stored = list(facts.dtypes)
    for i, found in enumerate(facts.dtypes):
        if found is not dtype and found.is_floating_point and i not in kept:
            if not _can_cast(found, dtype):
                raise _unsupported(tree, i, f"torch can't convert {found} to {dtype}; put it without dtype=")
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


# --- Values in external files: their leaves are where those files have them ------------------------------------------


def _take_apart(value: Any, kind: type[_WalkT], allow_pickle: bool) -> TakenApart[_WalkT]:
    """Takes a value apart with a walk of this kind. Raises UnsupportedValueError, which names the leaf."""
    try:
        return take_apart(value, lambda careful: kind(allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None


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
    tree, walk, facts, addresses = _take_apart(value, Walk, allow_pickle)
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
        leaves.append(_leaf((), dtype, shape, stride, 0 if 0 in shape else next(places)))
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
    spans = [Span(leaf.name, leaf.dtype, DTYPES[leaf.dtype].itemsize, leaf.shape, leaf.nbytes) for leaf in leaves]
    layout = lay_out([ahead, *spans], first=1)
    return _plan_at(tree, leaves, layout.offsets[1:]), layout.header


def plan_at(value: Any, offsets: Sequence[int]) -> Plan:
    """Makes the plan of a value whose leaves lie at these offsets, in their order."""
    return _plan_at(*_leaves_of(value), offsets)


def _plan_at(tree: Tree, leaves: Sequence[Leaf], offsets: Sequence[int]) -> Plan:
    placed = [msgspec.structs.replace(leaf, offset=offset) for leaf, offset in zip(leaves, offsets, strict=True)]
    return plan_of(describe(tree, placed, [PLAIN] * len(placed), {}, False))


def _leaves_of(value: Any) -> tuple[Tree, list[Leaf]]:
    tree, walk, facts, _ = _take_apart(value, Walk, False)
    if walk.objects:
        raise UnsupportedValueError("rows are of tensors, and nothing else")
    leaves: list[Leaf] = []
    for name, dtype, shape in zip(_tensor_names(tree), facts.dtypes, facts.shapes, strict=True):
        try:
            check_extent(shape, None, dtype)
        except MalformedError as error:
            raise UnsupportedValueError(f"{render_path(name)}: {error}: shape {list(shape)}") from None
        leaves.append(_leaf(name, dtype, shape, traits.contiguous_stride(shape), 0))
    return tree, leaves


# --- The tensors of a value, by name ---------------------------------------------------------------------------------


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


# --- What one rank holds of a sharded value: the tree of the whole, and the rank's tensors ---------------------------
# DTensors, TensorShards and ShardedTensors are leaves of the whole value; what this rank has of them are boxes. Dicts
# in which no tensor lies stay dicts here, since those of several ranks are merged by key.


class HeldLeaf(NamedTuple):
    """A leaf of the whole value, and what this rank holds of it.

    Attributes:
        shape: of the whole tensor.
        shards: empty ones left out; a plain tensor is one shard that has all of it.
        traits: without a device: each rank has its own.
    """

    name: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    traits: Traits
    is_plain: bool
    is_primary: bool
    is_replicated: bool
    is_fixed: bool  # only its container knows what it means, so that no cast concerns it


class HeldValue(NamedTuple):
    tree: Tree
    leaves: tuple[HeldLeaf, ...]
    objects: bytes  # the leaves that are no tensors, encoded
    object_names: tuple[Path, ...]


_WHOLE = PLAIN_TYPES | {dict, list, tuple, int, float, str, bool, type(None)}  # types of what is no part of a leaf


class HeldShards(NamedTuple):
    """A DTensor or the like of which this rank holds parts; and its value or its traits, as the walk needs."""

    about: Any
    leaf: ShardedLeaf


class ShardWalk(Walk):
    """A walk over a value that may have leaves of which this rank holds a part.

    Attributes:
        sharded: what is held of them, by where they stand among the tensors. There stands the only shard, or an empty
            tensor where there are several or none.
        has_shards: whether there was one, though it may have been refused.
    """

    __slots__ = ("has_shards", "sharded")

    def __init__(self, allow_pickle: bool, careful: bool = False) -> None:
        super().__init__(allow_pickle, careful)
        self.sharded: dict[int, HeldShards] = {}
        self.has_shards = False

    def visit(self, value: Any) -> Tree:
        if type(value) in _WHOLE:
            return super().visit(value)
        try:
            leaf = sharded_leaf(value)
        except UnsupportedValueError as error:
            self.has_shards = True
            raise RefusedError(error.message) from None
        return super().visit(value) if leaf is None else self.take_shards(value, leaf)

    def take_shards(self, value: Any, leaf: ShardedLeaf) -> Tree:
        """Takes what this rank holds of a DTensor, TensorShard or ShardedTensor."""
        raise NotImplementedError

    def append(self, about: Any, leaf: ShardedLeaf) -> Tree:
        self.sharded[len(self.tensors)] = HeldShards(about, leaf)
        is_one = len(leaf.shards) == 1
        self.tensors.append(leaf.shards[0].local if is_one else torch.empty(0, dtype=leaf.dtype, device="cpu"))
        return TENSOR


class _ShardedWalk(ShardWalk):
    """The walk of a sharded put. Beside each leaf that it holds parts of stand the traits."""

    __slots__ = ()

    def take_shards(self, value: Any, leaf: ShardedLeaf) -> Tree:
        described = value.local if isinstance(value, TensorShard) else value
        kind = traits.traits_of(described) if isinstance(described, torch.Tensor) else PLAIN
        if getattr(value, PARAMETER_MARK, False):
            kind = kind._replace(kind=traits.PARAMETER)
        wrapped = flatten_wrapped_shards(value, leaf, traits.to_flags(kind.kind, kind.requires_grad), self)
        if wrapped is not None:
            self.has_shards = True
            return wrapped
        leaf = held_in_memory(leaf)
        _check_size(leaf)
        return self.append(kind._replace(device=None), leaf)

    def joined(self, tree: Tree, trees: tuple[Tree, ...], join: Callable[[list[Any]], Any] | None = None) -> Tree:
        return tree if tree[0] in ("dict", "ordered") else super().joined(tree, trees, join)


def _check_size(leaf: ShardedLeaf) -> None:
    """Raises RefusedError for what no box can be stored of."""
    if len(leaf.shape) > MOST_DIMENSIONS:
        raise RefusedError(
            f"a shard of a tensor of {len(leaf.shape)} dimensions; {MOST_DIMENSIONS} is the most that ranks can put: "
            "put a view of fewer"
        )
    try:
        check_extent(leaf.shape, None, leaf.dtype)
    except MalformedError:
        raise RefusedError(
            f"a shard of a tensor of shape {list(leaf.shape)}, which is more than any memory has: global_shape is in "
            "elements"
        ) from None


def take_shards_apart(value: Any, *, allow_pickle: bool = False) -> HeldValue:
    """Takes apart what this rank holds, copying no tensor. Raises UnsupportedValueError, which names the leaf."""
    tree, walk, facts, _ = _take_apart(value, _ShardedWalk, allow_pickle)
    try:
        root, reader = compile_tree(tree)
        names, object_names = names_of(root)
    except MalformedError as error:
        raise UnsupportedValueError(f"value: {error}") from None
    twice = [name for name, times in Counter((*names, *object_names)).items() if times > 1]
    if twice:
        raise UnsupportedValueError(f"{render_path(twice[0])}: two leaves have this name, by which ranks tell leaves")
    leaves: list[HeldLeaf] = []
    for i, (name, tensor) in enumerate(zip(names, walk.tensors, strict=True)):
        is_plain = i not in walk.sharded
        if is_plain:
            kind = (PLAIN if facts.traits is None else facts.traits[i])._replace(device=None)
            shape = tuple(tensor.shape)
            shards = (Shard(whole(shape), tensor),) if tensor.numel() else ()
            found = ShardedLeaf(shape, tensor.dtype, shards, is_primary=True, is_replicated=True)
        else:
            kind, found = walk.sharded[i]
        leaves.append(HeldLeaf(name, *found[:3], kind, is_plain, *found[3:], i in reader.fixed))
    return HeldValue(tree, tuple(leaves), encode_objects(walk.objects), object_names)


def has_shards(value: Any) -> bool:
    """Returns whether a value that `flatten` refuses has leaves of which a rank holds a part."""
    walk = _FirstShardWalk(allow_pickle=True)
    aside = modes.put_aside(entirely=True) if modes.are_active() else contextlib.nullcontext()
    with aside, contextlib.suppress(RefusedError, RuntimeError, NotImplementedError):
        walk.visit(value)
    return walk.has_shards or bool(walk.sharded)


class _FirstShardWalk(_ShardedWalk):
    """A walk that ends at the first leaf of which a rank holds a part: a model has thousands."""

    __slots__ = ()

    def visit(self, value: Any) -> Tree:
        tree = super().visit(value)
        if self.has_shards or self.sharded:
            raise RefusedError("a leaf of which a rank holds a part")
        return tree


# --- Tensors that are stored by address, outside of a walk's facts: a rank's shards, the items of others' plans ------
# What a walk makes of such a tensor decides: a lazy leaf is read, and what a walk refuses, or would store as several
# tensors, is refused in the same words.


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a lazy leaf's values, in memory. Raises RefusedError where it is made of several."""
    if type(tensor) in PLAIN_TYPES and why_no_memory(tensor) is None:
        return tensor
    walk = Walk(allow_pickle=False, careful=True)
    with modes.put_aside():
        tree = walk.visit(tensor)
    if tree != TENSOR:
        reason = why_no_memory(tensor)
        raise RefusedError(reason or f"a {type(tensor).__qualname__}, which is made of several tensors")
    (found,) = walk.tensors
    reason = why_no_memory(found)
    if reason is not None:
        raise RefusedError(reason)
    return found


def check_held(leaf: ShardedLeaf) -> None:
    """Raises RefusedError for shards that can't be filled: they have no memory, or more than bytes."""
    if leaf.dtype in traits.QUANTIZED:
        raise RefusedError("a shard of a quantized tensor; put a shard of its dequantize()")
    for _, local in leaf.shards:
        reason = why_no_memory(local)
        if reason is not None:
            raise _refused(reason)


def _refused(reason: str) -> RefusedError:
    if reason == FREED:
        return RefusedError("a shard whose storage was freed or cut: its bytes aren't there: put it while it has them")
    return RefusedError(f"a shard that is {reason}")


def held_in_memory(leaf: ShardedLeaf) -> ShardedLeaf:
    """Returns the leaf with its shards in memory. Raises RefusedError for parts that have none, or more than bytes."""
    if leaf.dtype in traits.QUANTIZED:
        raise RefusedError("a shard of a quantized tensor; put a shard of its dequantize()")
    if all(type(local) in PLAIN_TYPES and why_no_memory(local) is None for _, local in leaf.shards):
        return leaf
    try:
        return leaf._replace(shards=tuple(one._replace(local=in_memory(one.local)) for one in leaf.shards))
    except RefusedError as error:
        raise _refused(error.reason) from None
