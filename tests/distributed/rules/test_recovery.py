"""What a removal leaves: who recovers a dead owner's groups, who is waited for, and what is told meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Change, Departed, Member, Place, directory, recovery
from memstore.distributed.rules.messages import FindBackups, IsRoster, Later, Lost, Note, Recovered
from memstore.distributed.rules.nouns import Roster
from memstore.errors import HomeUnavailableError, UnknownOutcomeError
from tests.distributed.rules.test_membership import cluster, get, key_at, put, run
from tests.distributed.rules.world import Host, World


def member(name: str, *, is_owner: bool = True) -> Member:
    return Member(name.encode().ljust(16, b"."), name, name, is_owner)


def roster(*members: Member, holders: tuple[bytes, ...] = (), leavers: tuple[bytes, ...] = ()) -> Roster:
    leaving = tuple((one, b"") for one in leavers)
    return Roster(b"C" * 16, 1, 1, members, members[0].id, holders=holders, leavers=leaving)


def kill(world: World, host: Host) -> bytes:
    dead = host.id
    world.lose(host)
    world.remove(dead)
    return dead


def dead_owner(world: World, owner: Host, putter: Host) -> tuple[bytes, bytes]:
    """A group that the first owns, with a key that the second has put; then the first is removed."""
    key = key_at(world, owner)
    process = world.start_process(putter)
    place = Place(putter.id, putter.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    return key, kill(world, owner)


def test_an_heir_owns_groups_and_stays() -> None:
    a, b, c, visitor = member("a"), member("b"), member("c"), member("d", is_owner=False)
    every = roster(a, b, c, visitor, leavers=(b.id,))
    (one,) = recovery.heirs(every, (a, b, visitor), ())
    assert (one.member, one.heir, one.is_ready) == (c, a.id, False)
    assert recovery.heirs(every, (a, b, c), ()) == (), "who never owned anything leaves nothing"
    (alone,) = recovery.heirs(roster(a, visitor), (visitor,), ())
    assert alone.heir == visitor.id


def test_an_heir_that_is_removed_is_replaced_and_the_next_one_begins_anew() -> None:
    a, b, c = member("a"), member("b"), member("c")
    ready = Departed(member("gone"), b.id, is_ready=True)
    found = {one.member.name: one for one in recovery.heirs(roster(a, b, c), (a, c), (ready,))}
    assert set(found) == {"gone", "b"}
    assert found["gone"].heir != b.id and not found["gone"].is_ready
    assert recovery.heirs(roster(a, b), (a, b), (ready,)) == (ready,)
    assert recovery.heirs(roster(a, b), (a, b, member("gone")), (ready,)) == (), "it was taken back"


def test_calls_for_a_dead_owners_groups_wait_and_name_the_heir_and_others_go_on() -> None:
    world = cluster(5)
    hosts = [world.hosts[f"h{number}"] for number in range(5)]
    other, reader = key_at(world, hosts[2]), world.start_process(hosts[0])
    behind: Any = hosts[4].index
    answer = world.answer

    def is_silent(host: Host, index: Any, request: Any) -> Any:
        return Later() if index is behind and isinstance(request, FindBackups) else answer(host, index, request)

    world.answer = is_silent
    key, dead = dead_owner(world, hosts[1], hosts[3])
    world.run(10)
    standing = hosts[0].tables.standing()
    assert standing is not None
    heir = standing.roster.departed_of(dead)
    assert heir is not None and not heir.is_ready
    with pytest.raises(HomeUnavailableError, match="recovers what h1 at h1 owned before it was removed"):
        run(world, reader, put(reader, key), seconds=3)
    run(world, reader, put(reader, other), seconds=2)
    index = next(host.index for host in hosts if host.id == heir.heir)
    assert index is not None and [one.address for one in index.recovery.silent] == ["h4"]
    kill(world, hosts[4])  # a second death: its groups are recovered, too, and it is waited for no longer
    world.run(15)
    entry = get(world, reader, key)
    assert entry is not None and entry.places[0].host == hosts[3].id
    standing = hosts[0].tables.standing()
    assert standing is not None and not standing.roster.departed


def test_a_late_word_of_an_heir_that_was_replaced_changes_nothing() -> None:
    world = cluster(3)
    seed = world.hosts["h0"]
    assert seed.index is not None
    standing = seed.tables.standing()
    assert standing is not None
    entry = Departed(member("gone"), world.hosts["h1"].id)
    seed.tables.own_standing = type(standing)(
        standing.member, type(standing.roster)(*_fields(standing.roster, departed=(entry,))), standing.floor, 1
    )
    for is_over in (False, True):
        answer = world.answer(seed, seed.index, Recovered(entry.member.id, world.hosts["h2"].id, is_over))
        assert isinstance(answer, IsRoster) and answer.roster.departed == (entry,)


def _fields(known: Roster, **changes: Any) -> list[Any]:
    return [changes.get(name, getattr(known, name)) for name in known.__struct_fields__]


def test_a_put_that_its_removed_owner_has_made_has_an_unknown_outcome() -> None:
    world = cluster(4)
    owner, putter = world.hosts["h1"], world.hosts["h2"]
    key, process = key_at(world, owner), world.start_process(putter)
    run(world, process, put(process, key))
    world.cut("h1", "h2", one_way=True)
    ends: list[Any] = []
    world.call(process, put(process, key, b"late"), 60, lambda result, error: ends.append(error or result))
    world.run(3)
    kill(world, owner)
    world.run(10)
    assert [type(end) for end in ends] == [UnknownOutcomeError]


def test_a_change_of_the_owners_host_that_cannot_tell_a_keeper_in_its_time_says_so() -> None:
    world = cluster(3)
    owner, putter = world.hosts["h1"], world.start_process(world.hosts["h2"])
    key, process = key_at(world, owner), world.start_process(owner)
    run(world, putter, put(putter, key))
    world.kill_index(world.hosts["h2"])
    with pytest.raises(UnknownOutcomeError, match="could not be told of it"):
        run(world, process, put(process, key, b"new"), seconds=0.1)  # less than the pause before the second try
    run(world, process, put(process, key, b"newer"), seconds=10)  # it counts as lost by then


def test_names_of_what_is_lost_are_limited() -> None:
    world = cluster(1)
    host = world.hosts["h0"]
    assert host.index is not None
    for first in range(0, 3000, 1000):
        names = tuple(b"k%d" % number for number in range(first, first + 1000))
        world.answer(host, host.index, Lost("who", names))
    assert len(host.tables.lost) == recovery.LOST_LIMIT


def test_a_note_goes_back_for_no_version() -> None:
    world = cluster(1)
    host = world.hosts["h0"]
    assert host.index is not None
    for upto in (7, 3):
        world.answer(host, host.index, Note(((b"k", upto),), host.id))
    assert host.tables.voids[b"k"][0] == 7


def test_what_is_kept_of_a_group_that_was_handed_over_goes_when_a_host_has_left() -> None:
    world = cluster(4)
    owner, putter, taker = (world.hosts[f"h{number}"] for number in (1, 2, 3))
    key, process = key_at(world, owner), world.start_process(putter)
    run(world, process, put(process, key))
    run(world, process, put(process, key_at(world, taker)))
    directory.begin(owner.tables, key, taker.id)
    world.run(5)
    assert len(putter.tables.backups) == 2
    kill(world, owner)
    world.run(10)
    assert set(putter.tables.backups) == {b"of-h3"}


@pytest.mark.parametrize("hosts", [2, 3])
def test_of_a_dead_seed_the_others_have_what_they_have_put_once_one_of_them_is_the_seed(hosts: int) -> None:
    """Of two hosts the other one must be forced: it has the directory, since it was the deputy."""
    world = cluster(hosts)
    seed, other = world.hosts["h0"], world.hosts["h1"]
    key, process = key_at(world, seed), world.start_process(other)
    run(world, process, put(process, key, b"kept"))
    dead, done = seed.id, list[bool]()
    world.lose(seed)
    world.promote(other, done.append, forced=hosts == 2)
    world.run(8)
    world.remove(dead)
    world.run(15)
    entry = get(world, process, key)
    assert done[0] and entry is not None and entry.body == b"kept"
