"""What a store takes of its machine: bytes by state, who pins what, huge pages. For `stats`; nothing here is hot."""

from __future__ import annotations

import os
from dataclasses import dataclass

from memstore.engine.leases import boot_clock
from memstore.engine.lockfile import lock_holders
from memstore.engine.root import Root
from memstore.engine.segment import segment_path
from memstore.engine.tables import Transaction
from memstore.errors import StoreFullError

_ROWS_A_PAGE = 1024


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
        keys, counters = root.catalog.view(lambda transaction: (transaction.count("entries"), transaction.counters()))
    retired = _retired(root)
    now = boot_clock()
    holders, device = lock_holders(), os.fstat(root.segments_fd).st_dev
    pinned, pinned_by = 0, set[int]()
    for segment, (size, leased_until) in retired.items():
        pids = holders.get((device, _inode(segment_path(root.segments, segment))), set())
        pinned_by |= pids
        if pids or leased_until > now:
            pinned += size
    return Usage(
        keys=keys,
        live_bytes=counters.live,
        reusable_bytes=max(counters.retired + counters.held - pinned, 0),  # others put meanwhile
        pinned_bytes=pinned,
        filling_bytes=counters.filling,
        capacity=counters.capacity or None,
        catalog_bytes=root.catalog.nbytes,
        huge_page_bytes=_huge_page_bytes(root.segments),
        pinned_by=tuple(sorted(pinned_by)),
    )


def _retired(root: Root) -> dict[int, tuple[int, int]]:
    """By segment: its size, and until when it is leased. In pages: a long transaction makes the catalog grow."""
    found: dict[int, tuple[int, int]] = {}
    for table in ("retired", "held"):
        after: bytes | None = None
        while True:
            with root.guard:
                last, page = root.catalog.view(_page, table, after)
            found |= page
            if last is None:
                break
            after = last
    return found


def _page(transaction: Transaction, table: str, after: bytes | None) -> tuple[bytes | None, dict[int, tuple[int, int]]]:
    """Also the last key, if there may be more."""
    found: dict[int, tuple[int, int]] = {}
    rows = transaction.listed(table, after, _ROWS_A_PAGE)
    for _, segment in rows:
        row = transaction.segment(segment)
        if row is not None:
            found[segment] = row.nbytes, transaction.number("leases", segment) or 0
    return rows[-1][0] if len(rows) == _ROWS_A_PAGE else None, found


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
