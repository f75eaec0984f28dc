"""Tensors that are stored by address, outside of a walk's facts: a rank's shards, the items of others' plans.

What a walk makes of such a tensor decides: a lazy leaf is read, and what a walk refuses, or would store as several
tensors, is refused in the same words.
"""

from __future__ import annotations

import torch

from memstore.sharding import ShardedLeaf
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import FREED, modes, traits, why_no_memory
from memstore.structure.tree import TENSOR
from memstore.structure.walk.walk import Walk

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with memory of its own; a lazy leaf's values. Raises RefusedError where it is made of several."""
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
    """The leaf, whose shards are plain memory. Raises RefusedError for parts that have none, or more than bytes."""
    if leaf.dtype in traits.QUANTIZED:
        raise RefusedError("a shard of a quantized tensor; put a shard of its dequantize()")
    if all(type(local) in _PLAIN and why_no_memory(local) is None for _, local in leaf.shards):
        return leaf
    try:
        return leaf._replace(shards=tuple(one._replace(local=in_memory(one.local)) for one in leaf.shards))
    except RefusedError as error:
        raise _refused(error.reason) from None
