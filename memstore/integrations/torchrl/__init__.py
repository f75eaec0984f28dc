"""TorchRL's replay buffers and weights in a store. The guide: docs/torchrl.md. It needs torchrl, which you install.

rows       the rows of a storage, as processes read and write them, without torchrl: a batch is whole or absent
storage    MemstoreStorage, what TorchRL calls a storage; what `dumps` and `loads` of a buffer do with the rows; and
           MemstoreWriter, whose cursor all processes share
weights    MemstoreWeightSyncScheme: the weights of collectors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore._threads import between_forks
from memstore._wording import offered
from memstore.errors import MissingPackageError

if TYPE_CHECKING:
    from memstore.integrations.torchrl.storage import (
        CopyCheckpointer,
        InPlaceCheckpointer,
        MemstoreStorage,
        MemstoreWriter,
    )
    from memstore.integrations.torchrl.weights import MemstoreWeightSyncScheme

__all__ = ["CopyCheckpointer", "InPlaceCheckpointer", "MemstoreStorage", "MemstoreWeightSyncScheme", "MemstoreWriter"]
__dir__ = offered(__all__)


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            with between_forks():
                module = "weights" if name == "MemstoreWeightSyncScheme" else "storage"
                found = importlib.import_module(f"{__name__}.{module}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "torchrl":
                raise
            raise MissingPackageError(
                f"{name} needs the package torchrl, which isn't installed: pip install 'torchrl>=0.14.1,<0.15'"
            ) from None
        return getattr(found, name)
