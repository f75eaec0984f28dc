"""Files in memory and under locks: segments and who fills them, mappings, external files."""

from __future__ import annotations

from memstore.engine.files.external import ExternalFiles, map_external, opened
from memstore.engine.files.lockfile import LockFile, OwnedFile, close_all
from memstore.engine.files.mapping import Mapping, lies_in_mapping, map_file, watch
from memstore.engine.files.placing import file_offsets
from memstore.engine.files.segment import Filling, map_segment, remove_file, segment_path
from memstore.engine.files.spares import Spares

__all__ = [
    "Filling",
    "LockFile",
    "Mapping",
    "OwnedFile",
    "ExternalFiles",
    "Spares",
    "close_all",
    "file_offsets",
    "lies_in_mapping",
    "map_external",
    "map_file",
    "map_segment",
    "opened",
    "remove_file",
    "segment_path",
    "watch",
]
