"""Verifies a store, and repairs a damaged one: nothing of it is believed before it was checked."""

from __future__ import annotations

from memstore.engine.repair.repair import repair_store
from memstore.engine.repair.salvage import FoundPart
from memstore.engine.repair.verify import verify_store

__all__ = [
    "FoundPart",
    "repair_store",
    "verify_store",
]
