"""LMDB's errors, as memstore's."""

from __future__ import annotations

import errno
import os

import lmdb

from memstore.engine.catalog.meta import damaged
from memstore.errors import CorruptionError, ResourceLimitError, StoreFullError

_REFUSALS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
_FULL = 8 << 20  # bytes: a disk that has fewer left has none for the catalog


def translated(error: lmdb.Error, folder: str, max_readers: int) -> Exception:
    path = f"{folder}/data.mdb"
    if isinstance(error, lmdb.DiskError):
        return StoreFullError(f"{path}: {error}")
    if isinstance(error, lmdb.ReadersFullError):
        text = (
            f"{folder}: {max_readers} processes have this store open, and it has room for no more; "
            "if many of them were killed, gc in one that lives makes room"
        )
        return ResourceLimitError(text, code=errno.EAGAIN)
    if "already open in this process" in str(error):
        text = f"{folder}: something else than memstore has it open in this process: close that first"
        return ResourceLimitError(text, code=errno.EBUSY)
    for code in _REFUSALS:
        if os.strerror(code) in str(error):  # LMDB's binding keeps the text only
            if code == errno.EIO and _is_full(folder):  # a short write is an I/O error to LMDB
                code = errno.ENOSPC
            return OSError(code, os.strerror(code), path)
    return damaged(path, str(error))


def located(error: CorruptionError, folder: str) -> CorruptionError:
    """A damaged row knows its key, and not where it lies."""
    if error.path is not None:
        return error
    path = f"{folder}/data.mdb"
    return CorruptionError(f"{path}: {error}", key=error.key, path=path, detail=error.detail)


def _is_full(folder: str) -> bool:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < _FULL
