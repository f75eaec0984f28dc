"""State dicts, saved and restored: a snapshot is a folder of safetensors files with a manifest, which is linked last.

snapshot      Snapshot: what a user calls          stateful     what can be saved
ranks         the process group                    progress     a callback, or a bar
manifest      written and read; manifest_nouns: what it consists of; manifest_checks: what it must be
names         of tensors and files
parallel      several reads or writes at once

taking        the steps of a take, on all ranks    restoring    those of a restore
preparing     those before anything is written     targets      the tensors that can be filled in place
state         a state dict, taken apart            layouts      new tensors, where there are none
partition     who writes what                      reading      boxes into memory
drafts        which files a rank writes            stored       a snapshot that is there
part          what a rank wrote                    entries      what it has, by path
parts         how the parts become a snapshot      objects_out  one tensor by itself
merging       all parts as one manifest            box_parts    where in its file a part of a box lies
pending       a take that is being written         mapped       its files in memory
                                                   served       views, and entries of stores
                                                   verifying    whether it is whole
                                                   comparing    two of them

storage/   where the files of a snapshot lie: file systems, behind an interface that an object store can have too
writer/    a process of its own, which writes what was staged
staging/   tensors, copied into warm shared memory, from which the writer writes them

This door loads what is asked for: the writer's process comes through it too, and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore.late_imports import between_forks

if TYPE_CHECKING:
    from memstore.snapshot.comparing import differences
    from memstore.snapshot.entries import TensorEntry
    from memstore.snapshot.manifest import load_manifest
    from memstore.snapshot.names import is_snapshot
    from memstore.snapshot.served import describe_snapshot, load_snapshot
    from memstore.snapshot.snapshot import PendingSnapshot, Snapshot
    from memstore.snapshot.stateful import AppState, RNGState, StateDict, Stateful

_HOMES = {
    "AppState": "memstore.snapshot.stateful",
    "PendingSnapshot": "memstore.snapshot.snapshot",
    "RNGState": "memstore.snapshot.stateful",
    "Snapshot": "memstore.snapshot.snapshot",
    "StateDict": "memstore.snapshot.stateful",
    "TensorEntry": "memstore.snapshot.entries",
    "describe_snapshot": "memstore.snapshot.served",
    "differences": "memstore.snapshot.comparing",
    "is_snapshot": "memstore.snapshot.names",
    "load_manifest": "memstore.snapshot.manifest",
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
    "is_snapshot",
    "load_manifest",
    "load_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memstore.snapshot' has no attribute {name!r}")
    with between_forks():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
