"""Boxes: parts of tensors, and which of them each rank holds.

box          a box, and what two of them share
box_index    which boxes of many meet another one
coverage     what of a tensor no box has; whether boxes overlap
runs         where the elements of a strided box lie in memory: contiguous runs, and the pages that cover them
copies       from boxes that are stored to boxes that are wanted
layout       which boxes each rank of a mesh holds, and where in its local tensor
placements   torch's meshes and placements, as a layout
shards       what a rank holds of a tensor: DTensors, TensorShards, ShardedTensors
doubles      new memory like a rank's part of a tensor
stored       where the boxes of stored tensors lie
"""

from __future__ import annotations

from memstore.sharding.box import Box, whole
from memstore.sharding.box_index import BoxIndex
from memstore.sharding.copies import Copies, copies, part
from memstore.sharding.coverage import overlap, uncovered
from memstore.sharding.doubles import double
from memstore.sharding.layout import Layout, Piece, Split
from memstore.sharding.placements import layout_of, local_shape, place
from memstore.sharding.runs import Offsets, cover, runs
from memstore.sharding.shards import Shard, ShardedLeaf, TensorShard, TensorShards, sharded_leaf
from memstore.sharding.stored import MOST_DIMENSIONS, NO_BOXES, Boxes, StoredBox

__all__ = [
    "MOST_DIMENSIONS",
    "NO_BOXES",
    "Box",
    "BoxIndex",
    "Boxes",
    "Copies",
    "Layout",
    "Offsets",
    "Piece",
    "Shard",
    "ShardedLeaf",
    "Split",
    "StoredBox",
    "TensorShard",
    "TensorShards",
    "copies",
    "cover",
    "double",
    "layout_of",
    "local_shape",
    "overlap",
    "part",
    "place",
    "runs",
    "sharded_leaf",
    "uncovered",
    "whole",
]
