"""Boxes: parts of tensors, and which of them each rank holds.

boxes        boxes; what they cover and share; copies between them; their runs in memory
shards       which boxes each rank of a mesh holds, by torch's placements; the shards of DTensors, TensorShards and
             ShardedTensors; new memory like them
"""

from __future__ import annotations

from memstore.sharding.boxes import (
    MOST_DIMENSIONS,
    NO_BOXES,
    Box,
    BoxCopies,
    Boxes,
    BoxIndex,
    Cover,
    Offsets,
    StoredBox,
    box_of,
    copies,
    cover,
    cover_of,
    narrow_to,
    overlap,
    runs,
    slabs,
    uncovered,
    whole,
)
from memstore.sharding.shards import (
    MeshLayout,
    MeshPiece,
    Shard,
    ShardedLeaf,
    Split,
    TensorShard,
    TensorShards,
    allocate_like,
    layout_of,
    local_shape,
    place,
    sharded_leaf,
)

__all__ = [
    "MOST_DIMENSIONS",
    "NO_BOXES",
    "Box",
    "BoxIndex",
    "Boxes",
    "BoxCopies",
    "Cover",
    "MeshLayout",
    "Offsets",
    "MeshPiece",
    "Shard",
    "ShardedLeaf",
    "Split",
    "StoredBox",
    "TensorShard",
    "TensorShards",
    "allocate_like",
    "box_of",
    "copies",
    "cover",
    "cover_of",
    "layout_of",
    "local_shape",
    "overlap",
    "narrow_to",
    "place",
    "runs",
    "sharded_leaf",
    "slabs",
    "uncovered",
    "whole",
]
