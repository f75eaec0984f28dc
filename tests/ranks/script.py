"""A script as users start it with torchrun: FSDP2, a put, and a load by name; nothing but `memstore.open(root)`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memstore


def main(root: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    store = memstore.open(root)
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        version = store.save_model("run", model, optimizer)
    weights = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # type: ignore[union-attr]
    found = store.get("run")["model"]
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert store.load_model("run", model, optimizer) == version
    with open(f"{root}.{dist.get_rank()}", "w") as file:
        file.write(str(version))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
