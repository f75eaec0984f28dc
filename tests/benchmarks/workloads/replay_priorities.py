"""Samples by priorities out of many rows, and changes of priorities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers.priorities import SHAPES, CpprbAlone, CpprbPriorities, PriorityPeer, Rows, StorePriorities
from tests.benchmarks.report import Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most

ROWS, FEW_ROWS, SAMPLED = 1_000_000, 20_000, 256
KINDS: tuple[type[PriorityPeer], ...] = (StorePriorities, CpprbPriorities, CpprbAlone)
TIMES = 1.5  # of cpprb's time: the goal


def measure(session: Session) -> Workload:
    count = FEW_ROWS if session.quick else ROWS
    generator = np.random.default_rng(0)
    rows = {name: generator.random((count, width), np.float32) for name, width in SHAPES.items()}
    priorities = generator.random(count) + 0.01
    with session.started(KINDS) as (peers, absent):
        for peer in peers:
            peer.fill(rows, priorities)
            check(peer, rows)
        sampled = _samples(session, peers, count)
        changed = _changes(session, peers, count)
        for peer in peers:
            check(peer, rows)
    return Workload(
        id="replay-priorities",
        title="Samples by priorities",
        text=f"{SAMPLED} rows of {4 * sum(SHAPES.values())} bytes in {len(SHAPES)} tensors, by random priorities, out "
        f"of {count:,}; and new priorities for {SAMPLED} rows. One process, one thread.",
        series=[sampled, changed],
        goals=_goals(sampled, count),
        absent=absent,
    )


def _samples(session: Session, peers: Sequence[PriorityPeer], count: int) -> Series:
    contestants = [
        Contestant(peer.name, peer.role, lambda peer=peer: peer.sample(SAMPLED), note=peer.settings) for peer in peers
    ]
    title = f"sample of {SAMPLED} out of {count:,} rows by priorities"
    return compare("sample", title, contestants, rounds=session.rounds, reference="memstore")


def _changes(session: Session, peers: Sequence[PriorityPeer], count: int) -> Series:
    contestants = [_changer(peer) for peer in peers]
    title = f"new priorities for {SAMPLED} of {count:,} rows"
    return compare("update", title, contestants, rounds=session.rounds, reference="memstore")


def _changer(peer: PriorityPeer) -> Contestant:
    generator, index = np.random.default_rng(1), [np.empty(0, np.int64)]

    def before() -> None:
        index[0] = peer.index_of(peer.sample(SAMPLED))

    def call() -> Any:
        return peer.update(index[0], priorities)

    priorities = generator.random(SAMPLED) + 0.01
    return Contestant(peer.name, peer.role, call, before=before, note=peer.settings)


def check(peer: PriorityPeer, rows: Rows) -> None:
    """Ends the run if a sample has other rows than its numbers say."""
    sample = peer.sample(SAMPLED)
    index = peer.index_of(sample)
    for name, found in peer.rows_of(sample).items():
        if not np.array_equal(found, rows[name][index]):
            raise SystemExit(f"{peer.name}: {name!r} of the rows that were sampled differs from what was put")


def _goals(sampled: Series, count: int) -> list[Goal]:
    best = sampled.best("peer")
    if best is None:
        return []
    return [at_most(f"sample of {SAMPLED} of {count:,} rows by priorities", sampled, TIMES, best.name)]
