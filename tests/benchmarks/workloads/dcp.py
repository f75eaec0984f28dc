"""Checkpoints of torch.distributed.checkpoint by several storages: saved, loaded, and rows out of a large tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers.checkpoints import WarmMemory, remove
from tests.benchmarks.peers.dcp_storages import DcpStorage, FileSystemStorage, HuggingFaceStorage, MemstoreStorage
from tests.benchmarks.report import Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most, nbytes, times_faster
from tests.benchmarks.workloads.snapshot import (
    MOST_ROUNDS,
    TENSORS,
    able,
    check_saves,
    compare_async,
    compare_restores,
    compare_saves,
    random_state,
)

KINDS = (MemstoreStorage, FileSystemStorage, HuggingFaceStorage, WarmMemory)
ROWS = 64
BY = "by DCP"  # in the headings: `snapshot` has the same by memstore's own snapshots


def measure(session: Session) -> Workload:
    side = 256 if session.quick else 1024
    state, target = random_state(side), random_state(side)
    size = f"{nbytes(state) >> 20} MiB"
    rounds = min(session.rounds, MOST_ROUNDS)
    series: list[Series] = []
    with session.started(KINDS) as (peers, absent):
        check_saves(peers, state, target, "save")
        save = compare_saves(peers, state, rounds, "save", f"save of {size} to memory, {BY}")
        staged, complete = compare_async(peers, state, rounds, f"{size}, {BY}")
        load = compare_restores(peers, state, target, rounds, f"load of {size} from memory")
        narrow = _compare_rows([peer for peer in able(peers, "rows") if isinstance(peer, DcpStorage)], side, rounds)
        series += [save, load, narrow, staged, complete]
    with session.started(KINDS, where=session.disk) as (peers, _):
        check_saves(peers, state, target, "save_durably")
        durable = compare_saves(peers, state, rounds, "save_durably", f"durable save of {size} to a disk, {BY}")
        series.append(durable)
    best = [FileSystemStorage.name, HuggingFaceStorage.name]
    return Workload(
        id="dcp",
        title=f"A checkpoint of {size}, by torch.distributed.checkpoint",
        text=f"{TENSORS} float32 tensors of {side:,} x {side:,}, by torch's save, async_save and load in one process, "
        f"which differ in the storage. Of one tensor of the same size, {ROWS} rows are loaded, by a planner that wants "
        "no more.",
        series=series,
        goals=[
            *times_faster(f"save of {size} to memory", save, 2, best),
            *times_faster(f"durable save of {size}", durable, 2, best),
            *times_faster(f"load of {size} from memory", load, 2, best),
            *times_faster(f"{ROWS} rows out of {size}", narrow, 100, [FileSystemStorage.name]),
            *times_faster(f"{ROWS} rows out of {size}", narrow, 100, [HuggingFaceStorage.name]),
            at_most(f"asynchronous save of {size}, {BY}, until the tensors may change", staged, 1.2, WarmMemory.name),
        ],
        absent=absent,
        notes=[] if session.disk else ["There is no disk to measure: what is durable was saved to memory."],
    )


def _compare_rows(peers: Sequence[DcpStorage], side: int, rounds: int) -> Series:
    """Of one tensor that is as large as all of the state."""
    whole = {"w": torch.randn(side * 64, side * 4)}
    target, start = {"w": torch.zeros(ROWS, side * 4)}, side * 32
    contestants: list[Contestant] = []
    for peer in peers:
        path = peer.root / "large"
        peer.save(path, whole)
        peer.rows(path, start, target)
        if not torch.equal(target["w"], whole["w"][start : start + ROWS]):
            raise SystemExit(f"{peer.name}: the rows that were loaded are others than those that were saved")
        contestants.append(
            Contestant(peer.name, peer.role, partial(peer.rows, path, start, target), note=peer.settings)
        )
    size = f"{nbytes(whole) >> 20} MiB"
    series = compare("rows", f"{ROWS} rows out of {size}", contestants, rounds=rounds, reference=MemstoreStorage.name)
    for peer in peers:
        remove(peer.root / "large")
    return series
