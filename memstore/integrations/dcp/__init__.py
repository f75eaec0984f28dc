"""torch.distributed.checkpoint with memstore as its storage. The guide: docs/dcp.md. Decision 022.

    dcp.save({"model": model.state_dict()}, checkpoint_id="/checkpoints/step-7")
    dcp.load(state, checkpoint_id="/checkpoints/step-7")  # into the tensors of `state`

For who works on it, the files:

calls        save, load and async_save: torch's own, with what follows
writer       StorageWriter, as torch calls it
reader       StorageReader
planners     planners that neither pickle nor unpickle
stager       Stager: copies for asynchronous saves
unfinished   saves that may be over
items        what a plan wants written or read, as boxes
description  torch's metadata, and what is stored of it
folder       a checkpoint in a folder: a snapshot
entry        a checkpoint in a store: a sharded entry
places       what the two have in common, and which of them is meant
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore.late_imports import between_forks

if TYPE_CHECKING:
    from memstore.integrations.dcp.calls import async_save, load, save
    from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
    from memstore.integrations.dcp.reader import StorageReader
    from memstore.integrations.dcp.stager import Stager
    from memstore.integrations.dcp.writer import StorageWriter

_HOMES = {
    "LoadPlanner": "planners",
    "SavePlanner": "planners",
    "Stager": "stager",
    "StorageReader": "reader",
    "StorageWriter": "writer",
    "async_save": "calls",
    "load": "calls",
    "save": "calls",
}

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "Stager",
    "StorageReader",
    "StorageWriter",
    "async_save",
    "load",
    "save",
]


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with between_forks():
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
