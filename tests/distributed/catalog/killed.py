"""Changes of a served root in a process that is killed in the middle of one."""

from __future__ import annotations

import gc

from tests.children import Wire
from tests.distributed.catalog import operations, sharded_operations
from tests.engine.bytes_store import opened
from tests.support import faults

OPERATIONS = {**operations.OPERATIONS, **sharded_operations.OPERATIONS}


def steps_of(path: str, name: str) -> list[str]:
    gc.disable()
    with opened(path) as root:
        return faults.record(lambda: OPERATIONS[name][1](root))


def die_at(wire: Wire, path: str, name: str, number: int, after: bool) -> None:
    gc.disable()
    with opened(path) as root, faults.at_step(number, faults.die, after=after):
        OPERATIONS[name][1](root)
