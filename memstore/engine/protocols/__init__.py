"""How a store changes and is read: the steps of put, get and delete; reuse of files; recovery after a process dies."""

from __future__ import annotations

from memstore.engine.protocols.ahead import close as close_ahead
from memstore.engine.protocols.attempt_outcomes import Failure, ended, version_of_outcome
from memstore.engine.protocols.attempt_publish import LOOK_EVERY, Merge
from memstore.engine.protocols.attempts import Member, missing_ranks
from memstore.engine.protocols.attempts_anywhere import (
    give_up,
    no_version,
    outcome_of,
    pending_parts,
    prepare,
    to_explain,
)
from memstore.engine.protocols.change import (
    SMALL,
    Change,
    Content,
    MembershipChanged,
    check_version,
    missing,
    mutable_entry,
    record_of,
)
from memstore.engine.protocols.elsewhere import (
    IN_A_THREAD,
    BegunWait,
    Elsewhere,
    Turn,
    at_each_home,
    elsewhere_of,
    find_record,
    home_now,
    is_fellow,
    is_served,
    register_elsewhere,
    shared_id,
)
from memstore.engine.protocols.features import need_boxes, need_cluster, need_mutable
from memstore.engine.protocols.get import (
    MISFIT,
    damaged_entry,
    files_of,
    hold,
    hold_at_once,
    map_beside,
    map_entry,
)
from memstore.engine.protocols.leases import DEFAULT_LEASE, lease
from memstore.engine.protocols.mapped_entry import Absent, MappedEntry
from memstore.engine.protocols.mutable import MutableEntry, fence, open_mutable, sync_rows
from memstore.engine.protocols.put import Draft, delete, fill, put, retry_after_sweep
from memstore.engine.protocols.recovery import after_death
from memstore.engine.protocols.rollback import LOOKED_AT, check_headers, check_publications
from memstore.engine.protocols.served import Effects, change_served
from memstore.engine.protocols.stored import mapped_size, placed_segments, stored_entry
from memstore.engine.protocols.sweep import sweep_all, sweep_if_due

__all__ = [
    "SMALL",
    "at_each_home",
    "placed_segments",
    "stored_entry",
    "mapped_size",
    "stored_entry",
    "sweep_if_due",
    "register_elsewhere",
    "find_record",
    "home_now",
    "is_fellow",
    "is_served",
    "shared_id",
    "elsewhere_of",
    "damaged_entry",
    "BegunWait",
    "Elsewhere",
    "IN_A_THREAD",
    "Turn",
    "Absent",
    "Change",
    "Content",
    "DEFAULT_LEASE",
    "Draft",
    "Effects",
    "Failure",
    "LOOKED_AT",
    "LOOK_EVERY",
    "MISFIT",
    "MappedEntry",
    "Member",
    "Merge",
    "MembershipChanged",
    "MutableEntry",
    "after_death",
    "change_served",
    "check_headers",
    "check_publications",
    "check_version",
    "close_ahead",
    "delete",
    "ended",
    "fence",
    "files_of",
    "fill",
    "give_up",
    "hold",
    "hold_at_once",
    "lease",
    "map_beside",
    "map_entry",
    "missing",
    "missing_ranks",
    "mutable_entry",
    "need_boxes",
    "need_cluster",
    "need_mutable",
    "no_version",
    "open_mutable",
    "outcome_of",
    "pending_parts",
    "prepare",
    "put",
    "record_of",
    "retry_after_sweep",
    "sweep_all",
    "sync_rows",
    "to_explain",
    "version_of_outcome",
]
