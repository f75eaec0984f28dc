"""Repair, for who calls it: what the engine has to ask of those who know what values are."""

from __future__ import annotations

import os
from collections.abc import Sequence

from memstore.engine import Content, FoundPart, Record, SegmentExtent, absolute_path, repair_store, resource_errors
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.info import Progress, RepairReport
from memstore.late_imports import between_forks
from memstore.wording import check_progress


def repair(root: str | os.PathLike[str], *, timeout: float = 30.0, progress: Progress | None = None) -> RepairReport:
    """Makes a new catalog for a damaged store, from the rest of the old one and from the headers of its segments.

    It needs the store for itself: every process has to close it first. Tensors are not read; `Store.verify` does that
    afterwards. If the store is intact, it frees the files that are kept to be used again, and changes nothing else,
    except that versions continue from a higher number.

    Args:
        root: the folder.
        timeout: seconds to wait until all have closed the store.
        progress: called with the bytes of the files that were looked at, and of all.

    Returns:
        Which keys the store has, which are lost, and how many bytes of files were freed. Files that may belong to a
        lost key are not deleted: they are renamed to `ID.safetensors.damaged`.

    Raises:
        NotAStoreError: `memstore.json` is missing or damaged: its content is stored nowhere else.
        StoreTimeoutError: a process still has the store open; the message names it.
        ResourceLimitError: no process could be started to read the catalog. Nothing was changed.
        PermissionDeniedError, FormatVersionError, UnsupportedFilesystemError, StoreFullError: as `open`.

    Example:
        >>> import memstore, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> with memstore.open(root) as store:
        ...     version = store.put("policy", torch.ones(1000))
        >>> memstore.repair(root)
        memstore.RepairReport: 1 key recovered, 0 lost; 0 B given back
    """
    path = absolute_path(root)
    check_progress(progress)
    with resource_errors(path):
        return repair_store(path, mend, merge, is_home, timeout, progress)


def mend(store: str, key: bytes, record: Record, extent: SegmentExtent, content: memoryview) -> bytes | None:
    """A header made anew of a record, for a file with that content; None if that can't be told to be the record's.

    It can if the bytes fit the record's checksums. Without these, if what is left of the header names the put.
    """
    with between_forks():  # torch, which most repairs need not
        from memstore import contents

    try:
        if record.parts is not None:
            return contents.header_of_part(store, key.decode(), record, extent, content)
        return contents.header_of(store, key.decode(), record, content)
    except (CorruptionError, UnsupportedValueError):
        return None


def is_home(said: bytes, key: bytes) -> bool:
    """Whether a key is at home on this host, by what its catalog says of its cluster."""
    with between_forks():
        from memstore.distributed.catalog import standing_of

    return standing_of(said).is_home_of(key)


def merge(key: str, parts: Sequence[FoundPart]) -> Content | None:
    """What a record says of a sharded value, made of the headers of its parts; None if they are not all of one."""
    with between_forks():
        from memstore import contents

    return contents.content_of_headers(key, parts)
