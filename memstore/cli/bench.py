"""`memstore bench`: what this machine does, in a few seconds. For figures to quote, see tests/benchmarks."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from memstore import _wording as wording
from memstore.cli import render

_PACKAGES = ("tensordict", "lmdb", "msgspec", "numpy")
_LARGE = 64 << 20  # bytes
_SECONDS = 0.3  # a measurement


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians, in seconds; `limit` is what the machine alone takes for it."""

    what: str
    seconds: float
    nbytes: int = 0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Selftest:
    root: str
    filesystem: str
    huge_pages: bool  # whether large values get them
    cores: int
    memory: int  # bytes
    system: str
    versions: dict[str, str]  # of Python and of what takes part
    results: list[Measurement]


def _median(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        kept = call()
        times.append(time.perf_counter() - start)
        del kept
    return statistics.median(times)


def measure(root: str) -> Selftest:
    import torch

    import memstore
    from memstore.engine import filesystem_name, syscalls

    folder = tempfile.mkdtemp(prefix="memstore-bench-", dir=root)
    try:
        with memstore.open(f"{folder}/store") as store:
            small, large = torch.randn(256), torch.randn(_LARGE // 4)
            other = torch.empty_like(large)
            copy = _median(lambda: other.copy_(large))
            total = _median(lambda: large.sum())
            results = [
                Measurement("put of 1 KiB", _median(lambda: store.put("small", small))),
                Measurement("get of 1 KiB", _median(lambda: store.get("small"))),
                Measurement("overwrite of 64 MiB", _median(lambda: store.put("large", large)), _LARGE, copy),
                Measurement("get of 64 MiB, the call", _median(lambda: store.get("large"))),
                Measurement("get of 64 MiB, until summed", _median(lambda: store.get("large").sum()), _LARGE, total),
            ]
            held = store.get("large")
            held.sum()
            huge = store.stats().huge_page_bytes > _LARGE // 2
            del held
        name = filesystem_name(syscalls.filesystem_type(folder))
        return Selftest(
            root=root,
            filesystem=name,
            huge_pages=huge,
            cores=len(os.sched_getaffinity(0)),
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            versions=_versions(),
            results=results,
        )
    finally:
        shutil.rmtree(folder)


def _versions() -> dict[str, str]:
    import torch

    import memstore

    found = {"memstore": memstore.__version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)  # it says for which CUDA it was built; its package's own version doesn't
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def show(found: Selftest) -> None:
    pages = "huge pages" if found.huge_pages else "small pages"
    render.console.print(f"{found.root}: {found.filesystem}, {pages}, {found.cores} cores")
    render.console.print(f"{found.system}, {wording.size(found.memory)}")
    render.console.print(", ".join(f"{name} {version}" for name, version in found.versions.items()))
    rows = [
        (
            one.what,
            _time(one.seconds),
            f"{one.nbytes / one.seconds / 1e9:.1f} GB/s" if one.nbytes else "",
            f"{one.limit / one.seconds:.2f} of {_time(one.limit)}" if one.limit else "",
        )
        for one in found.results
    ]
    render.write_rows(("", "time", "bandwidth", "of the machine's"), rows, right=("time", "bandwidth"))


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
