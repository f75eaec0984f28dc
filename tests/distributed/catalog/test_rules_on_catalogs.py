"""The rules of decision 016 over real catalogs and real segments, with requests that are answered at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from memstore.distributed.catalog import look, run
from memstore.distributed.rules.messages import Commit, Never, Remove
from memstore.engine import Change, MembershipChanged
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE
from memstore.engine.protocols.put import commit
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CrossHostError, KeyNotFoundError, VersionConflictError
from tests.distributed.catalog.direct import Host, Hosts
from tests.distributed.catalog.filling import asked, fill, given_up
from tests.engine import bytes_store
from tests.inside import owes_recovery

LARGE = 5_000  # bytes; in a segment
GROUPS = [f"g{i}/x".encode() for i in range(12)]


@pytest.fixture
def hosts(folder: str) -> Iterator[Hosts]:
    """Three, all homes, which have settled."""
    all_hosts = Hosts()
    with contextlib.ExitStack() as stack:
        for address in "abc":
            all_hosts.add(stack.enter_context(bytes_store.opened(f"{folder}/{address}")), address)
            all_hosts.settle()
        yield all_hosts


def home_of(hosts: Hosts, key: bytes) -> Host:
    standing = look(hosts.all["a"].root, lambda tables: tables.standing(), deadline_after(10))
    assert standing is not None
    home = standing.view.home_of(key)
    return next(host for host in hosts.all.values() if host.member.id == home)


def away(hosts: Hosts, host: Host) -> bytes:
    """A key whose home is elsewhere."""
    return next(key for key in GROUPS if home_of(hosts, key) is not host)


def value(key: bytes, number: int, size: int = LARGE) -> bytes:
    return (key + b"=%d;" % number).ljust(size, b".")


def live_bytes(host: Host) -> int:
    return host.root.catalog.view(Transaction.counters).live


def test_every_host_reads_and_replaces_what_any_has_put(hosts: Hosts) -> None:
    a, b, c = hosts.all.values()
    for number, (key, host) in enumerate(zip(GROUPS, [a, b, c] * 4, strict=True)):
        assert hosts.put(host, key, value(key, number, [LARGE, 100][number % 2])) > 0
    for key in GROUPS:
        number = GROUPS.index(key)
        for host in (a, b, c):
            assert hosts.get(host, key) == value(key, number, [LARGE, 100][number % 2])
    assert {key for host in (a, b, c) for key in hosts.lent(host)} <= set(GROUPS)
    for number, (key, host) in enumerate(zip(GROUPS, [b, c, a] * 4, strict=True)):
        hosts.put(host, key, value(key, 100 + number))
        assert hosts.get(a, key) == value(key, 100 + number)
    for host in (a, b, c):
        assert hosts.keys(host) == sorted(GROUPS)
    hosts.settle()
    hosts.check()
    assert [hosts.owed(host) for host in (a, b, c)] == [0, 0, 0]
    assert sum(map(live_bytes, (a, b, c))) == 12 * 12_288  # what was replaced is retired where it lay


def test_a_put_elsewhere_conflicts_as_one_here(hosts: Hosts) -> None:
    a = hosts.all["a"]
    key = away(hosts, a)
    version = hosts.put(a, key, value(key, 1), expect=0)
    live = live_bytes(a)
    with pytest.raises(VersionConflictError) as error:
        hosts.put(a, key, value(key, 2), expect=0)
    assert (error.value.expected, error.value.found) == (0, version)
    assert hosts.get(a, key) == value(key, 1)
    assert live_bytes(a) == live, "the segment was given back"
    assert hosts.lent(a) == [key]
    hosts.check()


def test_deletes_free_the_bytes_where_they_lie(hosts: Hosts) -> None:
    a = hosts.all["a"]
    key = away(hosts, a)
    hosts.put(a, key, value(key, 1))
    assert live_bytes(a) > 0
    other = next(host for host in hosts.all.values() if host is not a)
    hosts.delete(other, key)
    assert hosts.get(a, key) is None
    hosts.settle(2)
    assert (live_bytes(a), hosts.lent(a)) == (0, [])
    with pytest.raises(KeyNotFoundError):
        hosts.delete(a, key)
    hosts.check()


def test_a_local_put_over_a_value_that_lies_elsewhere_owes_its_release(hosts: Hosts) -> None:
    """By the engine's own commits, which know of no rules: both of them."""
    a = hosts.all["a"]
    keys = [one for one in GROUPS if home_of(hosts, one) is not a][:2]
    for key in keys:
        home = home_of(hosts, key).root
        owed = hosts.owed(home_of(hosts, key))
        membership = look(home, lambda tables: tables.membership(), deadline_after(10))
        inline = bytes_store.draft(home, key, b"inline").content
        hosts.put(a, key, value(key, 1))
        commit(home, [Change(key, inline)], deadline_after(10), membership=membership)
        hosts.put(a, key, value(key, 3))
        commit(home, [Change(key, inline), Change(b"beside", inline)], deadline_after(10), membership=membership)
        hosts.put(a, key, value(key, 5))
        commit(home, [Change(key, None)], deadline_after(10), membership=membership)
        assert hosts.owed(home_of(hosts, key)) == owed + 3
    assert len(hosts.lent(a)) == 6
    hosts.settle(2)
    assert (live_bytes(a), hosts.lent(a)) == (0, [])
    assert [hosts.owed(host) for host in hosts.all.values()] == [0, 0, 0]
    hosts.check()


def test_keys_of_several_homes_are_refused(hosts: Hosts) -> None:
    a = hosts.all["a"]
    filled = [fill(a.root, key, value(key, 1)) for key in GROUPS]
    with pytest.raises(CrossHostError):
        hosts.commit(a, [asked(a.root, one) for one in filled], filled)
    assert live_bytes(a) == 0
    hosts.check()


def test_homes_move_to_who_joins_and_back(hosts: Hosts, folder: str) -> None:
    a, b, c = hosts.all.values()
    groups = [b"group%d/k" % number for number in range(48)]  # of 12, one in 30 new hosts is home of none
    for number, (key, host) in enumerate(zip(groups, [a, b, c] * 16, strict=True)):
        hosts.put(host, key, value(key, number))
    with bytes_store.opened(f"{folder}/d") as root:
        d = hosts.add(root, "d")
        hosts.settle()
        moved = [key for key in groups if home_of(hosts, key) is d]
        assert moved, "this tests nothing"
        for number, key in enumerate(groups):
            assert [hosts.get(host, key) for host in (a, b, c, d)] == [value(key, number)] * 4
        assert all(root.catalog.read(key) is not None for key in moved)
        hosts.check()
        # it leaves: what it is home of goes back, and the segments that lie where the home is are owned again
        d.member = d.index.member = type(d.member)(d.member.id, "d", "d", is_home=False)
        hosts.settle()
        assert root.catalog.view(lambda transaction: transaction.count("entries")) == 0
        for number, key in enumerate(groups):
            assert hosts.get(d, key) == value(key, number)
        for host in (a, b, c):
            mine = [key for key in groups if home_of(hosts, key) is host]
            assert not set(mine) & set(hosts.lent(host))
        hosts.check()


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
    hosts.audit()
    assert (hosts.lent(a), live_bytes(a)) == ([], 0)
    assert hosts.send(message) == Never() and hosts.get(a, key) is None, "the late message makes nothing"
    hosts.check()


def test_a_root_with_keys_joins(hosts: Hosts, folder: str) -> None:
    a = hosts.all["a"]
    hosts.put(a, b"both/k", value(b"both/k", 1))
    with bytes_store.opened(f"{folder}/d") as root:
        for number, key in enumerate(GROUPS):
            bytes_store.put(root, key, value(key, number, [LARGE, 100][number % 2]))
        bytes_store.put(root, b"both/k", value(b"both/k", 2))
        d = hosts.add(root, "d")
        hosts.settle(60)
        standing = look(root, lambda tables: tables.standing(), deadline_after(10))
        assert standing is not None and not standing.is_joining and d.member.id in standing.view.homes
        for number, key in enumerate(GROUPS):
            assert [hosts.get(host, key) for host in (a, d)] == [value(key, number, [LARGE, 100][number % 2])] * 2
        assert hosts.get(d, b"both/k") == value(b"both/k", 1), "somebody else had it"
        hosts.check()


def test_a_removed_host_takes_its_keys_with_it(hosts: Hosts) -> None:
    a, b, c = hosts.all.values()
    for number, (key, host) in enumerate(zip(GROUPS, [a, b, c] * 4, strict=True)):
        hosts.put(host, key, value(key, number))
    was = {key: home_of(hosts, key) for key in GROUPS}
    del hosts.all["c"]
    run(a.root, lambda tables: a.index.answer(tables, Remove(c.member.id)), deadline_after(10))
    hosts.settle()
    for number, key in enumerate(GROUPS):
        expected = None if c in (was[key], [a, b, c][number % 3]) else value(key, number)
        assert hosts.get(a, key) == hosts.get(b, key) == expected
    for key in GROUPS:
        hosts.put(a, key, value(key, 7))
        assert hosts.get(b, key) == value(key, 7)
    a.restart()
    b.restart()
    hosts.settle(3)
    hosts.audit()
    assert sum(map(live_bytes, (a, b))) == 12 * 12_288
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
            hosts.tick([chance.choice(["pay", "ask_the_seed", "settle"])])
        if chance.random() < 0.05:
            chance.choice(list(hosts.all.values())).restart()
        if chance.random() < 0.05 and host is not a:  # a home comes or goes
            host.member = host.index.member = type(host.member)(
                host.member.id, host.address, host.address, is_home=not host.member.is_home
            )
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
