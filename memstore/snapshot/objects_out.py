"""One tensor of a snapshot, read by itself."""

from __future__ import annotations

from typing import Any

from memstore.errors import StructureMismatchError
from memstore.snapshot.manifest import StoredTensor
from memstore.snapshot.progress import SILENT
from memstore.snapshot.reading import BUDGET, Want, read_into
from memstore.snapshot.stored import Stored
from memstore.snapshot.targets import find_targets, new_target, why_not_filled


def read_tensor(stored: Stored, path: str, tensor: StoredTensor, obj_out: Any, budget: int | None) -> Any:
    """As `Snapshot.read_object`."""
    if budget is not None and budget < 1:
        raise ValueError(f"memory_budget_bytes is a positive number of bytes, and not {budget!r}")
    stored.check_files([tensor])
    if obj_out is None:
        target = new_target(tensor)
    else:
        found = find_targets(obj_out).get(())
        if found is None:
            raise StructureMismatchError(
                f"{path} is a tensor, and obj_out a {type(obj_out).__name__}, which has no memory"
            )
        problem = why_not_filled(tensor, found)
        if problem:
            raise StructureMismatchError(f"{path}: {problem}")
        target = found
    read_into(stored, [Want(tensor, target.shards)], SILENT, BUDGET if budget is None else budget)
    return target.value
