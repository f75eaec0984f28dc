"""Boxes: parts of tensors, and which of them each rank holds.

box      a box, and what two of them share
runs     where the elements of a strided box lie in memory: contiguous runs, and the pages that cover them
shards   what a rank holds of a tensor
stored   where the boxes of stored tensors lie
"""

from __future__ import annotations

from memstore.sharding.box import Box, whole
from memstore.sharding.runs import Offsets, cover, runs
from memstore.sharding.shards import Shard, ShardedLeaf, TensorShard, sharded_leaf
from memstore.sharding.stored import NO_BOXES, Boxes, StoredBox

__all__ = [
    "NO_BOXES",
    "Box",
    "Boxes",
    "Offsets",
    "Shard",
    "ShardedLeaf",
    "StoredBox",
    "TensorShard",
    "cover",
    "runs",
    "sharded_leaf",
    "whole",
]
