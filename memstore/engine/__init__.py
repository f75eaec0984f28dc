"""Bytes and files only. Imports neither torch nor tensordict.

Rooms, from below; each file's first lines say what it owns:
syscalls/     every call into the kernel: the seam where tests inject faults
format/       records, layouts and headers, as bytes
files/        segments, mappings, locks of files, files of others
catalog/      the index of a host, an LMDB database: its tables, transactions, growth and readers
sync/         what processes share in memory: robust mutexes, doorbells, the store's lock page; deadlines
root/         a store's folder, opened: its settings and files, who uses it, and what a fork does to it
usage         what a store takes of its machine; failures: the kernel's refusals, as memstore's errors
protocols/    put, get and delete step by step; reuse and sweep of files; leases; recovery after a crash
index         what a Store asks of the catalog: records, versions, keys, the wait for a version
repair/       verify, and what is saved of a damaged store
opening       a folder becomes a Root, and is created where there is none
reference     versions on their way to other processes
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
    OBJECTS_IN_RECORD,
    SAFETENSORS_DTYPES,
    Header,
    Leaf,
    Path,
    Record,
    Span,
    belongs,
    check_header,
    decode_record,
    encode_record,
    lay_out,
    leading_base64,
    names_put,
    objects_at,
    read_objects,
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
    "Filling",
    "HEADER_LIMIT",
    "HEAD_SIZE",
    "Header",
    "Held",
    "Leaf",
    "MISFIT",
    "Mapping",
    "OBJECTS_IN_RECORD",
    "Path",
    "Record",
    "Root",
    "SAFETENSORS_DTYPES",
    "Sources",
    "Span",
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
    "hold",
    "hold_at_once",
    "huge_page_bytes",
    "index",
    "is_full",
    "lay_out",
    "leading_base64",
    "lies_in_mapping",
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
