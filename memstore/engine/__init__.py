"""Bytes and files only. Imports neither torch nor tensordict.

Rooms, from below; each file's first lines say what it owns:
syscalls/     every call into the kernel: the seam where tests inject faults
format/       records, layouts and headers, as bytes
files/        segments, mappings, locks of files, external files (those of others)
catalog/      keys and files of this host's store, an LMDB database: its tables, transactions, growth and readers
sync/         what processes share in memory: robust mutexes, doorbells, the store's lock page; deadlines
root/         a store's folder, opened: its settings and files, who uses it, and what a fork does to it
usage         how much memory and disk a store takes, and who holds it; which stores a machine has; errors: no room
protocols/    put, get and delete step by step; sharded puts; reuse and sweep of files; recovery after a crash
index         what a Store asks of the catalog: records, versions, keys, the wait for a version
repair/       verify, and what is saved of a damaged store
opening       a folder becomes a Root, and is created where there is none
pin           versions that stay readable, on their way to other processes too
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.engine import index, syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import MOST_FOR_VALUES, Catalog, CatalogCrowded, ReadOnlyTransaction
from memstore.engine.catalog.tables import (
    AttemptOutcome,
    Failure,
    FailureDetails,
    KeptVersion,
    Now,
    PendingPart,
    Place,
    Transaction,
)
from memstore.engine.files.mapping import (
    ExternalFiles,
    LockFile,
    Mapping,
    OwnedFile,
    SharedMemory,
    file_offsets,
    lies_in_mapping,
    map_external,
    map_file,
    opened,
    watch,
)
from memstore.engine.files.segments import (
    ClaimedFile,
    SealedSegment,
    SegmentWriter,
    WritableMemory,
    fits,
    open_stored,
    read_stored,
    segment_path,
)
from memstore.engine.format.headers import (
    ALIGNMENT,
    ELEMENT_SIZES,
    HEAD_SIZE,
    HEADER_LIMIT,
    METADATA,
    PART_MARK,
    PLAIN_METADATA,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    DeltaHeader,
    Header,
    HeaderEntry,
    ParsedHeader,
    Span,
    belongs,
    check_header,
    copy_header,
    encode_delta,
    encode_entries,
    header_size,
    lay_out,
    leading_base64,
    make_header,
    names_put,
    objects_at,
    read_objects,
    read_tensors,
    split_header,
)
from memstore.engine.format.records import (
    FILLING,
    LIVE,
    OBJECTS_IN_RECORD,
    PREPARED,
    ExternalExtent,
    Leaf,
    MutableDescription,
    OriginRange,
    Path,
    Record,
    SegmentExtent,
    SegmentRow,
    base_after,
    decode_external,
    decode_mutable,
    decode_origins,
    decode_segments,
    encode_extents,
    encode_mutable,
    encode_origins,
    end_of,
    plan_bytes,
)
from memstore.engine.opening import (
    Creation,
    check_is_host,
    destroy_root,
    gone_if_new,
    has_no_options,
    may_come,
    open_root,
    remove_unused,
)
from memstore.engine.pin import HeldVersion, PinOptions, pack, unpack
from memstore.engine.protocols import attempts
from memstore.engine.protocols.attempts import (
    AttemptFailure,
    AttemptRows,
    Merge,
    Participant,
    ended,
    missing_ranks,
    version_of_outcome,
)
from memstore.engine.protocols.change import (
    SMALL,
    Change,
    Content,
    MembershipChanged,
    check_version,
    deltas_here,
    mutable_entry,
    need_boxes,
    need_cluster,
    need_deltas,
    need_history,
    need_mutable,
    note_history,
    record_of,
)
from memstore.engine.protocols.deltas import DELTA_BASE, BaseGone, DeltaDraft, Moved, carry, in_both, origins_of
from memstore.engine.protocols.elsewhere import (
    IN_A_THREAD,
    Absent,
    BegunWait,
    Elsewhere,
    MappedEntry,
    WaitState,
    at_each_owner,
    elsewhere_of,
    is_fellow,
    is_recovered,
    is_served,
    owned_now,
    owner_name,
    shared_id,
)
from memstore.engine.protocols.get import MISFIT, damaged_entry, files_of, hold, hold_at_once, map_entry
from memstore.engine.protocols.history import (
    Charge,
    TakenPin,
    charge,
    count_within,
    end_pin,
    held_bytes,
    hold_version_of,
    pinned_versions,
    set_quota,
    take_pin,
    used_by,
)
from memstore.engine.protocols.mutable import MutableEntry, fence, open_mutable, sync_rows
from memstore.engine.protocols.put import Draft, delete, fill_and_publish, put
from memstore.engine.protocols.reuse import DEFAULT_LEASE
from memstore.engine.protocols.served import Effects, change_served
from memstore.engine.protocols.sharded_put import (
    LOOK_EVERY,
    give_up,
    no_version,
    outcome_of,
    pending_parts,
    prepare,
    to_explain,
)
from memstore.engine.protocols.sweep import make_room_and_retry, sweep_all, sweep_if_due
from memstore.engine.repair.repair import repair_store
from memstore.engine.repair.salvage import FoundPart, read_left
from memstore.engine.repair.verify import verify_store
from memstore.engine.root.filesystem import filesystem_name, is_in_memory, lock_holders
from memstore.engine.root.folder import DOORBELL, absolute_path, create_file, has_settings
from memstore.engine.root.roots import Root, RootUse, close_root, reopen_root, use_root
from memstore.engine.root.shared import segments_of, state_folder, storage_error, wait_for_storage
from memstore.engine.root.storage import mapped_size
from memstore.engine.sync.pages import CONTROL_SIZE, SPARE_AT, check_page, new_page
from memstore.engine.sync.primitives import Refusal, Watch, boot_clock, boot_id, deadline_after
from memstore.engine.sync.replay_state import (
    CLAIMED,
    CLAIMING,
    CLAIMS_SIZE,
    FREE,
    INSERTS,
    PUBLISHING,
    QUEUE_SIZE,
    SAMPLES,
    Claim,
    ClaimTable,
    LimiterQueue,
    RingNumbers,
)
from memstore.engine.syscalls import same_bytes
from memstore.engine.usage import (
    Holding,
    command_of,
    huge_page_bytes,
    measure,
    numbers_of_rows,
    numbers_of_store,
    resource_errors,
    stores_of_machine,
    who_holds,
)
