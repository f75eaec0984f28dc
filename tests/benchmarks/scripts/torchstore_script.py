"""A script written for TorchStore, which runs with it or with memstore's module of the same calls: one import differs.

python tests/benchmarks/scripts/torchstore_script.py MODULE FD

By its path, since TorchStore's checkout has a package `tests` too. It takes orders from FD, a multiprocessing
connection, and answers with the ns that calls took. All values are made here.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, shutdown_context
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

LEAVES, SIDE = 300, 64
PUTTERS, GETTERS = 4, 2
KEY = "kept"


class Order(NamedTuple):
    """What is to be done: so many calls of a kind, on a value of a kind."""

    value: str  # "small", "large", "leaves", "ranks"
    call: str  # "put", "get", "fill"
    count: int
    nbytes: int


def value_of(kind: str, nbytes: int, number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    if kind == "leaves":
        return {f"layers.{leaf}.weight": torch.randn(SIDE, SIDE, generator=generator) for leaf in range(LEAVES)}
    return torch.randn(nbytes // 4, generator=generator)


def empty_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: torch.zeros_like(tensor) for name, tensor in value.items()}
    return torch.zeros_like(value)


def check(found: Any, expected: Any) -> None:
    pairs = [(found[name], expected[name]) for name in expected] if isinstance(expected, dict) else [(found, expected)]
    if not all(torch.equal(one, other) for one, other in pairs):
        raise ValueError("what was got is not what was put")


class Script:
    """One process: it puts, and gets."""

    def __init__(self, ts: Any) -> None:
        self.ts, self.number = ts, 0
        self.values: dict[str, Any] = {}
        self.targets: dict[str, Any] = {}
        self.ranks: Ranks | None = None

    async def take(self, order: Order) -> list[int]:
        if order.value == "ranks":
            if self.ranks is None:
                self.ranks = await start_ranks(self.ts.__name__, order.nbytes)
            return [await self.ranks.take(order.call) for _ in range(order.count)]
        if order.value not in self.values:
            await self._begin(order)
        return [await self._timed(order) for _ in range(order.count)]

    async def _begin(self, order: Order) -> None:
        """With a first put, and gets that are compared."""
        value = self.values[order.value] = value_of(order.value, order.nbytes, 0)
        self.targets[order.value] = empty_like(value)
        await self._call(order._replace(call="put"))
        check(await self._call(order._replace(call="get")), value)
        await self._call(order._replace(call="fill"))
        check(self.targets[order.value], value)

    async def _timed(self, order: Order) -> int:
        start = time.perf_counter_ns()
        found = await self._call(order)
        taken = time.perf_counter_ns() - start
        del found
        return taken

    def _call(self, order: Order) -> Awaitable[Any]:
        ts, key, value, target = (self.ts, f"{KEY}.{order.value}", self.values[order.value], self.targets[order.value])
        calls: dict[tuple[bool, str], Callable[[], Awaitable[Any]]] = {
            (False, "put"): lambda: ts.put(key, value),
            (False, "get"): lambda: ts.get(key),
            (False, "fill"): lambda: ts.get(key, inplace_tensor=target),
            (True, "put"): lambda: ts.put_state_dict(value, key),
            (True, "get"): lambda: ts.get_state_dict(key),
            (True, "fill"): lambda: ts.get_state_dict(key, user_state_dict=target),
        }
        return calls[order.value == "leaves", order.call]()


# --- a trainer of four ranks, and a generator of two, as torchtitan has them ------------------------------------------


class Ranks(NamedTuple):
    putters: Any
    getters: Any

    async def take(self, call: str) -> int:
        """ns from the first rank's begin to the last one's end."""
        actors = self.putters if call == "put" else self.getters
        spans = [span for _, span in await (actors.put.call() if call == "put" else actors.fill.call())]
        return max(end for _, end in spans) - min(start for start, _ in spans)


class Rank(Actor):
    """A rank of one of two worlds, with its parts of the weights."""

    def __init__(self, module: str, file: str, size: int, nbytes: int, dim: int, dtype: torch.dtype) -> None:
        self.rank = current_rank().rank
        os.environ.update(LOCAL_RANK=str(self.rank), HOSTNAME=socket.gethostname())
        torch.set_num_threads(1)
        self.ts = importlib.import_module(module)
        self.file, self.size, self.nbytes, self.dim, self.dtype, self.step = file, size, nbytes, dim, dtype, 0

    @endpoint
    async def join(self) -> None:
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size, init_method=f"file://{self.file}")
        mesh = DeviceMesh("cpu", list(range(self.size)))
        side = int((self.nbytes / 4 / LEAVES) ** 0.5) // 8 * 8
        shape = [side, side]
        shape[self.dim] //= self.size
        self.weights = {
            f"layers.{leaf}.weight": DTensor.from_local(torch.zeros(shape, dtype=self.dtype), mesh, [Shard(self.dim)])
            for leaf in range(LEAVES)
        }

    @endpoint
    async def put(self) -> tuple[int, int]:
        self.step += 1
        for tensor in self.weights.values():
            tensor.to_local().fill_(float(self.step))
        dist.barrier()
        start = time.monotonic_ns()
        await self.ts.put_state_dict(self.weights, "ranks")
        return start, time.monotonic_ns()

    @endpoint
    async def fill(self) -> tuple[int, int]:
        dist.barrier()
        start = time.monotonic_ns()
        found = await self.ts.get_state_dict("ranks", self.weights, strict=False)
        end = time.monotonic_ns()
        if any(found[name] is not tensor for name, tensor in self.weights.items()):
            raise ValueError("another tensor was returned than the one to be filled")
        steps = {float(step) for tensor in self.weights.values() for step in tensor.to_local().unique()}
        if len(steps) != 1 or steps.pop() < 1:
            raise ValueError(f"filled with steps {steps}")
        return start, end


async def start_ranks(module: str, nbytes: int) -> Ranks:
    spawn_actors = importlib.import_module(f"{module}.utils").spawn_actors
    folder = tempfile.mkdtemp(prefix="ranks-")
    worlds: list[Any] = []
    worlds_of = (("putters", PUTTERS, 0, torch.float32), ("getters", GETTERS, 1, torch.bfloat16))
    for name, size, dim, dtype in worlds_of:
        actors = await spawn_actors(
            size, Rank, name, module=module, file=f"{folder}/{name}", size=size, nbytes=nbytes, dim=dim, dtype=dtype
        )
        await actors.join.call()
        worlds.append(actors)
    return Ranks(*worlds)


# --- orders -----------------------------------------------------------------------------------------------------------


async def serve(ts: Any, channel: Connection) -> None:
    os.environ.update(LOCAL_RANK="0", HOSTNAME=socket.gethostname())
    await ts.initialize(num_storage_volumes=PUTTERS, strategy=ts.LocalRankStrategy())
    script = Script(ts)
    channel.send("ready")
    while (order := await asyncio.to_thread(channel.recv)) is not None:
        try:
            channel.send(await script.take(Order(*order)))
        except Exception as error:
            channel.send(f"{type(error).__name__}: {error}")
    await ts.shutdown()


def main(module: str, fd: int) -> None:
    torch.set_num_threads(1)
    channel = Connection(fd)
    try:
        asyncio.run(serve(importlib.import_module(module), channel))
    finally:
        channel.send("over")
        shutdown_context().get(timeout=5.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
