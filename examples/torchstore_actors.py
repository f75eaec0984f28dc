"""A script for TorchStore with one import changed: actors of Monarch send tensors to each other.

python examples/torchstore_actors.py
"""

import asyncio

import torch
from monarch.actor import Actor, current_rank, endpoint, shutdown_context

import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.utils import spawn_actors

ACTORS = 4


class Neighbour(Actor):
    def __init__(self, count: int) -> None:
        self.rank, self.count = current_rank().rank, count

    @endpoint
    async def publish(self) -> None:
        await ts.put(f"tensor.{self.rank}", torch.tensor([self.rank]))

    @endpoint
    async def fetch(self) -> str:
        other = (self.rank + 1) % self.count
        return f"rank {self.rank} got {await ts.get(f'tensor.{other}')} from rank {other}"


async def main() -> None:
    await ts.initialize()
    actors = await spawn_actors(ACTORS, Neighbour, "neighbours", count=ACTORS)
    await actors.publish.call()
    for _, line in await actors.fetch.call():
        print(line)
    print("keys:", *sorted(await ts.keys("tensor")))
    await ts.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    shutdown_context().get(timeout=60.0)
