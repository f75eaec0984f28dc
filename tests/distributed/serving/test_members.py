"""Roots become members of a cluster, leave it, are removed, and are refused; each with an agent of its own."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence

import pytest

import memstore
from memstore.distributed.actors import FoundActor
from memstore.distributed.catalog import look
from memstore.distributed.rules import Answer, Found, Lookup
from memstore.distributed.serving import Cluster, remove_host
from memstore.distributed.serving.asking import standing_at
from memstore.distributed.serving.messages import Reported
from memstore.engine import Creation, close_root, open_root
from memstore.errors import NotServedError
from tests.distributed.serving.agents import Agent, Agents, Caller, eventually
from tests.distributed.serving.test_agent import REFUSED

NUMBER = 12  # keys, so that each of two homes has some


@pytest.fixture
def secret(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the agents' secret too."""
    monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(agents.secret))


def put_keys(root: str, names: Sequence[str], value: int) -> None:
    with memstore.open(root) as store:
        for name in names:
            store.put(name, {"value": value})


def keys_at(agent: Agent) -> set[str]:
    """The records that lie there."""
    use = open_root(agent.root, "r+", Creation(), 10.0)
    try:
        return {key.decode() for key, _ in look(use.root, lambda tables: tables.page(b"", 1024), 1e18)}
    finally:
        close_root(use)


def lookup(caller: Caller, agent: Agent, key: str) -> Answer:
    standing = standing_at(agent.root, 10.0)
    assert standing is not None
    answer = caller.call(agent, Lookup(standing.view.epoch, (key.encode(),)))
    assert not isinstance(answer, Reported | FoundActor)
    return answer


def test_hosts_that_begin_in_any_order_become_one_cluster(agents: Agents, caller: Caller) -> None:
    first = agents.start("a")  # not there yet, when the others ask it
    others = [agents.start(name, join=first) for name in "bc"]
    for agent in (first, *others):
        agent.wait_until_serving(3)
    reports = [caller.report(agent) for agent in (first, *others)]
    assert len({report.epoch for report in reports}) == 1
    eventually(lambda: all(caller.report(agent).is_settled for agent in (first, *others)), "all have settled")
    views = {agent.address: (agent.view()["cluster"], agent.view()["seed"]) for agent in (first, *others)}
    assert len(set(views.values())) == 1 and first.view()["seed"] == first.address


def test_keys_move_to_who_joins_and_back_from_who_leaves(agents: Agents, caller: Caller, secret: None) -> None:
    names = [f"key{number}" for number in range(NUMBER)]
    put_keys(f"{agents.folder}/a", names, 1)  # before it is served: the seed is at home for all of it
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)
    eventually(lambda: len(keys_at(seed)) + len(keys_at(other)) == NUMBER and keys_at(other), "keys move")
    assert keys_at(seed) | keys_at(other) == set(names) and keys_at(seed)
    moved = sorted(keys_at(other))
    found = lookup(caller, other, moved[0])
    assert isinstance(found, Found) and found.entries[0] is not None and found.entries[0].version

    with pytest.raises(NotServedError, match="lives, and would go on"):
        remove_host(seed.root, other.address)
    other.terminate()
    leaving = agents.serve("b", "--no-homes", join=seed, address=other.address, members=2)
    eventually(lambda: len(keys_at(seed)) == NUMBER, "keys come back")
    eventually(lambda: caller.report(leaving).is_settled, "it has settled")
    assert remove_host(seed.root, leaving.address).address == other.address
    code, text = leaving.ended()
    assert code == REFUSED and "was removed" in text
    assert Cluster(seed.root).hosts == (seed.address,)


@pytest.mark.full
def test_a_dead_host_is_removed_and_stays_away(agents: Agents, caller: Caller, secret: None) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)
    eventually(lambda: caller.report(seed).is_settled, "it has settled")
    other.process.kill()
    other.process.wait()
    with pytest.raises(NotServedError, match="is no host of the cluster"):
        remove_host(seed.root, "tcp://127.0.0.9:1")
    with pytest.raises(NotServedError, match="is the seed"):
        remove_host(seed.root, seed.address)
    remove_host(seed.root, other.address)
    eventually(lambda: len(seed.view()["members"]) == 1, "it is gone")
    again = agents.start("b", join=seed, address=other.address)
    code, text = again.ended()
    assert code == REFUSED and "removed from this cluster" in text
    code, text = agents.start("b", join=seed, address=other.address).ended()
    assert code == REFUSED and "removed from its cluster" in text
    shutil.rmtree(other.root)
    agents.serve("b", join=seed, address=other.address, members=2)


@pytest.mark.full
def test_an_empty_root_at_a_lost_ones_address_takes_its_place(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)
    before = other.view()["members"]
    other.process.kill()
    other.process.wait()
    shutil.rmtree(other.root)
    again = agents.serve("b", join=seed, address=other.address, members=2)
    after = again.view()["members"]
    assert {one["address"] for one in before} == {one["address"] for one in after}
    assert {one["id"] for one in before} != {one["id"] for one in after}


@pytest.mark.full
def test_a_root_with_keys_brings_them_along(agents: Agents, caller: Caller) -> None:
    seed = agents.serve("a")
    names = [f"key{number}" for number in range(NUMBER)]
    put_keys(f"{agents.folder}/b", names, 1)
    other = agents.serve("b", join=seed, members=2)
    eventually(
        lambda: keys_at(seed) | keys_at(other) == set(names) and keys_at(seed) and keys_at(other), "all are there"
    )
    assert keys_at(seed) & keys_at(other) == set()


@pytest.mark.full
def test_a_root_whose_keys_the_cluster_has_too_is_refused_naming_them(agents: Agents, caller: Caller) -> None:
    put_keys(f"{agents.folder}/a", ["shared", "mine"], 1)
    seed = agents.serve("a")
    put_keys(f"{agents.folder}/b", ["shared", "theirs"], 2)
    code, text = agents.start("b", join=seed).ended()
    assert code == REFUSED and "both have 'shared':" in text and "theirs" not in text
    assert caller.report(seed).epoch == 1
    with memstore.open(f"{agents.folder}/b", "r+") as store:
        assert store.get("shared") == {"value": 2}
        store.delete("shared")
    agents.serve("b", join=seed, members=2)


@pytest.mark.full
def test_another_secret_is_refused_on_both_ways(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.new_secret("other")
    code, text = agents.start("b", join=seed, MEMSTORE_SECRET_FILE=str(other)).ended()
    assert code == REFUSED and "secret" in text and seed.address in text
    put_keys(f"{agents.folder}/c", ["key"], 1)  # which asks before it joins
    code, text = agents.start("c", join=seed, MEMSTORE_SECRET_FILE=str(other)).ended()
    assert code == REFUSED and "secret" in text and seed.address in text
    assert len(seed.view()["members"]) == 1


@pytest.mark.full
def test_a_root_belongs_to_one_cluster_and_one_address(agents: Agents) -> None:
    seed, stranger = agents.serve("a"), agents.serve("x")
    member = agents.serve("b", join=seed, members=2)
    member.terminate()
    code, text = agents.start("b", join=stranger, address=member.address).ended()
    assert code == REFUSED and f"belongs to the cluster of the seed {seed.address}" in text
    code, text = agents.start("b", join=seed).ended()
    assert code == REFUSED and f"is the host {member.address}" in text
    agents.serve("b", address=member.address, members=2)  # it knows its seed


@pytest.mark.full
def test_only_the_seed_admits(agents: Agents) -> None:
    seed = agents.serve("a")
    member = agents.serve("b", join=seed, members=2)
    code, text = agents.start("c", join=member).ended()
    assert code == REFUSED and f"this is not the seed: join {seed.address}" in text


@pytest.mark.full
def test_while_the_seed_is_down_nobody_joins_and_the_rest_goes_on(agents: Agents, caller: Caller) -> None:
    seed = agents.serve("a")
    member = agents.serve("b", join=seed, members=2)
    seed.terminate()
    waiting = agents.start("c", join=seed)
    report = caller.report(member)
    assert report.epoch >= 2
    member.process.send_signal(signal.SIGKILL)
    member.process.wait()
    again = agents.serve("b", address=member.address, members=2)  # a member without its seed
    assert caller.report(again).epoch == report.epoch
    assert waiting.process.poll() is None and waiting.view() == {}
    agents.start("a", address=seed.address)
    for agent in (again, waiting):
        agent.wait_until_serving(3)


@pytest.mark.full
def test_a_copy_of_a_root_at_another_address_is_refused_by_the_seed(agents: Agents) -> None:
    seed = agents.serve("a")
    member = agents.serve("b", join=seed, members=2)
    member.terminate()
    shutil.copytree(member.root, f"{agents.folder}/copy")
    code, text = agents.start("copy", join=seed).ended()
    assert code == REFUSED and "if it is a copy" in text
