"""The index of a host: an LMDB database and its tables. The only importer of lmdb."""

from __future__ import annotations

from memstore.engine.catalog import attempts, served
from memstore.engine.catalog.attempts import Now, Outcome, Part
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.growth import MOST_FOR_VALUES, CatalogCrowded
from memstore.engine.catalog.meta import has_gone_back
from memstore.engine.catalog.tables import (
    NAMES,
    OPTIONAL,
    SERVED,
    Counters,
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
    "Outcome",
    "Part",
    "SERVED",
    "Transaction",
    "attempts",
    "check_row",
    "has_gone_back",
    "read_counters",
    "read_segment",
    "served",
]
