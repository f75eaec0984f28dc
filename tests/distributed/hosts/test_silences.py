"""Hosts that fall silent while nobody is there to say what is to be done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.clusters import LONG, QUICK_AGENT, ROOT, ServedHosts, empty, wait_until
from tests.support.hosts import Hosts, need_hosts

HOSTS = 4
AFTER = 2.0  # seconds


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(HOSTS, shm_bytes=64 << 20) as hosts:
        yield hosts


@pytest.fixture
def hosts(machines: Hosts, tmp_path: Path) -> Iterator[ServedHosts]:
    """Hosts that nobody serves yet."""
    with empty(machines, tmp_path) as served:
        yield served


def serve(hosts: ServedHosts, count: int, *options: str, agent: str = "memstore") -> None:
    """Hosts 0 to `count` are one cluster, and 0 is its seed."""
    for number in range(count):
        hosts.serve(number, *options, agent=agent)
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


@pytest.mark.full
def test_of_two_hosts_neither_takes_over_by_itself(hosts: ServedHosts) -> None:
    serve(hosts, 2, f"--promote-after={AFTER}")
    hosts.call(1, actions.put_own, "here", 1)
    hosts.kill_host(0)
    time.sleep(5 * AFTER)  # that nothing happens can't be waited for
    assert hosts.view(1)["seed"] == hosts.address(0) and "seed now" not in hosts.log(1)
    assert hosts.call(1, actions.found, ["here0/k"], timeout=LONG) == ["here0/k"]


# --- the seed removes a silent host -----------------------------------------------------------------------------------

LEASE = 6.0  # seconds


def serve_with_leases(hosts: ServedHosts, count: int) -> None:
    serve(hosts, count, f"--remove-after={LEASE}", f"--promote-after={AFTER}", agent=QUICK_AGENT)
    if count > 2:
        wait_until(lambda: all(len(hosts.view(one)["leased"]) == count for one in range(count)), "all hold leases")


def errors_of(hosts: ServedHosts, number: int, key: str) -> tuple[str, str]:
    """With which errors a get and a put end on a host."""
    with hosts.start(number, actions.try_calls, ROOT, key) as worker:
        return worker.recv(LONG)


def cut_off(hosts: ServedHosts, number: int, *, heal: bool = False) -> None:
    for other in range(HOSTS):
        if other != number:
            (hosts.hosts.heal if heal else hosts.hosts.cut)(number, other)


def test_a_host_that_is_cut_off_stops_before_it_is_removed_and_what_it_said_is_put_is_not_said_in_vain(
    hosts: ServedHosts,
) -> None:
    serve_with_leases(hosts, 3)
    hosts.call(2, actions.put_again, ["of2/k"])
    hosts.call(1, actions.put_again, ["of1/k"])
    with hosts.start(2, actions.put_on, ROOT, "of2/number") as worker:
        assert worker.recv(LONG) == "begins"
        cut_off(hosts, 2)
        began = time.monotonic()
        last, error, text = worker.recv(LONG)
        stopped = time.monotonic()
    wait_until(lambda: len(hosts.view(0)["members"]) == 2, "it is removed")
    removed = time.monotonic()
    assert error in ("FencedError", "UnknownOutcomeError") and "lease" in text and last > 0
    assert stopped < removed and stopped - began < 1.5 * LEASE
    assert errors_of(hosts, 2, "of2/k") == ("FencedError", "FencedError")  # it owns that, and has it
    hosts.call(1, actions.put_again, ["of2/k"])  # nobody owns it any more
    assert hosts.call(0, actions.found, ["of1/k", "of2/k"]) == ["of1/k", "of2/k"]
    cut_off(hosts, 2, heal=True)
    wait_until(lambda: "has come back" in hosts.log(2), "it comes back by itself")
    everything = ["of1/k", "of2/k", "of2/number"]
    assert hosts.call(0, actions.found, everything) == hosts.call(2, actions.found, everything) == everything
    assert "silent for longer than remove_after" in hosts.log(0)


@pytest.mark.full
def test_a_host_whose_lease_was_over_and_that_was_not_removed_goes_on(hosts: ServedHosts) -> None:
    """All are cut off: nobody hears a majority, and so nobody is removed."""
    serve_with_leases(hosts, 3)
    hosts.call(1, actions.put_again, ["of1/k"])
    for number in range(3):
        cut_off(hosts, number)
    wait_until(lambda: errors_of(hosts, 1, "of1/k")[1] == "FencedError", "its lease is over")
    wait_until(lambda: "has heard no majority" in hosts.log(1), "its agent says so")
    for number in range(3):
        cut_off(hosts, number, heal=True)
    wait_until(lambda: errors_of(hosts, 1, "of1/k") == ("", ""), "it goes on")
    assert len(hosts.view(0)["members"]) == 3
    wait_until(lambda: "hears the others again" in hosts.log(1), "its agent says so")


def test_a_put_of_a_process_that_is_stopped_beyond_the_lease_is_not_acknowledged(hosts: ServedHosts) -> None:
    serve_with_leases(hosts, 3)
    with hosts.start(2, actions.put_on, ROOT, "of2/number") as worker:
        assert worker.recv(LONG) == "begins"
        time.sleep(0.5)
        frozen = [*hosts.hosts[2].processes()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)  # as a hypervisor stops a host: its agent, and all else
        wait_until(lambda: len(hosts.view(0)["members"]) == 2, "it is removed")
        hosts.call(1, actions.put_again, ["of2/number"])
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        _, error, text = worker.recv(LONG)
    assert error in ("FencedError", "UnknownOutcomeError", "StaleMembershipError", "NotAStoreError"), text
    wait_until(lambda: "has come back" in hosts.log(2), "it comes back by itself")


def test_a_seed_that_dies_is_replaced_and_removed_by_itself(hosts: ServedHosts) -> None:
    serve_with_leases(hosts, 4)
    hosts.call(3, actions.put_again, ["of3/k"])
    hosts.kill_host(0)
    wait_until(lambda: hosts.view(3)["seed"] != hosts.address(0), "one has taken over")
    wait_until(lambda: len(hosts.view(3)["members"]) == 3, "the old seed is removed")
    hosts.call(3, actions.put_own, "new", 1)
    assert hosts.call(3, actions.found, ["of3/k", "new0/k"]) == ["of3/k", "new0/k"]


@pytest.mark.full
def test_of_two_hosts_the_clock_removes_neither_and_both_go_on(hosts: ServedHosts) -> None:
    serve_with_leases(hosts, 2)
    for number in range(2):
        hosts.call(number, actions.put_again, [f"of{number}/k"])
    cut_off(hosts, 1)
    time.sleep(2 * LEASE)  # that nothing happens can't be waited for
    for number in range(2):
        assert errors_of(hosts, number, f"of{number}/k") == ("", "")
        assert len(hosts.view(number)["members"]) == 2
