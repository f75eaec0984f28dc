"""Files in memory and under locks: segments and who fills them, mappings, external files."""

from __future__ import annotations

from memstore.engine.files.claimed_file import ClaimedFile, PreparedFile
from memstore.engine.files.claims import ClaimedOnStorage, Claims, StorageFile, StorageWriter
from memstore.engine.files.external import ExternalFiles, map_external, opened
from memstore.engine.files.lockfile import LockFile, OwnedFile, close_all
from memstore.engine.files.mapping import Mapping, lies_in_mapping, map_file, watch
from memstore.engine.files.placing import file_offsets
from memstore.engine.files.segment import map_segment, map_segments, other_size, remove_file, segment_path
from memstore.engine.files.segment_writer import SealedSegment, SegmentWriter, WritableMemory
from memstore.engine.files.shared_memory import SharedMemory
from memstore.engine.files.slots import erase_put_id, vacate, write_slots, write_state
from memstore.engine.files.spares import Spares
from memstore.engine.files.stored import fits, open_stored, read_stored

__all__ = [
    "ClaimedFile",
    "ClaimedOnStorage",
    "Claims",
    "ExternalFiles",
    "LockFile",
    "Mapping",
    "OwnedFile",
    "PreparedFile",
    "SealedSegment",
    "SegmentWriter",
    "SharedMemory",
    "Spares",
    "StorageFile",
    "StorageWriter",
    "WritableMemory",
    "close_all",
    "erase_put_id",
    "file_offsets",
    "fits",
    "lies_in_mapping",
    "map_external",
    "map_file",
    "map_segment",
    "map_segments",
    "open_stored",
    "opened",
    "other_size",
    "read_stored",
    "remove_file",
    "segment_path",
    "vacate",
    "watch",
    "write_slots",
    "write_state",
]
