"""How much memory and disk a store takes, and who holds it. It takes milliseconds: for `stats` and errors."""

from __future__ import annotations

import os
from dataclasses import dataclass

from memstore.engine.catalog import Counters, Part, Transaction, attempts
from memstore.engine.files import segment_path
from memstore.engine.root import Root, holders_of
from memstore.engine.sync import boot_clock

_ROWS_A_PAGE = 1024
_MISSING = -1  # for an inode


@dataclass(frozen=True, slots=True)
class Usage:
    keys: int
    live_bytes: int
    reusable_bytes: int  # retired, or kept ahead, and nobody holds them: kept for the next puts; `gc` gives them back
    pinned_bytes: int  # retired, and held or leased
    filling_bytes: int
    pending_bytes: int  # of parts of sharded puts that wait for others
    capacity: int | None
    catalog_bytes: int
    pinned_by: tuple[int, ...]


def measure(root: Root) -> Usage:
    with root.guard:
        keys, counters, parts = root.catalog.view(_first_look)
        ahead = root.ahead.size if root.ahead is not None else 0
    pending = sum(part.size for part in parts if not part.host)
    retired, now, device = _retired(root), boot_clock(), os.fstat(root.segments_fd).st_dev
    files = {segment: (device, _inode(segment_path(root.segments, segment))) for segment in retired}
    holders = holders_of({file for file in files.values() if file[1] != _MISSING})
    pinned_by = set[int]().union(*holders.values())
    pinned = sum(size for segment, (size, leased) in retired.items() if files[segment] in holders or leased > now)
    return Usage(
        keys=keys,
        live_bytes=counters.live,
        reusable_bytes=max(counters.retired + counters.held - pinned, 0) + ahead,  # others put meanwhile
        pinned_bytes=pinned,
        filling_bytes=counters.filling - ahead - pending,
        pending_bytes=pending,
        capacity=counters.capacity or None,
        catalog_bytes=root.catalog.nbytes,
        pinned_by=tuple(sorted(pinned_by)),
    )


def _first_look(transaction: Transaction) -> tuple[int, Counters, list[Part]]:
    return transaction.count("entries"), transaction.counters(), attempts.parts_of(transaction)


def _retired(root: Root) -> dict[int, tuple[int, int]]:
    """By segment: its size, and until when it is leased. In pages: a long transaction makes the catalog grow."""
    found: dict[int, tuple[int, int]] = {}
    for table in ("retired", "held"):
        after: bytes | None = None
        while True:
            last, page = root.catalog.view(_page, table, after)
            found |= page
            if last is None:
                break
            after = last
    return found


def _page(transaction: Transaction, table: str, after: bytes | None) -> tuple[bytes | None, dict[int, tuple[int, int]]]:
    """The last key, None if there are no more; and the rows."""
    found: dict[int, tuple[int, int]] = {}
    rows = transaction.listed(table, after, _ROWS_A_PAGE)
    for _, segment in rows:
        row = transaction.segment(segment)
        if row is not None:
            found[segment] = row.nbytes, transaction.number("leases", segment) or 0
    return rows[-1][0] if len(rows) == _ROWS_A_PAGE else None, found


def _inode(path: str) -> int:
    """The device is that of the folder: overlay tells another for a file, which its locks are not listed under."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return _MISSING


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
