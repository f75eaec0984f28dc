"""TorchRL's replay buffers with rows in a store. The guide: docs/torchrl.md. It needs torchrl, which you install.

journal       rows that are written over: a batch is whole or absent, whoever dies
rows          the rows of a storage, as processes read and write them. No torchrl up to here
entry         the entry of a storage, found or made, and what its processes share
storage       MemstoreStorage, what TorchRL calls a storage: reads and writes of rows
writer        MemstoreWriter, whose cursor all processes share
checkpoint    what `dumps` and `loads` of a buffer do with the rows
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore.errors import MissingPackageError
from memstore.late_imports import between_forks

if TYPE_CHECKING:
    from memstore.integrations.torchrl.checkpoint import CopyCheckpointer, InPlaceCheckpointer
    from memstore.integrations.torchrl.storage import MemstoreStorage
    from memstore.integrations.torchrl.writer import MemstoreWriter

_HOMES = {
    "CopyCheckpointer": "checkpoint",
    "InPlaceCheckpointer": "checkpoint",
    "MemstoreStorage": "storage",
    "MemstoreWriter": "writer",
}


if not TYPE_CHECKING:  # for a type checker any name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            with between_forks():
                home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "torchrl":
                raise
            raise MissingPackageError(
                f"{name} needs the package torchrl, which isn't installed: pip install 'torchrl>=0.14.1,<0.15'"
            ) from None
        return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})


__all__ = ["CopyCheckpointer", "InPlaceCheckpointer", "MemstoreStorage", "MemstoreWriter"]
