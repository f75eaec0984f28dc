"""A removed host is served again: what nobody has put or deleted since comes back. Real agents and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from tests.distributed.serving.agents import LONG, Agent, Agents, eventually
from tests.distributed.serving.test_recovery import die, three

BIG = torch.arange(100_000, dtype=torch.float32)


def again(agents: Agents, agent: Agent, join: Agent) -> Agent:
    """Serves the folder once more, as a service manager does."""
    return agents.start(os.path.basename(agent.root), join=join, address=agent.address)


def until_back(agent: Agent) -> None:
    try:
        eventually(lambda: has_come_back(agent) or agent.process.poll() is not None, "it comes back", 60.0)
    finally:
        print(agent.log())
    assert agent.process.poll() is None


def has_come_back(agent: Agent) -> bool:
    return "has come back:" in agent.log()


def test_what_nobody_has_put_or_deleted_since_comes_back_and_the_rest_is_listed(agents: Agents) -> None:
    seed, dies, other = three(agents)
    with memstore.open(other.root) as c:
        c.put("other/own", 1)
    with memstore.open(dies.root) as b:
        versions = {
            key: b.put(key, value)
            for key, value in {
                "run/big": BIG,
                "run/small": {"step": 1},
                "run/deleted": 1,
                "run/replaced": BIG,
                "alone": BIG + 1,
                "other/bytes": BIG + 2,
                "other/gone": BIG,
            }.items()
        }
        data = b.create_dataset("run/rows", {"x": torch.zeros(3)}, capacity=10)
        data.extend({"x": torch.ones(4, 3)})
    with memstore.open(other.root) as c, memstore.open(seed.root) as a:
        kept = c.put("run/kept", BIG + 3)
        die(dies)
        cluster = Cluster(seed.root)
        cluster.remove(dies.address)
        assert torch.equal(a.get("run/kept", timeout=60.0), BIG + 3)
        eventually(lambda: {"run", "alone", "other/bytes", "other/gone"} <= set(cluster.status().lost), "it is told")
        c.put("run/replaced", 5)
        for store, key in ((a, "run/deleted"), (c, "other/gone")):
            store.delete_many([key], missing_ok=True)

        back = again(agents, dies, seed)
        until_back(back)
        with memstore.open(back.root) as b:
            for store in (a, b, c):
                assert torch.equal(store.get("run/big"), BIG) and store.get("run/small") == {"step": 1}
                assert torch.equal(store.get("alone"), BIG + 1) and torch.equal(store.get("other/bytes"), BIG + 2)
                assert store.get("run/replaced") == 5 and store.version("run/kept") == kept
                for key in ("run/big", "run/small", "alone", "other/bytes"):
                    assert store.version(key) > versions[key]
                for key in ("run/deleted", "other/gone", "run/rows"):
                    with pytest.raises(memstore.KeyNotFoundError):
                        store.get(key)
            assert b.put("run/big", 1) > a.version("run/small")
        assert a.get("run/big") == 1
        assert set(cluster.status().lost) == {"run/deleted", "other/gone", "run/rows"}
        assert any("'other/gone', 'run/deleted', 'run/rows'" in one for one in cluster.status().recovering)
        shown = subprocess.run(
            [sys.executable, "-m", "memstore", "status", seed.root],
            env=agents.environment,
            capture_output=True,
            text=True,
        )
        assert "4 keys are there again; 3 stay lost" in " ".join(shown.stdout.split())
        assert "1 have been put anew: 'run/replaced'" in back.log()
        assert len(cluster.hosts) == 3
    left = f"{dies.root}.left-1"
    assert left in back.log() and os.path.isdir(left) and not os.path.exists(f"{dies.root}.removed-1")
    back.terminate()
    once_more = again(agents, back, seed).wait_until_serving(3)
    assert not has_come_back(once_more)


def test_of_a_folder_that_has_nothing_left_nothing_is_left(agents: Agents) -> None:
    seed, dies, other = three(agents)
    with memstore.open(dies.root) as b, ThreadPoolExecutor(2) as threads:

        def shard(rank: int) -> int:
            value = {"w": memstore.TensorShard(torch.full((4, 50_000), float(rank)), (8, 50_000), (4 * rank, 0))}
            return b.put_sharded("run/w", value, attempt="1", rank=rank, world_size=2)

        (version,) = set(threads.map(shard, range(2)))
        b.put_many({f"many/{number}": BIG + number if number % 100 == 0 else number for number in range(500)})
    die(dies)
    Cluster(seed.root).remove(dies.address)
    back = again(agents, dies, seed)
    until_back(back)
    with memstore.open(other.root) as c:
        assert c.version("run/w") > version
        assert torch.equal(c.get("run/w")["w"][:, 0], torch.tensor([0.0] * 4 + [1.0] * 4))
        assert torch.equal(c.get("many/300"), BIG + 300) and c.get("many/301") == 301
        assert len(list(c.keys("many/"))) == 500
        eventually(lambda: not Cluster(seed.root).status().recovering, "all is recovered")
        assert not Cluster(seed.root).status().lost
        assert not c.verify().damaged
    folder = os.path.dirname(dies.root)
    assert [name for name in os.listdir(folder) if name.startswith(f"{os.path.basename(dies.root)}.")] == []


@pytest.mark.full
def test_an_agent_that_hears_of_the_removal_when_it_is_started_comes_back(agents: Agents) -> None:
    """It was stopped all the while. The old seed comes back, too, once another host is the seed."""
    seed, second, third = three(agents)
    eventually(lambda: second.view()["deputies"], "a deputy")
    with memstore.open(seed.root) as a:
        a.put("run/k", BIG)
    die(seed)
    cluster = Cluster(second.root)
    promoted = cluster.promote()
    cluster = Cluster(second.root if promoted == second.address else third.root)
    cluster.remove(seed.address)
    back = again(agents, seed, second)
    until_back(back)
    with memstore.open(third.root) as c:
        assert torch.equal(c.get("run/k"), BIG)
    assert Cluster(third.root).status().seed == promoted and len(Cluster(third.root).hosts) == 3


@pytest.mark.full
def test_a_return_goes_on_after_kills_at_any_time(agents: Agents) -> None:
    seed, dies, other = three(agents)
    values = {f"g{number % 5}/{number}": torch.full((20_000,), float(number)) for number in range(200)}
    with memstore.open(dies.root) as b:
        for key, value in values.items():
            b.put(key, value)
    die(dies)
    Cluster(seed.root).remove(dies.address)
    back = again(agents, dies, seed)
    for _ in range(5):
        eventually(lambda: os.path.isdir(f"{dies.root}.removed-1") or has_come_back(back), "it comes back")
        os.kill(back.index_process(), signal.SIGKILL)
    until_back(back)
    with memstore.open(other.root, timeout=LONG) as c:
        for key, value in values.items():
            assert torch.equal(c.get(key), value)
