"""Plans: how the values of one structure are laid out in memory, and built again.

plan          the plan
description   plans as bytes, and back; the cache of plans that were read
rows          those of entries whose rows are written in place
recipe        how the tensors of its leaves are made over memory
clusters      leaves by the storages that they share
"""

from __future__ import annotations

from memstore.structure.plans.clusters import cluster_leaves, spans_of, storage_range
from memstore.structure.plans.description import check_extent, describe, plan_of, read_leaf
from memstore.structure.plans.plan import Memory, Plan
from memstore.structure.plans.recipe import Recipe, suits_numpy
from memstore.structure.plans.rows import capacity_of, plan_of_rows

__all__ = [
    "Memory",
    "Plan",
    "Recipe",
    "capacity_of",
    "check_extent",
    "cluster_leaves",
    "describe",
    "plan_of",
    "plan_of_rows",
    "read_leaf",
    "spans_of",
    "storage_range",
    "suits_numpy",
]
