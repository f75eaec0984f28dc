"""Rows of a data set one by one, as a training loop takes them: a TensorDict of each, and what its leaves hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers.rows import KEY, MemmapRows, RowPeer, StoreRows
from tests.benchmarks.report import Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import times_faster

ROWS, WIDTH, TAKEN = 4_000, 64, 32
LEAVES = (1, 5)
IN_MEMORY = "a TensorDict of tensors"
USES: dict[str, Callable[[Any], object]] = {
    "taken": lambda row: row,
    "summed": lambda row: [leaf.sum() for leaf in row.values()],
    "cloned": lambda row: row.clone(),
}
LEAST = {"taken": 1.0, "summed": 1.0, "cloned": 1.0}  # times as fast; each operator on a lazy leaf costs 4 us


def measure(session: Session) -> Workload:
    series: list[Series] = []
    goals: list[Goal] = []
    for leaves in LEAVES:
        data = TensorDict({f"leaf-{i}": torch.rand(ROWS, WIDTH) for i in range(leaves)}, batch_size=[ROWS])
        with session.started((StoreRows, MemmapRows)) as (peers, absent):
            _open(peers, data)
            for use in USES:
                series.append(_compare(session, peers, data, leaves, use))
                goals += times_faster(series[-1].title, series[-1], LEAST[use])
            for peer in peers:
                peer.shut()
    return Workload(
        id="row",
        title="Rows, one by one",
        text=f"{TAKEN} rows of a TensorDict of {ROWS:,}, each leaf {WIDTH} float32: `td[i]` of a "
        "view or a memory map that stays open, the sum of each leaf of it, and a clone of it.",
        series=series,
        goals=goals,
        absent=absent,
    )


def _open(peers: Sequence[RowPeer], data: TensorDict) -> None:
    for peer in peers:
        peer.put(KEY, data)
        peer.open()
        if not (peer.row(7).clone() == data[7]).all():
            raise SystemExit(f"{peer.name}: a row differs from what was put")


def _compare(session: Session, peers: Sequence[RowPeer], data: TensorDict, leaves: int, use: str) -> Series:
    contestants = [Contestant(peer.name, peer.role, _rows(peer.row, USES[use])) for peer in peers]
    contestants.append(Contestant(IN_MEMORY, "limit", _rows(data.__getitem__, USES[use])))
    title = f"{TAKEN} rows of {leaves} {'leaf' if leaves == 1 else 'leaves'}, {use}"
    return compare(f"{use}-{leaves}", title, contestants, rounds=session.rounds, reference="memstore")


def _rows(row: Callable[[int], Any], use: Callable[[Any], object]) -> Callable[[], object]:
    return lambda: [use(row(i)) for i in range(0, ROWS, ROWS // TAKEN)]
