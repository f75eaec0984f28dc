"""TorchStore's strategies: on which storage volume a process puts. Here each puts into the files of its own host.

So a strategy is accepted, and nothing follows from it: what is put is found from everywhere, as it is there.
"""

from __future__ import annotations

from typing import Any

from memstore.integrations.torchstore.refusals import no_counterpart
from memstore.integrations.torchstore.transport import TransportType


class TorchStoreStrategy:
    """The base class. Classes of one's own may inherit it; their `get_volume_id` and `get_client_id` aren't called.

    Args:
        default_transport_type: accepted, and changes nothing.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = default_transport_type

    def __getattr__(self, name: str) -> Any:
        raise no_counterpart(type(self).__name__, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class HostStrategy(TorchStoreStrategy):
    """One volume a host: what memstore has."""


class LocalRankStrategy(TorchStoreStrategy):
    """One volume a rank."""


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume for all."""
