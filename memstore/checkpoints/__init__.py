"""The checkpoints of a run: saved step by step, kept by rules, found again. The guide is docs/managing-checkpoints.md.

    manager = memstore.CheckpointManager("/checkpoints/run1", keep_last=3)
    manager.save(100, app_state)
    step = manager.restore(app_state)

For who works on it, the files:

manager       CheckpointManager: the steps of a save and of a restore, on all ranks; signals; steps that are snapshots
folders       steps as folders: their names and records, which are whole, which stay, how one is removed. No torch
buckets       steps in a bucket, the same; which of the two a root is
dcp           steps that are checkpoints of torch.distributed.checkpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore._threads import late_names
from memstore._wording import offered

if TYPE_CHECKING:
    from memstore.checkpoints import buckets, folders
    from memstore.checkpoints.manager import CheckpointManager

_HOMES = {"CheckpointManager": "memstore.checkpoints.manager"}

__all__ = [
    "CheckpointManager",
    "buckets",
    "folders",  # these two for the command line
]
__dir__ = offered(__all__)


if not TYPE_CHECKING:  # for a type checker any name would be there
    __getattr__ = late_names(__name__, _HOMES)
