"""Values on two hosts, in networks of their own: hosts are lost under load, and what was acknowledged is there."""

from __future__ import annotations

import time

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from tests.distributed.hosts.clusters import ServedHosts, empty
from tests.support.hosts import Hosts, need_hosts

LEAST, SIZE = 20, 50_000  # puts, and elements of each


def state_policy(store: memstore.Store) -> None:
    store.set_policy(replicas=2)


def put_for(store: memstore.Store, group: str, seconds: float) -> dict[str, int]:
    """Puts values, over and over. Returns by key the number in the last one that was acknowledged."""
    done: dict[str, int] = {}
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end or number < LEAST:
        number += 1
        key = f"{group}/{number % 7}"
        store.put(key, torch.full((SIZE,), float(number)), timeout=60.0)
        done[key] = number
    return done


def numbers_of(store: memstore.Store, keys: list[str]) -> dict[str, int]:
    """Returns by key the number in its value. Raises ValueError: it is of several puts."""
    found: dict[str, int] = {}
    for key in keys:
        value = store.get(key, timeout=60.0)
        if not bool((value == value[0]).all()):
            raise ValueError(f"{key} is of several puts")
        found[key] = int(value[0])
    return found


def lacking(store: memstore.Store) -> int:
    status = Cluster(store.root).status()
    return sum(host.lacking for host in status.hosts) + sum(not host.alive for host in status.hosts)


def wait_until_none_lacks(hosts: ServedHosts, number: int) -> None:
    end = time.monotonic() + 120
    while hosts.call(number, lacking):
        assert time.monotonic() < end, "values stay on one host"
        time.sleep(0.5)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_hosts_that_are_lost_one_after_the_other_take_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_hosts()
    with Hosts(4, shm_bytes=256 << 20) as machines, empty(machines, tmp_path_factory.mktemp("replicas")) as hosts:
        for number in range(4):
            hosts.serve(number)
        hosts.wait_at(range(4), 4)
        hosts.call(0, state_policy)
        acknowledged: dict[str, int] = {}
        for dies, left in ((1, (0, 2, 3)), (2, (0, 3))):
            acknowledged |= hosts.call(dies, put_for, f"of{dies}", 3.0, timeout=180.0)
            acknowledged |= hosts.call(3, put_for, f"of{dies}-too", 1.0, timeout=180.0)
            hosts.kill_host(dies)
            hosts.remove(dies, by=0)
            hosts.wait_at(left, len(left))
            for reader in left:
                assert hosts.call(reader, numbers_of, list(acknowledged), timeout=180.0) == acknowledged
            wait_until_none_lacks(hosts, 0)
