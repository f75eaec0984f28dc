"""What a new process pays before its first value: import, open, and the first get, when no cache is warm."""

from __future__ import annotations

import torch

import memstore
from tests.benchmarks.measure import spread
from tests.benchmarks.processes import printed_by
from tests.benchmarks.report import Beside, Figure, Goal, Role, Series, Workload
from tests.benchmarks.session import Session

IMPORT = """
import sys, time
start = time.perf_counter()
import memstore
print(time.perf_counter() - start, "torch" in sys.modules)
"""
FIRST_GET = """
import sys, time
start = time.perf_counter()
import torch
loaded = time.perf_counter()
import tensordict, memstore
imported = time.perf_counter()
store = memstore.open(sys.argv[1])
opened = time.perf_counter()
value = store.get("dict")
got = time.perf_counter()
assert len(value) == 300
print(loaded - start, opened - imported, got - opened)
"""
MEMSTORE, TORCH = "import memstore", "import torch"


def measure(session: Session) -> Workload:
    root = str(session.root / "start")
    with memstore.open(root) as store:
        store.put("dict", {f"layers.{i}.weight": torch.randn(64, 64) for i in range(300)})
    alone: list[float] = []
    torch_alone: list[float] = []
    opened: list[float] = []
    got: list[float] = []
    for turn in range(3 if session.quick else 8):
        seconds, loads_torch = printed_by(IMPORT).split()
        if loads_torch == "True":
            raise SystemExit("import memstore loads torch")
        times = [float(text) for text in printed_by(FIRST_GET, root).split()]
        if turn:  # the first of each reads its files from disk
            alone.append(float(seconds))
            torch_alone.append(times[0])
            opened.append(times[1])
            got.append(times[2])
    figures = [
        _figure(MEMSTORE, "memstore", alone),
        _figure(TORCH, "limit", torch_alone),
        _figure("open of a store that exists", "memstore", opened),
        _figure("first get of 300 tensors", "memstore", got),
    ]
    series = Series("start", "the start of a new process", "s", figures)
    return Workload(
        id="start",
        title="A new process",
        text="`import memstore` in a new interpreter (which must not load torch); and, with torch and tensordict "
        "loaded, `memstore.open` of a store that exists and the first get of a state_dict of 300 tensors.",
        series=[series],
        goals=[
            Goal(
                MEMSTORE,
                series.figure(MEMSTORE).value,
                "<=",
                0.1,
                "s",
                limit=Beside(TORCH, series.figure(TORCH).value.median),
            )
        ],
    )


def _figure(name: str, role: Role, seconds: list[float]) -> Figure:
    return Figure(name, role, spread(seconds), len(seconds))
