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

from typing import TYPE_CHECKING

from memstore._threads import late_names
from memstore._wording import offered

if TYPE_CHECKING:
    from memstore.integrations.dcp.calls import Stager, async_save, load, save
    from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
    from memstore.integrations.dcp.storage import StorageReader, StorageWriter

_HOMES = {
    name: f"memstore.integrations.dcp.{module}"
    for module, names in {
        "calls": "Stager async_save load save",
        "planners": "LoadPlanner SavePlanner",
        "storage": "StorageReader StorageWriter",
    }.items()
    for name in names.split()
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
    __getattr__ = late_names(__name__, _HOMES)
