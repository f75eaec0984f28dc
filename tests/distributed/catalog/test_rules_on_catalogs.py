"""The rules of decisions 016 and 029 over real catalogs and real segments, with requests that are answered at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from memstore.distributed.catalog import look, run
from memstore.distributed.rules import group_of, look_up
from memstore.distributed.rules.directory import begin
from memstore.distributed.rules.messages import Commit, Never, Remove
from memstore.engine import Change, MembershipChanged
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE
from memstore.engine.protocols.put import commit
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.distributed.catalog.direct import Host, Hosts
from tests.distributed.catalog.filling import asked, fill, given_up
from tests.engine import bytes_store
from tests.inside import owes_recovery

LARGE = 5_000  # bytes; in a segment
GROUPS = [f"g{i}/x".encode() for i in range(12)]


@pytest.fixture
def hosts(folder: str) -> Iterator[Hosts]:
    """Three, which have settled: the first is the seed, the others its deputies."""
    all_hosts = Hosts()
    with contextlib.ExitStack() as stack:
        for address in "abc":
            all_hosts.add(stack.enter_context(bytes_store.opened(f"{folder}/{address}")), address)
            all_hosts.settle()
        yield all_hosts


def away(hosts: Hosts, host: Host) -> bytes:
    """A key that another host owns."""
    other = next(one for one in hosts.all.values() if one is not host)
    hosts.put(other, b"away/first", b"")
    return b"away/x"


def value(key: bytes, number: int, size: int = LARGE) -> bytes:
    return (key + b"=%d;" % number).ljust(size, b".")


def live_bytes(host: Host) -> int:
    return host.root.catalog.view(Transaction.counters).live


def test_a_local_put_over_a_value_that_lies_elsewhere_owes_its_release(hosts: Hosts) -> None:
    """By the engine's own commits, which know of no rules: both of them."""
    a, b, c = hosts.all.values()
    keys = [b"of b/x", b"of c/x"]
    for key, host in zip(keys, (b, c), strict=True):
        hosts.put(host, key, b"first")
        owner, owed = host.root, hosts.owed(host)
        membership = look(owner, lambda tables: tables.membership(), deadline_after(10))
        inline = bytes_store.draft(owner, key, b"inline").content

        def put(number: int, key: bytes = key, owner: Root = owner) -> None:
            """Puts a value of which no other host keeps the record."""
            hosts.put(a, key, value(key, number))
            run(owner, lambda tables: tables.put_keepers(key, ()), deadline_after(10))

        put(1)
        commit(owner, [Change(key, inline)], deadline_after(10), membership=membership)
        put(3)
        commit(owner, [Change(key, inline), Change(b"beside", inline)], deadline_after(10), membership=membership)
        put(5)
        commit(owner, [Change(key, None)], deadline_after(10), membership=membership)
        assert hosts.owed(host) == owed + 3
    assert len(hosts.lent(a)) == 6
    hosts.settle(2)
    assert (live_bytes(a), hosts.lent(a)) == (0, [])
    assert [hosts.owed(host) for host in hosts.all.values()] == [0, 0, 0]
    hosts.check()


def test_a_group_is_handed_over_and_back(hosts: Hosts) -> None:
    a, b, c = hosts.all.values()
    keys = [b"g/%d" % number for number in range(12)]
    for number, (key, host) in enumerate(zip(keys, [a, b, c] * 4, strict=True)):
        hosts.put(host, key, value(key, number, [LARGE, 100][number % 2]))
    for giver, taker in ((a, b), (b, a), (a, c)):
        assert giver.owns(b"g/0")
        run(giver.root, lambda tables, to=taker: begin(tables, b"g", to.member.id), deadline_after(10))
        with pytest.raises(MembershipChanged):
            inline = bytes_store.draft(giver.root, b"g/0", b"inline").content
            commit(giver.root, [Change(b"g/0", inline)], deadline_after(10), membership=membership_of(giver) - 1)
        hosts.settle()
        assert [host.owns(b"g/0") for host in (a, b, c)] == [host is taker for host in (a, b, c)]
        for host in (a, b, c):
            assert (host.root.catalog.read(b"g/0") is not None) is (host is taker)
            for number, key in enumerate(keys):
                assert hosts.get(host, key) == value(key, number, [LARGE, 100][number % 2])
        assert hosts.keys(a) == sorted(keys)
        assert hosts.lent(taker) == [], "what lies with the owner is its own again"
        hosts.audit()
        hosts.check()
    versions = [hosts.put(b, key, value(key, 77)) for key in keys]
    assert len(set(versions)) == 12
    hosts.settle(3)
    assert (hosts.lent(a), hosts.lent(c)) == ([], [])


def membership_of(host: Host) -> int:
    return host.root.catalog.view(Transaction.counters).membership


def test_a_client_that_dies_after_lending_leaves_nothing_behind(hosts: Hosts) -> None:
    a = hosts.all["a"]
    key = away(hosts, a)
    filled = fill(a.root, key, value(key, 1))
    steps = a.client.commit([asked(a.root, filled)], 0)
    message = hosts.drive_until(a, steps, Commit, [filled])
    for writer in filled.writers:
        writer.close()
    assert hosts.lent(a) == [key] and live_bytes(a) > 0
    a.restart()
    hosts.settle(2)
    hosts.audit()
    assert (hosts.lent(a), live_bytes(a)) == ([], 0)
    assert hosts.send(message) == Never() and hosts.get(a, key) is None, "the late message makes nothing"
    hosts.check()


def test_a_root_with_keys_joins(hosts: Hosts, folder: str) -> None:
    a = hosts.all["a"]
    with bytes_store.opened(f"{folder}/d") as root:
        for number, key in enumerate(GROUPS):
            bytes_store.put(root, key, value(key, number, [LARGE, 100][number % 2]))
        d = hosts.add(root, "d")
        hosts.settle()
        assert not d.standing().is_joining and all(map(d.owns, GROUPS))
        for number, key in enumerate(GROUPS):
            assert [hosts.get(host, key) for host in (a, d)] == [value(key, number, [LARGE, 100][number % 2])] * 2
        assert len({hosts.put(a, key, value(key, 5)) for key in GROUPS}) == 12
        hosts.check()


def test_a_removed_host_takes_what_it_owned_and_what_lay_there(hosts: Hosts) -> None:
    a, b, c = hosts.all.values()
    for number, (key, host) in enumerate(zip(GROUPS, [a, b, c] * 4, strict=True)):
        hosts.put(host, key, value(key, number))
    hosts.put(a, b"g0/of c", value(b"g0/of c", 1))
    hosts.put(c, b"g0/of c", value(b"g0/of c", 2))
    del hosts.all["c"]
    for _ in range(3):
        run(a.root, lambda tables: a.index.answer(tables, Remove(c.member.id)), deadline_after(10))
        hosts.settle(5)
    for number, (key, owner) in enumerate(zip(GROUPS, [a, b, c] * 4, strict=True)):
        expected = None if owner is c else value(key, number)
        assert hosts.get(a, key) == hosts.get(b, key) == expected
    assert hosts.get(a, b"g0/of c") is None
    for key in GROUPS:
        hosts.put(a, key, value(key, 7))
        assert hosts.get(b, key) == value(key, 7)
    a.restart()
    b.restart()
    hosts.settle(3)
    hosts.audit()
    assert sum(map(live_bytes, (a, b))) == 12 * 12_288
    hosts.check()


def version(hosts: Hosts, host: Host, key: bytes) -> int:
    (entry,) = hosts.drive(host, look_up(host.client, [key]))
    return 0 if entry is None else entry.version


@pytest.mark.parametrize("size", [100, LARGE], ids=["inline", "in a segment"])
def test_what_others_have_put_into_groups_of_a_removed_host_is_there(hosts: Hosts, size: int) -> None:
    a, b, c = hosts.all.values()
    keys = [b"of c/%d" % number for number in range(200)]
    hosts.put(c, b"of c/own", value(b"own", 0))
    for key in keys:
        hosts.put(a, key, value(key, 1, size))
        hosts.put(a, key, value(key, 2, size))
    hosts.put(b, keys[0], value(keys[0], 3, size))  # instead of a's
    hosts.put(c, keys[1], value(keys[1], 4, size))
    hosts.delete(c, keys[2])
    hosts.delete(b, keys[3])
    versions = {key: version(hosts, a, key) for key in keys}
    del hosts.all["c"]
    for _ in range(3):
        run(a.root, lambda tables: a.index.answer(tables, Remove(c.member.id)), deadline_after(10))
        hosts.settle(5)
    for host in (a, b):
        assert hosts.get(host, keys[0]) == value(keys[0], 3, size)
        assert [hosts.get(host, key) for key in keys[1:4]] == [None] * 3
        for key in keys[4:]:
            assert hosts.get(host, key) == value(key, 2, size)
            assert version(hosts, host, key) == versions[key]
    for number, key in enumerate(keys):
        hosts.put((a, b)[number % 2], key, value(key, 7, size))
        assert hosts.get(b, key) == value(key, 7, size)
        assert version(hosts, a, key) > versions[key]
    hosts.settle(3)
    hosts.audit()
    assert sum(map(live_bytes, (a, b))) == (len(keys) * 12_288 if size == LARGE else 0)
    hosts.check()


def test_commits_of_a_process_that_has_not_heard_of_the_members_change_nothing(hosts: Hosts) -> None:
    a = hosts.all["a"]
    before = a.root.catalog.view(Transaction.counters)
    inline = bytes_store.draft(a.root, b"k", b"inline").content
    filled = fill(a.root, b"k", value(b"k", 1))
    for membership in (0, before.membership - 1, before.membership + 1):
        with pytest.raises(MembershipChanged):
            commit(a.root, [Change(b"k", inline)], deadline_after(10), membership=membership)
        for change in (filled.change, Change(b"k", inline), Change(b"nothing", None), Change(b"k", inline, expect=5)):
            with pytest.raises(MembershipChanged):
                commit(a.root, [change], deadline_after(10), membership=membership)
    assert not owes_recovery(a.root)
    given_up(a.root, filled)
    after = a.root.catalog.view(Transaction.counters)
    assert (after.version, after.publications, after.live) == (before.version, before.publications, before.live)
    assert a.root.catalog.read(b"k") is None
    hosts.check()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 50))])
def test_what_is_done_at_random_by_all_hosts_is_read_by_all(hosts: Hosts, seed: int) -> None:
    chance, expected = random.Random(seed), dict[bytes, bytes]()
    a = hosts.all["a"]
    for number in range(60):
        host, key = chance.choice(list(hosts.all.values())), chance.choice(GROUPS)
        if chance.random() < 0.2 and key in expected:
            hosts.delete(host, key)
            del expected[key]
        else:
            expected[key] = value(key, number, chance.choice([LARGE, 100, 70_000]))
            hosts.put(host, key, expected[key])
        if chance.random() < 0.2:
            hosts.tick([chance.choice(["pay", "ask", "settle", "hand_over"])])
        if chance.random() < 0.05:
            chance.choice(list(hosts.all.values())).restart()
        if chance.random() < 0.1:
            group, other = group_of(chance.choice(GROUPS)), chance.choice(list(hosts.all.values()))
            run(host.root, lambda tables, to=(group, other.member.id): begin(tables, *to), deadline_after(10))
    assert {key: hosts.get(a, key) for key in expected} == expected
    assert hosts.keys(a) == sorted(expected)
    hosts.settle(5)
    for host in hosts.all.values():
        host.restart()
    hosts.settle(2)
    hosts.audit()
    rows = [row for host in hosts.all.values() for _, row in host.root.catalog.view(lambda one: list(one.segments()))]
    assert sorted(row.key for row in rows if row.state == LIVE) == sorted(
        key for key, data in expected.items() if len(data) > bytes_store.INLINE
    )
    hosts.check()
