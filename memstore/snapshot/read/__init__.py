"""A snapshot that is there: what it has, and its tensors in memory."""

from __future__ import annotations

from memstore.snapshot.format import StoredTensor
from memstore.snapshot.read.entries import (
    PICKLED,
    Entry,
    Leaf,
    ObjectEntry,
    SnapshotMetadata,
    TensorEntry,
    entries_of,
    find_leaf,
    leaves_of,
    metadata_of,
)
from memstore.snapshot.read.mapped import MappedFiles, Places
from memstore.snapshot.read.objects_out import build_unread, read_tensor
from memstore.snapshot.read.reading import Want, read_into
from memstore.snapshot.read.stored import Stored, Value
from memstore.snapshot.read.targets import Name, Target, find_targets, new_memory, new_target, why_not_filled
from memstore.snapshot.read.verifying import verify

__all__ = [
    "Entry",
    "Leaf",
    "MappedFiles",
    "Name",
    "ObjectEntry",
    "PICKLED",
    "Places",
    "SnapshotMetadata",
    "Stored",
    "StoredTensor",
    "Target",
    "TensorEntry",
    "Value",
    "Want",
    "build_unread",
    "entries_of",
    "find_leaf",
    "find_targets",
    "leaves_of",
    "metadata_of",
    "new_memory",
    "new_target",
    "read_into",
    "read_tensor",
    "verify",
    "why_not_filled",
]
