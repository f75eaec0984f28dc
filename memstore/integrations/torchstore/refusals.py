"""The errors of this package: what a script does that has no meaning here, or comes too early."""

from __future__ import annotations

from memstore.errors import KeyNotFoundError, MemstoreError, NotAStoreError


class NoCounterpartError(MemstoreError, NotImplementedError, AttributeError):
    """A part of TorchStore that memstore has no use for: volumes, controllers, transports. It says what to do."""


class NotInitializedError(NotAStoreError, RuntimeError):
    """No process has called `initialize` for a store of this name, or it was shut down."""


class AlreadyInitializedError(MemstoreError, RuntimeError):
    """A store of this name is there, and its owner lives."""


class StateDictNotFoundError(KeyNotFoundError, RuntimeError):
    """There is no state dict under this key. A RuntimeError too, since TorchStore raises one."""


def no_counterpart(owner: str, name: str) -> NoCounterpartError:
    return NoCounterpartError(
        f"{owner} has no {name!r} in memstore: values lie in files that every process of the host maps, so there are "
        "no volumes, controllers or transports to ask. docs/coming-from/torchstore.md says what takes their place"
    )
