"""How objects are restored: what is stored for them, compared, read in place, and loaded."""

from __future__ import annotations

from memstore.snapshot.restore.restoring import restore, state_dict_of

__all__ = [
    "restore",
    "state_dict_of",
]
