"""ROOT/cluster: what a member knows of its cluster, as JSON, for people and tools. Nobody decides by it.

Of a store on storage that hosts share, it lies in the state folder.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from memstore.distributed.rules import Member, Standing
from memstore.engine import Root, create_file, syscalls

NAME = "cluster"


def write_cluster_file(root: Root, member: Member, standing: Standing) -> None:
    """Whole, or not at all."""
    view = standing.view
    content = {
        "cluster": view.cluster.hex(),
        "epoch": view.epoch,
        "seed": view.seed_address,
        "address": member.address,
        "agent": os.getppid(),
        "index_process": os.getpid(),
        "is_removed": standing.is_removed,
        "is_joining": standing.is_joining,
        "waits_for": [one.hex() for one in standing.missing],
        "members": [
            {"id": one.id.hex(), "address": one.address, "name": one.name, "is_home": one.is_home}
            for one in view.members
        ],
    }
    create_file(root.state, NAME, msgspec.json.format(msgspec.json.encode(content)) + b"\n", root.settings)


def remove_cluster_file(root: Root) -> None:
    """After a clean end nobody answers there."""
    with contextlib.suppress(OSError):
        syscalls.unlink(f"{root.state}/{NAME}")
