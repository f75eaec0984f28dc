"""Actors of Monarch find the store of their job, also those that were spawned before it was made.

In processes of their own: one that has imported Monarch can't be forked, and pytest's is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memstore.integrations.torchstore.folders import ROOT_VARIABLE

ROOT = Path(__file__).parents[3]
NEEDS_MONARCH = pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="torchmonarch isn't installed")

SCRIPT = """
import asyncio, os
import torch
from monarch.actor import Actor, current_rank, endpoint, shutdown_context
import memstore.integrations.torchstore as ts

class Holder(Actor):
    @endpoint
    async def put(self, step: int) -> str:
        await ts.put(f"step{step}.{current_rank().rank}", torch.full((1000,), step))
        return (await (await ts.client()).store()).root

    @endpoint
    async def fails(self) -> str:
        try:
            await ts.get("key")
        except RuntimeError as error:
            return type(error).__name__

async def main():
    holders = await ts.spawn_actors(2, Holder, "holders")
    print([name for _, name in await holders.fails.call()])
    for step in range(2):
        await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy())
        roots = {root for _, root in await holders.put.call(step)}
        print(len(roots), sorted(await ts.keys()), (await ts.get(f"step{step}.1")).unique().tolist())
        await ts.shutdown()
    print([name for _, name in await holders.fails.call()], [os.path.exists(root) for root in roots])

asyncio.run(main())
shutdown_context().get(timeout=10.0)
"""


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(ROOT_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_actors_find_the_stores_of_their_job_one_after_the_other() -> None:
    assert run("-c", SCRIPT).splitlines() == [
        "['NotInitializedError', 'NotInitializedError']",
        "1 ['step0.0', 'step0.1'] [0]",
        "1 ['step1.0', 'step1.1'] [1]",
        "['NotInitializedError', 'NotInitializedError'] [False]",
    ]


SERVED = """
import asyncio, os
from monarch.actor import shutdown_context, this_host
import memstore.integrations.torchstore as ts

async def main():
    await ts.initialize(mesh=this_host())
    await ts.put("key", 5)
    store = await (await ts.client()).store()
    print(await ts.get("key"), os.path.exists(f"{store.root}/agent.lock"))
    await ts.shutdown()
    print(os.path.exists(store.root))

asyncio.run(main())
shutdown_context().get(timeout=10.0)
"""


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_hosts_of_a_mesh_are_served_until_the_shutdown() -> None:
    assert run("-c", SERVED).splitlines() == ["5 True", "False"]


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_example_of_actors_runs() -> None:
    output = run("examples/torchstore_actors.py")
    assert all(f"rank {rank} got tensor([{(rank + 1) % 4}])" in output for rank in range(4)), output
    assert "keys: tensor.0 tensor.1 tensor.2 tensor.3" in output


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_example_of_ranks_runs() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2")
    output = run(*torchrun, "examples/torchstore_spmd.py")
    assert all(f"rank {rank} got tensor([123])" in output for rank in range(2)), output
