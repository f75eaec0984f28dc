"""An opened store without its values, and what is told of them from records alone. Imports no torch.

keyspace    an opened store as keys and versions; `Store` adds the values
pending     sharded puts that wait for other ranks
entries     what the catalog says of each entry; its leaves by the description's tree
"""

from __future__ import annotations

from memstore.listing.entries import COLUMNS, Leaf, Listed, UnknownKindError, cells, entries, outline
from memstore.listing.keyspace import Keyspace, Mode, open_keyspace, opened

__all__ = [
    "COLUMNS",
    "Keyspace",
    "Leaf",
    "Listed",
    "Mode",
    "UnknownKindError",
    "cells",
    "entries",
    "open_keyspace",
    "opened",
    "outline",
]
