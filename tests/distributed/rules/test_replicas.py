"""Replicas by hand: where values lie, what a death leaves, and what a put says that finds no second host."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Backup, Change, Member, Place, directory, replicas
from memstore.distributed.rules.messages import IsRoster, Refused, SetPolicy
from memstore.distributed.rules.nouns import Policy
from memstore.distributed.rules.recovery import ToKeep, keep
from memstore.errors import NotReplicatedError
from tests.distributed.rules.test_membership import cluster, get, key_at, put, run
from tests.distributed.rules.test_recovery import kill
from tests.distributed.rules.world import Host, Process, World


def replicated(hosts: int, **policy: Any) -> tuple[World, list[Host], list[Process]]:
    """A cluster whose values lie on two hosts each, and a process on each host."""
    world = cluster(hosts)
    state(world, Policy(None, 2, **policy))
    every = list(world.hosts.values())
    return world, every, [world.start_process(host) for host in every]


def state(world: World, policy: Policy, *, drops: bool = False) -> None:
    seed = next(host for host in world.hosts.values() if (it := host.tables.standing()) is not None and it.is_seed)
    for _ in range(100):
        assert seed.index is not None
        if isinstance(world.answer(seed, seed.index, SetPolicy(policy, drops)), IsRoster):
            return
        world.run(0.1)
    raise AssertionError("nobody hears of the policy")


def put_bytes(world: World, process: Process, key: bytes, value: int, **more: Any) -> int:
    host = process.host
    change = Change(key, b"", (Place(host.id, host.tables.fill(value), 1),), **more)
    return run(world, process, process.client.commit([change], 1 << 62))[0]


def bytes_of(world: World, host: Host, entry: Any) -> set[int]:
    """What the places of a record, or of a row that is kept, have: all of them on this host."""
    assert entry is not None and {place.host for place in entry.places} == {host.id}
    return {host.tables.segments[place.put_id].value for place in entry.places}


def replicas_of(hosts: list[Host], key: bytes) -> list[Host]:
    return [host for host in hosts if host.tables.backup(key) is not None]


def test_a_put_here_is_on_two_hosts_when_it_returns() -> None:
    world, hosts, processes = replicated(4)
    version = put_bytes(world, processes[1], b"run/x", 7)
    small = run(world, processes[1], put(processes[1], b"run/y", b"small"))[0]
    assert bytes_of(world, hosts[1], hosts[1].tables.record(b"run/x")) == {7}
    (keeper,) = replicas_of(hosts, b"run/x")
    backup = keeper.tables.backup(b"run/x")
    assert backup is not None and (backup.version, backup.is_replica) == (version, True)
    assert bytes_of(world, keeper, backup) == {7}
    assert replicas_of(hosts, b"run/y") == [keeper], "a group's values lie together"
    other = keeper.tables.backup(b"run/y")
    assert other is not None and (other.version, other.body) == (small, b"small")
    assert not hosts[1].tables.lacks and not hosts[1].tables.unnoted


def test_a_put_of_another_owner_is_on_its_host_and_the_owners() -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    version = put_bytes(world, processes[2], key, 7)
    assert bytes_of(world, hosts[1], hosts[1].tables.record(key)) == {7}
    assert replicas_of(hosts, key) == [hosts[2]]
    backup = hosts[2].tables.backup(key)
    assert backup is not None and backup.version == version and bytes_of(world, hosts[2], backup) == {7}
    assert not hosts[1].tables.lacks
    world.run(10)
    assert bytes_of(world, hosts[2], backup) == {7}, "an audit leaves it"


@pytest.mark.parametrize("putter", [1, 2])
def test_a_death_takes_nothing_and_the_value_is_on_two_hosts_again(putter: int) -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    version = put_bytes(world, processes[putter], key, 7)
    for dies in (hosts[1], hosts[2]):
        kill(world, dies)
        world.run(20)
        living = [host for host in hosts if host.tables.standing() is not None]
        entry = get(world, processes[0], key)
        assert entry is not None and entry.version == version
        (owner,) = [host for host in living if host.tables.record(key) is not None]
        assert bytes_of(world, owner, entry) == {7}
        (keeper,) = replicas_of(living, key)
        assert keeper is not owner and bytes_of(world, keeper, keeper.tables.backup(key)) == {7}
        assert not any(host.tables.lost for host in living), "nobody says that it is lost"


def test_replaced_and_deleted_values_leave_nothing_and_do_not_come_back() -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    put_bytes(world, processes[1], key, 7)
    (keeper,) = replicas_of(hosts, key)
    put_bytes(world, processes[1], key, 8)
    assert replicas_of(hosts, key) == [keeper] and bytes_of(world, keeper, keeper.tables.backup(key)) == {8}
    put_bytes(world, processes[2], key, 9)
    world.run(5)
    assert replicas_of(hosts, key) == [hosts[2]]
    run(world, processes[3], processes[3].client.commit([Change(key, None)], 1 << 62))
    assert replicas_of(hosts, key) == []
    world.run(10)
    assert not any(host.tables.segments for host in hosts)
    kill(world, hosts[1])
    world.run(15)
    assert get(world, processes[0], key) is None


def test_a_put_that_finds_no_second_host_says_so_and_its_value_gets_one_later() -> None:
    world, hosts, processes = replicated(1)
    with pytest.raises(NotReplicatedError, match="no other host of the cluster") as found:
        put_bytes(world, processes[0], b"run/x", 7)
    entry = get(world, processes[0], b"run/x")
    assert entry is not None and entry.version == found.value.version
    newcomer = world.add_host("h1")
    world.serve(newcomer, "h0")
    world.run(20)
    assert bytes_of(world, newcomer, newcomer.tables.backup(b"run/x")) == {7}
    assert not hosts[0].tables.lacks


def test_a_damaged_record_keeps_no_other_from_its_replica() -> None:
    world, hosts, processes = replicated(3)
    key = key_at(world, hosts[1])
    pair = [key + b"/a", key + b"/b"]
    changes = [Change(one, b"small") for one in pair]
    for host in hosts:
        if host is not hosts[1]:
            assert host.index is not None
            host.index.replicate = refuse  # pyright: ignore
    with pytest.raises(NotReplicatedError):
        run(world, processes[1], processes[1].client.commit(changes, 1 << 62))
    hosts[1].tables.damaged.add(pair[0])
    for host in hosts:
        host.index.__dict__.pop("replicate", None)
    world.run(20)
    assert [bool(replicas_of(hosts, one)) for one in pair] == [False, True]


def test_where_that_is_allowed_a_put_goes_on_and_what_it_replaced_does_not_come_back() -> None:
    world, hosts, processes = replicated(3, fails=False)
    key = key_at(world, hosts[1])
    put_bytes(world, processes[1], key, 7)
    (keeper,) = replicas_of(hosts, key)
    for host in hosts:
        if host is not hosts[1]:
            assert host.index is not None
            host.index.replicate = refuse  # pyright: ignore
    put_bytes(world, processes[1], key, 8)
    assert keeper.tables.backup(key) is None and hosts[1].tables.lacking(key) is False
    kill(world, hosts[1])
    world.run(15)
    assert get(world, processes[0], key) is None


def refuse(*_: Any) -> Any:
    return Refused("no")
    yield


def test_without_waiting_a_put_returns_and_the_copy_follows() -> None:
    world, hosts, processes = replicated(3, is_async=True)
    key = key_at(world, hosts[1])
    ends: list[Any] = []
    change = Change(key, b"", (Place(hosts[1].id, hosts[1].tables.fill(7), 1),))
    world.call(processes[1], processes[1].client.commit([change], 1 << 62), 5, lambda *end: ends.append(end))
    world.run(0.05)
    assert ends and ends[0][1] is None and hosts[1].tables.lacking(key) is False
    world.run(5)
    assert len(replicas_of(hosts, key)) == 1 and not hosts[1].tables.lacks


def test_a_policy_of_a_group_goes_before_that_of_the_store() -> None:
    world, hosts, processes = replicated(3)
    state(world, Policy(b"alone", 1))
    put_bytes(world, processes[1], b"alone/x", 7)
    put_bytes(world, processes[1], b"other/x", 7)
    world.run(5)
    assert not replicas_of(hosts, b"alone/x") and replicas_of(hosts, b"other/x")
    state(world, Policy(b"alone", 1), drops=True)
    world.run(10)
    assert replicas_of(hosts, b"alone/x"), "what was there gets its replica"


def test_a_host_that_is_drained_gives_its_replicas_away() -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    put_bytes(world, processes[1], key, 7)
    (keeper,) = replicas_of(hosts, key)
    assert keeper is not hosts[0], "that is the seed, which can't be drained"
    leaver = keeper.id
    world.drain(leaver)
    world.run(40)
    standing = hosts[0].tables.standing()
    assert standing is not None and leaver not in standing.roster.ids
    (other,) = replicas_of(hosts, key)
    assert other.id != leaver and bytes_of(world, other, other.tables.backup(key)) == {7}


def test_a_group_that_is_handed_over_has_replicas_of_its_new_owner() -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    put_bytes(world, processes[1], key, 7)
    directory.begin(hosts[1].tables, key, hosts[2].id)
    world.run(30)
    entry = hosts[2].tables.record(key)
    assert bytes_of(world, hosts[2], entry) == {7}
    (keeper,) = replicas_of(hosts, key)
    assert keeper is not hosts[2] and bytes_of(world, keeper, keeper.tables.backup(key)) == {7}
    assert sum(len(host.tables.segments) for host in hosts) == 2


def test_a_host_keeps_nothing_whose_bytes_an_audit_has_given_back() -> None:
    world, hosts, processes = replicated(4)
    key = key_at(world, hosts[1])
    put_bytes(world, processes[1], key, 7)
    host, grant = hosts[2], hosts[1].tables.owned(key)
    assert grant is not None
    place = Place(host.id, host.tables.fill(8), 1)
    row = ToKeep(key, 1 << 50, grant, Backup(1 << 50, grant.number, b"", (place,), is_replica=True))
    owner = Member(hosts[1].id, "h1")
    host.tables.retire(place)
    before = host.tables.backup(key)
    assert run(world, processes[2], keep(owner, [row], host.tables.now())) is True
    assert host.tables.backup(key) == before and replicas.kept(host.tables, key, 1 << 50) == 0
