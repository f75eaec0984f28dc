"""What a process pays in memory: for values that it got and holds, and while it puts a large one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import memstore
from tests.benchmarks.processes import in_new_process
from tests.benchmarks.report import Beside, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session

KIB, MIB = 1 << 10, 1 << 20
LEAF_BYTES = 64 * KIB
PAGE_TABLE_ENTRY = 8


class Held(NamedTuple):
    """What the gets of one value added to a process, in bytes."""

    leaves: int
    private: int  # anonymous memory: heap, and pages that were copied on write
    page_tables: int
    private_after_sum: int  # once every byte was read
    mapped: int  # bytes of tensors that all that gave


class Used(NamedTuple):
    anonymous: int
    page_tables: int

    @classmethod
    def now(cls) -> Used:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return cls(*(int(fields[name].split()[0]) * KIB for name in ("RssAnon", "VmPTE")))


# Prints the highest RssAnon of a process, in KiB, looked at every 0.2 ms until standard input ends. A process of its
# own: a thread would have to wait for the lock of the interpreter that it watches.
WATCHER = """
import select, sys, time
peak = 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.0002)[0]:
    with open(f"/proc/{sys.argv[1]}/status") as file:
        peak = max(peak, next(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
print(peak)
"""


def measure(session: Session) -> Workload:
    root = str(session.root / "memory")
    gets, dict_gets, large = (200, 20, 64 * MIB) if session.quick else (1000, 100, 512 * MIB)
    with memstore.open(root) as store:
        store.put("leaf", torch.randn(LEAF_BYTES // 4))
        store.put("dict", {f"layers.{i}.weight": torch.randn(64, 64) for i in range(300)})
    one = in_new_process(_hold, root, "leaf", gets)
    many = in_new_process(_hold, root, "dict", dict_gets)
    extra = in_new_process(_peak_of_put, root, large)
    figures = [
        _figure(f"{gets} gets of a tensor of 64 KiB, a leaf", one.private / one.leaves),
        _figure("the same after every byte was read, a leaf", one.private_after_sum / one.leaves),
        _figure("the same, page tables, a get", one.page_tables / gets),
        _figure(f"{dict_gets} gets of 300 tensors, a leaf", many.private / many.leaves),
        _figure("the same after every byte was read, a leaf", many.private_after_sum / many.leaves),
        _figure("the same, page tables, a get", many.page_tables / dict_gets),
        _figure(f"a put of {large // MIB} MiB, beside the value and the segment", extra),
    ]
    return Workload(
        id="memory",
        title="Memory",
        text="What a new process's anonymous memory (RssAnon) grows by while it holds what it got, for each leaf, "
        f"before and after all of it was read; and what a put of {large // MIB} MiB adds to it at its highest.",
        series=[Series("memory", "bytes", "B", figures)],
        goals=[
            _bytes("held get, 1 leaf of 64 KiB, a leaf", one.private_after_sum / one.leaves, 1.5 * KIB),
            _bytes("held get, 300 leaves, a leaf", many.private_after_sum / many.leaves, 1.5 * KIB),
            _bytes(
                "held get, 300 leaves: page tables, a get",
                many.page_tables / dict_gets,
                2 * many.mapped / dict_gets / 4096 * PAGE_TABLE_ENTRY + 4 * 4096,
                Beside("8 bytes a 4 KiB page", many.mapped / dict_gets / 4096 * PAGE_TABLE_ENTRY),
            ),
            _bytes(f"put of {large // MIB} MiB, beside value and segment", extra, 8 * MIB),
        ],
        notes=[
            "A held get is one mapping (of 65,530 that Linux gives a process) and no file descriptor.",
            "The goal for page tables is twice what 8 bytes for each 4 KiB page of the value come to, plus 16 KiB.",
        ],
    )


def _figure(name: str, value: float) -> Figure:
    return Figure(name, "memstore", exactly(value), 1)


def _bytes(what: str, found: float, goal: float, limit: Beside | None = None) -> Goal:
    return Goal(what, exactly(found), "<=", goal, "B", limit=limit)


def _hold(root: str, key: str, count: int) -> Held:
    store = memstore.open(root)
    warm = [_tensors(store.get(key)) for _ in range(3)]  # imports, caches, threads
    sum(float(tensor.sum()) for tensor in warm[0])
    leaves, mapped = len(warm[0]), sum(tensor.nbytes for tensor in warm[0])
    del warm
    gc.collect()
    before = Used.now()
    held = [store.get(key) for _ in range(count)]
    after = Used.now()
    total = sum(float(tensor.sum()) for value in held for tensor in _tensors(value))
    read = Used.now()
    if total == 0.0:
        raise SystemExit(f"{key}: what was got is zero")
    return Held(
        leaves * count,
        after.anonymous - before.anonymous,
        read.page_tables - before.page_tables,
        read.anonymous - before.anonymous,
        mapped * count,
    )


def _peak_of_put(root: str, nbytes: int) -> int:
    """How far anonymous memory goes up during a put: a second copy of the value would be there. The segment is not."""
    store = memstore.open(root)
    value = torch.randn(nbytes // 4)
    store.put("warm-up", value[: MIB // 4])
    command = [sys.executable, "-c", WATCHER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        before = Used.now().anonymous
        store.put("large", value)
        peak, _ = watcher.communicate("")
    return max(0, int(peak) * KIB - before)


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]
