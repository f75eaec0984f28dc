"""What a store must not leave behind, looked for from outside: open files, mappings, rows and files of nobody."""

from __future__ import annotations

import gc
import os

import memstore
from memstore.engine import is_served
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import segment_path
from memstore.engine.format.records import LIVE, PREPARED, Record
from tests.inside import root_of


def find_leaks(path: str) -> list[str]:
    """Opens the store at `path`, collects what may go, and names everything that then should not be there."""
    leaks = _in_the_store(path)
    # After that: what finalizers gave up is closed by the next opening or closing.
    if _in_this_process(path):
        gc.collect()  # it takes milliseconds, after each of thousands of tests
    return [*leaks, *_in_this_process(path)]


def _kept_records(transaction: Transaction) -> list[Record]:
    rows = transaction.rows_with(tables.HISTORY, b"", 1 << 20)
    return [tables.read_version(name, stored)[1] for name, stored in rows]


def _in_this_process(path: str) -> list[str]:
    return [
        *(f"an open file: {target}" for target in open_files(path, folders=True)),
        *(f"a mapping: {target}" for target in sorted(set(mapped_files(path)))),
    ]


def _in_the_store(path: str) -> list[str]:
    with memstore.open(path, "r+", timeout=10.0) as store:
        root = root_of(store)
        if is_served(root):  # its bytes may be named by records of other hosts
            return []
        store.gc()
        keys = list(store)
        with root.guard:
            rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
            filling = root.catalog.view(lambda transaction: transaction.numbers("filling", 100))
            retired = root.catalog.view(
                lambda transaction: [
                    *(row[2] for row in transaction.retired(0, 1 << 60, 100)),
                    *(segment for _, segment in transaction.numbers("held", 100)),
                ]
            )
            leased = root.catalog.view(lambda transaction: dict(transaction.numbers("leases", 1000)))
            parts = root.catalog.view(parts_that_wait)
            kept = root.catalog.view(kept_for_other_hosts)
            moved, spill = root.catalog.view(tables.spilled_segments), root.storage.spill_folder()
            records = [*(root.catalog.read(key.encode()) for key in keys), *root.catalog.view(_kept_records)]
    folder = f"{path}/segments"
    present = {f"{folder}/{name}" for name in os.listdir(folder)}
    if spill is not None:
        present |= {f"{spill}/{name}" for name in os.listdir(spill) if name != "store"}
    named = {one.segment for record in records if record for one in record.segments} | parts | kept
    used = {segment_path(spill if spill and one in moved else folder, one) for one in named}
    expected = used | {segment_path(spill if spill and one in moved else folder, one) for one in leased if one in rows}
    idle = {segment: row for segment, row in rows.items() if row.state != (PREPARED if segment in parts else LIVE)}
    return [
        *(f"a filling row: {row}" for row in filling),
        *(f"a retired row: {segment}" for segment in retired if segment not in leased),
        *(f"a row of no entry: {row}" for segment, row in idle.items() if segment not in leased),
        *(f"a file of nobody: {name}" for name in sorted(present - expected)),
        *(f"a missing file: {name}" for name in sorted(used - present)),
    ]


def parts_that_wait(transaction: Transaction) -> set[int]:
    """The segments of sharded puts whose other ranks have not come yet."""
    return {part.segment for part in tables.parts_of(transaction) if part.segment}


def kept_for_other_hosts(transaction: Transaction) -> set[int]:
    """Segments of a served store that are lent to other hosts, and copies of what lies there."""
    rows = [(table, row) for table in tables.KEEPING for row in transaction.rows_with(table, b"", 1000)]
    return {one for table, row in rows for one, _ in tables.read_kept(table, *row).segments}


def open_files(path: str, *, folders: bool = False) -> list[str]:
    """The files of this process that lie in `path`. An open store keeps one folder open."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sorted(
        target for target in found if target.startswith(f"{path}/") and (folders or target != f"{path}/segments")
    )


def mapped_files(path: str) -> list[str]:
    """The files in `path` that this process has mapped, once a mapping."""
    with open("/proc/self/maps") as file:
        lines = [line.rstrip("\n").split(None, 5) for line in file if path in line]
    return [line[5] for line in lines if len(line) == 6 and line[5].startswith(f"{path}/")]
