"""A tensor of 256 MiB: what a get costs when nothing is copied, and what its bytes cost when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from tests.benchmarks.measure import Contestant, compare, spread, take_turns
from tests.benchmarks.peers import Peer
from tests.benchmarks.peers.limits import PlainFile
from tests.benchmarks.peers.memmap import Memmap
from tests.benchmarks.peers.ray_objects import RayObjects
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store, StoreThatVerifies
from tests.benchmarks.peers.torch_save import TorchSave
from tests.benchmarks.report import Beside, Figure, Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import KEPT, at_most, check, compare_gets, keep

PEERS = (Store, StoreThatVerifies, Memmap, SafetensorsFile, TorchSave, RayObjects, PlainFile)
BY_SIZE = (Store, Memmap, PlainFile)
RESIDENT = "a tensor of the process's own"
FIRST = "memstore, first after the put"
MIB = 1 << 20


def measure(session: Session) -> Workload:
    value = torch.randn((64 if session.quick else 256) * MIB // 4)
    size = f"{value.nbytes // MIB} MiB"
    with session.started(PEERS) as (peers, absent):
        check(peers, value)
        call = compare_gets(session, peers, value, title=f"get of {size}, the call alone")
        summed = _summed(session, peers, value, title=f"get of {size}, until summed")
        check(peers, value)
    by_size = _by_size(session)
    return Workload(
        id="large-get",
        title=f"A get of {size}",
        text=f"One float32 tensor of {size}. Each get makes a mapping of its own, so each sum meets its bytes for the "
        "first time; one row has the first get and sum after a fresh put.",
        series=[call, summed, by_size],
        goals=[
            at_most(f"get of {size}, the call", call, 2.4, PlainFile.name),
            _by_size_goal(by_size),
            _sum_goal(f"get of {size} until summed, against {RESIDENT}", summed, Store.name),
            _sum_goal("the same, first time after a put", summed, FIRST),
        ],
        absent=absent,
        notes=[
            "The process's own tensor lies in pages of 4 KiB, as torch allocates it; a segment in huge pages may be "
            "summed faster."
        ],
    )


def _by_size_goal(series: Series) -> Goal:
    """The goal of the call alone, for the size at which it is missed most."""
    pairs = [
        (figure, series.figure(PlainFile.name, figure.x)) for figure in series.figures if figure.role == "memstore"
    ]
    worst, plain = max(pairs, key=lambda pair: pair[0].value.median / pair[1].value.median)
    found = spread([worst.value.median / plain.value.median])
    limit = Beside(PlainFile.name, plain.value.median)
    return Goal(f"get, the call, slowest size ({_size(worst.x)})", found, "<=", 2.4, "x", limit=limit)


def _sum_goal(what: str, summed: Series, name: str) -> Goal:
    ratio = summed.figure(name).ratio
    assert ratio is not None
    return Goal(what, ratio, "<=", 1.1, "x", limit=Beside(RESIDENT, summed.figure(RESIDENT).value.median))


def _summed(session: Session, peers: list[Peer], value: torch.Tensor, *, title: str) -> Series:
    contestants = [
        Contestant(peer.name, peer.role, _sum_of_get(peer, KEPT), note=peer.settings)
        for peer in peers
        if peer.role != "limit"
    ]
    contestants.append(Contestant(RESIDENT, "limit", lambda: float(value.sum())))
    contestants.append(_first_sum(next(peer for peer in peers if isinstance(peer, Store)), value))
    return compare("summed", title, contestants, rounds=session.rounds, reference=RESIDENT, burst_seconds=0.1)


def _sum_of_get(peer: Peer, key: str) -> Callable[[], float]:
    def call() -> float:
        return float(_tensor(peer.get(key)).sum())

    return call


def _first_sum(store: Peer, value: torch.Tensor) -> Contestant:
    """Puts into a new file before each get, so that nobody has read these pages."""

    def before() -> None:
        store.drop("first")
        keep(store, "first", value)

    return Contestant(FIRST, "memstore", _sum_of_get(store, "first"), before=before, most=1)


def _tensor(found: Any) -> torch.Tensor:
    return next(iter(found.values())) if isinstance(found, dict | TensorDictBase) else found


def _by_size(session: Session) -> Series:
    """Does the call cost the same whatever the size? 1 MiB to 1 GiB."""
    figures: list[Figure] = []
    sizes = (1, 16, 64) if session.quick else (1, 4, 16, 64, 256, 1024)
    with session.started(BY_SIZE) as (peers, _):
        tensors = {size: torch.randn(size * MIB // 4) for size in sizes}
        contestants: list[tuple[Peer, int, Contestant]] = []
        for size, tensor in tensors.items():
            for peer in peers:
                key = f"{size}-mib"
                keep(peer, key, tensor)
                call = _get(peer, key)
                contestants.append((peer, size, Contestant(f"{peer.name} {size}", peer.role, call)))
        plain = [contestant for _, _, contestant in contestants]
        for (peer, size, _), sample in zip(contestants, take_turns(plain, rounds=session.rounds), strict=True):
            calls = sample.all()
            figures.append(Figure(peer.name, peer.role, spread(calls), len(calls), x=size * MIB))
    return Series("by-size", "get by size, the call alone", "s", figures, x_title="size of the tensor")


def _get(peer: Peer, key: str) -> Callable[[], object]:
    return lambda: peer.get(key)


def _size(nbytes: float | None) -> str:
    return f"{(nbytes or 0) / MIB:.0f} MiB"
