"""Names that scripts take from TorchStore's `transport`: how bytes travel there. Here nothing travels on a host."""

from __future__ import annotations

import enum

from memstore.integrations.torchstore.transport.types import TensorSlice


class TransportType(enum.Enum):
    """What a strategy may be given. It is accepted, and changes nothing: processes of a host map one file."""

    Unset = enum.auto()
    MonarchRPC = enum.auto()
    MonarchRDMA = enum.auto()
    TorchComms = enum.auto()
    TorchCommsRDMA = TorchComms
    Gloo = enum.auto()
    SharedMemory = enum.auto()


__all__ = ["TensorSlice", "TransportType"]
