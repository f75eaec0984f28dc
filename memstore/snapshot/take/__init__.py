"""How a snapshot is taken: what each rank holds and writes, and what becomes of it if one fails."""

from __future__ import annotations

from memstore.snapshot.take.drafts import Piece, draft_file, label_of
from memstore.snapshot.take.pending import PendingTake, start
from memstore.snapshot.take.preparing import prepare
from memstore.snapshot.take.state import State, StateWalker
from memstore.snapshot.take.taking import take

__all__ = [
    "PendingTake",
    "Piece",
    "State",
    "StateWalker",
    "draft_file",
    "label_of",
    "prepare",
    "start",
    "take",
]
