"""State dicts, saved and restored: a snapshot is a folder of safetensors files with a manifest, which is linked last.

snapshot      Snapshot: what a user calls          stateful      what can be saved, and how it is taken apart
take          the steps of a take                  restore       the steps of a restore
ranks         the steps of all ranks, and what they hear of each other
drafts        who writes what, in which file       publishing    the parts of all ranks as one snapshot; leftovers
stored        a snapshot that is there             reading       its tensors in memory, or mapped
manifest      what a snapshot says of itself; the names of its files and tensors
storage       its folder, and how far it is         chunks        parts of its files, read or written several at once
objects       its place in a bucket                 buckets       URLs, and the requests to an object store
staging       tensors, copied into shared memory   writer        the process that writes them
increments    what a take shares with a base        copying       whole copies
cache         blocks of a bucket's snapshots, kept in a store of this host

This door loads what is asked for: the writer's process comes through it too, and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore._threads import late_names
from memstore._wording import offered

if TYPE_CHECKING:
    from memstore.snapshot import (
        buckets,
        chunks,
        copying,
        drafts,
        increments,
        manifest,
        objects,
        publishing,
        ranks,
        reading,
        staging,
        storage,
        stored,
    )
    from memstore.snapshot.chunks import in_parallel
    from memstore.snapshot.manifest import is_snapshot, load_manifest
    from memstore.snapshot.reading import describe_snapshot, load_snapshot
    from memstore.snapshot.snapshot import PendingSnapshot, Snapshot, differences
    from memstore.snapshot.stateful import AppState, RNGState, StateDict, Stateful
    from memstore.snapshot.stored import TensorEntry

_HOMES = {
    name: f"memstore.snapshot.{module}"
    for module, names in {
        "chunks": "in_parallel",
        "manifest": "is_snapshot load_manifest",
        "reading": "describe_snapshot load_snapshot",
        "snapshot": "PendingSnapshot Snapshot differences",
        "stateful": "AppState RNGState StateDict Stateful",
        "stored": "TensorEntry",
    }.items()
    for name in names.split()
}

__all__ = [
    "AppState",
    "PendingSnapshot",
    "RNGState",
    "Snapshot",
    "StateDict",
    "Stateful",
    "TensorEntry",
    "buckets",
    "copying",
    "chunks",  # modules that integrations and conversions use, too
    "describe_snapshot",
    "differences",
    "drafts",
    "in_parallel",
    "increments",
    "is_snapshot",
    "load_manifest",
    "load_snapshot",
    "manifest",
    "objects",
    "publishing",
    "ranks",
    "reading",
    "staging",
    "storage",
    "stored",
]
__dir__ = offered(__all__)


if not TYPE_CHECKING:  # for a type checker any name would be there
    __getattr__ = late_names(__name__, _HOMES)
