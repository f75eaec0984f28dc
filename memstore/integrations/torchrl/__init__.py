"""TorchRL's replay buffers and weights in a store. The guide: docs/torchrl.md. It needs torchrl, which you install.

rows       the rows of a storage, as processes read and write them, without torchrl: a batch is whole or absent
storage    MemstoreStorage, what TorchRL calls a storage; what `dumps` and `loads` of a buffer do with the rows; and
           MemstoreWriter, whose cursor all processes share
weights    MemstoreWeightSyncScheme: the weights of collectors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore._threads import late_names
from memstore._wording import offered

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
    _HOMES = {**dict.fromkeys(__all__, f"{__name__}.storage"), "MemstoreWeightSyncScheme": f"{__name__}.weights"}
    __getattr__ = late_names(__name__, _HOMES, "torchrl>=0.14.1,<0.15")
