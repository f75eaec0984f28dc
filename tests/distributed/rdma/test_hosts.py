"""Registered memory between hosts of their own networks, with kills and cuts in the middle of transfers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from memstore._info import HostStatus
from tests.distributed.hosts import actions as of_hosts
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts, served, wait_until
from tests.distributed.rdma import actions
from tests.distributed.rdma.actions import MIB
from tests.support.fork_server import Worker
from tests.support.hosts import Hosts, need_hosts

pytestmark = [pytest.mark.full, pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")]

OWNER, READER, OTHER = range(3)
PLANES = [("--transport", "monarch"), ("--transport", "monarch", "--no-owner"), ("--transport", "tcp", "--no-owner")]
LARGE = 48  # MiB: a transfer of it can be met in its middle


@pytest.fixture(scope="module")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHosts]:
    need_hosts()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3, shm_bytes=400 << 20))
        yield stack.enter_context(served(hosts, tmp_path_factory.mktemp("hosts"), PLANES))


@pytest.fixture
def cluster(all_hosts: ServedHosts) -> Iterator[ServedHosts]:
    """Of which the first two hosts have registered memory, and use it."""
    wait_for_transports(all_hosts)
    wait_until(lambda: comes_by_monarch(all_hosts), "it comes by registered memory", 2 * LONG)
    yield all_hosts
    all_hosts.restore()


def statuses(cluster: ServedHosts) -> list[HostStatus]:
    """By the numbers of the hosts."""
    return sorted(cluster.call(OWNER, actions.hosts_of), key=lambda one: one.address)


def wait_for_transports(cluster: ServedHosts) -> None:
    def are_there() -> bool:
        return [one.transport for one in statuses(cluster)] == ["monarch", "monarch", "tcp"]

    wait_until(are_there, f"{statuses(cluster)}")


def comes_by_monarch(cluster: ServedHosts) -> bool:
    """After a fault it does again, in half a minute."""
    before = statuses(cluster)[READER].received
    cluster.call(OWNER, actions.put, "probe/k", 4)
    assert cluster.call(READER, actions.get, "probe/k", 4)
    return statuses(cluster)[READER].received - before >= 4 * MIB


def has_received(cluster: ServedHosts, number: int) -> int:
    """Bytes, as the kernel counts them."""
    for line in Path(f"/proc/{cluster.agent(number).pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[0])
    raise LookupError("the host has no network")


def in_the_middle(cluster: ServedHosts, timeout: float = LONG) -> Worker:
    """A process of the reader's host in the middle of a get: some MiB of it have come."""
    cluster.call(OWNER, actions.put, "large/k", LARGE)
    cluster.hosts.delay(OWNER, READER, 0.005)
    before = has_received(cluster, READER)
    reader = cluster.start(READER, actions.get_while_told, ROOT, "large/k", LARGE, timeout)
    assert reader.recv() == "begins"
    wait_until(lambda: has_received(cluster, READER) - before > 4 * MIB, "some of it comes")
    assert has_received(cluster, READER) - before < (LARGE - 8) * MIB, "it was too fast"
    return reader


def test_values_views_and_sharded_ones_come_by_it(cluster: ServedHosts) -> None:
    before = statuses(cluster)[READER].received
    cluster.call(OWNER, actions.put, "value/k", LARGE)
    assert cluster.call(READER, actions.get, "value/k", LARGE)
    cluster.call(OWNER, actions.put_columns, "columns/k", 1 << 10)
    assert cluster.call(READER, actions.get_columns, "columns/k", 1 << 10)
    for rank, host in enumerate((OWNER, READER)):
        cluster.call(host, actions.put_part, "parts/k", rank, 32)
    assert cluster.call(READER, actions.get_parts, "parts/k", 32)
    assert statuses(cluster)[READER].received - before >= (LARGE + 16 + 16) * MIB


def test_many_transfers_in_both_directions_at_once(cluster: ServedHosts) -> None:
    for host in (OWNER, READER):
        for number in range(4):
            cluster.call(host, actions.put, f"from{host}/{number}", 16, number)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                cluster.start(host, of_hosts.with_store, ROOT, actions.get, (f"from{other}/{number}", 16, number))
            )
            for host, other in ((OWNER, READER), (READER, OWNER))
            for number in range(4)
        ]
        assert [reader.recv(LONG) for reader in readers] == [True] * len(readers)


def test_a_host_without_it_takes_tcp_in_both_directions(cluster: ServedHosts) -> None:
    before = statuses(cluster)
    cluster.call(OWNER, actions.put, "mixed/k", 16)
    assert cluster.call(OTHER, actions.get, "mixed/k", 16)
    cluster.call(OTHER, actions.put, "mixed/back", 16)
    assert cluster.call(READER, actions.get, "mixed/back", 16)
    after = statuses(cluster)
    assert after[READER].received - before[READER].received < MIB


def of_owner(cluster: ServedHosts, _: Worker) -> int:
    return cluster.index_process(OWNER)


def of_reader(cluster: ServedHosts, _: Worker) -> int:
    return cluster.index_process(READER)


@pytest.mark.parametrize("victim", [of_owner, of_reader], ids=lambda victim: victim.__name__)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_index_process_that_ends_or_stops_in_the_middle_costs_a_wait(
    cluster: ServedHosts, victim: Callable[[ServedHosts, Worker], int], number: signal.Signals
) -> None:
    """One that is stopped for 10 s is killed by its agent."""
    with in_the_middle(cluster) as reader:
        others = {host: cluster.index_process(host) for host in (OWNER, READER)}
        pid = victim(cluster, reader)
        os.kill(pid, number)
        cluster.hosts.delay(OWNER, READER, 0)
        came, seconds = reader.recv(LONG)
        assert came == "whole" and seconds < 40
    assert cluster.call(READER, of_hosts.bytes_left)[0] == 0
    wait_until(lambda: cluster.index_process(OWNER if victim is of_owner else READER) != pid, "another is started")
    (stays,) = [(host, one) for host, one in others.items() if one != pid]
    assert cluster.index_process(stays[0]) == stays[1], "the other host's goes on"


def test_a_client_that_is_killed_in_the_middle_leaves_nothing(cluster: ServedHosts) -> None:
    before = [cluster.index_process(host) for host in (OWNER, READER)]
    with in_the_middle(cluster) as reader:
        reader.kill()
        assert reader.wait() == -9
    cluster.hosts.delay(OWNER, READER, 0)
    assert cluster.call(READER, of_hosts.bytes_left)[0] == 0
    assert cluster.call(READER, actions.get, "large/k", LARGE)
    assert [cluster.index_process(host) for host in (OWNER, READER)] == before


def test_a_network_that_is_cut_in_the_middle_costs_a_wait(cluster: ServedHosts) -> None:
    with in_the_middle(cluster) as reader:
        cluster.hosts.cut(OWNER, READER)
        time.sleep(8)  # the fault: longer than a piece may take
        cluster.hosts.heal(OWNER, READER)
        cluster.hosts.delay(OWNER, READER, 0)
        came, seconds = reader.recv(LONG)
        assert came == "whole" and seconds < 40


def test_a_get_that_is_cut_off_ends_within_its_timeout(cluster: ServedHosts) -> None:
    with in_the_middle(cluster, timeout=12.0) as reader:
        cluster.hosts.cut(OWNER, READER)
        came, seconds = reader.recv(LONG)
        assert came == "HomeUnavailableError" and seconds < 16
    cluster.hosts.heal(OWNER, READER)
    cluster.hosts.delay(OWNER, READER, 0)
    assert cluster.call(READER, of_hosts.bytes_left)[0] == 0


def test_long_after_a_kill_the_other_index_process_goes_on(cluster: ServedHosts) -> None:
    """By its defaults Monarch ends, half a minute later, who has a message for one that was killed."""
    before = cluster.index_process(READER)
    with in_the_middle(cluster) as reader:
        os.kill(cluster.index_process(OWNER), signal.SIGKILL)
        assert reader.recv(LONG)[0] == "whole"
    time.sleep(50)
    assert cluster.index_process(READER) == before
