"""One tensor of a snapshot, read by itself; and a state dict before its tensors are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memstore.arguments import whole_number
from memstore.errors import SnapshotMismatchError
from memstore.snapshot.format import StoredTensor
from memstore.snapshot.progress import SILENT
from memstore.snapshot.read.reading import BUDGET, Want, read_into
from memstore.snapshot.read.stored import Stored, Value
from memstore.snapshot.read.targets import find_targets, new_target, why_not_filled
from memstore.wording import an


def read_tensor(stored: Stored, path: str, tensor: StoredTensor, obj_out: Any, budget: int | None) -> Any:
    """As `Snapshot.read_object`."""
    if isinstance(budget, float) and budget.is_integer():  # 1e9
        budget = int(budget)
    if budget is not None and whole_number("memory_budget_bytes", budget) < 1:
        raise ValueError(f"memory_budget_bytes is a positive number of bytes, and not {budget!r}")
    stored.check_files([tensor])
    if obj_out is None:
        target = new_target(tensor)
    else:
        found = find_targets(obj_out).get(())
        if found is None:
            raise SnapshotMismatchError(f"{path} is a tensor, and obj_out {an(type(obj_out))}, which has no memory")
        problem = why_not_filled(tensor, found)
        if problem:
            raise SnapshotMismatchError(f"{path}: {problem}")
        target = found
    read_into(stored, [Want(tensor, target.shards)], SILENT, BUDGET if budget is None else budget)
    return target.value


def build_unread(stored: Stored, value: Value, tensors: Sequence[Any], *, allow_pickle: bool) -> Any:
    """The state dict, to be looked at before what is stored is read into these tensors.

    What containers look into when they are made (lengths of jagged tensors) is read, into memory of its own.
    """
    first = {i: value.plan.same.get(i, i) for i in value.plan.loaded}
    made = {i: new_target(value.tensors[i]) for i in set(first.values())}
    read_into(stored, [Want(value.tensors[i], target.shards) for i, target in made.items()], SILENT)
    shown = [made[first[i]].value if i in first else tensor for i, tensor in enumerate(tensors)]
    return stored.build(value, shown, allow_pickle=allow_pickle)
