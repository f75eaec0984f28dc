"""Boxes: parts of tensors."""

from __future__ import annotations

from memstore.sharding.box import Offsets, cover, runs

__all__ = [
    "Offsets",
    "cover",
    "runs",
]
