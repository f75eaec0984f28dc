"""Where the files of a snapshot lie.

interface      what a snapshot needs of such a place: files by name, written and read in runs of bytes
"""

from __future__ import annotations

from memstore.snapshot.storage.interface import Done, FilePart, Storage

__all__ = ["Done", "FilePart", "Storage"]
