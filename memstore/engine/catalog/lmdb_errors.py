"""LMDB's errors, as memstore's."""

from __future__ import annotations

import errno
import os
import resource

import lmdb

from memstore.engine.catalog.meta import damaged
from memstore.errors import CorruptionError, ResourceLimitError, StoreFullError

_REFUSALS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
)
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
            if code == errno.EIO:  # so LMDB tells a short write
                code = _why_short(folder, path)
            return OSError(code, os.strerror(code), path)
    return damaged(path, str(error))


def located(error: CorruptionError, folder: str) -> CorruptionError:
    """A damaged row knows its key, and not where it lies."""
    if error.path is not None:
        return error
    path = f"{folder}/data.mdb"
    return CorruptionError(f"{path}: {error}", key=error.key, path=path, detail=error.detail)


def _why_short(folder: str, path: str) -> int:
    """The errno of the next write, had there been one; EIO if nothing but the disk explains it."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < _FULL:
        return errno.ENOSPC
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < os.stat(path).st_size:
        return errno.EFBIG
    return errno.EIO
