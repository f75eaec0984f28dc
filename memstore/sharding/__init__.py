"""Boxes: parts of tensors, and which of them each rank holds.

boxes        boxes; what they cover and share; copies between them; their runs in memory
shards       which boxes each rank of a mesh holds, by torch's placements; the shards of DTensors, TensorShards and
             ShardedTensors; new memory like them
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.sharding.boxes import (
    MOST_DIMENSIONS,
    NO_BOXES,
    Box,
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
