"""A value, taken apart for a put: its plan, its tensors and its objects; then the bytes of its tensors, copied.

flatten    a value as a plan, tensors and objects; the cache of plans that were made
dense      plans of values that are not put: their leaves lie contiguous in memory that is there
cast       which leaves are stored as another dtype
planning   the plan of a structure that was not seen before
fill       tensors into memory
shards     what one rank holds of a sharded value
"""

from __future__ import annotations

from memstore.structure.put.dense import plan_at, plan_dense
from memstore.structure.put.fill import Copies, Flat, GatheredCopy, PlainCopy, contents, copy_tensors, fill
from memstore.structure.put.flatten import flatten
from memstore.structure.put.shards import HeldLeaf, HeldValue, has_shards, take_shards_apart

__all__ = [
    "Copies",
    "Flat",
    "GatheredCopy",
    "HeldLeaf",
    "HeldValue",
    "PlainCopy",
    "contents",
    "copy_tensors",
    "fill",
    "flatten",
    "has_shards",
    "plan_at",
    "plan_dense",
    "take_shards_apart",
]
