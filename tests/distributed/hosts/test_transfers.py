"""What crosses the network between hosts: a value once a host, of a slice its bytes, and whole or not at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.hosts import actions
from tests.distributed.hosts.actions import MOVED
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts, wait_until

_READERS = 8


def test_eight_readers_of_a_host_cost_one_transfer(cluster: ServedHosts) -> None:
    """They are children of one that has the store open, which reads too."""
    cluster.call(0, actions.put_rows, "value/k")
    before = cluster.sent(0)
    assert cluster.call(1, actions.read_in_children, "value/k", _READERS) == [0] * (_READERS + 1)
    assert MOVED < cluster.sent(0) - before < 1.5 * MOVED


@pytest.mark.parametrize(
    "ways", [["get"] * 4, ["get", "out", "like", "ref", "view"], ["view"] * 4, ["out", "like"] * 2]
)
def test_parts_of_a_sharded_value_come_once_a_host_whatever_its_processes_ask(
    cluster: ServedHosts, ways: list[str]
) -> None:
    cluster.call(0, actions.put_half, "value/sharded", " ".join(ways), 0)
    cluster.call(2, actions.put_half, "value/sharded", " ".join(ways), 1)
    before = [cluster.sent(0), cluster.sent(2)]
    assert cluster.call(1, actions.read_halves_in_children, "value/sharded", ways) == [0] * len(ways)
    for number, sent in zip((0, 2), before, strict=True):
        times = (cluster.sent(number) - sent) / MOVED
        assert 1 < times < 1.05, "headers of packets, and what hosts ask, are counted"


def test_a_slice_costs_its_bytes(cluster: ServedHosts) -> None:
    cluster.call(0, actions.put_rows, "value/k")
    before = cluster.sent(0)
    cluster.call(1, actions.read_a_slice, "value/k")
    assert cluster.sent(0) - before < MOVED / 8, "beside the bytes, hosts ask and answer all the time"


@pytest.mark.full
def test_a_network_that_is_cut_in_a_transfer_costs_a_wait(cluster: ServedHosts) -> None:
    count = 8
    cluster.call(0, actions.put_several, count)
    cluster.hosts.delay(0, 1, 0.02)  # so that there are transfers to be cut
    with cluster.start(1, actions.read_until_all_have_come, ROOT, count) as reader:
        assert reader.recv() == 0
        cluster.hosts.cut(0, 1)
        time.sleep(2)  # the fault
        cluster.hosts.heal(0, 1)
        assert [reader.recv(LONG) for _ in range(count - 1)] == list(range(1, count))
        assert reader.recv() > 0


@pytest.mark.full
def test_a_client_that_is_killed_in_a_transfer_leaves_nothing_on_either_side(cluster: ServedHosts) -> None:
    """No bytes where it was to lie, and no thread that goes on to send."""
    cluster.call(0, actions.put_rows, "value/k")
    before = cluster.call(1, actions.bytes_left)
    cluster.hosts.delay(0, 1, 0.2)  # so that it is killed in the middle
    sender = cluster.index_process(0)
    threads = _threads(sender)
    with cluster.start(1, actions.fetch, ROOT, "value/k") as reader:
        assert reader.recv() == "begins"
        wait_until(lambda: _threads(sender) > threads, "it sends")
        reader.kill()
        assert reader.wait() == -9
    cluster.hosts.delay(0, 1, 0)
    wait_until(lambda: _threads(sender) == threads, "its thread ends")
    assert cluster.call(1, actions.bytes_left) == before
    assert cluster.call(1, actions.read_in_children, "value/k", 1) == [0, 0]


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
