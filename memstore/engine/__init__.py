"""Bytes and files only. Imports neither torch nor tensordict.

opening, root, registry       a store folder, opened; what a fork does to it
folder, filesystem            what may be a store, its settings and its files
claim, publish                put and delete: their protocols; lookup: that of get
reuse, sweep                  retired segments: used again, or given back; leases: kept meanwhile
recovery, age                 what the living do for the dead; is the catalog as new as its files?
segment, spares               the file of one put, and how it is filled; layout: where its tensors lie
header, header_reader         what that file says of itself
mapping, placing, external    files in memory, external ones too
catalog, tables, record       the index; readers: which of its pages are kept, and by whom
pages, lockfile               what processes share beside it: the mutex, the doorbell, locks of files
inspection, survey, verify    is it whole? salvage, triage, repair: what is left of it
pin                           versions that stay readable, on their way to other processes too
usage, holders, room, limits  what a store takes, and who holds it; no room; the kernel's refusals
syscalls/                     every call into the kernel: the seam where tests inject faults
"""

from __future__ import annotations

from memstore.engine import index, syscalls
from memstore.engine.catalog import Catalog, Transaction
from memstore.engine.failures import is_full, resource_errors
from memstore.engine.files import (
    ExternalFiles,
    Filling,
    file_offsets,
    lies_in_mapping,
    map_external,
    opened,
    watch,
)
from memstore.engine.format import (
    ALIGNMENT,
    HEAD_SIZE,
    HEADER_LIMIT,
    OBJECTS_IN_RECORD,
    SAFETENSORS_DTYPES,
    Header,
    Leaf,
    Path,
    Record,
    Span,
    belongs,
    check_header,
    decode_external,
    lay_out,
    leading_base64,
    names_put,
    objects_at,
    read_objects,
)
from memstore.engine.opening import Creation, open_root
from memstore.engine.pin import Pin, PinOptions
from memstore.engine.protocols import (
    MISFIT,
    Change,
    Content,
    MappedEntry,
    abandon,
    check_version,
    claim,
    commit,
    commit_inline,
    files_of,
    hold,
    hold_at_once,
    missing,
    park,
    retry_after_sweep,
    sweep_all,
)
from memstore.engine.repair import repair_store, verify_store
from memstore.engine.root import (
    Root,
    abandon_root,
    absolute_path,
    close_root,
    filesystem_name,
    reopen_root,
)
from memstore.engine.sync import deadline_after
from memstore.engine.usage import huge_page_bytes, measure

__all__ = [
    "ALIGNMENT",
    "Catalog",
    "Change",
    "Content",
    "Creation",
    "Filling",
    "HEADER_LIMIT",
    "HEAD_SIZE",
    "Header",
    "MappedEntry",
    "Leaf",
    "MISFIT",
    "OBJECTS_IN_RECORD",
    "Path",
    "Pin",
    "PinOptions",
    "Record",
    "Root",
    "SAFETENSORS_DTYPES",
    "ExternalFiles",
    "Span",
    "Transaction",
    "abandon",
    "abandon_root",
    "absolute_path",
    "belongs",
    "check_header",
    "check_version",
    "claim",
    "close_root",
    "commit",
    "commit_inline",
    "deadline_after",
    "file_offsets",
    "files_of",
    "filesystem_name",
    "hold",
    "hold_at_once",
    "huge_page_bytes",
    "index",
    "is_full",
    "lay_out",
    "leading_base64",
    "lies_in_mapping",
    "map_external",
    "decode_external",
    "measure",
    "missing",
    "names_put",
    "objects_at",
    "open_root",
    "opened",
    "park",
    "read_objects",
    "reopen_root",
    "repair_store",
    "resource_errors",
    "sweep_all",
    "syscalls",
    "verify_store",
    "watch",
    "retry_after_sweep",
]
