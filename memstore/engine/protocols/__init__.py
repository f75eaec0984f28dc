"""How a store changes and is read: the steps of put, get and delete, and what follows a death."""

from __future__ import annotations

from memstore.engine.protocols.change import Change, Content, check_version, missing
from memstore.engine.protocols.get import MISFIT, MappedEntry, files_of, hold, hold_at_once, map_entry
from memstore.engine.protocols.leases import lease
from memstore.engine.protocols.put import Draft, delete, put, retry_after_sweep
from memstore.engine.protocols.rollback import LOOKED_AT, check_headers, check_publications
from memstore.engine.protocols.sweep import sweep_all

__all__ = [
    "retry_after_sweep",
    "Change",
    "Content",
    "Draft",
    "MappedEntry",
    "LOOKED_AT",
    "MISFIT",
    "check_headers",
    "check_publications",
    "check_version",
    "delete",
    "files_of",
    "hold",
    "hold_at_once",
    "lease",
    "map_entry",
    "missing",
    "put",
    "sweep_all",
]
