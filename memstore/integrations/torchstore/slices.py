"""A box of a stored tensor: only its bytes are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memstore.errors import StructureMismatchError
from memstore.integrations.torchstore.transport import TensorSlice
from memstore.sharding import Shard, sharded_leaf, whole
from memstore.structure import copy_into, why_not_filled


def read_slice(lazy: Any, key: str, spec: TensorSlice, target: torch.Tensor | None) -> torch.Tensor:
    """A copy of the box, or `target`, which it was copied into.

    A box that reaches past the tensor's end is clipped to it, as by a slice of Python.

    Args:
        lazy: the leaf, of a view.

    Raises:
        StructureMismatchError: what is stored is no tensor of `global_shape`, the box begins before it, or `target`
            has another shape than the clipped box, or can't be filled.
    """
    found: tuple[int, ...] | None = tuple(lazy.shape) if isinstance(lazy, torch.Tensor) else None
    if found is None or found != spec.global_shape:
        what = "no tensor" if found is None else f"a tensor of shape {list(found)}"
        text = f"{key!r} is {what}, and the slice is one of a tensor of shape {list(spec.global_shape)}"
        raise StructureMismatchError(text, key=key)
    if any(offset < 0 for offset in spec.offsets):
        text = f"{key!r}: a slice of shape {list(spec.local_shape)} at {list(spec.offsets)} is not in {list(found)}"
        raise StructureMismatchError(text, key=key)
    ends = [offset + size for offset, size in zip(spec.offsets, spec.local_shape, strict=True)]
    box = lazy.detach()[tuple(map(slice, spec.offsets, ends))]
    if target is None:
        return box.clone(memory_format=torch.contiguous_format)
    check_fillable(key, target)
    if target.shape != box.shape:
        clipped = "" if box.shape == spec.local_shape else f", clipped to the stored tensor's {list(found)}"
        text = f"{key!r}: inplace_tensor has shape {list(target.shape)}, and the slice {list(box.shape)}{clipped}"
        raise StructureMismatchError(text, key=key)
    copy_into(target, box)
    return target


def check_fillable(key: str, target: torch.Tensor) -> None:
    """Raises StructureMismatchError for an inplace_tensor that can't be filled."""
    leaf = sharded_leaf(target)
    for local in [target] if leaf is None else [shard.local for shard in leaf.shards]:
        why = why_not_filled(local)
        if why is not None:
            raise StructureMismatchError(f"{key!r}: inplace_tensor is {why}", key=key)


def shards_of(target: torch.Tensor) -> Sequence[Shard]:
    """Returns the parts of a tensor that are here: of a DTensor this rank's, of others all."""
    leaf = sharded_leaf(target)
    return (Shard(whole(target.shape), target),) if leaf is None else leaf.shards
