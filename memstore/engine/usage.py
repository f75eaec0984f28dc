"""What a store takes of its machine: bytes by state, who pins what, huge pages. For `stats`; nothing here is hot."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from memstore.engine.leases import boot_clock
from memstore.engine.lockfile import lock_holders
from memstore.engine.record import FILLING, LIVE, RETIRED
from memstore.engine.root import Root
from memstore.engine.segment import segment_path
from memstore.errors import StoreFullError


@dataclass(frozen=True, slots=True)
class Usage:
    keys: int
    live_bytes: int
    reusable_bytes: int  # retired, and nobody holds them: kept for the next puts; `gc` gives them back
    pinned_bytes: int  # retired, and held or leased
    filling_bytes: int
    capacity: int | None
    catalog_bytes: int
    huge_page_bytes: int  # of this process's mappings
    pinned_by: tuple[int, ...]


def measure(root: Root) -> Usage:
    with root.guard:
        keys = root.catalog.view(lambda transaction: transaction.count("entries"))
        counters = root.catalog.view(lambda transaction: transaction.counters())
        rows = root.catalog.view(lambda transaction: list(transaction.segments()))
        leased = root.catalog.view(lambda transaction: dict(transaction.numbers("leases", 1 << 20)))
        now = boot_clock()
    totals: dict[int, int] = defaultdict(int)
    holders, device = lock_holders(), os.fstat(root.segments_fd).st_dev
    pinned, pinned_by = 0, set[int]()
    for segment, row in rows:
        totals[row.state] += row.nbytes
        if row.state != RETIRED:
            continue
        pids = holders.get((device, _inode(segment_path(root.segments, segment))), set())
        pinned_by |= pids
        if pids or leased.get(segment, 0) > now:
            pinned += row.nbytes
    return Usage(
        keys=keys,
        live_bytes=totals[LIVE],
        reusable_bytes=totals[RETIRED] - pinned,
        pinned_bytes=pinned,
        filling_bytes=totals[FILLING],
        capacity=counters.capacity or None,
        catalog_bytes=root.catalog.nbytes,
        huge_page_bytes=_huge_page_bytes(root.segments),
        pinned_by=tuple(sorted(pinned_by)),
    )


def explain_full(root: Root, reason: OSError, key: str | None) -> StoreFullError:
    """What has no room, for what, and who could make some."""
    usage = measure(root)
    what = f" for {key!r}" if key is not None else ""
    limit = f"capacity {usage.capacity:,}" if usage.capacity else "no capacity set"
    pinned = f"{usage.pinned_bytes:,} replaced but held"
    if usage.pinned_by:
        pinned += f" by pid {', '.join(map(str, usage.pinned_by))}"
    detail = reason if isinstance(reason, StoreFullError) else reason.strerror
    return StoreFullError(
        f"{root.path} has no room{what} ({detail}): {limit}, {usage.live_bytes:,} bytes live, {pinned}, "
        f"{usage.filling_bytes:,} being written, {usage.catalog_bytes:,} of catalog: delete keys, drop held values, or "
        "enlarge the file system or the capacity; nothing was changed",
        key=key,
    )


def _inode(path: str) -> int:
    """The device is that of the folder: overlay tells another for a file, which its locks are not listed under."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1


def _huge_page_bytes(segments: str) -> int:
    total, ours = 0, False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
                    ours = segments in line
                elif ours and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
                    total += int(line.split()[1]) * 1024
    except OSError:
        pass
    return total
