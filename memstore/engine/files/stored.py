"""Reads of segments on storage that hosts share, of this host or others: bytes are copied, and nothing is locked.

A file there is written once, by the host whose folder it lies in, and synced before anybody hears of it. It is never
used again; when its value was replaced it stays for the store's grace time, and is then removed. So a reader opens it,
compares what its header says with the record, reads, and compares the put id again, which is erased before a removal.

A file that is missing, too short, full of zeros, or another put's may be gone, or not have come here yet: file systems
show the files of other hosts when they like. The reader looks up the record again to tell which.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.files.lockfile import OwnedFile
from memstore.engine.format import HEAD_SIZE, SegmentExtent, belongs
from memstore.errors import CorruptionError

_NOT_THERE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_AT_ONCE = 64 << 20  # bytes a call


def open_stored(path: str, extent: SegmentExtent, store: str, *, live: bool = False) -> OwnedFile | None:
    """Opens a segment that a record names, if it is that and whole; with `live`, and its header says live.

    Args:
        store: the id of the host that has written it.

    Raises OSError; CorruptionError: there is a link, or a folder.
    """
    try:
        file = OwnedFile(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise CorruptionError(path=path, detail="it is no file of memstore's") from None
        raise
    return file if fits(file, extent, store, live=live) else None


def fits(file: OwnedFile, extent: SegmentExtent, store: str, *, live: bool = False) -> bool:
    """Whether the file is the segment, and whole, as far as header and size tell."""
    try:
        head = syscalls.read_at(file.fd, HEAD_SIZE, 0)
        if len(head) < HEAD_SIZE or not belongs(head, extent.put_id, store, live=live):
            return False
        return (8 + int.from_bytes(head[:8], "little"), syscalls.size_of(file.fd)) == (extent.start, extent.size)
    except OSError as error:
        if error.errno in _NOT_THERE:  # removed by another host, while it was open here
            return False
        raise


def read_stored(file: OwnedFile, pieces: Sequence[tuple[int, int, int]]) -> bool:
    """Reads pieces of the file: (offset, size, address). False: it has ended, or is gone. Raises OSError."""
    try:
        for offset, size, address in pieces:
            for at in range(0, size, _AT_ONCE):
                part = syscalls.memory_at(address + at, min(_AT_ONCE, size - at))
                if syscalls.read_parts_at(file.fd, [part], offset + at) < len(part):
                    return False
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    return True
