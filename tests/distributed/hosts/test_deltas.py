"""Deltas between hosts: what crosses the network when a few leaves of a value have changed, whoever puts it."""

from __future__ import annotations

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.actions import LEAVES, MODEL
from tests.distributed.hosts.clusters import ServedHosts

KEY = "model/k"
MOST = 0.04 * MODEL  # bytes, of a value in which 2 % of the leaves have changed; with what hosts ask and answer anyway


def moved(cluster: ServedHosts, sender: int, reader: int, changed: int, value: float) -> int:
    """The bytes that a host sends while another one gets the value."""
    before = cluster.sent(sender)
    cluster.call(reader, actions.check_model, KEY, changed, value)
    return cluster.sent(sender) - before


@pytest.mark.parametrize("owner", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_follower_fetches_what_changed(cluster: ServedHosts, owner: int) -> None:
    """Also where another host owns the key than the one that puts it."""
    cluster.call(owner, actions.put_small, "model/other")
    cluster.call(0, actions.put_model, KEY, 0, 0.0)
    assert moved(cluster, 0, 1, 0, 0.0) > MODEL
    cluster.call(0, actions.put_model, KEY, LEAVES // 50, 1.0, True)
    assert moved(cluster, 0, 1, LEAVES // 50, 1.0) < MOST
    for value in (2.0, 3.0):  # it misses the first of them
        cluster.call(0, actions.put_model, KEY, LEAVES // 50, value, True)
    assert moved(cluster, 0, 1, LEAVES // 50, 3.0) < MOST


@pytest.mark.full
def test_hosts_take_turns_at_putting_it(cluster: ServedHosts) -> None:
    """A host compares with its copy of what another one has put. Bytes of the first put are known by all."""
    cluster.call(0, actions.put_model, KEY, 0, 0.0)
    for reader in (1, 2):
        cluster.call(reader, actions.check_model, KEY, 0, 0.0)
    cluster.call(1, actions.put_model, KEY, LEAVES // 50, 1.0, True)
    assert moved(cluster, 1, 2, LEAVES // 50, 1.0) < MOST
    cluster.call(2, actions.put_model, KEY, LEAVES // 50, 2.0, True)
    assert moved(cluster, 2, 1, LEAVES // 50, 2.0) < MOST, "it still has its copy of the first"
    cluster.call(0, actions.check_model, KEY, LEAVES // 50, 2.0)


@pytest.mark.full
def test_without_its_base_a_delta_comes_whole(cluster: ServedHosts) -> None:
    """The copy is dropped at the reader; at the host that put it, the base is gone with the next version."""
    cluster.call(0, actions.put_model, KEY, 0, 0.0)
    cluster.call(1, actions.check_model, KEY, 0, 0.0)
    cluster.call(0, actions.put_model, KEY, LEAVES // 50, 1.0, True)
    cluster.call(1, actions.collect)
    cluster.call(0, actions.collect)
    assert moved(cluster, 0, 1, LEAVES // 50, 1.0) > MODEL
    cluster.call(0, actions.put_model, KEY, LEAVES // 50, 2.0, True)
    assert moved(cluster, 0, 1, LEAVES // 50, 2.0) < MOST


@pytest.mark.full
@pytest.mark.parametrize("how", ["iter_weights", "load_model"])
def test_who_loads_weights_fetches_what_changed(cluster: ServedHosts, how: str) -> None:
    cluster.call(0, actions.put_model, KEY, 0, 0.0)
    cluster.call(1, actions.follow_model, KEY, how, 0, 0.0)
    cluster.call(0, actions.put_model, KEY, LEAVES // 50, 1.0, True)
    before = cluster.sent(0)
    cluster.call(1, actions.follow_model, KEY, how, LEAVES // 50, 1.0)
    assert cluster.sent(0) - before < MOST
