"""Files in memory and under locks: segments and who fills them, mappings, external files."""

from __future__ import annotations

from memstore.engine.files.claimed_file import ClaimedFile, PreparedFile
from memstore.engine.files.external import ExternalFiles, map_external, opened
from memstore.engine.files.lockfile import LockFile, OwnedFile, close_all
from memstore.engine.files.mapping import Mapping, lies_in_mapping, map_file, watch
from memstore.engine.files.placing import file_offsets
from memstore.engine.files.segment import map_segment, map_segments, remove_file, segment_path
from memstore.engine.files.segment_writer import SealedSegment, SegmentWriter, WritableMemory
from memstore.engine.files.shared_memory import SharedMemory
from memstore.engine.files.slots import erase_put_id, vacate, write_slots, write_state
from memstore.engine.files.spares import Spares

__all__ = [
    "ClaimedFile",
    "ExternalFiles",
    "LockFile",
    "Mapping",
    "OwnedFile",
    "PreparedFile",
    "SealedSegment",
    "SegmentWriter",
    "SharedMemory",
    "Spares",
    "WritableMemory",
    "close_all",
    "erase_put_id",
    "file_offsets",
    "lies_in_mapping",
    "map_external",
    "map_file",
    "map_segment",
    "map_segments",
    "opened",
    "remove_file",
    "segment_path",
    "vacate",
    "watch",
    "write_slots",
    "write_state",
]
