"""How a snapshot is taken: what each rank holds and writes, and what becomes of it if one fails."""

from __future__ import annotations

from memstore.snapshot.take.pending import PendingTake, start
from memstore.snapshot.take.preparing import prepare
from memstore.snapshot.take.taking import take

__all__ = [
    "PendingTake",
    "prepare",
    "start",
    "take",
]
