"""The rules' tables in a host's catalog.

entries   records, changes and parts of the engine, as the rules have them
rows      what the rules write, as bytes, and rows that can't be read and are passed over
segments  segments of this host: owned, lent, retired; values of other hosts that were fetched
groups    what this host owns, what is handed over, and the directory
tables    the tables of one transaction, and how one is run
"""

from __future__ import annotations

from memstore.distributed.catalog.entries import (
    Checked,
    change_of,
    checked,
    entry_of,
    failure_of,
    outcome_row,
    part_row,
    record_of,
)
from memstore.distributed.catalog.rows import Copy, standing_of
from memstore.distributed.catalog.tables import CatalogTables, MustChange, look, look_or_run, run

__all__ = [
    "CatalogTables",
    "Checked",
    "Copy",
    "MustChange",
    "change_of",
    "checked",
    "entry_of",
    "failure_of",
    "look",
    "look_or_run",
    "outcome_row",
    "part_row",
    "record_of",
    "run",
    "standing_of",
]
