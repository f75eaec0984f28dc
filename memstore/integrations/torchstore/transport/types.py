"""TensorSlice: a part of a tensor, as TorchStore names it. Scripts import it from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _numbers(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(map(int, value))


@dataclass(frozen=True)
class TensorSlice:
    """A box of a tensor.

    Attributes:
        offsets: where the box begins in each dimension, in elements.
        coordinates: the shard's coordinates on its mesh; ignored.
        global_shape: the shape of the whole tensor.
        local_shape: the shape of the box.
        mesh_shape: the shape of the mesh; ignored.
    """

    offsets: tuple[int, ...]
    coordinates: tuple[int, ...] | None
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name in ("offsets", "coordinates", "global_shape", "local_shape", "mesh_shape"):
            object.__setattr__(self, name, _numbers(getattr(self, name)))  # torch.Size and lists are given too
