"""What a store takes of its machine: bytes by state, who pins what, huge pages. For `stats` and errors; not hot."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from memstore.engine.holders import holders_of
from memstore.engine.leases import boot_clock
from memstore.engine.record import FILLING, LIVE, RETIRED
from memstore.engine.root import Root
from memstore.engine.segment import segment_path

_MISSING = (-1, -1)


@dataclass(frozen=True, slots=True)
class Usage:
    keys: int
    live_bytes: int
    reusable_bytes: int  # retired, and nobody holds them: kept for the next puts; `gc` gives them back
    pinned_bytes: int  # retired, and held or leased
    filling_bytes: int
    capacity: int | None
    catalog_bytes: int
    pinned_by: tuple[int, ...]


def measure(root: Root) -> Usage:
    with root.guard:
        keys = root.catalog.view(lambda transaction: transaction.count("entries"))
        counters = root.catalog.view(lambda transaction: transaction.counters())
        rows = root.catalog.view(lambda transaction: list(transaction.segments()))
        leased = root.catalog.view(lambda transaction: dict(transaction.numbers("leases", 1 << 20)))
        now = boot_clock()
    totals: dict[int, int] = defaultdict(int)
    for _, row in rows:
        totals[row.state] += row.nbytes
    paths = {segment: segment_path(root.segments, segment) for segment, row in rows if row.state == RETIRED}
    retired = {segment: _identity(path) for segment, path in paths.items()}
    holders = holders_of(set(retired.values()) - {_MISSING})
    pinned_by = set[int]().union(*holders.values())
    pinned = sum(
        row.nbytes
        for segment, row in rows
        if segment in retired and (retired[segment] in holders or leased.get(segment, 0) > now)
    )
    return Usage(
        keys=keys,
        live_bytes=totals[LIVE],
        reusable_bytes=totals[RETIRED] - pinned,
        pinned_bytes=pinned,
        filling_bytes=totals[FILLING],
        capacity=counters.capacity or None,
        catalog_bytes=root.catalog.nbytes,
        pinned_by=tuple(sorted(pinned_by)),
    )


def _identity(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return _MISSING
    return status.st_dev, status.st_ino


def huge_page_bytes(root: Root) -> int:
    """Of this process's mappings; reads its page tables, which takes as long as it has mapped much."""
    total, ours = 0, False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
                    ours = root.segments in line
                elif ours and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
                    total += int(line.split()[1]) * 1024
    except OSError:
        pass
    return total
