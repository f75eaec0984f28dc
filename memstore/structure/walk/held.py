"""What a rank holds of a tensor has to be plain memory: boxes are bytes of dense tensors."""

from __future__ import annotations

import torch

from memstore.sharding import ShardedLeaf
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import traits

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def check_held(leaf: ShardedLeaf) -> None:
    """Raises RefusedError for parts that have no bytes of their own, or more than bytes."""
    if leaf.dtype in traits.QUANTIZED:
        raise RefusedError("a shard of a quantized tensor; put a shard of its dequantize()")
    for _, local in leaf.shards:
        if type(local) not in _PLAIN and any(base.__name__ == "FakeTensor" for base in type(local).__mro__):
            raise RefusedError(
                "a shard that is a fake tensor: it has a shape, but no bytes: give a real one, "
                "which materialize_module makes of a deferred one"
            )
        if local.is_meta:
            raise RefusedError("a shard that is a meta tensor: it has a shape, but no bytes: put a real one")
        if local.layout is not torch.strided:
            raise RefusedError(f"a shard that is a {local.layout} tensor; put one of its to_dense()")
