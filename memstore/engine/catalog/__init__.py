"""The index of a host: an LMDB database and its tables. The only importer of lmdb."""

from __future__ import annotations

from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import MOST_FOR_VALUES, Catalog, CatalogCrowded
from memstore.engine.catalog.environment import has_gone_back
from memstore.engine.catalog.tables import (
    NAMES,
    OPTIONAL,
    SERVED,
    AttemptOutcome,
    Counters,
    Now,
    PendingPart,
    Transaction,
    check_row,
    read_counters,
    read_segment,
)

__all__ = [
    "MOST_FOR_VALUES",
    "NAMES",
    "OPTIONAL",
    "Catalog",
    "CatalogCrowded",
    "Counters",
    "Now",
    "AttemptOutcome",
    "PendingPart",
    "SERVED",
    "Transaction",
    "tables",
    "check_row",
    "has_gone_back",
    "read_counters",
    "read_segment",
]
