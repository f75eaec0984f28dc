"""A checkpoint of torch.distributed.checkpoint: FSDP2 saves it on four ranks, a tensor-parallel mesh of two loads it.

    torchrun --nproc-per-node 4 examples/dcp.py train FOLDER
    torchrun --nproc-per-node 2 examples/dcp.py test FOLDER

The first trains a small network on the handwritten digits of scikit-learn (extra `demo`). Every rank has a part of each
weight and of the optimizer's moments. It saves asynchronously while it trains, every epoch into the same checkpoint;
the last one stays. The second shards the network by its columns and rows, loads its own parts, and counts how many
digits of the test set it recognizes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memstore.integrations import dcp

EPOCHS, BATCH, TRAINED = 12, 64, 1500  # of 1,797 digits


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node N examples/dcp.py")
    parser.add_argument("what", choices=["train", "test"])
    parser.add_argument("folder")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    checkpoint = f"{arguments.folder}/digits"
    train(checkpoint) if arguments.what == "train" else test(checkpoint)
    dist.destroy_process_group()


def train(checkpoint: str) -> None:
    """FSDP2: each rank has some rows of each weight, and every fourth batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images, labels = digits()
    saving: Any = None
    waited = 0.0
    for epoch in range(EPOCHS):
        for start in range(rank * BATCH, TRAINED - TRAINED % (ranks * BATCH), ranks * BATCH):
            rows = slice(start, start + BATCH)
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if saving is not None:
            saving.result()
        began = time.perf_counter()
        saving = dcp.async_save(state_of(model, optimizer, epoch), checkpoint_id=checkpoint)
        waited += time.perf_counter() - began
    saving.result()
    if rank == 0:
        print(f"{ranks} ranks saved {EPOCHS} times, and waited {waited / EPOCHS * 1e3:.1f} ms for each")


def test(checkpoint: str) -> None:
    """Tensor parallel: each rank has columns of the first weight, and rows of the second."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer, epoch=0)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    images, labels = digits()
    right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks loaded epoch {state['epoch']}: {right:.0%} of the other digits are right")


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "epoch": epoch}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found: Any = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.data).float()[order] / 16
    return images, torch.from_numpy(found.target)[order]


if __name__ == "__main__":
    main()
