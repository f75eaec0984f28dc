"""Where the files of a snapshot lie. Imports no torch.

interface    what a snapshot needs of such a place: files by name, written and read in runs of bytes
names        which names files may have
chunks       files in chunks of 16 MiB, and the sums of these
transfer     a run of bytes, from memory to a file or back
locks        locks of a folder and of files in it
failures     what a file system refuses, as memstore's errors
files        a folder of a file system as storage
verify       a file, compared with its sums
"""

from __future__ import annotations

from memstore.snapshot.storage.chunks import by_width
from memstore.snapshot.storage.files import FileStorage
from memstore.snapshot.storage.interface import CHUNK, SUM_SIZE, Done, FilePart, LateBytes, Storage
from memstore.snapshot.storage.names import check_name, is_unfinished
from memstore.snapshot.storage.verify import verify_file

__all__ = [
    "CHUNK",
    "SUM_SIZE",
    "Done",
    "FilePart",
    "FileStorage",
    "LateBytes",
    "Storage",
    "by_width",
    "check_name",
    "is_unfinished",
    "verify_file",
]
