"""The rules' tables in a host's catalog.

rows    records and changes of the engine, as the rules have them; what else the rules write, as bytes
tables  the tables of one transaction, and how one is run
"""

from __future__ import annotations

from memstore.distributed.catalog.rows import Copy, change_of, checked, entry_of, record_of, standing_of
from memstore.distributed.catalog.tables import CatalogTables, MustChange, look, look_or_run, run

__all__ = [
    "CatalogTables",
    "Copy",
    "MustChange",
    "change_of",
    "checked",
    "entry_of",
    "look",
    "look_or_run",
    "record_of",
    "run",
    "standing_of",
]
