"""State dicts, saved and restored: a snapshot is a folder of safetensors files with a manifest, which is linked last.

snapshot      Snapshot: what a user calls          stateful      what can be saved
options       what a caller may choose             progress      a callback, or a bar
served        a view; a snapshot as a store's key  comparing     two snapshots
tensor_bytes  the elements of a tensor             cover         whether boxes make up a tensor
tables        what is there, as it is printed
parallel      several reads or writes at once

take/      what each rank holds, and how it is written
parts/     what each rank wrote, and how all of that becomes a snapshot
restore/   what is stored for an object is compared with it, read in place, and loaded
read/      a snapshot that is there: what it has, and its tensors in memory
ranks/     the steps of all ranks, what they hear of each other, and who has died
format/    the manifest and its checks; the names of tensors and files
storage/   where the files of a snapshot lie: file systems, behind an interface that an object store can have too
planned/   snapshots of which others say who writes what: checkpoints of torch.distributed.checkpoint
staging/   tensors, copied into warm shared memory, from which the writer writes them
writer/    a process of its own, which writes what was staged

This door loads what is asked for: the writer's process comes through it too, and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore.late_imports import between_forks

if TYPE_CHECKING:
    from memstore.snapshot import planned, read, staging, storage
    from memstore.snapshot.comparing import differences
    from memstore.snapshot.format import is_snapshot, load_manifest
    from memstore.snapshot.parallel import in_parallel
    from memstore.snapshot.read import TensorEntry
    from memstore.snapshot.served import describe_snapshot, load_snapshot
    from memstore.snapshot.snapshot import PendingSnapshot, Snapshot
    from memstore.snapshot.stateful import AppState, RNGState, StateDict, Stateful

_HOMES = {
    "AppState": "memstore.snapshot.stateful",
    "PendingSnapshot": "memstore.snapshot.snapshot",
    "RNGState": "memstore.snapshot.stateful",
    "Snapshot": "memstore.snapshot.snapshot",
    "StateDict": "memstore.snapshot.stateful",
    "TensorEntry": "memstore.snapshot.read",
    "describe_snapshot": "memstore.snapshot.served",
    "in_parallel": "memstore.snapshot.parallel",
    "differences": "memstore.snapshot.comparing",
    "is_snapshot": "memstore.snapshot.format",
    "load_manifest": "memstore.snapshot.format",
    "load_snapshot": "memstore.snapshot.served",
    "Stateful": "memstore.snapshot.stateful",
}

__all__ = [
    "AppState",
    "PendingSnapshot",
    "RNGState",
    "Snapshot",
    "StateDict",
    "Stateful",
    "TensorEntry",
    "describe_snapshot",
    "differences",
    "in_parallel",
    "is_snapshot",
    "load_manifest",
    "load_snapshot",
    "planned",  # rooms with doors of their own, for integrations and conversions
    "read",
    "staging",
    "storage",
]


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'memstore.snapshot' has no attribute {name!r}")
        with between_forks():
            value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
