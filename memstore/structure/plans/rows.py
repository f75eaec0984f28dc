"""The plan of a mutable entry, as its description has it: leaves of one number of rows, behind a control page."""

from __future__ import annotations

from memstore.engine import CONTROL_SIZE, decode_mutable
from memstore.errors import CorruptionError
from memstore.structure.plans.description import plan_of
from memstore.structure.plans.plan import Plan


def plan_of_rows(description: bytes, nbytes: int) -> Plan:
    """The plan of all rows, of an entry with so many bytes of data. Raises CorruptionError."""
    plan = plan_of(decode_mutable(description).plan)
    capacity = plan.leaves[0].shape[0] if plan.leaves and plan.leaves[0].shape else 0
    for leaf in plan.leaves:
        has_rows = leaf.stride is None and leaf.shape[:1] == (capacity,)
        if not has_rows or leaf.offset < CONTROL_SIZE or leaf.offset + leaf.nbytes > nbytes:
            raise CorruptionError(f"its leaf {leaf.name} doesn't have {capacity:,} rows within its {nbytes:,} bytes")
    if not capacity or plan.object_count or plan.same or plan.marked:
        raise CorruptionError("its description isn't that of rows")
    return plan


def capacity_of(description: bytes, nbytes: int) -> int:
    """In rows. Raises CorruptionError."""
    return plan_of_rows(description, nbytes).leaves[0].shape[0]
