"""Values on two hosts each: real agents and processes, deaths, puts that find no second host."""

from __future__ import annotations

import time

import pytest
import torch

import memstore
from memstore.distributed.catalog import look
from memstore.distributed.serving import Cluster
from memstore.engine import Creation, close_root, open_root
from tests.distributed.serving.agents import Agent, Agents, Caller, eventually
from tests.distributed.serving.test_recovery import die, three

BIG = torch.arange(100_000, dtype=torch.float32)


def kept_by(agent: Agent, key: str) -> int:
    """Returns the version of which a host has a replica, with its bytes; 0: of none."""
    use = open_root(agent.root, "r", Creation(), 60.0)
    try:
        found = look(use.root, lambda tables: tables.backup(key.encode()), time.monotonic() + 60.0)
        member = use.root.member_id()
    finally:
        close_root(use)
    is_whole = found is not None and all(place.host == member for place in found.places)
    return found.version if found is not None and is_whole else 0


def batches(agent: Agent) -> list[int]:
    """Returns the numbers of calls of whose keys some lack a replica."""
    use = open_root(agent.root, "r", Creation(), 60.0)
    try:
        return look(use.root, lambda tables: tables.all_batches(0, 9), time.monotonic() + 60.0)
    finally:
        close_root(use)


def test_what_dead_hosts_have_put_is_there_and_nothing_that_was_replaced(agents: Agents) -> None:
    seed, dies, other = three(agents)
    Cluster(seed.root).set_policy(replicas=2)
    with memstore.open(dies.root) as owner, memstore.open(other.root) as c, memstore.open(seed.root) as a:
        owner.put("run/own", BIG)
        owner.put("run/small", {"step": 1})
        owner.put("run/replaced", BIG)
        version = owner.put("run/replaced", BIG + 1)
        owner.put("run/deleted", BIG)
        owner.delete("run/deleted")
        owner.put_many({"run/one": BIG, "run/two": {"x": BIG + 2, "step": 3}})
        assert any(kept_by(host, "run/one") and kept_by(host, "run/two") for host in (seed, other))
        assert not batches(dies), "what was put together has its replicas"
        c.put("run/of-c", BIG + 3)
        assert kept_by(other, "run/of-c") and max(kept_by(seed, "run/own"), kept_by(other, "run/own"))
        assert max(kept_by(seed, "run/replaced"), kept_by(other, "run/replaced")) == version
        held = owner.get("run/own")
        die(dies)
        Cluster(seed.root).remove(dies.address)
        for store in (a, c):
            assert torch.equal(store.get("run/own"), BIG) and store.get("run/small") == {"step": 1}
            assert torch.equal(store.get("run/replaced"), BIG + 1) and store.info("run/replaced").version == version
            assert torch.equal(store.get("run/two")["x"], BIG + 2) and torch.equal(store.get("run/of-c"), BIG + 3)
            assert "run/deleted" not in store
        assert torch.equal(held, BIG)
        keys = ["run/own", "run/replaced", "run/one", "run/of-c"]
        eventually(lambda: all(kept_by(seed, key) or kept_by(other, key) for key in keys), "each is on two hosts again")


def test_a_put_that_finds_no_second_host_fails_or_says_so(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    alone = agents.serve("a", "--replicas", "2")
    with memstore.open(alone.root) as store:
        eventually(lambda: look_policies(alone), "the policy that it was served with")
        with pytest.raises(memstore.NotReplicatedError, match="no other host of the cluster") as found:
            store.put("run/x", BIG)
        assert store.info("run/x").version == found.value.version and found.value.key == "run/x"
        store.set_policy("warned/", replicas=2, on_missing="warn")
        store.put("warned/x", BIG + 1)
        assert "'warned/x': it was put" in caplog.text
        store.set_policy("alone", replicas=1)
        store.put("alone/x", 1)
        for wrong in (3, True, "2"):
            with pytest.raises(ValueError, match="expected 2"):
                store.set_policy(replicas=wrong)  # pyright: ignore
        with pytest.raises(ValueError, match="a whole group"):
            store.set_policy("run/x", replicas=2)
        newcomer = agents.serve("b", join=alone, members=2)
        eventually(lambda: kept_by(newcomer, "run/x") and kept_by(newcomer, "warned/x"), "what was put before")
        version = store.put("run/x", BIG + 2)
        assert kept_by(newcomer, "run/x") == version and not kept_by(newcomer, "alone/x")


def look_policies(agent: Agent) -> int:
    return len(Cluster(agent.root).roster().policies)


def test_a_replica_is_read_where_it_is_and_follows_later_where_nobody_waits(agents: Agents) -> None:
    seed = agents.serve("a", "--replicas", "async")
    other = agents.serve("b", join=seed, members=2)
    with memstore.open(seed.root) as a, memstore.open(other.root) as b, Caller(agents.secret) as caller:
        eventually(lambda: look_policies(seed), "the policy that it was served with")
        version = a.put("run/x", BIG)
        eventually(lambda: kept_by(other, "run/x") == version, "the copy")
        before = caller.report(other).received, caller.report(seed).sent
        assert torch.equal(b.get("run/x"), BIG) and torch.equal(b.get("run/x"), BIG)
        assert (
            caller.report(other).received - before[0] < BIG.nbytes and caller.report(seed).sent - before[1] < BIG.nbytes
        )
        a.delete("run/x")
        assert "run/x" not in b and not kept_by(other, "run/x")
