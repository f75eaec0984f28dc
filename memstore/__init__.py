"""memstore: nested tensors in memory-mapped files, shared by every process of a host, with no server.

    store = memstore.open("/dev/shm/run1")        # in every process
    store.put("policy", {"w": torch.ones(2, 2)})  # dicts, TensorDicts, tensors, plain objects
    store.get("policy")["w"]                      # as it was put, without a copy

help(memstore.Store) has the methods; the guides are in docs/, which begin with docs/quickstart.md.

For who works on memstore, the layers; each imports only what stands above it:

    errors                what can go wrong
    _threads, _parsing    forks, and the imports that they wait for; documents that anybody may have written
    _modes                torch's modes and transforms, put aside
    _wording, _arguments  numbers and names as text; keys and other arguments, checked
    _ranks                messages between the ranks of a process group
    _info                 what a store tells of itself and its entries
    engine/               bytes and files: segments, the catalog, the protocols of put, get and delete. No torch
    sharding/             boxes: parts of tensors, and which of them a rank holds
    structure/            nested value <-> flat list of tensors and a description
    contents/             what a put writes, and what a get makes of it
    figures/              what is told of a tensor's elements: statistics, and how two differ
    view/, rows/          lazy leaves that read what is used; batches of rows
    formats/              external files, served in place and written
    listing/              an opened store without its values, and what is told of them. No torch
    store/                Store and open: what a user calls
    dataloader            stored rows for torch's DataLoader
    datasets/             rows that all processes read and write in place
    replay/               the same round and round, sampled meanwhile
    snapshot/             state dicts, saved in files and restored, by one process or many ranks
    fake/                 tensors without memory, and modes that make them
    deferred_init/        modules whose tensors are made later, or come out of a snapshot
    aio/                  every method of a Store, awaited
    integrations/         interfaces of other libraries: TorchRL's storages, TorchStore's calls, DCP's storage
    checkpoints/          the checkpoints of a run: saved, kept by rules, found again
    distributed/          one store across hosts: its rules
    metrics, ui/          figures of a store and of calls; the page that shows them
    cli/                  the command line

Nothing heavy is imported before a name needs it: `import memstore` loads neither torch nor the catalog. `memstore.open`
loads all that a forked child may need; what comes later still (tensordict, formats) comes `between_forks`.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from memstore._threads import between_forks, late_names
from memstore._version import __version__ as __version__
from memstore.errors import (
    AddressUnavailableError,
    AlreadyExistsError,
    AmbiguousCheckpointError,
    ContentionError,
    CorruptionError,
    CredentialsError,
    CrossHostError,
    FencedError,
    FormatVersionError,
    HomeUnavailableError,
    InvalidAddressError,
    InvalidKeyError,
    KeyNotFoundError,
    LinkRefusedError,
    MemstoreError,
    MissingPackageError,
    MutableEntryError,
    NoBucketError,
    NotAStoreError,
    NotReplicatedError,
    NotServedError,
    PartialCommitError,
    PermissionDeniedError,
    QuotaExceededError,
    ReadOnlyError,
    ResourceLimitError,
    SecretError,
    ShardMismatchError,
    StaleMembershipError,
    StorageError,
    StoreClosedError,
    StoreFullError,
    StoreTimeoutError,
    StructureMismatchError,
    ThrottledError,
    TransportUnavailableError,
    UnknownOutcomeError,
    UnsupportedFilesystemError,
    UnsupportedValueError,
    VersionConflictError,
    VersionGoneError,
)

if TYPE_CHECKING:
    from memstore import aio as aio
    from memstore import convert as convert
    from memstore import deferred_init as deferred_init
    from memstore import errors as errors
    from memstore import fake as fake
    from memstore import integrations as integrations
    from memstore import metrics as metrics
    from memstore import ui as ui
    from memstore._info import (
        ClusterStatus,
        EntryInfo,
        FollowerStatus,
        HostStatus,
        LeafInfo,
        PendingInfo,
        QuotaInfo,
        RepairReport,
        ShardInfo,
        StoreStats,
        StoreSummary,
        VerifyReport,
    )
    from memstore.checkpoints import CheckpointManager
    from memstore.contents import bytes_read
    from memstore.dataloader import BlockShuffle, StoreDataset
    from memstore.datasets import Dataset
    from memstore.distributed.meshes import serve
    from memstore.distributed.serving import Cluster, join
    from memstore.replay import RateLimiter, ReplayBuffer
    from memstore.rows import prefetch_rows, read_rows
    from memstore.sharding import TensorShard
    from memstore.snapshot import AppState, PendingSnapshot, RNGState, Snapshot, StateDict, Stateful
    from memstore.store.following import Follower, follow
    from memstore.store.maintenance import destroy, repair, stores
    from memstore.store.opening import open
    from memstore.store.sharded import PendingPut
    from memstore.store.store import Store
    from memstore.store.values import Pin, Ref
    from memstore.store.weights import iter_weights
    from memstore.view import StoredTensor

_HOMES = {
    name: f"memstore.{home}"
    for home, names in {
        "_info": "ClusterStatus EntryInfo FollowerStatus HostStatus LeafInfo PendingInfo QuotaInfo RepairReport "
        "ShardInfo StoreStats StoreSummary VerifyReport",
        "checkpoints": "CheckpointManager",
        "contents": "bytes_read",
        "dataloader": "BlockShuffle StoreDataset",
        "datasets": "Dataset",
        "distributed.meshes": "serve",
        "distributed.serving": "Cluster join",
        "replay": "RateLimiter ReplayBuffer",
        "rows": "prefetch_rows read_rows",
        "sharding": "TensorShard",
        "snapshot": "AppState PendingSnapshot RNGState Snapshot StateDict Stateful",
        "store.following": "Follower follow",
        "store.maintenance": "destroy repair stores",
        "store.opening": "open",
        "store.sharded": "PendingPut",
        "store.store": "Store",
        "store.values": "Pin Ref",
        "store.weights": "iter_weights",
        "view": "StoredTensor",
    }.items()
    for name in names.split()
}

# memstore.fake.fake_mode, without an import of its own
_ROOMS = frozenset({"aio", "convert", "deferred_init", "errors", "fake", "integrations", "metrics", "ui"})

__all__ = [
    "AddressUnavailableError",
    "AlreadyExistsError",
    "AmbiguousCheckpointError",
    "AppState",
    "BlockShuffle",
    "CheckpointManager",
    "Cluster",
    "ClusterStatus",
    "ContentionError",
    "CorruptionError",
    "CredentialsError",
    "CrossHostError",
    "Dataset",
    "EntryInfo",
    "FencedError",
    "Follower",
    "FollowerStatus",
    "FormatVersionError",
    "HomeUnavailableError",
    "HostStatus",
    "InvalidAddressError",
    "InvalidKeyError",
    "KeyNotFoundError",
    "LeafInfo",
    "LinkRefusedError",
    "MemstoreError",
    "MissingPackageError",
    "MutableEntryError",
    "NoBucketError",
    "NotAStoreError",
    "NotReplicatedError",
    "NotServedError",
    "PartialCommitError",
    "PendingInfo",
    "QuotaInfo",
    "PendingPut",
    "PendingSnapshot",
    "PermissionDeniedError",
    "RNGState",
    "RateLimiter",
    "ReadOnlyError",
    "Pin",
    "Ref",
    "RepairReport",
    "ReplayBuffer",
    "ResourceLimitError",
    "SecretError",
    "ShardInfo",
    "ShardMismatchError",
    "Snapshot",
    "StaleMembershipError",
    "StorageError",
    "StateDict",
    "Stateful",
    "Store",
    "StoreClosedError",
    "StoreDataset",
    "QuotaExceededError",
    "StoreFullError",
    "StoreStats",
    "StoreSummary",
    "StoreTimeoutError",
    "StoredTensor",
    "StructureMismatchError",
    "TensorShard",
    "ThrottledError",
    "TransportUnavailableError",
    "UnknownOutcomeError",
    "UnsupportedFilesystemError",
    "UnsupportedValueError",
    "VerifyReport",
    "VersionConflictError",
    "VersionGoneError",
    "bytes_read",
    "destroy",
    "follow",
    "iter_weights",
    "join",
    "open",
    "prefetch_rows",
    "read_rows",
    "repair",
    "serve",
    "stores",
]


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            with between_forks():
                return importlib.import_module(f"memstore.{name}")  # `import memstore` is enough
        return late_names("memstore", _HOMES)(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, "__doc__", "__file__", "__name__", "__path__", "__version__"})


def _configure_logging() -> None:
    """Prints the library's log if MEMSTORE_LOG_LEVEL is set, to DEBUG or a number; else the application decides."""
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
