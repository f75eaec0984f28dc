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
from memstore.engine.catalog import Catalog
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
    decode_external,
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
from memstore.engine.pin import Pin, PinOptions
from memstore.engine.protocols import (
    DEFAULT_LEASE,
    MISFIT,
    Change,
    Content,
    Draft,
    MappedEntry,
    check_version,
    delete,
    files_of,
    hold,
    hold_at_once,
    missing,
    put,
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
    "DEFAULT_LEASE",
    "HEADER_LIMIT",
    "HEAD_SIZE",
    "METADATA",
    "MISFIT",
    "OBJECTS_IN_RECORD",
    "SAFETENSORS_DTYPES",
    "TORCH_DTYPES",
    "Catalog",
    "Change",
    "Content",
    "Creation",
    "Draft",
    "Entry",
    "ExternalFiles",
    "Header",
    "Leaf",
    "MappedEntry",
    "OwnedFile",
    "Path",
    "Pin",
    "PinOptions",
    "Record",
    "Root",
    "SharedMemory",
    "Span",
    "WritableMemory",
    "abandon_root",
    "absolute_path",
    "belongs",
    "check_header",
    "check_version",
    "close_root",
    "deadline_after",
    "decode_external",
    "delete",
    "file_offsets",
    "files_of",
    "filesystem_name",
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
    "names_put",
    "objects_at",
    "open_root",
    "opened",
    "put",
    "read_objects",
    "read_tensors",
    "reopen_root",
    "repair_store",
    "resource_errors",
    "split_header",
    "sweep_all",
    "syscalls",
    "verify_store",
    "watch",
]
