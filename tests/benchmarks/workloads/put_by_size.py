"""Puts of a tensor, by size, into new files and into files used again: bandwidth, beside memcpy and plain writes."""

from __future__ import annotations

import msgspec
import torch

from tests.benchmarks.measure import spread, take_turns
from tests.benchmarks.peers import Peer
from tests.benchmarks.peers.limits import Memcpy, PlainFile
from tests.benchmarks.peers.memmap import Memmap, MemmapUpdate
from tests.benchmarks.peers.safetensors_file import SafetensorsRenamed
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import Absent, Figure, Goal, Series, Spread, Workload
from tests.benchmarks.session import FRESH_BYTES, Session
from tests.benchmarks.table import amount
from tests.benchmarks.workloads.put_get import check, put_contestant

PEERS = (Store, Memmap, MemmapUpdate, SafetensorsRenamed, PlainFile, Memcpy)
NEW_FILE = "memstore, new file"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (1 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MEDIUM = 4 * MIB  # up to here, each put is to be faster than a file of safetensors
ROUNDS = 6
BURST = 0.01  # seconds


def measure(session: Session) -> Workload:
    first: list[Figure] = []
    again: list[Figure] = []
    absent: list[Absent] = []
    for size in SIZES[: 7 if session.quick else None]:  # a size at a time: their files are removed in between
        value = torch.randn(size // 4)
        with session.started(PEERS) as (peers, missing):
            absent = missing
            stored = [peer for peer in peers if not isinstance(peer, Memcpy)]
            check(stored, value)
            new = [peer for peer in peers if not isinstance(peer, MemmapUpdate)]  # a first put of it is Memmap's
            first += _puts(session, new, value, fresh=True)
            again += _puts(session, peers, value, fresh=False)
            check(stored, value)
    beside = [
        msgspec.structs.replace(figure, name=NEW_FILE, ratio=None) for figure in first if figure.role == "memstore"
    ]
    return Workload(
        id="put-by-size",
        title="Puts, by size",
        text="Puts of one float32 tensor, each until it is published: into new space (a new key; the value before it "
        "is removed and its space given back), and again and again under one key. memcpy is a copy into warm memory.",
        series=[
            _series("first", "first put, by size", first),
            _series("again", "put under the same key, by size", again + beside),
        ],
        goals=[*_goals("first put", first), *_goals("put under the same key", again)],
        absent=absent,
    )


def _goals(what: str, figures: list[Figure]) -> list[Goal]:
    """Bandwidths, whose ratios are times: how often a put fits into the time of `save_file` and a rename."""
    return [
        Goal(f"{what} of {amount(figure.x, 'B')}, against {figure.name}", figure.ratio, ">=", 1.0, "x")
        for figure in figures
        if figure.name == SafetensorsRenamed.name and figure.ratio is not None and figure.x and figure.x <= MEDIUM
    ]


def _series(id: str, title: str, figures: list[Figure]) -> Series:
    return Series(id, title, "B/s", figures, reference=Store.name, x_title="size of the tensor")


def _puts(session: Session, peers: list[Peer], value: torch.Tensor, *, fresh: bool) -> list[Figure]:
    contestants = [put_contestant(session, peer, value, fresh=fresh) for peer in peers]
    rounds = max(5, min(ROUNDS, session.rounds, FRESH_BYTES // value.nbytes))
    samples = take_turns(contestants, rounds=rounds, burst_seconds=BURST)
    ours = next(sample for peer, sample in zip(peers, samples, strict=True) if isinstance(peer, Store))
    return [
        Figure(
            contestant.name,
            contestant.role,
            _rate(sample.all(), value.nbytes),
            len(sample.all()),
            ratio=sample.ratio_to(ours),
            x=value.nbytes,
        )
        for contestant, sample in zip(contestants, samples, strict=True)
    ]


def _rate(seconds: list[float], nbytes: int) -> Spread:
    return spread([nbytes / time for time in seconds])
