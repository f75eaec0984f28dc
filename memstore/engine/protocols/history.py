"""History: versions of a key that were replaced, and stay readable.

A put may say how many versions of its key stay readable, the present one among them, and how many bytes the replaced
ones may take. The record of the key has both (`Record.history`), and each later put hands them on, so a put of a key
without them pays nothing: it reads the record that it replaces anyway.

1. The transaction that replaces a record with a history writes it into the table `history` (`keep_replaced`), and takes
   those out that are beyond the limits: these are retired as all that is replaced. So versions and limits are right
   at each moment, whoever is killed.
2. The files of a version that is kept stay as they are: their rows say *live*. But their headers say *retired*, as
   those of all that was replaced (step 4 of `put.py`; after a kill, `recovery.py`). So a repair without a catalog never
   takes a replaced version for the present one.
3. A get of a version (`hold_version_of`) reads its row, and maps its files by the put id in their headers, as a
   reference does. If a file is another put's by then, the version went meanwhile, and the row is gone too.
4. A delete takes all versions of its key out. Where there is no room for a put, the oldest versions of all keys go
   first (`drop_oldest`), before the put fails.

The names of the rows have version and size, so what goes is decided without reading a record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import KeptVersion, Transaction
from memstore.engine.format.records import Record
from memstore.engine.protocols.elsewhere import MappedEntry
from memstore.engine.protocols.get import damaged_entry, map_entry
from memstore.engine.protocols.reuse import retire_live
from memstore.engine.root.roots import Root
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")

_SHARE = 4  # of the bytes of all kept versions, one part in so many goes at once where there is no room


class Kept(NamedTuple):
    """Outcome of a replacement.

    Attributes:
        gone: the segments that no version names any more.
        has_more: whether the key keeps versions beside the present one.
    """

    gone: list[int]
    has_more: bool


def keep_replaced(transaction: Transaction, key: bytes, old: Record, limits: tuple[int, int] | None) -> Kept:
    """Keeps the version that is replaced, as far as the limits let it, and takes out what is beyond them.

    Args:
        limits: as of `Record.history`; None: the key is deleted.
    """
    most, most_bytes = limits or (1, 0)
    replaced = KeptVersion(b"", old.version, old.held_bytes)
    versions = [*tables.kept_versions(transaction, key), replaced]
    within = count_within(versions, most - 1, most_bytes)
    gone: list[int] = []
    for one in versions[: len(versions) - within]:
        gone += take_out(transaction, one) if one.name else [extent.segment for extent in old.segments]
    if within:
        tables.put_version(transaction, key, old)
    return Kept(gone, within > 0)


def with_history(record: Record, limits: tuple[int, int], kept: Kept | None) -> Record:
    """Returns the record of a new version, which hands the limits on, if there is anything to keep by them."""
    if limits[0] == 1 and (kept is None or not kept.has_more):
        return record
    return msgspec.structs.replace(record, history=limits)


def count_within(versions: Sequence[KeptVersion], most: int, most_bytes: int) -> int:
    """Returns how many of these versions, from the newest one on, are within the limits. 0 bytes: no such limit."""
    count = nbytes = 0
    for one in reversed(versions):
        nbytes += one.nbytes
        if count == most or (most_bytes and nbytes > most_bytes):
            break
        count += 1
    return count


def take_out(transaction: Transaction, kept: KeptVersion) -> list[int]:
    """Deletes the row of a replaced version. Returns its segments, which nothing names any more."""
    stored, segments = transaction.row(tables.HISTORY, kept.name), list[int]()
    try:
        if stored is not None:
            segments = [extent.segment for extent in tables.read_version(kept.name, stored)[1].segments]
    except CorruptionError:
        log.warning("the row of replaced version %d is damaged: its files stay until a repair", kept.version)
    transaction.delete_row(tables.HISTORY, kept.name)
    return segments


# --- gets of a version -----------------------------------------------------------------------------------------------


_TRIES = 3


def hold_version_of(root: Root, key: bytes, version: int, deadline: float, *, may_lock: bool) -> MappedEntry | None:
    """Maps one version of a key, the present one or one that is kept; None if it can't be read any more, or yet.

    Raises CorruptionError; NotAStoreError; StoreTimeoutError.
    """

    def find(transaction: Transaction) -> Record | None:
        present = transaction.record(key)
        if present is not None and present.version == version:
            return present
        return tables.kept_record(transaction, key, version)

    def try_once() -> tuple[Record | None, MappedEntry | None]:
        with root.reading():
            record = root.catalog.view(find)
            return record, None if record is None else map_entry(root, key, record)

    root.catalog.open_optional()
    record, held = try_once()
    for number in range(_TRIES):
        if record is None or held is not None:
            return held
        is_last = number == _TRIES - 1  # nobody takes it out under the mutex
        record, held = root.mutex.run(try_once, deadline) if may_lock and is_last else try_once()
    if record is None or held is not None:
        return held
    raise damaged_entry(root, key, record)


# --- no room ---------------------------------------------------------------------------------------------------------


def drop_oldest(root: Root, needed: int, deadline: float) -> bool:
    """Takes out the oldest kept versions of all keys, of so many bytes and a part of all. False: there was none."""
    return root.mutex.run(_drop_oldest, deadline, root, needed)


def _drop_oldest(root: Root, needed: int) -> bool:
    def drop(transaction: Transaction) -> bool:
        kept = sorted(tables.kept_versions(transaction), key=lambda one: one.version)
        total = sum(one.nbytes for one in kept)
        wanted = max(needed, total // _SHARE)
        counters, dropped = transaction.counters(), 0
        if counters.capacity and counters.allocated - total + needed > counters.capacity:
            return False  # without all of them, there would be no room either
        for one in kept:
            if dropped >= wanted:
                break
            for segment in take_out(transaction, one):
                retire_live(transaction, counters, segment)
            dropped += max(one.nbytes, 1)
        if kept:
            transaction.put_counters(counters)
        return bool(kept)

    with root.guard:
        return root.catalog.update(drop, is_delete=True)
