"""Wishes: what the real tensors of one call are to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from memstore.deferred_init.shards import Spread, placements_of, spread_as
from memstore.deferred_init.slots import Slot
from memstore.deferred_init.wrappers import is_wrapper

Names = Mapping[int, Sequence[str]]


class Wish(NamedTuple):
    """What real tensors are to be. None: as the deferred ones say.

    Attributes:
        names: all names of each tensor of the module, by its id.
    """

    device: torch.device | None
    dtype: torch.dtype | None
    mesh: Any
    placements: Any
    names: Names

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype if self.dtype is None or not tensor.dtype.is_floating_point else self.dtype

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        if self.device is not None:
            return self.device
        return tensor.device if self.mesh is None else torch.device(self.mesh.device_type)

    def spread_of(self, slot: Slot) -> Spread | None:
        """How a slot's tensor is spread: as it is wished, or as it is already."""
        if is_wrapper(slot.tensor):
            return spread_as(slot.tensor)
        if self.mesh is None:
            return None
        names = self.names[id(slot.tensor)]
        placements = placements_of(self.placements, slot.name, names, slot.tensor, is_parameter=slot.is_parameter)
        return None if placements is None else Spread(self.mesh, placements)

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether what is real can share the memory that a deferred tensor shares."""
        if self.mesh is not None or (self.device is not None and not is_on(tensor.device, self.device)):
            return False
        return self.dtype is None or self.dtype_of(tensor) == tensor.dtype


def is_on(device: torch.device, wished: torch.device) -> bool:
    """Whether a device is the wished one; without an index it is any of its type."""
    if device.type != wished.type:
        return False
    index = cast("int | None", wished.index)  # torch says that it is never None
    return index is None or device.type == "cpu" or device.index == index
