"""Asynchronous snapshots: tensors are copied into warm shared memory, and a process of its own makes files of that.

    staged = stage(tensors)                                # when it returns, the tensors may change
    pending = staged.write(folder, files, finish="part", argument=...)
    pending.wait()                                         # what that step returned

memory     blocks of shared memory, used again and again, and bounded
containers how much memory a container may have
copying    tensors into such a block
pinning    what CUDA needs for that
stager     the steps of it
"""

from __future__ import annotations

from memstore.snapshot.staging.stager import Staged, Stager, stage
from memstore.snapshot.writer import PendingWrite, StagedFile

__all__ = ["PendingWrite", "Staged", "StagedFile", "Stager", "stage"]
