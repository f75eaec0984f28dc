"""How clusters begin: one of them, whoever is started first, and whoever comes back with an empty root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.distributed.rules.scenes import CALM
from tests.distributed.rules.test_membership import cluster, root_with
from tests.distributed.rules.world import CLUSTER, Host, World


def start(names: Mapping[str, Sequence[str]], seed: int = 0, seconds: float = 20) -> World:
    """Hosts that are started within a second of each other, each told of some."""
    world = World(seed, CALM)
    for address in names:
        world.add_host(address)
    for address, told in names.items():
        world.at(
            world.random.random(), lambda address=address, told=told: world.serve(world.hosts[address], names=told)
        )
    world.run(seconds)
    return world


def cluster_of(host: Host) -> bytes | None:
    standing = host.tables.standing()
    return None if standing is None else standing.roster.cluster


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "names",
    [
        {"h0": (), "h1": ("h0",)},
        {"h0": ("h1",), "h1": ("h0",)},
        {"h0": ("h0", "h1", "h2"), "h1": ("h0", "h1", "h2"), "h2": ("h0", "h1", "h2")},
        {"h0": ("h1",), "h1": ("h2",), "h2": ("h0",)},
        {"h0": ("h1",), "h1": ("h2",), "h2": ()},
        {"h0": ("h1",), "h1": ("h2",), "h2": ("h1",)},
        {"h2": ("h0", "h1"), "h1": ("h0",), "h0": ()},
    ],
    ids=str,
)
def test_hosts_of_a_first_boot_are_one_cluster(names: Mapping[str, Sequence[str]], seed: int) -> None:
    world = start(names, seed)
    (found,) = {cluster_of(host) for host in world.hosts.values()}
    assert found is not None
    for host in world.hosts.values():
        standing = host.tables.standing()
        assert standing is not None and len(standing.roster.members) == len(names)


def test_a_host_that_was_told_of_one_that_does_not_answer_makes_no_cluster() -> None:
    world = start({"h0": ("h1", "h2"), "h1": ("h0",)})
    assert [cluster_of(host) for host in world.hosts.values()] == [None, None]


def test_a_root_that_is_told_of_nobody_is_alone_for_three_seconds() -> None:
    world = World(0, CALM)
    host = world.add_host("h0")
    world.serve(host, names=())
    world.run(2.8)
    assert cluster_of(host) is None
    world.run(1)
    assert cluster_of(host) == host.id


def test_the_seeds_host_that_comes_back_empty_joins_the_members_that_find_it() -> None:
    """It was started by a unit that names nobody."""
    world = cluster(3)
    seed = world.hosts["h0"]
    lost = seed.id
    world.lose(seed)
    world.run(10)
    world.serve(seed, names=())
    world.run(10)
    assert cluster_of(seed) is None  # nobody can admit it yet
    done = list[bool]()
    world.promote(world.hosts["h1"], done.append)
    world.run(10)
    world.remove(lost)
    world.run(10)
    assert done == [True] and cluster_of(seed) == CLUSTER
    standing = seed.tables.standing()
    assert standing is not None and {member.id for member in standing.roster.members} == {
        host.id for host in world.hosts.values()
    }


def test_the_old_seeds_host_that_comes_back_empty_after_a_promotion_joins_the_members() -> None:
    """It was started by a unit that names nobody."""
    world = cluster(3)
    seed = world.hosts["h0"]
    world.lose(seed)
    world.run(10)
    done = list[bool]()
    world.promote(world.hosts["h1"], done.append)
    world.run(30)
    world.serve(seed, names=())
    world.run(20)
    assert done[0] and cluster_of(seed) == CLUSTER


def test_nobody_is_looked_for_while_all_members_ask() -> None:
    world = cluster(3)
    index = world.hosts["h0"].index
    assert index is not None and index.seed.looked_for == b""
    world.run(60)
    assert index.seed.looked_for == b""
    world.kill_index(world.hosts["h2"])
    world.run(30)
    assert index.seed.looked_for == world.hosts["h2"].id


@pytest.mark.parametrize("count", [2, 3, 5])
def test_members_that_have_all_moved_find_each_other_by_the_addresses_that_they_were_told(count: int) -> None:
    world = cluster(count)
    hosts = list(world.hosts.values())
    for host in hosts:
        world.kill_index(host)
    world.run(5)
    world.hosts.clear()
    for host in hosts:
        host.address = f"new-{host.address}"
        world.hosts[host.address] = host
    for host in hosts:
        world.serve(host, names=[one.address for one in hosts if one is not host], moved=True)
    world.run(60)
    for host in hosts:
        standing = host.tables.standing()
        assert standing is not None
        assert {member.address for member in standing.roster.members} == {one.address for one in hosts}


def test_a_root_that_has_a_cluster_stays_there_whoever_finds_it() -> None:
    world = cluster(2)
    other = root_with(world, "h2", b"ours")
    world.serve(other, names=())
    world.run(10)
    assert cluster_of(other) == other.id and set(other.tables.own_groups) == {b"ours"}
