"""Meshes of a world that many tests share: each group of gloo has threads that poll for as long as it lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

_meshes: dict[Any, Any] = {}


def mesh_of(shape: Sequence[int], names: tuple[str, ...] | None = None) -> Any:
    """The mesh on the CPU of this shape, made once. All ranks have to ask for new ones in the same order."""
    names = names or tuple(f"dim{i}" for i in range(len(shape)))
    key = (*shape, *names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    return _meshes[key]
