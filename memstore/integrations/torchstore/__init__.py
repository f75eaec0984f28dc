"""TorchStore's API: `import memstore.integrations.torchstore as ts`. The guide: docs/coming-from/torchstore.md.

api        the functions, by TorchStore's names; a process's client; which folder a name stands for
spmd       initialize_spmd, for ranks of torchrun
calls      what is done with a Store: values, state dicts, slices, DTensors
folders    a job's stores, made and removed
actors     how actors of Monarch hear of a store; several hosts of a mesh
strategy   strategies, which have no effect; errors of what TorchStore has and memstore lacks
transport, utils, logging: names that scripts import from TorchStore, under the same paths
"""

from __future__ import annotations

from typing import NoReturn

from memstore._wording import offered
from memstore.integrations.torchstore import spmd
from memstore.integrations.torchstore.api import (
    Client,
    NotInitializedError,
    client,
    delete,
    delete_batch,
    exists,
    get,
    get_batch,
    get_state_dict,
    initialize,
    keys,
    put,
    put_batch,
    put_state_dict,
    reset_client,
    shutdown,
)
from memstore.integrations.torchstore.calls import StateDictNotFoundError
from memstore.integrations.torchstore.folders import AlreadyInitializedError
from memstore.integrations.torchstore.logging import init_logging
from memstore.integrations.torchstore.spmd import initialize as initialize_spmd
from memstore.integrations.torchstore.strategy import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    NoCounterpartError,
    NoCounterpartImportError,
    TorchStoreStrategy,
    explain_absent_modules,
    no_counterpart,
)
from memstore.integrations.torchstore.transport import TensorSlice, TransportType
from memstore.integrations.torchstore.utils import spawn_actors

__all__ = [
    "AlreadyInitializedError",
    "Client",
    "ControllerStorageVolumes",
    "HostStrategy",
    "LocalRankStrategy",
    "NoCounterpartError",
    "NoCounterpartImportError",
    "NotInitializedError",
    "StateDictNotFoundError",
    "TensorSlice",
    "TorchStoreStrategy",
    "TransportType",
    "client",
    "delete",
    "delete_batch",
    "exists",
    "get",
    "get_batch",
    "get_state_dict",
    "init_logging",
    "initialize",
    "initialize_spmd",
    "keys",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "spawn_actors",
    "spmd",
]
__dir__ = offered(__all__)


explain_absent_modules()


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise no_counterpart(f"module {__name__}", name, __all__)
