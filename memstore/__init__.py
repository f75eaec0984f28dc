"""memstore: nested tensors in memory-mapped files, shared by every process of a host, with no server.

The layers; each imports only what stands above it:

    errors, keys, info    what can go wrong, what a key is, what a store tells
    late_imports          what is imported when it is needed, and forks that wait for it
    engine/               bytes and files: segments, the catalog, the protocols of put, get and delete. No torch
    structure/            nested value <-> flat list of tensors and a description
    contents/             what a put writes, and what a get makes of it
    view/, rows           lazy leaves that read what is used; batches of rows (box: the arithmetic of both)
    keyspace, listing     an opened store without its values, and what is told of them; without torch. entries: for both
    ref, store, opening   what a user calls; also describe, as_mapping, weights, rescue
    cli/                  the command line
    integrations/         files of others, adopted and exported; a Store's methods import it when they are called
    testing/              what tests share, and users may reuse

Nothing heavy is imported before a name needs it: `import memstore` loads neither torch nor the catalog. `memstore.open`
loads all that a forked child may need; what comes later still (tensordict, formats) comes `between_forks`.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from memstore.errors import (
    AlreadyExistsError,
    ContentionError,
    CorruptionError,
    FormatVersionError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    MutableEntryError,
    NotAStoreError,
    PermissionDeniedError,
    ReadOnlyError,
    ResourceLimitError,
    StoreClosedError,
    StoreFullError,
    StoreTimeoutError,
    StructureMismatchError,
    UnknownOutcomeError,
    UnsupportedFilesystemError,
    UnsupportedValueError,
    VersionConflictError,
    VersionGoneError,
)
from memstore.late_imports import between_forks

if TYPE_CHECKING:
    from memstore.info import EntryInfo, LeafInfo, RepairReport, StoreStats, VerifyReport
    from memstore.opening import open
    from memstore.ref import Ref
    from memstore.rescue import repair
    from memstore.rows import prefetch_rows, read_rows
    from memstore.store import Store
    from memstore.view import StoredTensor, bytes_read
    from memstore.weights import iter_weights

__version__ = "0.1.0"

_HOMES = {
    "open": "memstore.opening",
    "Store": "memstore.store",
    "iter_weights": "memstore.weights",
    "Ref": "memstore.ref",
    "EntryInfo": "memstore.info",
    "LeafInfo": "memstore.info",
    "RepairReport": "memstore.info",
    "StoreStats": "memstore.info",
    "VerifyReport": "memstore.info",
    "repair": "memstore.rescue",
    "StoredTensor": "memstore.view",
    "bytes_read": "memstore.view",
    "read_rows": "memstore.rows",
    "prefetch_rows": "memstore.rows",
}

__all__ = [
    "AlreadyExistsError",
    "ContentionError",
    "CorruptionError",
    "EntryInfo",
    "FormatVersionError",
    "InvalidKeyError",
    "KeyNotFoundError",
    "LeafInfo",
    "MemstoreError",
    "MutableEntryError",
    "NotAStoreError",
    "PermissionDeniedError",
    "ReadOnlyError",
    "Ref",
    "RepairReport",
    "ResourceLimitError",
    "Store",
    "StoreClosedError",
    "StoreFullError",
    "StoreStats",
    "StoreTimeoutError",
    "StoredTensor",
    "StructureMismatchError",
    "UnknownOutcomeError",
    "UnsupportedFilesystemError",
    "UnsupportedValueError",
    "VerifyReport",
    "VersionConflictError",
    "VersionGoneError",
    "bytes_read",
    "iter_weights",
    "open",
    "prefetch_rows",
    "read_rows",
    "repair",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memstore' has no attribute {name!r}")
    with between_forks():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _configure_logging() -> None:
    """MEMSTORE_LOG_LEVEL=DEBUG (or a number) prints the library's log; otherwise the application decides."""
    level = os.environ.get("MEMSTORE_LOG_LEVEL", "").upper()
    if level:
        logger = logging.getLogger("memstore")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s memstore[%(process)d] %(levelname)s %(message)s"))
        logger.addHandler(handler)
        try:
            logger.setLevel(int(level) if level.isdigit() else level)
        except ValueError:
            logger.warning("MEMSTORE_LOG_LEVEL=%s is no level: DEBUG, INFO, WARNING, ERROR or a number", level)


_configure_logging()
