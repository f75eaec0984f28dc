"""100,000 keys in 10,000 groups on each of three hosts: they are put, listed, found, and outlive their directory."""

from __future__ import annotations

import time

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import ROOT, ServedHosts, empty
from tests.support.hosts import Hosts, need_hosts

GROUPS, OF_EACH = 10_000, 10
PATIENCE = 300.0  # seconds


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_keys_on_each_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_hosts()
    with Hosts(4, shm_bytes=1 << 30) as machines, empty(machines, tmp_path_factory.mktemp("many")) as hosts:
        for number in range(3):
            hosts.serve(number)
        hosts.wait_at(range(3), 3)
        for number in range(3):
            hosts.call(number, actions.put_many_groups, f"of{number}", GROUPS, OF_EACH, timeout=PATIENCE)
        count = 3 * GROUPS * OF_EACH
        assert hosts.call(1, actions.count_keys, timeout=PATIENCE) == count
        began = time.monotonic()
        hosts.serve(3)
        hosts.wait_at(range(4), 4)
        assert time.monotonic() - began < 60, "a join moves nothing"
        check_all(hosts, 3)

        # The directory is lost, with its copies: owners say what they own.
        for number in range(3):
            hosts.kill_agent(number)
        for number in (1, 2):
            hosts.serve(number)
        done = hosts.command(3, "promote", ROOT, hosts.address(3), "--force")
        assert done.returncode == 0, done.stderr
        hosts.serve(0)
        hosts.wait_at(range(4), 4, PATIENCE)
        assert hosts.call(3, actions.put_and_get, ["forced/k"], 60.0, timeout=PATIENCE) == ["forced/k"]
        assert hosts.call(2, actions.count_keys, timeout=PATIENCE) == count + 1
        check_all(hosts, 3)

        # One host is lost: its keys are gone, and no other ones.
        hosts.kill_host(1)
        hosts.remove(1, by=0)
        hosts.wait_at((0, 2, 3), 3, PATIENCE)
        assert hosts.call(0, actions.count_keys, timeout=PATIENCE) == 2 * count // 3 + 1
        assert hosts.call(0, actions.put_and_get, ["of1-7/3"], 60.0) == ["of1-7/3"]


def check_all(hosts: ServedHosts, by: int) -> None:
    """A sample of each host's keys, of which its groups are asked for at once."""
    for number in range(3):
        keys = [f"of{number}-{group}/{group % OF_EACH}" for group in range(0, GROUPS, 97)]
        assert hosts.call(by, actions.found, keys, timeout=PATIENCE) == keys
