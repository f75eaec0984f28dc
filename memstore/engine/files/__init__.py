"""Files in memory and under locks: segments and who fills them, mappings, files of others."""

from __future__ import annotations

from memstore.engine.files.claimed_file import ClaimedFile
from memstore.engine.files.external import Sources, map_sources, opened, read_sources
from memstore.engine.files.lockfile import LockFile, OwnedFile, close_all
from memstore.engine.files.mapping import Mapping, lies_in_mapping, map_file, watch
from memstore.engine.files.placing import file_offsets
from memstore.engine.files.segment import map_segment, remove_file, segment_path
from memstore.engine.files.segment_writer import SealedSegment, SegmentWriter, WritableMemory
from memstore.engine.files.spares import Spares

__all__ = [
    "ClaimedFile",
    "LockFile",
    "Mapping",
    "OwnedFile",
    "SealedSegment",
    "SegmentWriter",
    "Sources",
    "Spares",
    "WritableMemory",
    "close_all",
    "file_offsets",
    "lies_in_mapping",
    "map_file",
    "map_segment",
    "map_sources",
    "opened",
    "read_sources",
    "remove_file",
    "segment_path",
    "watch",
]
