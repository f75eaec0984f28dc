"""The boxes of an entry: where the bytes of leaves lie that are spread over its segments."""

from __future__ import annotations

from memstore.engine import Record
from memstore.sharding import NO_BOXES, Boxes, StoredBox

__all__ = ["NO_BOXES", "Boxes", "StoredBox", "boxes_of"]


def boxes_of(record: Record) -> Boxes:
    """Of an entry that is not sharded: none."""
    return NO_BOXES
