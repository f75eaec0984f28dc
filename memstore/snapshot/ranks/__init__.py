"""The ranks of a snapshot: steps that all take, what they hear of each other, and which of them died."""

from __future__ import annotations

from memstore.snapshot.ranks.asking import ask
from memstore.snapshot.ranks.exchange import error_of_rank
from memstore.snapshot.ranks.ranks import TIMEOUT, Ranks

__all__ = [
    "Ranks",
    "TIMEOUT",
    "ask",
    "error_of_rank",
]
