"""How a store changes and is read: the steps of put, get and delete; reuse of files; recovery after a process dies."""

from __future__ import annotations

from memstore.engine.protocols.ahead import close as close_ahead
from memstore.engine.protocols.attempt_ends import give_up
from memstore.engine.protocols.attempt_outcomes import Failure, ended, version_of_outcome
from memstore.engine.protocols.attempt_prepare import prepare
from memstore.engine.protocols.attempt_publish import outcome_of
from memstore.engine.protocols.attempts import Member, missing_ranks, no_version, pending_parts
from memstore.engine.protocols.change import Change, Content, check_version, missing, mutable_entry
from memstore.engine.protocols.features import need_boxes, need_mutable
from memstore.engine.protocols.get import MISFIT, MappedEntry, files_of, hold, hold_at_once, map_entry
from memstore.engine.protocols.leases import DEFAULT_LEASE, lease
from memstore.engine.protocols.mutable import MutableEntry, fence, open_mutable, sync_rows
from memstore.engine.protocols.put import Draft, delete, put, retry_after_sweep
from memstore.engine.protocols.recovery import after_death
from memstore.engine.protocols.rollback import LOOKED_AT, check_headers, check_publications
from memstore.engine.protocols.sweep import sweep_all

__all__ = [
    "Change",
    "Content",
    "DEFAULT_LEASE",
    "Draft",
    "Failure",
    "LOOKED_AT",
    "MISFIT",
    "MappedEntry",
    "Member",
    "MutableEntry",
    "after_death",
    "check_headers",
    "check_publications",
    "check_version",
    "close_ahead",
    "delete",
    "ended",
    "fence",
    "files_of",
    "give_up",
    "hold",
    "hold_at_once",
    "lease",
    "map_entry",
    "missing",
    "missing_ranks",
    "mutable_entry",
    "need_boxes",
    "need_mutable",
    "no_version",
    "open_mutable",
    "outcome_of",
    "pending_parts",
    "prepare",
    "put",
    "retry_after_sweep",
    "sweep_all",
    "sync_rows",
    "version_of_outcome",
]
