"""TorchStore's strategies, which choose the storage volume of a put. In memstore a process puts into its host's files.

So strategies are accepted, and have no effect. As in TorchStore, every process finds what was put.
"""

from __future__ import annotations

from typing import Any

from memstore.integrations.torchstore.errors import no_counterpart
from memstore.integrations.torchstore.transport import TransportType


class TorchStoreStrategy:
    """The base class. You may derive from it, but `get_volume_id` and `get_client_id` are never called.

    Args:
        default_transport_type: accepted without effect.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = default_transport_type

    def __getattr__(self, name: str) -> Any:
        raise no_counterpart(type(self).__name__, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class HostStrategy(TorchStoreStrategy):
    """One volume per host, which is what memstore does in any case."""


class LocalRankStrategy(TorchStoreStrategy):
    """One volume per rank in TorchStore; no effect here."""


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume for all processes in TorchStore; no effect here."""
