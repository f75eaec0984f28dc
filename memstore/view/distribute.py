"""This rank's part of a lazy leaf, read into a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memstore.late_imports import between_forks
from memstore.sharding import local_shape, part, place
from memstore.structure import contiguous_stride, modes
from memstore.view.lazy import LazyTensor


def distribute(leaf: LazyTensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor of the leaf's values. Raises UnsupportedValueError for placements that nothing can be read into."""
    with between_forks():
        from torch.distributed.tensor import DTensor
    shape = tuple(leaf.shape)
    pieces, own = place(mesh, placements, shape), local_shape(mesh, placements, shape)
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        local = torch.empty(own, dtype=leaf.dtype, device=mesh.device_type)
        for piece in pieces:
            leaf.stored.copy_to(part(local, piece.local), part(leaf.shown, piece.box))
        made: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )
        return made.requires_grad_(leaf.requires_grad)
