"""Hosts that fall silent while nobody is there to say what is to be done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import LONG, ServedHosts, empty, wait_until
from tests.support.hosts import Hosts, why_unavailable

HOSTS = 3
AFTER = 2.0  # seconds


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    with Hosts(HOSTS, shm_bytes=64 << 20) as hosts:
        yield hosts


@pytest.fixture
def hosts(machines: Hosts, tmp_path: Path) -> Iterator[ServedHosts]:
    """Hosts that nobody serves yet."""
    with empty(machines, tmp_path) as served:
        yield served


def serve(hosts: ServedHosts, count: int, *options: str) -> None:
    """Hosts 0 to `count` are one cluster, and 0 is its seed."""
    for number in range(count):
        hosts.serve(number, *options)
    hosts.wait_at(range(count), count)
    wait_until(lambda: len(hosts.view(0)["deputies"]) == min(2, count - 1), "there are deputies")


# --- a deputy takes over ----------------------------------------------------------------------------------------------


def test_a_deputy_takes_over_from_a_seed_that_is_killed_by_itself(hosts: ServedHosts) -> None:
    serve(hosts, 3, f"--promote-after={AFTER}")
    hosts.kill_host(0)
    wait_until(lambda: hosts.view(1)["seed"] == hosts.view(2)["seed"] != hosts.address(0), "one has taken over")
    hosts.call(2, actions.put_own, "new", 1)  # a group that nobody owns yet: the new seed grants it
    assert hosts.call(1, actions.found, ["new0/k"]) == ["new0/k"]
    assert "this host is the seed now" in hosts.log(1) + hosts.log(2)


def test_a_seed_that_is_cut_off_obeys_the_one_that_took_over_when_it_hears(hosts: ServedHosts) -> None:
    serve(hosts, 3, f"--promote-after={AFTER}")
    for other in (1, 2):
        hosts.hosts.cut(0, other)
    wait_until(lambda: hosts.view(1)["seed"] == hosts.view(2)["seed"] != hosts.address(0), "one has taken over")
    assert hosts.view(0)["seed"] == hosts.address(0)
    hosts.call(1, actions.put_own, "meanwhile", 1)
    for other in (1, 2):
        hosts.hosts.heal(0, other)
    wait_until(lambda: hosts.view(0)["seed"] == hosts.view(1)["seed"], "it obeys")
    assert hosts.call(0, actions.found, ["meanwhile0/k"]) == ["meanwhile0/k"]


def test_of_two_hosts_neither_takes_over_by_itself(hosts: ServedHosts) -> None:
    serve(hosts, 2, f"--promote-after={AFTER}")
    hosts.call(1, actions.put_own, "here", 1)
    hosts.kill_host(0)
    time.sleep(5 * AFTER)  # that nothing happens can't be waited for
    assert hosts.view(1)["seed"] == hosts.address(0) and "seed now" not in hosts.log(1)
    assert hosts.call(1, actions.found, ["here0/k"], timeout=LONG) == ["here0/k"]
