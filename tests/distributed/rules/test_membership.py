"""Members by hand: what a host hears that was removed, that others go on, and who is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memstore.distributed.rules import Change, Entry, Member, Place, Send, Steps, directory, reading, roster
from memstore.distributed.rules.index import Index
from memstore.distributed.rules.messages import (
    Ask,
    BringGroups,
    Brought,
    Give,
    IsRoster,
    Lookup,
    Refused,
    Release,
    Remove,
    RosterChange,
)
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    StaleMembershipError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from tests.distributed.rules.scenes import CALM
from tests.distributed.rules.world import Host, Process, Task, World, read, wait


def cluster(hosts: int, promote_after: float = 0, remove_after: float = 0, *, is_shared: bool = False) -> World:
    world = World(0, CALM, promote_after=promote_after, remove_after=remove_after, is_shared=is_shared)
    for number in range(hosts):
        world.add_host(f"h{number}")
    for host in world.hosts.values():
        world.serve(host, "h0")
    world.run(10)
    return world


def run(world: World, process: Process, steps: Any, seconds: float = 5) -> Any:
    """The result of a call; it raises its error."""
    ends: list[tuple[Any, BaseException | None]] = []
    world.call(process, steps, seconds, lambda result, error: ends.append((result, error)))
    world.run(2 * seconds)
    ((result, error),) = ends
    if error is not None:
        raise error
    return result


def put(process: Process, key: bytes, body: bytes = b"x") -> Steps[tuple[int, ...]]:
    return process.client.commit([Change(key, body)], 1 << 62)


def get(world: World, process: Process, key: bytes) -> Entry | None:
    return run(world, process, reading.look_up(process.client, [key]), seconds=1)[0]


def key_at(world: World, host: Host) -> bytes:
    """A key that was first put there, and is there no more."""
    key, process = f"of-{host.address}".encode(), world.start_process(host)
    run(world, process, put(process, key), seconds=1)
    run(world, process, process.client.commit([Change(key, None)], 1 << 62), seconds=1)
    assert key in host.tables.own_groups
    return key


def remove(world: World, host: Host) -> None:
    world.remove(host.id)
    world.run(2)


def test_members_that_come_know_the_same_roster_and_two_are_deputies() -> None:
    world = cluster(4)
    standings = [host.tables.standing() for host in world.hosts.values()]
    rosters = {one.roster for one in standings if one is not None}
    (known,) = rosters
    assert len(standings) == 4 and sorted(member.address for member in known.members) == ["h0", "h1", "h2", "h3"]
    assert len(known.deputies) == 2 and known.seed not in known.deputies


def test_roots_that_come_at_once_are_one_roster_and_if_all_die_the_others_can_remove_them() -> None:
    world = cluster(3)
    seed = world.hosts["h0"]
    index, before = seed.index, seed.tables.standing()
    assert index is not None and before is not None
    position = before.roster.position
    index.keep(1000, Ask(world.hosts["h1"].index.member, before.roster.cluster, *position, milliseconds=10_000))  # pyright: ignore
    new = [Member(b"%016d" % number, f"n{number}") for number in range(5)]
    for ticket, member in enumerate(new, 1001):
        index.keep(ticket, Ask(member, None, *position, milliseconds=10_000))
    ended = dict(index.ended_waits(seed.tables))
    after = seed.tables.standing()
    assert after is not None
    added = [member for member in after.roster.members if member in new]
    assert len(added) == 2 and after.roster.voters == tuple(member.id for member in before.roster.members)
    told = ended[1000]
    told = told.whole(before.roster) if isinstance(told, RosterChange) else told
    assert told == IsRoster(after.roster), "it is told once, of all"
    for ticket in range(1000, 1006):
        index.forget(ticket)
    world.run(5)
    for member in added:
        world.remove(member.id)
    world.run(10)
    for host in world.hosts.values():
        standing = host.tables.standing()
        assert standing is not None and standing.roster.members == before.roster.members


def test_a_key_is_owned_where_it_was_first_put_and_nobody_is_asked_again() -> None:
    world = cluster(3)
    host = world.hosts["h1"]
    process = world.start_process(host)
    (version,) = run(world, process, put(process, b"a/b"))
    for one in world.hosts.values():
        world.kill_index(one)
    (later,) = run(world, process, put(process, b"a/c"))
    assert later > version >> 40 > 0
    assert get(world, process, b"a/c") == Entry(later, b"x")
    assert get(world, process, b"a/none") is None


def test_who_is_waited_for_is_named() -> None:
    world = cluster(3)
    process, key = world.start_process(world.hosts["h1"]), key_at(world, world.hosts["h2"])
    for one in world.hosts.values():
        world.kill_index(one)
    named: list[str] = []
    for steps in (reading.look_up(process.client, [b"unknown"]), put(process, b"new"), put(process, key)):
        with pytest.raises(HomeUnavailableError, match=r"h0 at h0") as found:
            run(world, process, steps)
        named.append(str(found.value))
    for text in named[:2]:  # which host would own it only the seed could say
        assert ": the seed, h0 at h0," in text and "its owner" not in text
        assert "`memstore promote`" in text and "`memstore remove`" not in text
    for prefix, keys in ((b"", "^all keys"), (b"of-h2/", "^the keys that start with '")):
        with pytest.raises(
            HomeUnavailableError,
            match=f"{keys}.* can't be listed: (h. at h.(, which is the seed too,)? may own some|the seed, h0 at h0)",
        ):
            run(world, process, reading.page(process.client, prefix, b""))


def test_gets_waits_deletes_and_puts_that_fail_claim_nothing() -> None:
    world = cluster(3)
    process = world.start_process(world.hosts["h1"])
    client = process.client
    assert get(world, process, b"g/k") is None
    with pytest.raises(StoreTimeoutError):
        run(world, process, wait(client, b"g/k", 0))
    assert run(world, process, client.commit([Change(b"g/k", None, missing_ok=True)], 1 << 62)) == (0,)
    for change in (Change(b"g/k", b"x", expect=5), Change(b"g/k", None), Change(b"g/k", b"x", seals=3)):
        with pytest.raises(Exception, match="g/k"):
            run(world, process, client.commit([change], 1 << 62))
    assert not any(b"g" in host.tables.directory for host in world.hosts.values())


def test_a_wait_begins_before_its_group_has_an_owner() -> None:
    world = cluster(3)
    waiting, putting = world.start_process(world.hosts["h1"]), world.start_process(world.hosts["h2"])
    ends: list[Any] = []
    for steps in (wait(waiting.client, b"g/k", 0), reading.wait_any(waiting.client, b"g/", {})):
        world.call(waiting, steps, 20, lambda result, error: ends.append((world.now, result, error)))
    anything = reading.wait_any(waiting.client, b"g", 0)
    world.call(waiting, anything, 20, lambda result, error: ends.append((world.now, result, error)))
    world.run(3)
    began = world.now
    (version,) = run(world, putting, put(putting, b"g/k"), seconds=2)
    assert sorted(str(result) for _, result, _ in ends) == sorted([str(version), *[str({b"g/k": version})] * 2])
    assert all(now - began < 1_000_000_000 for now, _, _ in ends)


def test_two_owners_in_one_call_are_named_and_what_has_none_is_claimed_for_the_other() -> None:
    world = cluster(3)
    first, second = key_at(world, world.hosts["h1"]), key_at(world, world.hosts["h2"])
    process = world.start_process(world.hosts["h0"])
    for steps in (
        process.client.commit([Change(first, b"1"), Change(second, b"2"), Change(b"new", b"3")], 1 << 62),
        reading.look_up(process.client, [first, second]),
    ):
        with pytest.raises(CrossHostError, match="'of-h1' to h1 at h1, 'of-h2' to h2 at h2"):
            run(world, process, steps)
    assert b"new" not in world.hosts["h0"].tables.directory
    run(world, process, process.client.commit([Change(first, b"1"), Change(b"new", b"3")], 1 << 62))
    assert b"new" in world.hosts["h1"].tables.own_groups


def test_a_host_that_is_never_an_owner_puts_for_one_that_stays() -> None:
    world = World(0, CALM)
    for number in range(3):
        world.add_host(f"h{number}")
    for host in world.hosts.values():
        world.serve(host, "h0", is_owner=host.address != "h2")
    world.run(10)
    process = world.start_process(world.hosts["h2"])
    place = Place(process.host.id, process.host.tables.fill(7))
    (version,) = run(world, process, process.client.commit([Change(b"g/k", b"", (place,))], 1 << 62))
    assert world.hosts["h0"].tables.records[b"g/k"] == Entry(version, b"", (place,))
    assert not process.host.tables.own_groups


def test_a_host_that_owns_nothing_is_not_asked_and_one_that_has_groups_is() -> None:
    world = World(0, CALM)
    for number in range(5):
        world.add_host(f"h{number}")
    h0, h1, h2, h3, h4 = world.hosts.values()
    for host in (h0, h1, h2, h3, h4):
        world.serve(host, "h0", is_owner=host not in (h3, h4))
    world.run(10)
    process = world.start_process(h0)
    run(world, world.start_process(h1), put(world.start_process(h1), b"one/k"))
    (version,) = run(world, process, put(process, b"two/k"))
    for host in (h1, h2):
        world.kill_index(host)
        world.run(1)
        world.serve(host, "h0", is_owner=False)
    world.run(10)
    known = h0.tables.standing().roster  # pyright: ignore[reportOptionalMemberAccess]
    assert known.holders == (h1.id,) and {one.id for one in known.owners} == {h0.id, h1.id}
    for host in (h2, h3):
        world.kill_index(host)
        world.run(5)  # a deputy is left out
    rows = run(world, process, reading.page(process.client, b"", b""))
    assert [key for key, _ in rows] == [b"one/k", b"two/k"] and rows[1][1] == version
    world.kill_index(h1)
    with pytest.raises(HomeUnavailableError, match="h1 at h1 may own some"):
        run(world, process, reading.page(process.client, b"", b""))


def test_where_nobody_is_to_own_anything_the_seed_does() -> None:
    world = World(0, CALM)
    for number in range(2):
        world.serve(world.add_host(f"h{number}"), "h0", is_owner=False)
    world.run(10)
    process = world.start_process(world.hosts["h1"])
    run(world, process, put(process, b"g/k"))
    assert b"g" in world.hosts["h0"].tables.own_groups
    assert [key for key, _ in run(world, process, reading.page(process.client, b"", b""))] == [b"g/k"]


def test_a_host_that_was_removed_hears_of_it_and_its_keys_can_be_put_anew() -> None:
    world = cluster(3)
    removed, other = world.hosts["h1"], world.start_process(world.hosts["h2"])
    process, key = world.start_process(removed), key_at(world, removed)
    (before,) = run(world, other, put(other, key))
    world.cut("h0", "h1")
    world.cut("h1", "h2")
    remove(world, removed)
    (unheard,) = run(world, process, put(process, key))  # it can't know
    (after,) = run(world, other, put(other, key))
    assert after > unheard > before

    world.heal()
    world.run(5)
    for steps in (put(process, key), reading.look_up(process.client, [b"nothing"]), put(process, b"new")):
        with pytest.raises(StaleMembershipError):
            run(world, process, steps)
    assert get(world, other, key) == Entry(after, b"x")


def test_bytes_of_a_host_that_came_and_went_between_two_looks_are_not_named_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = cluster(3)
    owner = world.hosts["h2"]
    key, other = key_at(world, owner), world.start_process(world.hosts["h1"])
    settle, is_held = Index.settle, [True]

    def held_up(index: Index) -> Steps[bool]:
        return False if index is owner.index and is_held[0] else (yield from settle(index))

    monkeypatch.setattr(Index, "settle", held_up)
    visitor = world.add_host("h3")
    world.serve(visitor, "h0")
    world.run(5)
    process, place = world.start_process(visitor), Place(visitor.id, visitor.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    assert get(world, other, key) is not None
    gone = visitor.id
    world.lose(visitor)
    world.remove(gone)
    world.run(5)
    is_held[0] = False
    world.run(5)
    assert get(world, other, key) is None


def test_who_asks_a_host_that_was_removed_was_not_removed_itself() -> None:
    world = cluster(5)
    removed, other = world.hosts["h1"], world.start_process(world.hosts["h2"])
    key = key_at(world, removed)
    run(world, other, put(other, key))
    world.cut("h0", "h2", one_way=True)  # so it doesn't hear of it
    remove(world, removed)
    world.run(15)
    standing = removed.tables.standing()
    assert standing is not None and standing.is_removed
    with pytest.raises(HomeUnavailableError):
        run(world, other, put(other, key))
    world.heal()
    world.run(5)
    run(world, other, put(other, key))


def test_a_call_whose_owner_is_removed_ends_then() -> None:
    """Nobody knows whether it was made; what hadn't been sent is made by the next owner."""
    world = cluster(4)
    removed, process, late = world.hosts["h1"], *(world.start_process(world.hosts["h2"]) for _ in range(2))
    key = key_at(world, removed)
    run(world, process, put(process, key))
    world.cut("h1", "h2", one_way=True)
    ends: list[Any] = []
    for one in (process, late):  # the second has no session there
        world.call(one, put(one, key), 60, lambda result, error: ends.append(error or result))
    world.run(3)
    assert not ends
    world.kill_index(removed)
    remove(world, removed)
    world.run(10)
    assert sorted(type(end) is UnknownOutcomeError for end in ends) == [False, True]
    assert any(key in host.tables.own_groups for host in world.hosts.values() if host is not removed)


def test_bytes_of_a_host_that_was_removed_are_not_put_any_more() -> None:
    world = cluster(4)
    removed, owner = world.hosts["h1"], world.hosts["h2"]
    key, process = key_at(world, owner), world.start_process(removed)
    run(world, process, put(process, key))
    world.cut("h0", "h1")  # so it doesn't hear of it
    remove(world, removed)
    world.run(10)
    place = Place(removed.id, removed.tables.fill(7))
    with pytest.raises(StaleMembershipError):
        run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))


def test_of_a_dead_owner_that_is_the_seed_people_are_told_to_promote_another_host_first() -> None:
    world = cluster(3)
    seed, process = world.hosts["h0"], world.start_process(world.hosts["h2"])
    key = key_at(world, seed)
    run(world, process, put(process, key))
    world.kill_index(seed)
    for steps, owns in (
        (reading.look_up(process.client, [key]), True),
        (reading.page(process.client, b"", b""), True),
        (put(process, b"new"), False),
    ):
        with pytest.raises(HomeUnavailableError, match="h0 at h0.*memstore promote") as error:
            run(world, process, steps, seconds=1)
        assert ("then `memstore remove`" in str(error.value)) is owns


def test_promises_are_asked_for_at_once_and_dead_hosts_hold_up_no_promotion() -> None:
    world = cluster(15)
    standing = world.hosts["h0"].tables.standing()
    assert standing is not None
    deputy = next(host for host in world.hosts.values() if host.id in standing.roster.deputies)
    for host in [host for host in world.hosts.values() if host is not deputy][:7]:
        world.cut(deputy.address, host.address)
    ends = list[float]()
    began = world.now
    world.promote(deputy, lambda done: ends.append((world.now - began) / 1e9) if done else None)
    world.run(20)
    assert ends and ends[0] < 4


def test_who_is_no_member_any_more_is_told_so_and_the_seed_stays() -> None:
    world = cluster(3)
    seed, other = world.hosts["h0"], world.hosts["h1"]
    assert seed.index is not None and other.index is not None
    assert isinstance(world.answer(seed, seed.index, Remove(seed.id)), Refused)
    remove(world, other)
    answer = world.answer(seed, seed.index, Ask(other.index.member, b"C" * 16, 1, 2))
    assert isinstance(answer, Refused) and answer.is_removed
    world.run(10)
    standing = seed.tables.standing()
    assert standing is not None and other.id not in standing.roster.ids


def test_a_root_of_another_cluster_and_a_copied_root_are_refused_and_one_that_has_moved_is_not() -> None:
    world = cluster(2)
    seed, other = world.hosts["h0"], world.hosts["h1"]
    assert seed.index is not None and other.index is not None
    standing = seed.tables.standing()
    assert standing is not None
    member, position = other.index.member, standing.roster.position
    for ask in (Ask(member, b"D" * 16, *position), Ask(Member(member.id, "elsewhere"), b"C" * 16, *position)):
        answer = world.answer(seed, seed.index, ask)
        assert isinstance(answer, Refused) and not answer.is_removed
    world.answer(seed, seed.index, Ask(Member(member.id, "elsewhere"), b"C" * 16, *position, moved=True))
    standing = seed.tables.standing()
    assert standing is not None and {one.address for one in standing.roster.members} == {"h0", "elsewhere"}


@pytest.mark.parametrize("address", ["h0", "h1"], ids=["the seed", "another member"])
def test_a_host_that_is_served_at_another_address_is_found_there(address: str) -> None:
    world = cluster(3)
    host = world.hosts[address]
    key = key_at(world, host)
    world.kill_index(host)
    host.address = "elsewhere"
    world.hosts["elsewhere"] = world.hosts.pop(address)
    world.serve(host, names=())
    world.run(10)
    process = world.start_process(world.hosts["h2"])
    with pytest.raises(HomeUnavailableError):
        run(world, process, put(process, key), seconds=1)
    world.kill_index(host)
    world.serve(host, names=(), moved=True)
    world.run(20)
    run(world, process, put(process, key))
    for one in world.hosts.values():
        standing = one.tables.standing()
        assert standing is not None and {member.address for member in standing.roster.members} == set(world.hosts)


def test_a_stranger_at_a_dead_members_address_removes_nobody() -> None:
    world = cluster(3)
    host = world.hosts["h1"]
    old = host.id
    world.lose(host)
    world.serve(host, "h0")
    world.run(10)
    standing = world.hosts["h0"].tables.standing()
    assert standing is not None and {old, host.id} <= standing.roster.ids


def test_bytes_that_are_pinned_stay_until_the_pin_is_over() -> None:
    world = cluster(2)
    owner, data = world.hosts["h0"], world.hosts["h1"]
    assert owner.index is not None
    process, key = world.start_process(data), key_at(world, owner)
    place = Place(data.id, data.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    world.answer(owner, owner.index, Lookup((key,), (owner.tables.own_groups[key],), pin=True))
    run(world, process, put(process, key), seconds=2)
    assert place.put_id in data.tables.segments
    world.run(12)
    assert place.put_id not in data.tables.segments


def test_a_late_release_leaves_alone_what_is_owned() -> None:
    world = cluster(2)
    owner = world.hosts["h0"]
    assert owner.index is not None
    process, key = world.start_process(owner), key_at(world, owner)
    place = Place(owner.id, owner.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    world.answer(owner, owner.index, Release((place,)))
    assert place.put_id in owner.tables.segments


def test_a_get_that_meets_replaced_bytes_looks_again_and_then_pins() -> None:
    world = cluster(2)
    reader, key, tries = world.start_process(world.hosts["h1"]), key_at(world, world.hosts["h0"]), list[Entry]()
    run(world, reader, put(reader, key))

    def fetch(entry: Entry) -> Steps[bytes | None]:
        tries.append(entry)
        return entry.body if len(tries) > 3 else None
        yield Send("", None, Release(()))  # a generator

    assert run(world, reader, read(reader.client, key, fetch)) == (tries[-1].version, b"x")
    assert len(tries) == 4


# --- roots with keys --------------------------------------------------------------------------------------------------


def root_with(world: World, address: str, *keys: bytes) -> Host:
    host = world.add_host(address)
    for key in keys:
        host.tables.version += 1
        place = Place(host.id, host.tables.fill(7))
        host.tables.put_record(key, Entry(host.tables.version, b"ours", (place,)))
        host.tables.own(place, key)
    return host


def test_a_root_with_keys_is_admitted_with_all_of_them_in_new_versions() -> None:
    world = cluster(2)
    joining = root_with(world, "h2", b"a/1", b"a/2", b"b")
    world.serve(joining, "h0")
    world.run(10)
    process = world.start_process(world.hosts["h0"])
    standing = joining.tables.standing()
    assert standing is not None and not standing.is_joining and set(joining.tables.own_groups) == {b"a", b"b"}
    for key in (b"a/1", b"a/2", b"b"):
        entry = get(world, process, key)
        assert entry is not None and entry.body == b"ours" and entry.version >> 40 >= 2
    (version,) = run(world, process, put(process, b"b"))
    assert version > max(entry.version for entry in joining.tables.records.values() if entry.body == b"ours")


def test_a_root_with_a_group_that_another_host_owns_is_refused_and_nothing_changes() -> None:
    world = cluster(2)
    key = key_at(world, world.hosts["h1"])
    joining = root_with(world, "h2", b"ours", key)
    world.serve(joining, "h0")
    world.run(10)
    assert joining.index is not None and joining.tables.standing() is None
    assert isinstance(joining.index.refusal, Refused) and "'of-h1' (h1)" in joining.index.refusal.why
    assert set(joining.tables.records) == {b"ours", key} and b"ours" not in world.hosts["h0"].tables.directory
    joining.tables.delete_record(key)
    world.run(10)
    assert set(joining.tables.own_groups) == {b"ours"}


def test_a_root_is_a_store_by_itself_until_it_is_admitted_and_what_it_put_meanwhile_comes_with_it() -> None:
    world = cluster(1)
    joining = root_with(world, "h1", b"ours")
    process = world.start_process(joining)
    world.cut("h0", "h1", one_way=True)
    world.serve(joining, "h0")
    for key in (b"ours", b"late"):
        (version,) = run(world, process, put(process, key, b"2"))  # nobody has admitted it
        assert not version >> 40
    world.heal()
    seed = world.hosts["h0"].tables
    while (standing := seed.standing()) is None or joining.id not in standing.roster.ids:
        world.run(0.001)
    assert joining.tables.standing() is None
    joining.tables.put_record(b"later", Entry(9, b"3"))
    world.run(10)
    (version,) = run(world, process, put(process, b"ours", b"3"))
    assert version >> 40 and set(joining.tables.own_groups) == {b"ours", b"late", b"later"}
    assert get(world, process, b"ours") == Entry(version, b"3")


def test_a_root_joins_in_portions_and_its_processes_put_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "PORTION", 4)
    monkeypatch.setattr(directory, "ROWS_LIMIT", 4)
    world = cluster(3)
    joining = root_with(world, "h3", *(b"g%d/%d" % (number // 3, number % 3) for number in range(120)), b"g7")
    process, ends, most = world.start_process(joining), list[tuple[float, Any]](), list[int]()
    answer, transact = world.answer, Task._transact  # pyright: ignore[reportPrivateUsage]

    def answered(host: Host, index: Any, request: Any) -> Any:
        most.append(len(msgspec.msgpack.encode(request)) if isinstance(request, Ask | BringGroups) else 0)
        return answer(host, index, request)

    def counted(task: Task, action: Any, turn: int) -> None:
        tables = task._host.tables  # pyright: ignore[reportPrivateUsage]
        before = [dict(rows) for rows in (tables.records, tables.own_groups, tables.directory)]
        transact(task, action, turn)
        for old, new in zip(before, (tables.records, tables.own_groups, tables.directory), strict=True):
            assert len({*old.items()} ^ {*new.items()}) <= 2 * 4

    def put_again() -> None:
        began = world.now
        world.call(
            process, put(process, b"g7/0"), 5, lambda result, error: ends.append((world.now - began, error or result))
        )
        world.at(0.01, put_again)

    monkeypatch.setattr(world, "answer", answered)
    monkeypatch.setattr(Task, "_transact", counted)
    world.at(0, put_again)
    world.run(0.5)
    world.serve(joining, "h0")
    world.run(10)
    assert len(joining.tables.own_groups) == 40 and not joining.tables.standing().is_joining  # pyright: ignore
    assert all(entry.version >> 40 for entry in joining.tables.records.values())
    versions = [result[0] for _, result in ends]
    assert len(ends) > 900 and versions == sorted(versions) and max(seconds for seconds, _ in ends) < 0.05e9
    assert 0 < max(most) < 300


@pytest.mark.parametrize("seed", range(5))
def test_of_two_roots_with_one_group_one_is_admitted_and_the_other_refused(seed: int) -> None:
    world = World(seed, CALM)
    world.serve(world.add_host("h0"), "h0")
    world.run(5)
    rivals = [root_with(world, address, b"both/k", *(b"%s-%d" % (address.encode(), one) for one in range(300)))
              for address in ("h1", "h2")]  # fmt: skip
    for host in rivals:
        world.serve(host, "h0")
    world.run(30)
    (refused,) = [host for host in rivals if host.tables.standing() is None]
    assert refused.index is not None and refused.index.refusal is not None and "'both'" in refused.index.refusal.why
    assert all(entry.version < 1 << 40 for entry in refused.tables.records.values())


def test_a_root_gets_a_group_of_one_that_was_killed_while_it_joined() -> None:
    world = cluster(1)
    first, second = root_with(world, "h1", b"both/k"), root_with(world, "h2", b"both/k")
    assert world.hosts["h0"].index is not None
    answer = world.answer(world.hosts["h0"], world.hosts["h0"].index, BringGroups(first.id))
    assert isinstance(answer, Brought)
    world.answer(world.hosts["h0"], world.hosts["h0"].index, BringGroups(first.id, answer.number, (b"both",)))
    world.serve(second, "h0")
    world.run(5)
    assert second.tables.standing() is None
    world.run(20)
    assert set(second.tables.own_groups) == {b"both"}


def test_large_records_are_handed_over_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BYTES_LIMIT", 5000)
    world = cluster(2)
    first, second = world.hosts["h0"], world.hosts["h1"]
    process = world.start_process(first)
    keys = [f"g/{number}".encode() for number in range(20)]
    changes = [Change(key, b"x" * (6000 if key == b"g/0" else 2000)) for key in keys]
    run(world, process, process.client.commit(changes, 1 << 62))
    sent, answer = list[int](), world.answer

    def answered(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, Give):
            sent.append(sum(entry.nbytes for _, entry in request.rows))
            assert len(request.rows) <= 1 or sent[-1] <= 5000
        return answer(host, index, request)

    monkeypatch.setattr(world, "answer", answered)
    directory.begin(first.tables, b"g", second.id)
    world.run(20)
    assert len(sent) > 10 and set(second.tables.records) == set(keys) and not first.tables.records


def test_a_hand_over_to_a_host_that_gives_no_answer_can_be_cancelled() -> None:
    world = cluster(3)
    owner = world.hosts["h1"]
    process = world.start_process(owner)
    run(world, process, put(process, b"g/k"))
    world.kill_index(world.hosts["h2"])
    directory.begin(owner.tables, b"g", world.hosts["h2"].id)
    world.run(3)
    with pytest.raises(HomeUnavailableError):
        run(world, process, put(process, b"g/k"), seconds=1)
    directory.cancel(owner.tables, b"g")
    world.run(3)
    run(world, process, put(process, b"g/k"), seconds=1)
    assert not owner.tables.leaving_groups
