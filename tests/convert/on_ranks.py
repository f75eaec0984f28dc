"""What ranks save that is converted: called on four ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memstore import Snapshot, StateDict
from memstore.integrations.dcp import StorageWriter
from tests.integrations.dcp.states import save
from tests.ranks.meshes import mesh_of

SAVED = ("torch", "memstore", "snapshot")


def whole_model() -> torch.nn.Module:
    """Of sizes that four ranks can't split evenly."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(13, 10), torch.nn.Linear(10, 3), torch.nn.LayerNorm(3))


def whole_tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(13 * 10, dtype=torch.float32).view(13, 10)
    return {"grid": grid, "rows": grid.bfloat16(), "same": grid[:2].clone()}


def save_sharded(folder: str) -> bool:
    """Saves a model of FSDP2, and DTensors of a mesh of two dimensions, in each of the ways that SAVED has."""
    model = whole_model()
    fully_shard(model, mesh=mesh_of((4,)))
    mesh = mesh_of((2, 2))
    layouts = {"grid": [Shard(0), Shard(1)], "rows": [Replicate(), Shard(0)], "same": [Replicate(), Replicate()]}
    tensors = {name: distribute_tensor(tensor, mesh, layouts[name]) for name, tensor in whole_tensors().items()}
    state: dict[str, Any] = {"model": get_model_state_dict(model), "tensors": tensors}
    save(state, FileSystemWriter(f"{folder}/torch"))
    save(state, StorageWriter(f"{folder}/memstore"))
    Snapshot.take(f"{folder}/snapshot", {name: StateDict(**part) for name, part in state.items()})
    return True
