"""What a run ran on: the machine, the settings that matter for mapped memory, and the versions of what took part."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "memstore",
    "torch",
    "tensordict",
    "numpy",
    "lmdb",
    "msgspec",
    "safetensors",
    "ray",
    "redis",
    "torchsnapshot",
    "torch_checkpointing",
    "cpprb",
    "torchmonarch",
)
HUGE_PAGE = 2 << 20
SMALL = 64 << 10  # below, a put finds its pages in the lists that each core keeps


def machine(root: Path) -> dict[str, str]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "store on": _filesystem(root),
        "shmem_enabled": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = _from_source(package)
    found["redis-server"] = _redis_server()
    return {name: text for name, text in found.items() if text}


def used_by_others() -> float:
    """The share of all cores that other processes (and other virtual machines) take while this one sleeps a moment."""
    before = _cpu_times()
    time.sleep(0.5)
    spent = [after - start for start, after in zip(before, _cpu_times(), strict=True)]
    idle = spent[3] + spent[4]
    return 1 - idle / max(sum(spent), 1)


def busy_seconds() -> float:
    """What all cores have worked since the machine started, for whomever."""
    spent = _cpu_times()
    return (sum(spent) - spent[3] - spent[4]) / os.sysconf("SC_CLK_TCK")


def _cpu_times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal."""
    with open("/proc/stat") as file:
        return [int(word) for word in file.readline().split()[1:9]]


_is_backed = True


@contextmanager
def not_backed() -> Iterator[None]:
    """For memory as it is: meanwhile `back_memory` does nothing, here and in children that are forked."""
    global _is_backed
    _is_backed = False
    try:
        yield
    finally:
        _is_backed = True


def back_memory(nbytes: int) -> None:
    """Has the host back as much free memory as a put is about to take.

    A virtual machine that reports its free pages to the host loses them within seconds; the first touch of such a page
    took 20 times as long as a warm one (0.5 instead of 10 GB/s), in whoever happened to be there first. What was just
    given back is what the kernel gives out next. Not timed, and the same for every contestant.
    """
    if nbytes < SMALL or not _is_backed:
        return
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags=flags) as huge, mmap.mmap(-1, size, flags=flags) as small:
        huge.madvise(mmap.MADV_HUGEPAGE)  # the kernel keeps free memory of either size apart
        small.madvise(mmap.MADV_NOHUGEPAGE)
        for memory in (huge, small):
            for offset in range(0, size, mmap.PAGESIZE):
                memory[offset] = 1


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), platform.machine())


def _chosen(path: str) -> str:
    """The word in brackets of a sysfs choice such as `always [madvise] never`."""
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _filesystem(root: Path) -> str:
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, found, options, *_ = line.split()
        if (str(root) + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best):
            best, kind = where, f"{found}{' ' + h if (h := _huge_option(options)) else ''}"
    return f"{kind} ({best})"


def _huge_option(options: str) -> str:
    return next((option for option in options.split(",") if option.startswith("huge=")), "")


def _from_source(package: str) -> str:
    """memstore run from a checkout that was not installed."""
    if package != "memstore":
        return ""
    try:
        described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "checkout"
    return f"checkout {described.stdout.strip()}"


def _redis_server() -> str:
    try:
        output = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next((word[2:] for word in output.split() if word.startswith("v=")), "")
