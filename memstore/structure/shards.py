"""Shards: what one rank holds of a sharded value, taken apart: the tree of the whole value, and the rank's tensors.

DTensors, TensorShards and ShardedTensors are leaves of the whole value; what this rank has of them are boxes. Dicts in
which no tensor lies stay dicts here, since those of several ranks are merged by key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memstore import _modes as modes
from memstore._compat import PARAMETER_MARK
from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.sharding import MOST_DIMENSIONS, Shard, ShardedLeaf, TensorShard, sharded_leaf, whole
from memstore.structure import traits
from memstore.structure.containers import flatten_wrapped_shards
from memstore.structure.objects import encode_objects
from memstore.structure.plans import check_extent
from memstore.structure.refusals import MalformedError, RefusedError, render_path
from memstore.structure.tensor_memory import FREED, why_no_memory
from memstore.structure.traits import PLAIN, Traits
from memstore.structure.tree import TENSOR, TensorNode, Tree, compile_tree, leaf_names
from memstore.structure.walk import Walk, take_apart

# --- A rank's part of a value ----------------------------------------------------------------------------------------


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


class _ShardedWalk(Walk):
    """Attributes:
    sharded: by number of the tensor, what this rank holds of it.
    has_shards: whether there was one, though it may have been refused.
    """

    __slots__ = ("has_shards", "sharded")

    def __init__(self, allow_pickle: bool, careful: bool = False) -> None:
        super().__init__(allow_pickle, careful)
        self.sharded: dict[int, tuple[ShardedLeaf, Traits]] = {}
        self.has_shards = False

    def visit(self, value: Any) -> Tree:
        try:
            found = sharded_leaf(value)
        except UnsupportedValueError as error:
            self.has_shards = True
            raise RefusedError(error.message) from None
        if found is None:
            return super().visit(value)
        described = value.local if isinstance(value, TensorShard) else value
        kind = traits.traits_of(described) if isinstance(described, torch.Tensor) else PLAIN
        if getattr(value, PARAMETER_MARK, False):
            kind = kind._replace(kind=traits.PARAMETER)
        wrapped = flatten_wrapped_shards(value, found, traits.to_flags(kind.kind, kind.requires_grad), self)
        if wrapped is not None:
            self.has_shards = True
            return wrapped
        found = held_in_memory(found)
        _check_size(found)
        self.sharded[len(self.tensors)] = found, kind._replace(device=None)
        # in its place stands what has its dtype, for the facts of all tensors
        self.tensors.append(found.shards[0].local if found.shards else torch.empty(0, dtype=found.dtype))
        return TENSOR

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
    try:
        tree, walk, facts, _ = take_apart(value, lambda careful: _ShardedWalk(allow_pickle, careful))
        root, reader = compile_tree(tree)
        names: dict[bool, list[Path]] = {True: [], False: []}
        for name, node in leaf_names(root):
            names[isinstance(node, TensorNode)].append(name)
    except (RefusedError, MalformedError) as error:
        text = error.message() if isinstance(error, RefusedError) else f"value: {error}"
        raise UnsupportedValueError(text) from None
    _check_names(names[True] + names[False])
    leaves: list[HeldLeaf] = []
    for i, (name, tensor) in enumerate(zip(names[True], walk.tensors, strict=True)):
        is_plain = i not in walk.sharded
        if is_plain:
            kind = (PLAIN if facts.traits is None else facts.traits[i])._replace(device=None)
            shape = tuple(tensor.shape)
            shards = (Shard(whole(shape), tensor),) if tensor.numel() else ()
            found = ShardedLeaf(shape, tensor.dtype, shards, is_primary=True, is_replicated=True)
        else:
            found, kind = walk.sharded[i]
        leaves.append(HeldLeaf(name, *found[:3], kind, is_plain, *found[3:], i in reader.fixed))
    return HeldValue(tree, tuple(leaves), encode_objects(walk.objects), tuple(names[False]))


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


def _check_names(names: list[Path]) -> None:
    seen: set[Path] = set()
    for name in names:
        if name in seen:
            raise UnsupportedValueError(f"{render_path(name)}: two leaves have this name, by which ranks tell leaves")
        seen.add(name)


# --- Tensors that are stored by address ------------------------------------------------------------------------------
# Tensors that are stored by address, outside of a walk's facts: a rank's shards, the items of others' plans.
#
# What a walk makes of such a tensor decides: a lazy leaf is read, and what a walk refuses, or would store as several
# tensors, is refused in the same words.


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a lazy leaf's values, in memory. Raises RefusedError where it is made of several."""
    if type(tensor) in _PLAIN and why_no_memory(tensor) is None:
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
    if all(type(local) in _PLAIN and why_no_memory(local) is None for _, local in leaf.shards):
        return leaf
    try:
        return leaf._replace(shards=tuple(one._replace(local=in_memory(one.local)) for one in leaf.shards))
    except RefusedError as error:
        raise _refused(error.reason) from None
