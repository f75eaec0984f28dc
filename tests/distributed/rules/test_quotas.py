"""Quotas of prefixes, as all members hear of them. What an owner counts is tested over real catalogs."""

from __future__ import annotations

import pytest

from memstore.distributed.rules import promotion
from memstore.distributed.rules.messages import Answer, IsRoster, Refused, SetQuota
from memstore.distributed.rules.nouns import QUOTAS_LIMIT, Quota
from tests.distributed.rules.test_membership import cluster
from tests.distributed.rules.world import Host, World


def set_quota(world: World, prefix: bytes, limit: int | None) -> Answer:
    seed = next(host for host in world.hosts.values() if (it := host.tables.standing()) is not None and it.is_seed)
    for _ in range(100):
        assert seed.index is not None
        answer = world.answer(seed, seed.index, SetQuota(prefix, limit))
        if isinstance(answer, IsRoster | Refused):
            return answer
        world.run(0.1)
    raise AssertionError("nobody hears of the quota")


def quotas_at(host: Host) -> tuple[Quota, ...]:
    standing = host.tables.standing()
    assert standing is not None
    return standing.roster.quotas


def promoted() -> list[tuple[Quota, ...]]:
    """Sets quotas, and returns which each host knows once another one is the seed."""
    world = cluster(3)
    for prefix, limit in ((b"run/a", 5), (b"run/b", 6), (b"run/a", 7), (b"run/b", None)):
        assert isinstance(set_quota(world, prefix, limit), IsRoster)
    world.run(2)
    hosts = list(world.hosts.values())
    assert [quotas_at(host) for host in hosts] == [(Quota(b"run/a", 7),)] * 3
    ends: list[bool] = []
    world.promote(hosts[1], ends.append)
    world.run(5)
    assert ends == [True]
    assert isinstance(set_quota(world, b"other/", 1), IsRoster)
    world.run(2)
    return [quotas_at(host) for host in hosts]


def test_each_member_knows_them_also_after_a_promotion() -> None:
    assert promoted() == [(Quota(b"run/a", 7), Quota(b"other/", 1))] * 3


def test_a_promotion_that_forgets_them_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*given: object) -> object:
        return roster(*given[:-1])

    roster = promotion.Roster
    monkeypatch.setattr(promotion, "Roster", without)
    assert promoted() != [(Quota(b"run/a", 7), Quota(b"other/", 1))] * 3


def test_there_are_so_many_at_most() -> None:
    world = cluster(1)
    for number in range(QUOTAS_LIMIT):
        assert isinstance(set_quota(world, b"run/%d" % number, 1), IsRoster)
    refused = set_quota(world, b"run/more", 1)
    assert isinstance(refused, Refused) and "the limit" in refused.why
    assert isinstance(set_quota(world, b"run/0", 2), IsRoster)
