"""A host dies and is removed: what others have put into its groups is there again. Real agents and processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import memstore
from memstore.distributed.catalog import look
from memstore.distributed.serving import Cluster
from memstore.engine import Creation, close_root, open_root
from tests.distributed.serving.agents import Agent, Agents

BIG = torch.arange(100_000, dtype=torch.float32)


def die(agent: Agent) -> None:
    """All processes of a host end at once."""
    index = agent.index_process()
    os.kill(agent.pid, signal.SIGKILL)
    os.kill(index, signal.SIGKILL)
    agent.process.wait()


def three(agents: Agents) -> tuple[Agent, Agent, Agent]:
    seed = agents.serve("a")
    dies = agents.serve("b", join=seed, members=2)
    other = agents.serve("c", join=seed, members=3)
    for agent in (seed, dies):
        agent.wait_until_serving(3)
    return seed, dies, other


def test_what_living_hosts_have_put_is_there_after_the_removal_and_nothing_else(agents: Agents) -> None:
    seed, dies, other = three(agents)
    with memstore.open(dies.root) as owner:
        owner.put("run/own", BIG)
    with memstore.open(seed.root) as a, memstore.open(other.root) as c:
        c.put("run/tensor", BIG)
        a.put("run/small", {"step": 1})
        c.put("run/small", {"step": 2})
        c.put("run/deleted", 1)
        c.put("run/replaced", 1)
        c.put("run/read", BIG + 1)
        with memstore.open(dies.root) as owner:
            owner.delete("run/deleted")
            owner.put("run/replaced", 2)
        held = a.get("run/tensor")
        versions = {key: a.info(key).version for key in ("run/tensor", "run/small", "run/read")}

        die(dies)
        with pytest.raises(memstore.HomeUnavailableError, match="memstore remove"):
            a.get("run/small", timeout=0.5)
        Cluster(seed.root).remove(dies.address)
        began = time.monotonic()
        for store in (a, c):
            assert store.get("run/small") == {"step": 2}
            assert torch.equal(store.get("run/tensor"), BIG) and torch.equal(store.get("run/read"), BIG + 1)
            assert {key: store.info(key).version for key in versions} == versions
            assert sorted(store) == ["run/read", "run/small", "run/tensor"]
            for key in ("run/own", "run/deleted", "run/replaced"):
                with pytest.raises(memstore.KeyNotFoundError):
                    store.get(key)
        assert time.monotonic() - began < 20
        assert torch.equal(held, BIG)
        assert c.put("run/small", {"step": 3}) > versions["run/small"]
        assert a.get("run/small") == {"step": 3}
        c.delete("run/tensor")
        assert "run/tensor" not in a


def test_the_heir_dies_too(agents: Agents) -> None:
    """What a third host has put is there after each of the removals."""
    seed, dies, other = three(agents)
    fourth = agents.serve("d", join=seed, members=4)
    for agent in (seed, dies, other):
        agent.wait_until_serving(4)
    with memstore.open(dies.root) as owner:
        owner.put("run/own", 1)
    sizes = [number * 10 if number % 2 else 20_000 + number for number in range(50)]
    values = {f"run/{number}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}
    with memstore.open(seed.root) as store:
        for key, value in values.items():
            store.put(key, value)

        def check() -> None:
            for key, value in values.items():
                assert torch.equal(store.get(key, timeout=60.0), value)

        die(dies)
        Cluster(seed.root).remove(dies.address)
        check()
        heir = next((agent for agent in (other, fourth) if owns(agent, b"run")), None)
        if heir is not None:
            die(heir)
            Cluster(seed.root).remove(heir.address)
            check()
        store.put("run/0", 5)
        assert store.get("run/0") == 5


def owns(agent: Agent, group: bytes) -> bool:
    use = open_root(agent.root, "r", Creation(), 10.0)
    try:
        return look(use.root, lambda tables: tables.owned(group) is not None, time.monotonic() + 10)
    finally:
        close_root(use)
