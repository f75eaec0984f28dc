"""What a store has that belongs to no entry, seen from a process that has it open."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import memstore
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import segment_path
from memstore.engine.format.records import FILLING, LIVE, PREPARED, RETIRED, Record
from memstore.engine.sync.primitives import deadline_after
from tests.inside import root_of
from tests.leaks import parts_that_wait


def leftovers(store: memstore.Store, *, spares: bool = False) -> list[str]:
    """Files without an entry, entries without a file, rows of what is neither live nor a waiting part. Hold no value.

    Call `gc` first, or allow for `spares`: retired files, kept for reuse, or held when they were last looked at; and
    the one that this process keeps for its next put.
    """
    root = root_of(store)
    with root.guard:
        keys, rows, filling, retired, held, parts, counters = root.catalog.view(
            lambda transaction: (
                transaction.keys(b"", None, 1 << 20),
                dict(transaction.segments()),
                transaction.numbers("filling", 1 << 20),
                [segment for *_, segment in transaction.retired(0, 1 << 60, 1 << 20)],
                transaction.numbers("held", 1 << 20),
                parts_that_wait(transaction),
                transaction.counters(),
            )
        )
        pins = root.catalog.view(tables.pins_of)
        records = [*(root.catalog.read(key) for key in keys), *root.catalog.view(kept_records)]
    totals: dict[int, int] = dict.fromkeys((LIVE, RETIRED, FILLING), 0)
    for row in rows.values():
        totals[FILLING if row.state == PREPARED else row.state] += row.nbytes
    idle = [*retired, *(segment for _, segment in held)]
    kept = {segment for segment in idle if rows[segment].state == RETIRED} if spares else set[int]()
    if spares and root.next_put.file is not None:
        kept.add(root.next_put.file.segment)
        filling = [row for row in filling if row != (root.next_put.file.segment, root.next_put.file.put_id)]
    live = {extent.segment for record in records if record is not None for extent in record.segments}
    moved, folder = root.catalog.view(tables.spilled_segments), root.storage.spill_folder()
    found = [f"a part, and no part: {segment}" for segment in parts if rows[segment].state != PREPARED]
    kept |= parts
    expected = {os.path.basename(segment_path("", segment)) for segment in (live | kept) - set(moved)}
    present = set(os.listdir(root.segments))
    found += [f"a file of nobody: {name}" for name in sorted(present - expected)]
    found += [f"a missing file: {name}" for name in sorted(expected - present)]
    if folder is not None:
        spilled = {os.path.basename(segment_path("", segment)) for segment in moved}
        found += [f"in the spill folder: {name}" for name in sorted(set(os.listdir(folder)) ^ {*spilled, "store"})]
        found += [f"moved, and counted: {segment}" for segment in moved if rows[segment].nbytes]
    found += [f"a filling row: {row}" for row in filling]
    found += [f"a pin: {pin}" for pin in pins]
    found += [f"a retired row: {row}" for row in {*retired} - kept]
    found += [f"a held row: {row}" for row in held if row[1] not in kept]
    found += [f"a row without an entry: {rows[segment]}" for segment in sorted(set(rows) - live - kept)]
    found += [f"an entry without a row: {segment}" for segment in sorted(live - set(rows))]
    found += [
        f"not live, but an entry: {row}" for segment, row in rows.items() if segment in live and row.state != LIVE
    ]
    booked = {LIVE: counters.live, RETIRED: counters.retired + counters.held, FILLING: counters.filling}
    found += [f"the counters say {booked}, the rows {totals}"] if booked != totals else []
    return found


def kept_records(transaction: Transaction) -> list[Record]:
    """Those of replaced versions that are kept."""
    rows = transaction.rows_with(tables.HISTORY, b"", 1 << 20)
    return [tables.read_version(name, stored)[1] for name, stored in rows]


def kept_files(store: memstore.Store) -> set[str]:
    """The names of the files of replaced versions that are kept."""
    root = root_of(store)
    with root.guard:
        records = root.catalog.view(kept_records)
    return {os.path.basename(segment_path("", one.segment)) for record in records for one in record.segments}


def left_after_gc(store: memstore.Store) -> list[str]:
    """As `leftovers`, when locks of the dead have had time to go.

    Who reads the maps of a process that ends, as `stats` does in a test beside this one, keeps its memory a moment
    longer, and with it the locks of what it had mapped.
    """
    deadline = time.monotonic() + 10.0
    store.gc()
    while (found := leftovers(store)) and time.monotonic() < deadline:
        time.sleep(0.01)
        store.gc()
    return found


def claimed_at(names: list[str]) -> int:
    """Which of the steps of a put that fills a file is the last one of its claim: of what was kept, the look at it."""
    return 0 if names[0] == "status" else names.index("mutex_unlock")


def end_leases(store: memstore.Store) -> None:
    """As if their time were over."""
    root = root_of(store)

    def end(transaction: Transaction) -> None:
        for segment, _ in transaction.numbers("leases", 1 << 20):
            transaction.put_number("leases", segment, 0)

    def action() -> None:
        with root.guard:
            root.catalog.update(end)

    root.mutex.run(action, deadline_after(10.0))


def headers_not_live(store: memstore.Store, *, looks_at_kept: bool = True) -> list[str]:
    """Segments of entries whose header says otherwise: a repair would lose them. Of replaced ones it says retired.

    Where that could not be written, it says live: a repair takes the newest version.
    """
    root = root_of(store)
    found: list[str] = []
    kept = kept_files(store)
    for name in sorted(os.listdir(root.segments)):
        if name in kept and not looks_at_kept:
            continue
        with open(f"{root.segments}/{name}", "rb") as file:
            head = file.read(128)
        if (b" state=retired " if name in kept else b" state=live ") not in head:
            found.append(f"{name}: {head[8:]!r}")
    return found


def headers_unlike_rows(store: memstore.Store) -> list[str]:
    """Segments whose header says that they are live, and whose row doesn't, or the other way round."""
    root, kept = root_of(store), kept_files(store)
    with root.guard:
        rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
    found: list[str] = []
    for segment, row in rows.items():
        path = segment_path(root.segments, segment)
        if row.state == RETIRED and not os.path.exists(path):
            continue  # a sweep removes the file first, and then the row: the next one goes on
        with open(path, "rb") as file:
            head = file.read(128)
        is_live = row.state == LIVE and os.path.basename(path) not in kept
        if (b" state=live " in head) is not is_live:
            found.append(f"{segment} has the row {row} and the header {head[8:]!r}")
    return found


def held_locks(store: memstore.Store) -> list[str]:
    """The store's locks that somebody holds, as another thread of this process finds them."""
    root = root_of(store)
    found = [f"the mutex: thread {root.mutex.owner()}"] if root.mutex.owner() else []
    with ThreadPoolExecutor(1) as pool:
        free = pool.submit(root.guard.acquire, blocking=False).result()
        if free:
            pool.submit(root.guard.release).result()
    return found if free else [*found, "the guard"]


def open_fds(but_ahead: memstore.Store | None = None) -> set[str]:
    """What this process has open, by number and target.

    Args:
        but_ahead: without what it keeps for its next put into that store; and without sockets, of which a store on one
            host has none: those of tests before this one end when their threads do.
    """
    found: set[str] = set()
    ahead = None if but_ahead is None else root_of(but_ahead).next_put.file
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if but_ahead is None or not target.startswith("socket:"):
            found.add(f"{fd} {target}")
    return found if ahead is None else {name for name in found if name.split()[0] != str(ahead.file.lock_file.fd)}


def shared_mappings(store: memstore.Store) -> list[str]:
    """Mappings of this process through which it could write to segments, but for those kept for the next puts."""
    root_of(store).storage.mappings.clear()
    path = store.root
    with open("/proc/self/maps") as file:
        return [line.rstrip("\n") for line in file if f"{path}/segments/" in line and line.split()[1][3] == "s"]
