"""TensorSlice: a part of a tensor, as TorchStore names it. Scripts import it from here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Returns whole numbers of torch.Size, lists and tensors too. Raises TypeError for anything else."""
    try:
        return tuple(map(operator.index, value))
    except TypeError:
        raise TypeError(f"{name} is whole numbers, one for each dimension, and not {value!r:.100}") from None


@dataclass(frozen=True)
class TensorSlice:
    """A box of a tensor.

    Attributes:
        offsets: where the box begins in each dimension, in elements.
        coordinates: the shard's coordinates on its mesh; ignored.
        global_shape: the shape of the whole tensor.
        local_shape: the shape of the box.
        mesh_shape: the shape of the mesh; ignored.

    Raises:
        TypeError: one of them isn't numbers.
        ValueError: offsets and shapes have different numbers of dimensions, or `local_shape` has a negative one.
    """

    offsets: tuple[int, ...]
    coordinates: tuple[int, ...] | None
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name in ("offsets", "coordinates", "global_shape", "local_shape", "mesh_shape"):
            value = getattr(self, name)
            if value is not None or name not in ("coordinates", "mesh_shape"):
                object.__setattr__(self, name, _numbers(name, value))
        if not len(self.offsets) == len(self.global_shape) == len(self.local_shape):
            raise ValueError(
                "offsets, global_shape and local_shape have a number for each dimension of the tensor, and not "
                f"{len(self.offsets)}, {len(self.global_shape)} and {len(self.local_shape)} of them"
            )
        if any(size < 0 for size in self.local_shape):
            raise ValueError(f"local_shape is sizes, 0 or more, and not {self.local_shape}")
