"""The rules' tables in a host's catalog.

entries       records of the engine, as entries of the rules
rows          what the rules write, as bytes
damage        rows that can't be read, and are passed over
attempts      sharded puts that wait for parts, and what became of them
segments      segments of this host: owned, lent, retired
copies        values of other hosts that were fetched
tables        the tables of one transaction
transactions  how one is run
"""

from __future__ import annotations

from memstore.distributed.catalog.attempts import failure_of, outcome_row, part_row
from memstore.distributed.catalog.entries import Checked, change_of, checked, entry_of, record_of
from memstore.distributed.catalog.rows import Copy, standing_of
from memstore.distributed.catalog.tables import CatalogTables
from memstore.distributed.catalog.transactions import look, run

__all__ = [
    "CatalogTables",
    "Checked",
    "Copy",
    "change_of",
    "checked",
    "entry_of",
    "failure_of",
    "look",
    "outcome_row",
    "part_row",
    "record_of",
    "run",
    "standing_of",
]
