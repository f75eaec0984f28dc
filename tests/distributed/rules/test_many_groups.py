"""A cluster with 10,000 groups, and 100,000 keys, at each host: what a change of members costs, and loses."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from memstore.distributed.rules import Entry, directory, owning, reading
from tests.distributed.rules.checks import check_directory
from tests.distributed.rules.test_membership import cluster, put, run
from tests.distributed.rules.world import Host, World

GROUPS, OF_EACH = 10_000, 10
PAGES = 3 * GROUPS // directory.ROWS_LIMIT + 1  # of the directory


def fill(world: World, host: Host) -> None:
    """As its processes do, without their messages."""
    seed = next(one.tables for one in world.hosts.values() if (it := one.tables.standing()) and it.is_seed)
    standing = seed.standing()
    assert standing is not None
    for number in range(GROUPS):
        group = f"{host.address}-{number}".encode()
        owning.record_grant(host.tables, group, directory.give(seed, standing.roster, group, host.id).grant)
        for one in range(OF_EACH):
            host.tables.version += 1
            host.tables.records[group + b"/%d" % one] = Entry(host.tables.version, b"x")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_changes_of_members_take_as_many_messages_as_the_directory_has_pages() -> None:
    world = cluster(3)
    seed, first, second = world.hosts.values()
    for host in (seed, first, second):
        fill(world, host)
    counts: collections.Counter[str] = collections.Counter()
    answer = world.answer

    def counted(host: Host, index: Any, request: Any) -> Any:
        counts[type(request).__name__] += len(getattr(request, "rows", "x")) > 0
        return answer(host, index, request)

    world.answer = counted
    settle(world, [seed, first, second])
    assert 2 * PAGES - 2 <= counts["Mirror"] <= 4 * PAGES, "to two deputies"

    counts.clear()
    joining = world.add_host("h3")
    world.serve(joining, "h0")
    settle(world, [seed, first, second, joining])
    assert not counts["Give"] and counts["Mirror"] < 4, "a join moves nothing"
    process = world.start_process(joining)
    for host in (seed, first, second):
        rows = run(world, process, reading.look_up(process.client, [f"{host.address}-7/3".encode()]))
        assert rows[0] is not None

    counts.clear()
    world.promote(first, forced=True)
    world.run(10)
    settle(world, [seed, first, second, joining])
    assert counts["Announce"] <= 4 * (PAGES + 4), "each says what it owns, page by page"
    run(world, process, put(process, b"forced/k"))

    removed = second.id
    world.lose(second)
    world.remove(removed)
    world.run(20)
    settle(world, [seed, first, joining])
    assert run(world, process, put(process, b"h2-7/3"))  # nobody owns it any more
    assert b"h2-7" in joining.tables.own_groups


def settle(world: World, hosts: list[Host]) -> None:
    world.run(20)
    standing = hosts[0].tables.standing()
    assert standing is not None and {one.id for one in hosts} == set(standing.roster.ids)
    check_directory(world, hosts)
