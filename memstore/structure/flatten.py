"""A value as a plan, its tensors and its objects. The plan of a structure that was seen before comes from a cache.

    1. walk the value: tree, tensors, objects
    2. take the facts of all tensors (dtypes, shapes, strides, traits), each by one map over C functions
    3. (tree, facts) is the cache's key; tied tensors, found by their addresses, choose among the plans of one key
    4. see that the bytes of all tensors are there
    5. only if it is new: lay the leaves out and write the description

Steps 1 to 4 take 0.8 µs a leaf. If any fact can't be taken so (sparse, nested, quantized, meta tensors), the value is
walked again, carefully: tensor by tensor, for special forms and for errors that name the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from memstore.engine.layout import ALIGNMENT, lay_out
from memstore.engine.record import Leaf, Path
from memstore.errors import UnsupportedValueError
from memstore.structure import objects, ties, traits
from memstore.structure.extents import Extents
from memstore.structure.fill import Copies, Gather, Raw, run
from memstore.structure.fill import contents as contents_of
from memstore.structure.node import MalformedError, Node, Reader, TensorNode, Tree, walk_names
from memstore.structure.plan import Plan, check_extent, describe, encode_tree, plan_of, spans_of, storage_range
from memstore.structure.storage import Memory
from memstore.structure.ties import NO_TIES, Group, Ties
from memstore.structure.traits import DTYPE_NAMES, PLAIN, Traits
from memstore.structure.walk import RefusedError, Walk, render_path

_CACHED_PLANS = 256
_CACHED_LEAVES = 1 << 18  # of all these plans

_dtype = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_stride = torch.Tensor.stride
_data_ptr = torch.Tensor.data_ptr
_is_neg = torch.Tensor.is_neg
_WalkT = TypeVar("_WalkT", bound=Walk)
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


class Flat:
    """A value taken apart: the plan, its tensors (no copies), and the other leaves as msgpack."""

    __slots__ = ("copies", "objects", "plan", "tensors")

    def __init__(self, plan: Plan, tensors: list[torch.Tensor], encoded: bytes, copies: Copies) -> None:
        self.plan = plan
        self.tensors = tensors
        self.objects = encoded
        self.copies = copies


class Facts(NamedTuple):
    """Of all tensors of a value. Hashable. None stands for: all plain, none to resolve."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    traits: tuple[Traits, ...] | None
    resolve: tuple[bool, ...] | None  # conj or neg bit set: the bytes in memory aren't the values


class _Structure:
    """What the cache knows of a tree and its facts: how far its tensors reach, and a plan for each way to be tied."""

    __slots__ = ("extents", "plans")

    def __init__(self, facts: Facts) -> None:
        self.extents = Extents(facts.dtypes, facts.shapes, facts.strides)
        self.plans: dict[Ties, tuple[Plan, Copies]] = {}


_structures: dict[Any, _Structure] = {}
_cached_plans = 0
_cached_leaves = 0


def flatten(value: Any, *, allow_pickle: bool = False, inline_limit: int = 1536) -> Flat:
    """Takes a value apart, copying no tensor.

    Args:
        value: tensors, or containers of them; see docs for what can be stored.
        allow_pickle: store other objects with pickle.
        inline_limit: values up to so many bytes are laid out for living in the record.

    Raises:
        UnsupportedValueError: something in it can't be stored; the message names the leaf.
    """
    if type(value) is torch.Tensor:
        known = _flatten_bare(value, inline_limit)
        if known is not None:
            return known
    try:
        tree, walk, facts, addresses = take_apart(value, lambda careful: Walk(allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    tensors = walk.tensors
    key = (tree, facts, inline_limit)
    structure = _structures.get(key) or _Structure(facts)
    extents = structure.extents
    missing = extents.missing(tensors, addresses)
    if missing:
        raise _unsupported(tree, missing[0], "a tensor whose storage was freed or cut: its bytes aren't there")
    found = NO_TIES
    overlapping = ties.overlapping(addresses, extents.spans)
    if overlapping:
        alone = facts.resolve or (False,) * len(tensors)
        found = ties.find_ties(tensors, addresses, extents, alone, overlapping)
    planned = structure.plans.get(found)
    if planned is None:
        planned = _make_plan(tree, facts, found, inline_limit)
        _remember(key, structure, found, planned)
    plan, copies = planned
    flat = Flat(plan, tensors, objects.encode(walk.objects), copies)
    if type(value) is torch.Tensor and len(tensors) == 1 and tensors[0] is value:
        _remember_bare(flat, facts, extents, inline_limit)
    return flat


_bare: dict[Any, tuple[Plan, Copies, int]] = {}  # of bare, plain tensors: plan, copies, bytes of the storage


def _flatten_bare(tensor: torch.Tensor, inline_limit: int) -> Flat | None:
    """A tensor just like one that was seen before, in 2 us instead of 5. None where there is more to look at."""
    try:
        found = _bare.get((tensor.dtype, tensor.shape, tensor.stride(), inline_limit))
        if (
            found is None
            or not tensor.is_cpu
            or tensor.requires_grad
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor.storage_offset()
            or tensor.untyped_storage().nbytes() != found[2]
            or not tensor.data_ptr()
            or hasattr(tensor, "_is_buffer")
        ):
            return None
    except (RuntimeError, NotImplementedError):  # no plain memory
        return None
    return Flat(found[0], [tensor], b"", found[1])


def _remember_bare(flat: Flat, facts: Facts, extents: Extents, inline_limit: int) -> None:
    nbytes = int(extents.spans[0])
    if facts.traits is None and facts.resolve is None and flat.tensors[0].untyped_storage().nbytes() == nbytes > 0:
        if len(_bare) >= _CACHED_PLANS:
            _bare.clear()
        _bare[facts.dtypes[0], facts.shapes[0], facts.strides[0], inline_limit] = (flat.plan, flat.copies, nbytes)


def fill(flat: Flat, memory: Memory) -> None:
    """Copies every leaf to its place in `memory`, a writable array of `flat.plan.nbytes` bytes. Pads are left alone."""
    if memory.nbytes < flat.plan.nbytes:
        raise ValueError(f"{flat.plan.nbytes} bytes don't fit into {memory.nbytes}")
    run(flat.copies, flat.tensors, memory)


def contents(flat: Flat) -> bytes:
    """As `fill`, for values of a few bytes: what the memory would hold."""
    return contents_of(flat.copies, flat.tensors, flat.plan.nbytes)


def take_apart(value: Any, walk_with: Callable[[bool], _WalkT]) -> tuple[Tree, _WalkT, Facts, list[int]]:
    """The walk of a value, first in the fast way, then if need be carefully; raises RefusedError."""
    for careful in (False, True):
        walk = walk_with(careful)
        try:
            tree = walk.visit(value)
            facts = _facts(walk.tensors)
            addresses = list(map(_data_ptr, walk.tensors))
        except RecursionError:
            raise RefusedError("too many levels for what is left of Python's stack here") from None
        except (RuntimeError, NotImplementedError) as error:
            if careful:
                raise RefusedError(f"a tensor that has no plain memory ({error})") from error
            continue
        if facts is not None:
            return tree, walk, facts, addresses
    raise RefusedError("a tensor that has no plain memory")


def _facts(tensors: Sequence[torch.Tensor]) -> Facts | None:
    """The facts of all tensors; None, or an error by torch, if one of them has to be looked at by itself."""
    dtypes = tuple(map(_dtype, tensors))
    kinds = set(dtypes)
    if not kinds.isdisjoint(traits.QUANTIZED):
        return None
    found: tuple[Traits, ...] | None = None
    if (
        not all(map(_is_cpu, tensors))
        or any(map(_requires_grad, tensors))
        or any([getattr(tensor, "_is_buffer", False) for tensor in tensors])  # noqa: C419 - a list is faster
        or torch.nn.Parameter in set(map(type, tensors))
    ):
        found = tuple(map(traits.traits_of, tensors))
        if any(trait.device == "meta" for trait in found):
            return None
    resolve: tuple[bool, ...] | None = None
    if any(map(_is_neg, tensors)) or (not kinds.isdisjoint(_COMPLEX) and any(t.is_conj() for t in tensors)):
        resolve = tuple(tensor.is_neg() or tensor.is_conj() for tensor in tensors)
    return Facts(dtypes, tuple(map(_shape, tensors)), tuple(map(_stride, tensors)), found, resolve)


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


# -- new plans -------------------------------------------------------------------------------------------------------


def _make_plan(tree: Tree, facts: Facts, found: Ties, inline_limit: int) -> tuple[Plan, Copies]:
    root, _ = compile_tree(tree)
    names = [name for name, leaf in walk_names(root) if isinstance(leaf, TensorNode)]
    same = dict(found.same)
    leaves, gathers = _loose_leaves(names, facts, found)
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
    return plan, Copies(_raw_copies(leaves, gathers, found), _gathers(leaves, gathers, facts), len(leaves), on_cpu)


def _check_extents(tree: Tree, leaves: Sequence[Leaf]) -> None:
    for i, leaf in enumerate(leaves):
        try:
            check_extent(leaf.shape, leaf.stride, traits.DTYPES[leaf.dtype])
        except MalformedError as error:
            raise _unsupported(tree, i, f"{error}: shape {list(leaf.shape)}, strides {leaf.stride}") from None


def _unsupported(tree: Tree, leaf: int, reason: str) -> UnsupportedValueError:
    names = [name for name, node in walk_names(compile_tree(tree)[0]) if isinstance(node, TensorNode)]
    return UnsupportedValueError(f"{render_path(names[leaf])}: {reason}")


def compile_tree(tree: Tree) -> tuple[Node, Reader]:
    """The node that a walk's tree describes, and what its reader found."""
    reader = Reader()
    try:
        return reader.node(msgspec.msgpack.decode(encode_tree(tree))), reader
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"value: a key with a lone surrogate, {error.object!r}: it is no Unicode text"
        ) from None


def _loose_leaves(names: Sequence[Path], facts: Facts, found: Ties) -> tuple[list[Leaf], set[int]]:
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


def _raw_copies(leaves: Sequence[Leaf], gathers: set[int], found: Ties) -> list[Raw]:
    skipped = gathers | {i for i, _ in found.same}
    for group in found.groups:
        # of tied leaves, those whose bytes another one brings
        end = -1
        for i, _ in sorted(group.members, key=lambda member: (member[1], -leaves[member[0]].nbytes)):
            if leaves[i].offset + leaves[i].nbytes <= end:
                skipped.add(i)
            end = max(end, leaves[i].offset + leaves[i].nbytes)
    return [Raw(i, leaf.offset, leaf.nbytes) for i, leaf in enumerate(leaves) if leaf.nbytes and i not in skipped]


def _gathers(leaves: Sequence[Leaf], gathers: set[int], facts: Facts) -> list[Gather]:
    resolve = facts.resolve or (False,) * len(leaves)
    chosen = {leaves[i].offset: i for i in sorted(gathers, reverse=True) if leaves[i].nbytes}
    return [Gather(i, offset, resolve[i]) for offset, i in chosen.items()]
