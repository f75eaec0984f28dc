"""What a snapshot says of itself: its manifest, checked, and the names of tensors and files. Imports no torch."""

from __future__ import annotations

from memstore.snapshot.format.manifest import (
    LIMIT,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    StoredValue,
    check_length,
    encode_manifest,
    load_manifest,
    read_manifest,
)
from memstore.snapshot.format.names import (
    CLAIM,
    INDEX,
    MANIFEST,
    claim_name,
    failure_name,
    file_name,
    is_id,
    is_snapshot,
    local_path,
    part_name,
    path_of,
    rank_of,
    take_of,
    trace_of,
)

__all__ = [
    "CLAIM",
    "INDEX",
    "LIMIT",
    "MANIFEST",
    "Manifest",
    "StoredBox",
    "StoredFile",
    "StoredTensor",
    "StoredValue",
    "check_length",
    "claim_name",
    "encode_manifest",
    "failure_name",
    "file_name",
    "is_id",
    "is_snapshot",
    "load_manifest",
    "local_path",
    "part_name",
    "path_of",
    "rank_of",
    "read_manifest",
    "take_of",
    "trace_of",
]
