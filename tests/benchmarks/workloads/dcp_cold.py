"""Checkpoints of torch.distributed.checkpoint whose pages are on the disk: loaded, and rows out of a large tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import pages
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, compare
from tests.benchmarks.peers import same
from tests.benchmarks.peers.checkpoints import Checkpointer, PlainFile, State, remove
from tests.benchmarks.peers.dcp_storages import DcpStorage, FileSystemStorage, HuggingFaceStorage, MemstoreStorage
from tests.benchmarks.report import Absent, Role, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.dcp import ROWS
from tests.benchmarks.workloads.put_get import nbytes, times_faster
from tests.benchmarks.workloads.snapshot import MOST_ROUNDS, TENSORS, able, random_state

KINDS = (MemstoreStorage, FileSystemStorage, HuggingFaceStorage, PlainFile)
READ = "the rows alone, by preadv"


def measure(session: Session) -> Workload:
    side = 256 if session.quick else 1024
    rounds = min(session.rounds, MOST_ROUNDS)
    state = random_state(side)
    size = f"{nbytes(state) >> 20} MiB"
    title = f"A checkpoint of {size}, loaded from a disk by torch.distributed.checkpoint"
    if session.disk is None:
        reason = "no folder with 10 GiB free whose pages can be dropped: name one on a disk with --disk"
        return Workload("dcp-cold", title, "", [], [], absent=[Absent("any of it", reason)])
    with session.started(KINDS, where=session.disk) as (peers, absent):
        load = _compare_loads(peers, state, rounds, f"load of {size} from a disk")
        del state
        rows = _compare_rows(peers, side, rounds, f"{ROWS} rows out of {size} on a disk")
    best = [FileSystemStorage.name, HuggingFaceStorage.name]
    return Workload(
        id="dcp-cold",
        title=title,
        text=f"{TENSORS} float32 tensors of {side:,} x {side:,}, and one tensor of the same size, of which {ROWS} rows "
        "are loaded. Before each call the pages of the checkpoint's files are dropped from memory, outside the time.",
        series=[load, rows],
        goals=[
            *times_faster(load.title, load, 2, best),
            *times_faster(rows.title, rows, 100, best[:1]),
            *times_faster(rows.title, rows, 100, best[1:]),
        ],
        absent=absent,
    )


def _compare_loads(peers: Sequence[Checkpointer], state: State, rounds: int, title: str) -> Series:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    contestants: list[Contestant] = []
    for peer in able(peers, "restore"):
        path = peer.root / "saved"
        peer.save(path, state)
        load = partial(peer.restore, path, target)
        contestants.append(
            _cold(peer.name, peer.role, path, load, rounds, _checked(peer, target, state), peer.settings)
        )
    series = compare("load-cold", title, contestants, rounds=rounds, reference=MemstoreStorage.name)
    for peer in peers:
        remove(peer.root / "saved")
    return series


def _compare_rows(peers: Sequence[Checkpointer], side: int, rounds: int, title: str) -> Series:
    whole = {"w": torch.randn(side * 64, side * 4)}
    target, start = {"w": torch.zeros(ROWS, side * 4)}, side * 32
    wanted = {"w": whole["w"][start : start + ROWS].clone()}
    contestants: list[Contestant] = []
    for peer in peers:
        path = peer.root / "large"
        peer.save(path, whole)
        done = _checked(peer, target, wanted)
        if isinstance(peer, DcpStorage):
            load = partial(peer.rows, path, start, target)
            contestants.append(_cold(peer.name, peer.role, path, load, rounds, done, peer.settings))
        else:
            load = partial(_read, path, start * side * 16, target["w"])
            contestants.append(_cold(READ, "limit", path, load, rounds, done))
    series = compare("rows-cold", title, contestants, rounds=rounds, reference=MemstoreStorage.name)
    for peer in peers:
        remove(peer.root / "large")
    return series


def _cold(
    name: str,
    role: Role,
    path: Path,
    call: Callable[[], object],
    rounds: int,
    after: Callable[[object], None],
    note: str = "",
) -> Contestant:
    """Calls that find none of the files' pages in memory."""
    files = list(_files(path))
    for file in files:
        pages.flush(file)

    def before() -> None:
        for file in files:
            pages.drop(file)
            if pages.are_in_memory(file):
                raise SystemExit(f"{name}: pages of {file} can't be dropped: somebody has them mapped")

    return Contestant(name, role, call, before, after, rounds + WARM_UP_CALLS, note)


def _checked(peer: Checkpointer, target: State, wanted: State) -> Callable[[object], None]:
    """Compares what was loaded, and clears it for the next call."""

    def check(_: Any) -> None:
        if not same(target, wanted):
            raise SystemExit(f"{peer.name}: what was loaded differs from what was saved")
        for tensor in target.values():
            tensor.zero_()

    return check


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else (one for one in path.rglob("*") if one.is_file() and one.stat().st_size)


def _read(path: Path, start: int, target: torch.Tensor) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [memoryview(target.numpy()).cast("B")], start)
    finally:
        os.close(fd)
