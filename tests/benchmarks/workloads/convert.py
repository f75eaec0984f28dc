"""Checkpoints converted from one format to another, beside a copy of the file: in memory and on a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from memstore.convert import convert
from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, compare
from tests.benchmarks.peers.checkpoints import remove
from tests.benchmarks.report import Goal, Role, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most, nbytes
from tests.benchmarks.workloads.snapshot import MOST_ROUNDS, TENSORS, random_state

OURS, COPY = "memstore", "cp of the file"
PAIRS = (("torch", "safetensors"), ("safetensors", "dcp"), ("dcp", "torch"), ("torch", "snapshot"))


def measure(session: Session) -> Workload:
    side = 256 if session.quick else 1024
    state = random_state(side)
    size = f"{nbytes(state) >> 20} MiB"
    rounds = min(session.rounds, MOST_ROUNDS)
    series: list[Series] = []
    goals: list[Goal] = []
    places = [(session.root / "convert", "in memory")]
    if session.disk:
        places.append((session.disk / "convert", "on a disk"))
    for root, where in places:
        root.mkdir()
        sources = _sources(root, state)
        for source, target in PAIRS:
            found = _compare(root, sources, source, target, rounds, f"{size} from {source} to {target} {where}")
            series.append(found)
            goals.append(at_most(f"{size} from {source} to {target} {where}", found, 1.2, COPY))
        remove(root)
    return Workload(
        id="convert",
        title=f"A checkpoint of {size}, converted",
        text=f"{TENSORS} float32 tensors of {side:,} x {side:,}. A conversion reads back what it has written, compares "
        "it with the source, and ends when it is on the disk; the copy beside it is of the same bytes, by `cp`, and is "
        "synced, and is not compared.",
        series=series,
        goals=goals,
        notes=[] if session.disk else ["There is no disk to measure: all was converted in memory."],
    )


def _sources(root: Path, state: dict[str, torch.Tensor]) -> dict[str, Path]:
    torch.save(state, root / "torch")
    found = {"torch": root / "torch"}
    for format in ("safetensors", "dcp"):
        found[format] = root / format
        convert(found["torch"], found[format], target_as=format)
    return found


class _Converting:
    """Calls that each make a new target, which is removed outside of the time."""

    def __init__(self, root: Path, name: str, call: Callable[[Path], Any]) -> None:
        self._root, self._name, self._call = root, name, call
        self._numbers = count()
        self._path = root

    def contestant(self, role: Role, rounds: int, nbytes: int, note: str) -> Contestant:
        def before() -> None:
            self._path = self._root / f"made-{next(self._numbers)}"
            back_memory(nbytes)

        return Contestant(
            self._name,
            role,
            lambda: self._call(self._path),
            before,
            lambda _: remove(self._path),
            rounds + WARM_UP_CALLS,
            note,
        )


def _compare(root: Path, sources: dict[str, Path], source: str, target: str, rounds: int, title: str) -> Series:
    path = sources[source]
    file = path if path.is_file() else max(path.iterdir(), key=os.path.getsize)
    ours = _Converting(root, OURS, lambda made: convert(path, made, source_as=source, target_as=target))
    copied = _Converting(root, COPY, lambda made: _copy(file, made))
    size = file.stat().st_size
    contestants = [
        ours.contestant("memstore", rounds, size, "compared with the source, and synced"),
        copied.contestant("limit", rounds, size, "synced"),
    ]
    id = f"convert-{source}-{target}-{'memory' if 'memory' in title else 'disk'}"
    return compare(id, title, contestants, rounds=rounds, reference=OURS)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", source, target], check=True)
    fd = os.open(target, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
