"""No room: what is kept for reuse is given back, and the change is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memstore.engine.failures import is_full
from memstore.engine.protocols.sweep import sweep_all
from memstore.engine.root import Root

Change = TypeVar("Change")
Result = TypeVar("Result")


def retry_after_sweep(
    make: Callable[[Root, Change, float], Result], root: Root, change: Change, deadline: float
) -> Result:
    """Makes a change; a second time if files that are kept for reuse stood in the way."""
    try:
        return make(root, change, deadline)
    except OSError as error:
        if not is_full(error):
            raise
    sweep_all(root, deadline)  # the files that were kept for reuse; another process may have given them back by now
    return make(root, change, deadline)
