"""Bytes and files only. Imports neither torch nor tensordict.

Rooms, from below; each file's first lines say what it owns:
syscalls/     every call into the kernel: the seam where tests inject faults
format/       records, layouts and headers, as bytes
files/        segments, mappings, locks of files, external files (those of others)
catalog/      keys and files of this host's store, an LMDB database: its tables, transactions, growth and readers
sync/         what processes share in memory: robust mutexes, doorbells, the store's lock page; deadlines
root/         a store's folder, opened: its settings and files, who uses it, and what a fork does to it
usage         how much memory and disk a store takes, and who holds it
failures      "disk full" and "too many", as memstore's errors
protocols/    put, get and delete step by step; reuse and sweep of files; leases; recovery after a crash
index         what a Store asks of the catalog: records, versions, keys, the wait for a version
repair/       verify, and what is saved of a damaged store
opening       a folder becomes a Root, and is created where there is none
pin           versions that stay readable, on their way to other processes too
"""

from __future__ import annotations

from memstore.engine import index, syscalls
from memstore.engine.catalog import Catalog, Outcome, Part
from memstore.engine.failures import resource_errors
from memstore.engine.files import (
    ExternalFiles,
    OwnedFile,
    SharedMemory,
    WritableMemory,
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
    METADATA,
    OBJECTS_IN_RECORD,
    PART_MARK,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    Entry,
    Header,
    Leaf,
    Path,
    Record,
    SegmentExtent,
    Span,
    base_after,
    belongs,
    check_header,
    decode_external,
    encode_extents,
    end_of,
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
from memstore.engine.opening import Creation, open_root
from memstore.engine.pin import Pin, PinOptions, pack, unpack
from memstore.engine.protocols import (
    DEFAULT_LEASE,
    MISFIT,
    Change,
    Content,
    Draft,
    Failure,
    MappedEntry,
    Member,
    check_version,
    delete,
    ended,
    files_of,
    give_up,
    hold,
    hold_at_once,
    missing,
    missing_ranks,
    no_version,
    outcome_of,
    pending_parts,
    prepare,
    put,
    retry_after_sweep,
    sweep_all,
    version_of_outcome,
)
from memstore.engine.repair import FoundPart, repair_store, verify_store
from memstore.engine.root import (
    Root,
    abandon_root,
    absolute_path,
    close_root,
    filesystem_name,
    reopen_root,
)
from memstore.engine.sync import boot_id, deadline_after
from memstore.engine.usage import huge_page_bytes, measure

__all__ = [
    "ALIGNMENT",
    "Catalog",
    "Change",
    "Content",
    "Creation",
    "DEFAULT_LEASE",
    "Draft",
    "Entry",
    "ExternalFiles",
    "Failure",
    "FoundPart",
    "HEADER_LIMIT",
    "HEAD_SIZE",
    "Header",
    "Leaf",
    "METADATA",
    "MISFIT",
    "MappedEntry",
    "Member",
    "OBJECTS_IN_RECORD",
    "Outcome",
    "OwnedFile",
    "PART_MARK",
    "Part",
    "Path",
    "Pin",
    "PinOptions",
    "Record",
    "Root",
    "SAFETENSORS_DTYPES",
    "SegmentExtent",
    "SharedMemory",
    "Span",
    "TORCH_DTYPES",
    "WritableMemory",
    "abandon_root",
    "absolute_path",
    "base_after",
    "belongs",
    "boot_id",
    "check_header",
    "check_version",
    "close_root",
    "deadline_after",
    "decode_external",
    "delete",
    "encode_extents",
    "end_of",
    "ended",
    "file_offsets",
    "files_of",
    "filesystem_name",
    "give_up",
    "header_size",
    "hold",
    "hold_at_once",
    "huge_page_bytes",
    "index",
    "lay_out",
    "leading_base64",
    "lies_in_mapping",
    "make_header",
    "map_external",
    "measure",
    "missing",
    "missing_ranks",
    "names_put",
    "no_version",
    "objects_at",
    "open_root",
    "opened",
    "outcome_of",
    "pack",
    "pending_parts",
    "prepare",
    "put",
    "read_objects",
    "read_tensors",
    "reopen_root",
    "repair_store",
    "resource_errors",
    "retry_after_sweep",
    "split_header",
    "sweep_all",
    "syscalls",
    "unpack",
    "verify_store",
    "version_of_outcome",
    "watch",
]
