"""What each rank wrote, and how all parts become a snapshot. Imports no torch: the writer does it, too."""

from __future__ import annotations

from memstore.snapshot.parts.part import Part, PartTensor, Take, with_sums
from memstore.snapshot.parts.publishing import claimant, finish_part, publish

__all__ = [
    "finish_part",
    "Part",
    "PartTensor",
    "Take",
    "claimant",
    "publish",
    "with_sums",
]
