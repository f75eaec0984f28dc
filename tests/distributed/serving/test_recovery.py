"""A host dies and is removed: what others have put into its groups is there again. Real agents and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memstore
from memstore.distributed.catalog import look
from memstore.distributed.serving import Cluster
from memstore.engine import Creation, close_root, open_root
from tests.distributed.serving.agents import Agent, Agents, eventually

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
            assert all(store.info(key).recovered for key in versions)
            assert sorted(store) == ["run/read", "run/small", "run/tensor"]
            for key in ("run/own", "run/deleted", "run/replaced"):
                with pytest.raises(memstore.KeyNotFoundError):
                    store.get(key)
        assert time.monotonic() - began < 20
        assert torch.equal(held, BIG)
        assert c.put("run/small", {"step": 3}) > versions["run/small"]
        assert a.get("run/small") == {"step": 3} and not c.info("run/small").recovered
        c.delete("run/tensor")
        assert "run/tensor" not in a


def test_a_sharded_value_and_a_sealed_dataset_are_there_after_the_removal(agents: Agents) -> None:
    seed, dies, other = three(agents)
    with memstore.open(dies.root) as owner:
        owner.put("run/own", 1)

    def shard(rank: int, step: int) -> dict[str, memstore.TensorShard]:
        local = torch.full((4, 5_000), float(10 * step + rank))
        return {"w": memstore.TensorShard(local, (8, 5_000), (4 * rank, 0))}

    with memstore.open(seed.root) as a, memstore.open(other.root) as c, ThreadPoolExecutor(2) as threads:
        for step in range(2):

            def put(rank: int, step: int = step) -> int:
                store = (a, c)[rank]
                value, attempt = shard(rank, step), f"step{step}"
                return store.put_sharded("run/w", value, attempt=attempt, rank=rank, world_size=2)

            versions = set(threads.map(put, range(2)))
        data = c.create_dataset("run/rows", {"x": torch.zeros(3)}, capacity=10)
        data.extend({"x": torch.ones(4, 3)})
        data.seal()
        unsealed = c.create_dataset("run/open", {"x": torch.zeros(3)}, capacity=10)
        unsealed.extend({"x": torch.ones(2, 3)})

        die(dies)
        Cluster(seed.root).remove(dies.address)
        for store in (a, c):
            found = store.get("run/w", timeout=60.0)["w"]
            assert (
                torch.equal(found[:, 0], torch.tensor([10.0] * 4 + [11.0] * 4)) and {store.version("run/w")} == versions
            )
            assert torch.equal(store.get("run/rows")["x"], torch.ones(4, 3))
        unsealed.extend({"x": torch.zeros(1, 3)})
        unsealed.seal()
        assert len(a.get("run/open")["x"]) == 3


def test_what_is_lost_is_told_by_name(agents: Agents) -> None:
    seed, dies, other = three(agents)
    with memstore.open(dies.root) as owner, memstore.open(other.root) as c:
        owner.put("flat", 1)
        owner.put("run/own", 2)
        c.put("run/kept", 3)
        c.put("mine/first", 4)
        owner.put("mine/there", BIG)
    die(dies)
    cluster = Cluster(seed.root)
    cluster.remove(dies.address)
    lost = eventually(lambda: {**cluster.status().lost} if len(cluster.status().lost) == 3 else None, "it is told")
    assert set(lost) == {"flat", "run", "mine/there"} and all(dies.address in who for who in lost.values())
    eventually(lambda: not cluster.status().recovering, "all is recovered")
    with memstore.open(other.root) as c, memstore.open(seed.root) as a:
        for store in (a, c):
            assert store.get("run/kept") == 3
            for key in ("flat", "run/own", "mine/there"):
                with pytest.raises(memstore.KeyNotFoundError, match=f"at {dies.address} had it.*lost when"):
                    store.get(key)
            with pytest.raises(memstore.KeyNotFoundError) as error:
                store.get("other")
            assert dies.address not in str(error.value)
    shown = subprocess.run(
        [sys.executable, "-m", "memstore", "status", seed.root], env=agents.environment, capture_output=True, text=True
    )
    text = " ".join(shown.stdout.split())
    assert f"{dies.address} was removed, and what lay there alone is lost, of: 'flat'" in text
    assert "what lay there alone is lost" in seed.log() + other.log()


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


def test_thousands_of_keys_and_of_groups_are_there_soon(agents: Agents) -> None:
    seed, dies, other = three(agents)
    flat = [f"flat{number}" for number in range(2_000)]
    keys = [*(f"run/{number}" for number in range(3_000)), *flat]
    with memstore.open(dies.root) as owner:
        owner.put("run/own", 0)
        for first in range(0, len(flat), 500):
            owner.put_many(dict.fromkeys(flat[first : first + 500], 0))
    with memstore.open(other.root, timeout=60.0) as c, memstore.open(seed.root, timeout=60.0) as a:
        for first in range(0, len(keys), 500):
            some = keys[first : first + 500]
            c.put_many({key: first + number for number, key in enumerate(some)})
        die(dies)
        Cluster(seed.root).remove(dies.address)
        began = time.monotonic()
        assert [a.get(key) for key in (keys[0], keys[-1], keys[3_000])] == [0, len(keys) - 1, 3_000]
        assert sorted(a.keys()) == sorted(keys)
        assert time.monotonic() - began < 30  # 1 s on a machine at rest
        assert a.get(keys[2_500]) == 2_500


def test_a_second_host_that_dies_meanwhile_is_waited_for_until_it_is_removed(agents: Agents) -> None:
    seed, dies, other = three(agents)
    second, fifth = (agents.serve(name, join=seed, members=members) for name, members in (("d", 4), ("e", 5)))
    for agent in (seed, dies, other, second, fifth):
        agent.wait_until_serving(5)
    with memstore.open(dies.root) as owner:
        owner.put("run/own", 1)
    with memstore.open(other.root) as c, memstore.open(fifth.root) as e:
        c.put("run/kept", BIG)
        e.put("other/k", 1)
        die(second)
        die(dies)
        cluster = Cluster(seed.root)
        cluster.remove(dies.address, timeout=60.0)
        with pytest.raises(memstore.HomeUnavailableError) as error:
            e.get("run/kept", timeout=3.0)
        assert "recovers what" in str(error.value) and dies.address in str(error.value)
        assert e.put("other/k", 2, timeout=10.0)
        cluster.remove(second.address, timeout=60.0)
        assert torch.equal(e.get("run/kept", timeout=60.0), BIG)
        eventually(lambda: not cluster.status().recovering, "all is recovered")


def owns(agent: Agent, group: bytes) -> bool:
    use = open_root(agent.root, "r", Creation(), 10.0)
    try:
        return look(use.root, lambda tables: tables.owned(group) is not None, time.monotonic() + 10)
    finally:
        close_root(use)
