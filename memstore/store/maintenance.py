"""Whole stores of this machine: listing, removing and repairing them. Imports no torch.

A repair has the engine make a new catalog. What only those know who know what values are, the engine asks the functions
at the end for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from memstore._info import Progress, RepairReport, StoreSummary
from memstore._threads import between_forks
from memstore._wording import check_progress
from memstore.engine import (
    Content,
    FoundPart,
    Record,
    SegmentExtent,
    absolute_path,
    destroy_root,
    repair_store,
    resource_errors,
    stores_of_machine,
)
from memstore.errors import CorruptionError, UnsupportedValueError

# --- Listing and removing --------------------------------------------------------------------------------------------


def destroy(root: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
    """Removes a store with all its values, and its folder.

    Processes may have it open: values that they got stay valid, and every later call of their stores raises a
    NotAStoreError. If this process is killed meanwhile, the store is there as before, or is none any more; call this
    again, or open the folder with mode "w", for the rest of its files. Files that `attach` serves stay where they are.

    Args:
        root: the folder. If it is a mount point or a link, it stays, and is empty.
        timeout: seconds to wait for a process that is opening the store.

    Raises:
        NotAStoreError: there is no store; or the folder has something else beside it. Nothing was removed.
        NotServedError: it is served to other hosts now, or is on storage that hosts share.
        PermissionDeniedError: it belongs to another user.
        StoreTimeoutError: another process took too long to open it.

    Example:
        >>> import memstore, os, tempfile
        >>> root = tempfile.mkdtemp()
        >>> memstore.open(root).close()
        >>> memstore.destroy(root)
        >>> os.path.exists(root)
        False
    """
    path = absolute_path(root)
    with resource_errors(path):
        destroy_root(path, timeout)


def stores() -> tuple[StoreSummary, ...]:
    """Lists the stores of this machine: those on `/dev/shm`, up to three folders deep, and those that are open.

    Stores on disks that nobody has open aren't found. Nothing is opened or changed.

    Returns:
        A summary of each with its size, its age and the processes that have it open, sorted by their folders.

    Example:
        >>> import memstore
        >>> abandoned = [one.root for one in memstore.stores() if not one.pids and not one.is_member]
    """
    return stores_of_machine()


# --- Repairing -------------------------------------------------------------------------------------------------------


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
        return repair_store(path, mend_header, merge_headers, is_joining, timeout, progress)


def mend_header(store: str, key: bytes, record: Record, extent: SegmentExtent, content: memoryview) -> bytes | None:
    """Makes a header anew from a record, for a file with that content.

    Returns None if it can't be told to be the record's.

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


def is_joining(said: bytes) -> bool:
    """Returns whether a root has keys of groups that it has not claimed yet, by what its catalog says."""
    with between_forks():
        from memstore.distributed.catalog import standing_of

    return standing_of(said).is_joining


def merge_headers(key: str, parts: Sequence[FoundPart]) -> Content | None:
    """Makes the content of a sharded value's record from the headers of its parts.

    Returns None if parts are missing.
    """
    with between_forks():
        from memstore import contents

    return contents.content_of_headers(key, parts)
