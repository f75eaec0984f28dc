"""Plans: how the values of one structure are laid out in memory, and built again.

plan          the plan
description   plans as bytes, and back; the cache of plans that were read
clusters      leaves by the storages that they share
"""

from __future__ import annotations

from memstore.structure.plans.clusters import cluster_leaves, spans_of, storage_range
from memstore.structure.plans.description import check_extent, describe, plan_of
from memstore.structure.plans.plan import Memory, Plan

__all__ = [
    "Memory",
    "Plan",
    "check_extent",
    "cluster_leaves",
    "describe",
    "plan_of",
    "spans_of",
    "storage_range",
]
