"""Which folder a name stands for, in whatever process of the job it is asked.

1. The environment says it: this process has initialized a store, or was started by one that had, or the user has set
   the variable.
2. Else Monarch does, if this process has imported it: actors may have been started before the store was made.
"""

from __future__ import annotations

import sys
from types import ModuleType

from memstore.integrations.torchstore import folders
from memstore.integrations.torchstore.refusals import NotInitializedError
from memstore.late_imports import between_forks


def announcing() -> ModuleType | None:
    """How names are told by Monarch; None in a process that hasn't imported it, and so is none of its actors."""
    if "monarch.actor" not in sys.modules:
        return None
    with between_forks():
        from memstore.integrations.torchstore import announcing

    return announcing


async def find(name: str) -> str:
    """The root of a store.

    Raises:
        NotInitializedError: nobody has made it, or it was shut down.
    """
    path = folders.known_path(name)
    monarch = None if path else announcing()
    if monarch is not None:
        path = await monarch.find(name)
    if path is None:
        raise NotInitializedError(
            f"no store named {name!r}: call initialize() or initialize_spmd() first, in this process or in one that "
            f"starts it, or set {folders.ROOT_VARIABLE} to the same folder in all processes of the job"
        )
    return path
