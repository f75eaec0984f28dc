"""A host that is never an owner is removed, while others hold values whose bytes lie there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

import memstore
from memstore.distributed.rules.roster import leave
from memstore.errors import HomeUnavailableError, StaleMembershipError
from tests.distributed.client.hosts import Cluster, await_, cluster_of

BIG = torch.arange(500_000, dtype=torch.float32).view(1000, 500)


@pytest.fixture
def cluster(scratch: str) -> Iterator[Cluster]:
    """Two owners, and a third host, which comes and goes."""
    with cluster_of(scratch, True, True, False) as made:
        yield made


def remove(cluster: Cluster, number: int) -> None:
    """As the seed does when it is told so; the host hears of it itself, too."""
    gone = cluster.homes[number]
    left = [home for home in cluster.homes if home is not gone]
    members = tuple(home.member for home in left)
    roster = msgspec.structs.replace(cluster.roster, epoch=cluster.roster.epoch + 1, members=members)
    for home in left:
        home.adopt(roster)
    gone.run(leave)


@pytest.mark.parametrize("home", [0, 1])
def test_what_was_fetched_stays_and_the_rest_is_gone_by_name(cluster: Cluster, home: int) -> None:
    """The readers are on the key's home, and on another host."""
    reader, other, leaving = cluster.stores
    key = cluster.key_at(home)
    version = leaving.put(key, BIG)
    mine = leaving.view(key)
    views = [store.view(key) for store in (reader, other)]
    assert torch.equal(views[0][10:12], BIG[10:12])
    copied = other.get(key)

    remove(cluster, 2)
    for view in views[:1]:
        assert torch.equal(view[10:12], BIG[10:12])
        with pytest.raises(HomeUnavailableError, match="has left the cluster, and the bytes are there"):
            view[500:].sum()
    assert torch.equal(copied, BIG) and torch.equal(mine[:], BIG)
    await_(lambda: all(key not in store for store in (reader, other)))
    for store in (reader, other):
        with pytest.raises(memstore.KeyNotFoundError):
            store.get(key)
    with pytest.raises(StaleMembershipError, match="was removed from the cluster"):
        leaving.get(key)
    assert reader.put(key, 1, expect_version=0) > version
    assert other.get(key) == 1 and torch.equal(copied, BIG)


def test_a_host_that_hears_nothing_of_the_others_is_told_why(cluster: Cluster) -> None:
    """Nobody serves its folder, and its processes go on."""
    roster = msgspec.structs.replace(cluster.roster, epoch=cluster.roster.epoch + 1)
    for home in cluster.homes[:2]:
        home.adopt(roster)
    with (
        memstore.open(cluster.stores[2].root, timeout=1.0) as behind,
        pytest.raises(HomeUnavailableError, match="hasn't heard of it: does an agent serve this folder"),
    ):
        list(behind)
