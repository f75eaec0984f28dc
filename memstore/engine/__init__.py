"""Bytes and files only. Imports neither torch nor tensordict.

opening, root, registry       a store folder, opened; what a fork does to it
folder, filesystem            what may be a store, its settings and its files
claim, publish                put and delete: their protocols; lookup: that of get
reuse, sweep                  retired segments: used again, or given back; leases: kept meanwhile
recovery, age                 what the living do for the dead; is the catalog as new as its files?
segment, spares               the file of one put, and how it is filled; layout: where its tensors lie
header, header_reader         what that file says of itself
mapping, placing, adopted     files in memory, those of others too
catalog, tables, record       the index; readers: which of its pages are kept, and by whom
pages, lockfile               what processes share beside it: the mutex, the doorbell, locks of files
inspection, survey, verify    is it whole? salvage, triage, repair: what is left of it
reference                     versions on their way to other processes
usage, holders, room, limits  what a store takes, and who holds it; no room; the kernel's refusals
syscalls/                     every call into the kernel: the seam where tests inject faults
"""

from __future__ import annotations

from memstore.engine import index, syscalls
from memstore.engine.catalog import Catalog, Transaction
from memstore.engine.failures import is_full, resource_errors
from memstore.engine.files import (
    Filling,
    Mapping,
    Sources,
    file_offsets,
    lies_in_mapping,
    map_sources,
    opened,
    read_sources,
    segment_path,
    watch,
)
from memstore.engine.format import (
    ALIGNMENT,
    HEAD_SIZE,
    HEADER_LIMIT,
    METADATA,
    OBJECTS_IN_RECORD,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    Entry,
    Header,
    Leaf,
    Path,
    Record,
    Span,
    belongs,
    check_header,
    decode_record,
    encode_record,
    header_size,
    lay_out,
    leading_base64,
    make_header,
    names_put,
    objects_at,
    read_objects,
    read_tensors,
)
from memstore.engine.opening import Creation, open_root
from memstore.engine.protocols import (
    MISFIT,
    Change,
    Content,
    Held,
    abandon,
    check_version,
    claim,
    commit,
    commit_inline,
    files_of,
    hold,
    hold_at_once,
    map_record,
    missing,
    park,
    retry_after_sweep,
    sweep_all,
)
from memstore.engine.reference import arrive, gone, take_lease
from memstore.engine.repair import repair_store, verify_store
from memstore.engine.root import (
    Root,
    abandon_root,
    absolute_path,
    close_root,
    filesystem_name,
    reopen_root,
    retain_root,
)
from memstore.engine.sync import deadline_after
from memstore.engine.usage import huge_page_bytes, measure

__all__ = [
    "ALIGNMENT",
    "Catalog",
    "Change",
    "Content",
    "Creation",
    "Entry",
    "Filling",
    "HEADER_LIMIT",
    "HEAD_SIZE",
    "Header",
    "Held",
    "Leaf",
    "METADATA",
    "MISFIT",
    "Mapping",
    "OBJECTS_IN_RECORD",
    "Path",
    "Record",
    "Root",
    "SAFETENSORS_DTYPES",
    "Sources",
    "Span",
    "TORCH_DTYPES",
    "Transaction",
    "abandon",
    "abandon_root",
    "absolute_path",
    "arrive",
    "belongs",
    "check_header",
    "check_version",
    "claim",
    "close_root",
    "commit",
    "commit_inline",
    "deadline_after",
    "decode_record",
    "encode_record",
    "file_offsets",
    "files_of",
    "filesystem_name",
    "gone",
    "header_size",
    "hold",
    "hold_at_once",
    "huge_page_bytes",
    "index",
    "is_full",
    "lay_out",
    "leading_base64",
    "lies_in_mapping",
    "make_header",
    "map_record",
    "map_sources",
    "measure",
    "missing",
    "names_put",
    "objects_at",
    "open_root",
    "opened",
    "park",
    "read_objects",
    "read_sources",
    "read_tensors",
    "reopen_root",
    "repair_store",
    "resource_errors",
    "retain_root",
    "segment_path",
    "sweep_all",
    "syscalls",
    "take_lease",
    "verify_store",
    "watch",
    "retry_after_sweep",
]
