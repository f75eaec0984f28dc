"""Hosts whose clocks differ by a year, which lose their memory, or get another name."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import ROOT, ServedHosts, wait_until

pytestmark = pytest.mark.full
YEAR = 365 * 86_400  # seconds


def in_a_year() -> list[str]:
    """Words before a command, for which it is a year later since boot. Skips where the kernel can't do that."""
    words = ["unshare", "--time", "--monotonic", str(YEAR), "--boottime", str(YEAR), "--fork", "--kill-child", "--"]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if done.returncode:
        pytest.skip(f"no namespaces of time here: {done.stderr.strip()}")
    return words


def test_hosts_whose_clocks_are_a_year_apart(cluster: ServedHosts) -> None:
    cluster.begin_anew(1, before=in_a_year())
    try:
        assert cluster.call(1, actions.clock) - cluster.call(0, actions.clock) > YEAR - 600
        for number in range(3):
            cluster.call(number, actions.put_all, number)
        for number in (0, 1):
            assert len(cluster.call(number, actions.get_all)) == 24
        for owner in (0, 1):
            _check_times(cluster, cluster.group_of(owner))
    finally:
        cluster.begin_anew(1)


def _check_times(cluster: ServedHosts, group: str) -> None:
    """Waits and attempts last as long as they should, and leases hold, whoever asks whom."""
    key = f"{group}/k"
    for here, there in ((0, 1), (1, 0)):
        version, seconds = cluster.call(here, actions.wait, key, 1.0)
        assert version == 0 and 0.9 < seconds < 20
        with cluster.start(there, actions.put_in_a_while, ROOT, key, 0.5) as late:
            assert late.recv() == "begins"
            version, seconds = cluster.call(here, actions.wait, key, 30.0)
            assert version == late.recv() and seconds < 20
        cluster.call(here, actions.put_again, [key])
        reference = cluster.call(there, actions.refer, key)
        cluster.call(there, actions.put_again, [key])
        assert cluster.call(there, actions.sum_of, reference) == 5000.0
        sharded = f"{group}/sharded-{here}"
        assert cluster.call(here, actions.put_part, sharded, "alone", 0, 1.5) == "StoreTimeoutError"
        assert cluster.call(there, actions.put_part, sharded, "alone", 1, 5.0) == "StoreTimeoutError"
        with cluster.start(there, actions.with_store, ROOT, actions.put_part, (sharded, "both", 1, 30.0)) as other:
            assert cluster.call(here, actions.put_part, sharded, "both", 0, 30.0) == other.recv()
        cluster.call(here, actions.delete_all)


def test_a_host_that_has_lost_its_memory_takes_its_own_place(cluster: ServedHosts) -> None:
    """What it has put is gone, and no more: the others have theirs, and it works as before."""
    keys = {number: [f"from{number}-{one}/k" for one in range(12)] for number in range(3)}
    for number in range(3):
        cluster.call(number, actions.put_own, f"from{number}-", 12)
    before = {one["id"] for one in cluster.view(0)["members"]}
    cluster.begin_anew(1)
    after = {one["id"] for one in cluster.view(0)["members"]}
    assert len(before & after) == 2 and len(after) == 3
    kept = keys[0] + keys[2]
    everything = sorted(kept + keys[1])
    for number in range(3):
        assert sorted(cluster.call(number, actions.found, everything)) == sorted(kept)
    for number in range(3):
        cluster.call(number, actions.put_again, everything)
        assert sorted(cluster.call(2 - number, actions.found, everything)) == everything


def test_a_memory_that_is_emptied_under_an_agent_ends_it_and_nobody_else(cluster: ServedHosts) -> None:
    cluster.call(0, actions.put_own, "kept", 6)
    kept = [f"kept{number}/k" for number in range(6)]
    cluster.hosts[1].run(["sh", "-c", f"rm -rf {ROOT}"], timeout=20.0)
    assert cluster.agent(1).wait(20.0) == 3
    assert "was removed or moved" in cluster.log(1)
    assert cluster.call(2, actions.found, kept) == kept
    cluster.begin_anew(1)
    assert cluster.call(1, actions.found, kept) == kept


def test_a_host_may_get_another_name(cluster: ServedHosts) -> None:
    if shutil.which("hostname") is None:
        pytest.skip("no command hostname")
    cluster.call(1, actions.put_own, "named", 3)
    for name in ("renamed", "host1"):
        cluster.hosts[1].run(["hostname", name], check=True, timeout=20.0)
        cluster.kill_agent(1)
        cluster.serve(1)
        wait_until(functools.partial(_is_named, cluster, name), f"host 1 is {name}")
        cluster.wait_for_members(3)
        assert cluster.call(2, actions.found, [f"named{number}/k" for number in range(3)])


def _is_named(cluster: ServedHosts, name: str) -> bool:
    return {one["name"] for one in cluster.view(0)["members"]} == {"host0", name, "host2"}
