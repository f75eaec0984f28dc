"""Benchmarks between hosts: what is fetched is compared, and plain sockets bring what the others do."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import on_hosts
from tests.benchmarks.peers import Value, far_sockets
from tests.benchmarks.peers.far import ROW, Work, expected, take_each, value_of
from tests.benchmarks.peers.far_readers import FarReaders
from tests.benchmarks.peers.far_store import FarStore
from tests.benchmarks.session import Session
from tests.benchmarks.workloads import broadcast, remote, remote_rdma, remote_small, served
from tests.benchmarks.workloads.by_hosts import take_turns
from tests.support.hosts import need_hosts

WORKS = (
    Work("small", 1 << 10),
    Work("large", 2 << 20),
    Work("rows", 2 << 20, picks=100),
    Work("state-dict", 4 << 10, leaves=300),
)
PUT = Work("put", 64 << 10, is_put=True)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.id)
def test_what_was_fetched_is_compared(work: Work) -> None:
    take_each(lambda work, number, _: expected(work, number), work, [1, 2], check=True)
    with pytest.raises(ValueError, match=f"{work.id}: what was got is not value 2"):
        take_each(lambda work, number, _: expected(work, 1), work, [1, 2], check=True)


def test_no_two_values_are_alike_and_rows_are_other_ones_each_time() -> None:
    first, second = value_of(WORKS[0], 1), value_of(WORKS[0], 2)
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert not bool((first == second).any())
    rows = expected(WORKS[2], 1)
    assert isinstance(rows, torch.Tensor) and rows.shape == (100, ROW // 8)


@pytest.mark.parametrize("work", [*WORKS, PUT], ids=lambda work: work.id)
def test_plain_sockets_bring_what_is_asked(work: Work) -> None:
    far_sockets.connect("127.0.0.1", far_sockets.listen("127.0.0.1"))
    far_sockets.hold(work, 3)
    (taken,) = far_sockets.take(work, [3], True)
    assert 0 < taken.call <= taken.used


def test_a_call_is_timed_without_what_is_made_for_it() -> None:
    made: list[object] = []

    def call(work: Work, number: int, ready: object) -> Value | None:
        made.append(ready)
        return None

    take_each(call, PUT, [1], check=True)
    take_each(call, WORKS[2], [1], check=True)
    assert [type(one) for one in made] == [torch.Tensor, torch.Tensor]


def test_where_there_can_be_no_hosts_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(on_hosts, "why_unavailable", lambda: "there is no command ip")
    session = Session(tmp_path_factory.mktemp("bench"), quick=True)
    for workload in (broadcast, remote, remote_rdma, remote_small, served):
        found = workload.measure(session)
        assert [one.reason for one in found.absent] == ["there is no command ip"]
        assert not found.series and not found.goals


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_store_brings_values_from_host_to_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each burst is compared with its source: it raises if one differs."""
    need_hosts()
    session = Session(tmp_path_factory.mktemp("bench"), quick=True)
    with session.until_end:
        hosts = on_hosts.two_hosts(session)
        with session.started([FarStore], hosts) as ((store,), _):
            for work in (*WORKS, PUT):
                laps = take_turns(work, [store], rounds=1)
                assert all(seconds > 0 for seconds in laps.calls()[0].all())
            assert store.asked(WORKS[3], 7).messages == 1
            store.offer(WORKS[1], [8])
            readers = FarReaders(hosts.process_on(on_hosts.READER), 3)
            before = store.owner.sent_bytes()
            readers.read(WORKS[1], 8, 3, check=True)
            assert store.owner.sent_bytes() - before < 1.1 * WORKS[1].moved, "one value for all of them"
            readers.close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_broadcast_is_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each get is compared with its source."""
    need_hosts()
    found = broadcast.measure_with(3, 4 << 20, 1)
    sent = next(goal for goal in found.goals if "sent" in goal.what)
    assert sent.found.median < 3.5 and not found.absent
