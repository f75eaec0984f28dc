"""torch.distributed.checkpoint with memstore as its storage. The guide: docs/dcp.md. Decision 022.

    dcp.save({"model": model.state_dict()}, checkpoint_id="/checkpoints/step-7")
    dcp.load(state, checkpoint_id="/checkpoints/step-7")  # into the tensors of `state`

For who works on it, the files:

calls       save, load and async_save: torch's own, with what follows; Stager: copies for asynchronous saves
storage     StorageWriter and StorageReader, as torch calls them
planners    planners that neither pickle nor unpickle
plans       torch's plans and metadata, in memstore's terms
places      a checkpoint in a folder (a snapshot), or in a store (a sharded entry), and which of them is meant
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore._threads import between_forks
from memstore._wording import offered

if TYPE_CHECKING:
    from memstore.integrations.dcp.calls import Stager, async_save, load, save
    from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
    from memstore.integrations.dcp.storage import StorageReader, StorageWriter

_HOMES = {
    "LoadPlanner": "planners",
    "SavePlanner": "planners",
    "Stager": "calls",
    "StorageReader": "storage",
    "StorageWriter": "storage",
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
__dir__ = offered(__all__)


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with between_forks():
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
