"""How a store changes and is read: the steps of put, get and delete, and what follows a death."""

from __future__ import annotations

from memstore.engine.protocols.claim import abandon, claim, park
from memstore.engine.protocols.commit import Change, Content, check_version, commit, missing
from memstore.engine.protocols.commit_inline import commit_inline
from memstore.engine.protocols.get import MISFIT, MappedEntry, files_of, hold, hold_at_once, map_entry
from memstore.engine.protocols.leases import lease
from memstore.engine.protocols.retry import retry_after_sweep
from memstore.engine.protocols.rollback import LOOKED_AT, check_headers, check_publications
from memstore.engine.protocols.sweep import sweep_all

__all__ = [
    "retry_after_sweep",
    "Change",
    "Content",
    "MappedEntry",
    "LOOKED_AT",
    "MISFIT",
    "abandon",
    "check_headers",
    "check_publications",
    "check_version",
    "claim",
    "commit",
    "commit_inline",
    "files_of",
    "hold",
    "hold_at_once",
    "lease",
    "map_entry",
    "missing",
    "park",
    "sweep_all",
]
