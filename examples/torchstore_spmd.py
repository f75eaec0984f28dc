"""A script for TorchStore's ranks, with one import changed.

torchrun --standalone --nnodes=1 --nproc-per-node=2 examples/torchstore_spmd.py
"""

import asyncio

import torch
import torch.distributed as dist

import memstore.integrations.torchstore as ts


async def main() -> None:
    dist.init_process_group("gloo")
    await ts.initialize_spmd(strategy=ts.LocalRankStrategy())
    try:
        if dist.get_rank() == 0:
            await ts.put("demo", torch.tensor([123]))
        dist.barrier()  # it is there
        print(f"rank {dist.get_rank()} got {await ts.get('demo')}\n", end="", flush=True)
    finally:
        dist.barrier()  # nobody reads any more
        await ts.shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())
