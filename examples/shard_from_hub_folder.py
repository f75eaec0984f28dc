"""A model that is built sharded: no rank ever has all of it.

    python examples/shard_from_hub_folder.py [--ranks N] [--layers N] [--folder PATH]

An encoder is written as a folder in Hugging Face's format, safetensors files with an index. Then N ranks of
torch.distributed (gloo, on this machine) create it deferred, and each reads only its shards from the folder, as
DTensors. Each prints how much memory that took. Then all compute with it, and the result is compared with that of the
whole model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch

import memstore
from memstore.deferred_init import deferred_init, materialize_module

MIB = 1 << 20
WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/shard_from_hub_folder.py")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", default="/dev/shm/memstore-hub", help="of all files; what is there is removed")
    options = parser.parse_args()
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)  # what a run has left that was killed
    os.mkdir(folder)
    try:
        expected = write(f"{folder}/hub", f"{folder}/store", options.layers)
        whole = sum(path.stat().st_size for path in Path(folder, "hub").glob("*.safetensors"))
        print(f"{whole / MIB:.0f} MiB in {len(list(Path(folder, 'hub').glob('*.safetensors')))} files")
        with multiprocessing.get_context("spawn").Pool(options.ranks) as pool:
            port = free_port()
            work = [(rank, options.ranks, port, f"{folder}/hub", options.layers) for rank in range(options.ranks)]
            results = pool.starmap(run_rank, work, chunksize=1)
        for rank, (shard, grown, value) in enumerate(results):
            print(f"rank {rank}: shards {shard / MIB:6.1f} MiB, more memory {grown / MIB:6.1f} MiB")
            same = torch.allclose(torch.tensor(value), expected, rtol=1e-4, atol=1e-5)
            print(f"        computes {'the same' if same else 'SOMETHING ELSE'} as the whole model")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def write(hub: str, root: str, layers: int) -> torch.Tensor:
    """The folder, and what the model makes of ones."""
    torch.manual_seed(0)
    model = make(layers)
    with memstore.open(root) as store:
        store.put("model", dict(model.state_dict()))
        store.export("model", hub, max_shard_size="16MiB")
    shutil.rmtree(root)
    with torch.no_grad():
        return model(torch.ones(1, WIDTH))[0, :4]


def run_rank(rank: int, ranks: int, port: int, hub: str, layers: int) -> tuple[int, int, list[float]]:
    """Bytes of this rank's shards, bytes of memory that building took at its peak, and what it computes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    seen = [anonymous()]

    def rows(name: str, tensor: torch.Tensor) -> Any:
        """Asked for each tensor, while the model is built."""
        seen.append(anonymous())
        return [Shard(0)]

    model = deferred_init(make, layers)
    materialize_module(model, source=hub, mesh=mesh, placements=rows)
    grown = max(*seen, anonymous()) - seen[0]
    tensors: list[Any] = list(model.parameters())
    shard = sum(one.to_local().nbytes for one in tensors)
    with torch.no_grad():
        ones = distribute_tensor(torch.ones(1, WIDTH), mesh, [Replicate()], src_data_rank=None)
        computed: Any = model(ones)
        value = computed.full_tensor()[0, :4].tolist()
    dist.barrier()
    dist.destroy_process_group()
    return shard, grown, value


def anonymous() -> int:
    """Bytes of memory that are this process's own; the folder's pages belong to all."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
