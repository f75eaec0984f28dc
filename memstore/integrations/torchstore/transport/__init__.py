"""Names that scripts import from TorchStore's `transport`. Within a host, memstore sends no bytes."""

from __future__ import annotations

import enum

from memstore.integrations.torchstore.transport.types import TensorSlice


class TransportType(enum.Enum):
    """A transport for a strategy. It is accepted without effect, because processes of a host map one file."""

    Unset = enum.auto()
    MonarchRPC = enum.auto()
    MonarchRDMA = enum.auto()
    TorchComms = enum.auto()
    TorchCommsRDMA = TorchComms
    Gloo = enum.auto()
    SharedMemory = enum.auto()


__all__ = ["TensorSlice", "TransportType"]
