"""A script: an actor whose endpoints await one store, hundreds of calls at a time."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
import threading

import torch
from monarch.actor import Actor, concurrent_endpoint, shutdown_context, this_host

import memstore
import memstore.aio

CALLS = 300


class Follower(Actor):
    def __init__(self, root: str) -> None:
        self.store = memstore.aio.open(root)

    @concurrent_endpoint
    async def follow(self, number: int) -> float:
        """Waits for a key, and puts what it finds under another one."""
        await self.store.wait(f"in/{number}", timeout=60)
        value = await self.store.get(f"in/{number}")
        await self.store.put(f"out/{number}", value * 2)
        return float(value.sum())

    @concurrent_endpoint
    async def threads(self) -> int:
        return sum(thread.name.startswith("memstore.aio") for thread in threading.enumerate())


def main(root: str) -> None:
    with memstore.open(root) as store:
        follower = this_host().spawn_procs(per_host={"procs": 1}).spawn("follower", Follower, root)
        calls = [follower.follow.call_one(number) for number in range(CALLS)]
        threads = follower.threads.call_one().get()
        assert threads <= 1 + 8, threads
        for number in range(CALLS):
            store.put(f"in/{number}", torch.full((100,), float(number)))
        assert [call.get() for call in calls] == [100.0 * number for number in range(CALLS)]
        assert all(store.get(f"out/{number}")[0] == 2 * number for number in range(CALLS))
        print("as it should be")
    shutdown_context().get()


if __name__ == "__main__":
    main(sys.argv[1])
