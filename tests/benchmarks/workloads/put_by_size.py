"""The first put of a tensor, by size: its bandwidth beside a memcpy's and beside plain writes to a new file."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Contestant, spread, take_turns
from tests.benchmarks.peers import Peer, same
from tests.benchmarks.peers.limits import Memcpy, PlainFile
from tests.benchmarks.peers.memmap import Memmap
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import Absent, Figure, Goal, Series, Spread, Workload
from tests.benchmarks.session import FRESH_BYTES, Session
from tests.benchmarks.workloads.put_get import read

PEERS = (Store, Memmap, SafetensorsFile, PlainFile, Memcpy)
KIB, MIB = 1 << 10, 1 << 20
SIZES = (1 * KIB, 16 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def measure(session: Session) -> Workload:
    sizes = [size for size in SIZES if not session.quick or size <= 16 * MIB]
    figures: list[Figure] = []
    absent: list[Absent] = []
    for size in sizes:  # a size at a time: their files are removed in between
        with session.started(PEERS) as (peers, missing):
            figures += _puts(session, peers, torch.randn(size // 4))
            absent = missing
    title, x_title = "first put by size", "size of the tensor"
    series = Series("put-by-size", title, "B/s", figures, reference=Store.name, x_title=x_title)
    largest = sizes[-1]
    ratio = series.figure(PlainFile.name, largest).ratio
    assert ratio is not None
    return Workload(
        id="put-by-size",
        title="First put, by size",
        text="Puts of one float32 tensor under new keys, each until it is published; a memcpy into warm memory and a "
        "plain write through a mapping of a new file beside it.",
        series=[series],
        goals=[Goal(f"first put of {largest // MIB} MiB, against a plain mapped file", ratio, ">=", 3, "x")],
        absent=absent,
        notes=["The goal of 3x a plain mmap write needs huge pages for shared memory (Linux 6.1 or later)."],
    )


def _puts(session: Session, peers: list[Peer], value: torch.Tensor) -> list[Figure]:
    contestants = [_put(peer, value) for peer in peers]
    rounds = max(5, min(10, session.rounds, FRESH_BYTES // value.nbytes))
    samples = take_turns(contestants, rounds=rounds)
    for peer in peers:
        if not isinstance(peer, Memcpy) and not same(peer.get("0"), value):
            raise SystemExit(f"{peer.name}: what was got differs from what was put")
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


def _put(peer: Peer, value: torch.Tensor) -> Contestant:
    numbers = count()
    ready: list[Any] = [None, ""]

    def before() -> None:
        back_memory(value.nbytes)
        ready[:] = peer.ready(value), str(next(numbers))
        read(value)

    return Contestant(
        name=peer.name,
        role=peer.role,
        call=lambda: peer.put(ready[1], ready[0]),
        before=before,
        most=max(6, FRESH_BYTES // value.nbytes),
    )


def _rate(seconds: list[float], nbytes: int) -> Spread:
    return spread([nbytes / time for time in seconds])
