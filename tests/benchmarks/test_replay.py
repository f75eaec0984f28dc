"""The benchmark of replay buffers: its laps, and that it would find a torn row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.document import markdown
from tests.benchmarks.peers.replay import PlainCopy, StoreBuffer
from tests.benchmarks.report import FORMAT, Figure, Report, Series, Workload, exactly
from tests.benchmarks.table import amount
from tests.benchmarks.workloads.by_writers import STAMPS, Plan, Work, homes, take_laps, torn_rows
from tests.benchmarks.workloads.replay import BATCH_BYTES, BUFFER_BYTES, SIZES, plan_of

PLAN = Plan(width=8, capacity=64, written=4, sampled=16)


class _Torn(StoreBuffer):
    """Its samples have one row of two writes, in an interpreter that has been named."""

    @classmethod
    def python(cls) -> str | None:
        return sys.executable

    def sample(self, count: int) -> np.ndarray[Any, Any]:
        rows = super().sample(count)
        rows[3, -1] += 1
        return rows


@pytest.mark.full
def test_writers_and_a_sampler_do_what_they_are_told(tmp_path: Path) -> None:
    peers = [kind(tmp_path / kind.__name__) for kind in (StoreBuffer, _Torn, PlainCopy)]
    for peer in peers:
        peer.root.mkdir()
    with homes(peers, PLAN, writers=2) as found:
        sampled = take_laps(found[:2], Work(2, 0.1, samples=True), rounds=2)
        added = take_laps(found[:1], Work(1, 0.1, single=True), rounds=1)
        copied = take_laps(found[2:], Work(1, 0.1), rounds=1)
    whole, torn = ([lap.sampled for lap in laps] for laps in sampled)
    assert all(one and one.rows and not one.torn for one in whole), whole
    assert all(one and one.torn == one.rows // PLAN.sampled for one in torn), torn
    for lap in (*sampled[0], *copied[0]):
        assert all(one.rows == one.calls * PLAN.written > 0 for one in lap.written), lap
    assert [len(lap.written) for lap in (*sampled[0], *added[0])] == [2, 2, 1]
    assert all(one.rows == one.calls for one in added[0][0].written) and added[0][0].sampled is None


def test_rows_of_two_writes_are_torn() -> None:
    rows = np.repeat(np.arange(5), 1000).reshape(5, 1000)
    assert torn_rows(rows) == 0
    for row, part in ((0, slice(None, 500)), (2, slice(-1, None)), (3, slice(1, None)), (4, slice(None, 1))):
        rows[row, part] = 9
    assert torn_rows(rows) == 4
    assert torn_rows(rows[:, :1]) == 0


def test_writers_have_no_number_in_common() -> None:
    numbers = [int(batch[0, 0]) for writer in range(4) for batch in PLAN.batches(writer)]
    assert len(set(numbers)) == 4 * STAMPS and 0 not in numbers


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_keeps_its_bounds(size: int) -> None:
    plan = plan_of(size)
    assert plan.width * 8 == size and plan.capacity * size <= BUFFER_BYTES
    assert 0 < plan.written * size <= BATCH_BYTES and 4 * plan.written <= plan.sampled <= plan.capacity // 4


def test_of_rates_more_is_better() -> None:
    figures = [Figure("memstore", "memstore", exactly(2000.0), 9), Figure("Peer", "peer", exactly(12_345.0), 9)]
    workload = Workload("w", "A thing", "", [Series("rows", "rows sampled a second", "n/s", figures)], [])
    page = markdown(Report(FORMAT, "2026-01-01", False, {"cpu": "a"}, {}, [workload]), "plots")
    assert "| rows sampled a second | 2000/s | Peer | 12,345/s | 0.162x |" in page
    assert amount(0.5, "n/s") == "0.5/s"
