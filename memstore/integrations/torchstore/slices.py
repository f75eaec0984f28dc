"""A box of a stored tensor: only its bytes are read."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from memstore.errors import StructureMismatchError
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.structure import traits


def read_slice(lazy: Any, key: str, spec: TensorSlice, target: torch.Tensor | None) -> torch.Tensor:
    """A copy of the box, or `target`, which it was copied into.

    Args:
        lazy: the leaf, of a view.

    Raises:
        StructureMismatchError: what is stored is no tensor of `global_shape`, the box isn't in it, or `target` has
            another shape, or can't be filled.
    """
    found: tuple[int, ...] | None = tuple(lazy.shape) if isinstance(lazy, torch.Tensor) else None
    if found is None or found != spec.global_shape:
        what = "no tensor" if found is None else f"a tensor of shape {list(found)}"
        text = f"{key!r} is {what}, and the slice is one of a tensor of shape {list(spec.global_shape)}"
        raise StructureMismatchError(text, key=key)
    ends = [offset + size for offset, size in zip(spec.offsets, spec.local_shape, strict=True)]
    if any(offset < 0 or end > size for offset, end, size in zip(spec.offsets, ends, found, strict=True)):
        text = f"{key!r}: a slice of shape {list(spec.local_shape)} at {list(spec.offsets)} is not in {list(found)}"
        raise StructureMismatchError(text, key=key)
    if target is not None and tuple(target.shape) != spec.local_shape:
        text = f"{key!r}: inplace_tensor has shape {list(target.shape)}, and the slice {list(spec.local_shape)}"
        raise StructureMismatchError(text, key=key)
    if target is not None:
        check_fillable(key, target)
    box = lazy[tuple(map(slice, spec.offsets, ends))]
    if target is None:
        return box.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        return target.copy_(box)


def check_fillable(key: str, target: torch.Tensor) -> None:
    """Raises StructureMismatchError for an inplace_tensor whose elements have no memory, or share it."""
    if isinstance(target, DTensor):
        return
    why = None
    if target.device.type == "meta":
        why = "is a meta tensor, which has no memory"
    elif target.layout is not torch.strided:
        why = f"is of layout {target.layout}"
    elif traits.overlaps_itself(target.shape, target.stride()):
        why = "has elements that lie in the same memory, as expand() makes them"
    if why is not None:
        raise StructureMismatchError(f"{key!r}: inplace_tensor {why}: give a plain tensor to fill", key=key)
