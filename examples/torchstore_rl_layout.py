"""The layout of torchtitan's RL jobs, by TorchStore's API: trainers on their hosts, generators on others, one store.

    python examples/torchstore_rl_layout.py [--steps N] [--address IP --trainers tcp://HOST:PORT ... --generators
        tcp://HOST:PORT ... --later tcp://HOST:PORT ...]

Without arguments all are processes of this host. With them the controller runs at IP, and each role on the hosts whose
Monarch workers listen there; the generators named by --later come in the middle. No role tells another where the store
is: `ts.initialize(mesh=trainers)` makes one on the trainers' hosts, and all others join it when they use it first.

Each step the trainers put their shards of the weights, and the generators get them into tensors of their own: sharded
in another way, in bfloat16, without the layers that they lack. A host of generators may die, or be cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from typing import Any

import monarch.actor
import torch
import torch.distributed as dist
from monarch.actor import Actor, attach_to_workers, current_rank, current_size, enable_transport, endpoint, this_host
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import memstore.integrations.torchstore as ts

PATIENCE = 30.0  # seconds for generators, which may be dead
LAYERS = {f"layers.{number}.{name}": (256, 512) for number in range(4) for name in ("attention", "feed_forward")}


class Rank(Actor):
    """A process of a role, which has a process group of its own, as torchrun would make it."""

    def __init__(self, processes: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.processes = current_rank().rank, processes
        self.state: dict[str, Any] = {}

    @endpoint
    async def free_address(self) -> tuple[str, int]:
        with socket.create_server(("", 0)) as sock:
            return socket.gethostname(), sock.getsockname()[1]

    @endpoint
    async def meet(self, host: str, port: int) -> None:
        world = 1
        for size in current_size().values():
            world *= size
        variables = {"RANK": self.rank, "LOCAL_RANK": self.rank % self.processes, "WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        await asyncio.to_thread(dist.init_process_group, "gloo")
        self.state = self.make_state(init_device_mesh("cpu", (world,)))

    def make_state(self, mesh: DeviceMesh) -> dict[str, Any]:
        raise NotImplementedError


class Trainer(Rank):
    def make_state(self, mesh: DeviceMesh) -> dict[str, Any]:
        names = {**LAYERS, "optimizer.momentum": (64, 64)}
        return {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for name, shape in names.items()}

    @endpoint
    async def train(self, step: int) -> None:
        for value in self.state.values():
            value.to_local().fill_(step)

    @endpoint
    async def push_model_state_dict(self) -> None:
        await ts.put_state_dict(self.state, "policy")


class Generator(Rank):
    def make_state(self, mesh: DeviceMesh) -> dict[str, Any]:
        made: dict[str, Any] = {
            name: distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), mesh, [Shard(1)])
            for name, shape in LAYERS.items()
        }
        return {**made, "cache.positions": torch.arange(16)}  # which no trainer has

    @endpoint
    async def pull_model_state_dict(self) -> float:
        """Returns the step whose weights it has now, which is one in all layers."""
        await ts.get_state_dict("policy", user_state_dict=self.state, strict=False)
        found = {
            float(one)
            for value in self.state.values()
            if isinstance(value, DTensor)
            for one in value.to_local().unique()
        }
        assert len(found) == 1, f"weights of several steps: {found}"
        return found.pop()


async def spawn(name: str, kind: type[Rank], workers: list[str], processes: int) -> tuple[Any, Any]:
    """Returns the processes of a role, and the actors in them."""
    hosts = attach_to_workers(ca="trust_all_connections", workers=workers) if workers else this_host()
    procs = hosts.spawn_procs(per_host={"gpus": processes})
    actors = procs.spawn(name, kind, processes)
    first = actors.flatten("rank").slice(rank=0)
    await actors.meet.call(*await first.free_address.call_one())
    return procs, actors


async def main(arguments: argparse.Namespace) -> None:
    if arguments.address:
        enable_transport(f"tcp://{arguments.address}:0")
    monarch.actor.unhandled_fault_hook = lambda failure: print("a process is gone:", str(failure)[:60], flush=True)
    count = arguments.processes
    trainer_mesh, trainers = await spawn("trainers", Trainer, arguments.trainers, count)
    generators = {"generators": (await spawn("generators", Generator, arguments.generators, count))[1]}

    await ts.initialize(mesh=trainer_mesh, strategy=ts.LocalRankStrategy())
    for step in range(1, arguments.steps + 1):
        await trainers.train.call(step)
        began = time.monotonic()
        await trainers.push_model_state_dict.call()
        print(f"step {step}: the trainers have put in {time.monotonic() - began:.1f} s", flush=True)
        if step == arguments.steps // 2 and (arguments.later or not arguments.address):
            generators["later generators"] = (await spawn("later", Generator, arguments.later, count))[1]
        for name, actors in list(generators.items()):
            try:
                got = await asyncio.wait_for(actors.pull_model_state_dict.call(), PATIENCE)
                print(f"step {step}: {name} have the weights of step", *{int(value) for _, value in got}, flush=True)
            except Exception as error:
                print(f"step {step}: without {name}, which are gone ({type(error).__name__})", flush=True)
                del generators[name]
        if arguments.pause:
            await asyncio.to_thread(input)  # a test kills a host meanwhile
    print("keys:", *await ts.keys(), flush=True)
    await ts.shutdown()
    print("the store is removed", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2, help="of each role on each host")
    parser.add_argument("--address", help="the IP of this host")
    for role in ("--trainers", "--generators", "--later"):
        parser.add_argument(role, nargs="+", default=[], metavar="tcp://HOST:PORT")
    parser.add_argument("--pause", action="store_true", help="wait for a line after each step")
    asyncio.run(main(parser.parse_args()))
    monarch.actor.shutdown_context().get(timeout=60.0)
