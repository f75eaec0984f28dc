"""Snapshots that somebody else plans, as torch.distributed.checkpoint does: who writes which boxes comes from outside.

writing      the boxes of one rank, as a file
leftovers    what saves leave that die or fail
publishing   the files of all ranks as one snapshot, in the place of an earlier one of the same kind
reading      such a snapshot, and boxes of it
values       a snapshot of values that lie in files of others
"""

from __future__ import annotations

from memstore.snapshot.format import StoredTensor, refuse_two
from memstore.snapshot.planned.leftovers import begin, sweep
from memstore.snapshot.planned.publishing import (
    Planned,
    Whole,
    check_folder,
    check_others,
    new_save,
    publish_planned,
    remove_torchs,
)
from memstore.snapshot.planned.reading import PlannedSnapshot, Wanted
from memstore.snapshot.planned.values import write_values
from memstore.snapshot.planned.writing import PlannedBox, WrittenFile, write_boxes

__all__ = [
    "Planned",
    "PlannedBox",
    "PlannedSnapshot",
    "StoredTensor",
    "Wanted",
    "Whole",
    "WrittenFile",
    "begin",
    "check_folder",
    "check_others",
    "new_save",
    "publish_planned",
    "refuse_two",
    "remove_torchs",
    "sweep",
    "write_boxes",
    "write_values",
]
