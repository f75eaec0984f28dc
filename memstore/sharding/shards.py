"""What a rank holds of a tensor: boxes, each with the tensor that has it. Of DTensors, TensorShards, ShardedTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memstore.sharding.box import Box


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A part of a tensor that no DTensor describes.

    Attributes:
        local: the part, of the same number of dimensions as the whole.
        global_shape: of the whole, in elements.
        offsets: where the part starts in the whole, in elements.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Shard(NamedTuple):
    """A box of a tensor, and the tensor (often a view of a rank's local one) that holds just its elements."""

    box: Box
    local: torch.Tensor


class ShardedLeaf(NamedTuple):
    """What this rank holds of one tensor.

    Attributes:
        shape: of the whole tensor.
        shards: none of them is empty, and no two overlap. There may be none at all.
        is_primary: among the ranks that hold the very same boxes, this is the one that writes them.
        is_replicated: other ranks may hold the same boxes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    is_primary: bool
    is_replicated: bool


def sharded_leaf(value: Any) -> ShardedLeaf | None:
    """What a DTensor, TensorShard or ShardedTensor says of this rank; None for any other value."""
    raise NotImplementedError
