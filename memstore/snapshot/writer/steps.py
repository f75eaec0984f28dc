"""The last steps that a job may name: functions of memstore itself, and no others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from memstore.errors import MemstoreError
from memstore.snapshot.storage import Storage

Step = Callable[[Storage, bytes, Mapping[str, bytes], bool], bytes]
"""Called with the storage, the job's argument, the sums of its files by name, and whether it is durable.

What it returns is the job's result. If it raises, the job's files stay: others may count on them already. It removes
them itself where it knows that nobody does.
"""

STEPS = {
    "part": "memstore.snapshot.parts:finish_part",  # leaves a rank's part; who finds all parts publishes
}


def step_named(name: str) -> Step:
    """Raises MemstoreError for any name but those above."""
    if name not in STEPS:
        raise MemstoreError(f"a job of a snapshot names the step {name!r:.100}, and there are {sorted(STEPS)}")
    module, _, function = STEPS[name].partition(":")
    return getattr(importlib.import_module(module), function)
