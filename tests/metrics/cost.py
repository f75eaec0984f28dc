"""`python -m tests.metrics.cost`: what a put and a get cost unasked, counted and traced; interleaved, in microseconds.

Minimum and median of rounds: the machine is shared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch

import memstore
from memstore import metrics

CALLS, ROUNDS = 300, 40


def seconds_a_call(call: Callable[[], object]) -> float:
    began = perf_counter()
    for _ in range(CALLS):
        call()
    return (perf_counter() - began) / CALLS


def main() -> None:
    small, large = torch.zeros(25), torch.zeros(1 << 16)
    found: dict[tuple[str, str], list[float]] = {}
    kinds = ["unasked", "counted"]
    with contextlib.suppress(ImportError):
        from opentelemetry.sdk.trace import TracerProvider

        kinds.append("traced")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memstore.open(folder).close()
        for _ in range(ROUNDS):
            for kind in kinds:
                if kind == "counted":
                    metrics.count_calls()
                elif kind == "traced":
                    metrics.trace_calls(TracerProvider())  # pyright: ignore[reportPossiblyUnboundVariable]
                with memstore.open(folder) as store:
                    store.put("small", small)
                    store.put("large", large)
                    for name, call in {
                        "get of 100 B": lambda: store.get("small"),
                        "get of 256 KiB": lambda: store.get("large"),
                        "put of 100 B": lambda: store.put("small", small),
                        "put of 256 KiB": lambda: store.put("large", large),
                    }.items():
                        found.setdefault((name, kind), []).append(seconds_a_call(call) * 1e6)
                metrics.stop_calls()
    print(f"load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds of {CALLS} calls", file=sys.stderr)
    for (name, kind), times in sorted(found.items()):
        print(f"{name:15} {kind:8} minimum {min(times):7.2f} us, median {statistics.median(times):7.2f} us")


if __name__ == "__main__":
    main()
