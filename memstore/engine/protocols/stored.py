"""Gets of a store on storage that hosts share, as far as this host's catalog and files go: see `files/stored.py`.

1. Read the records; no transaction outlives that. Inline values are done.
2. Copy the bytes of each segment into memory of this process; or, where the store was made so, map the files. Nothing
   is locked. A file that isn't the one says that the value was replaced since its record was read, and removed: read
   the record again. The same misfit twice is damage, since this host's own writes are seen by it at once.

None of it holds the guard: a forked child that has a file open has no lock by that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from memstore.engine import syscalls
from memstore.engine.files import Mapping, fits, map_file, open_stored, read_stored, segment_path
from memstore.engine.format import Record, SegmentExtent, end_of
from memstore.engine.protocols.mapped_entry import MappedEntry
from memstore.engine.root import Root, segments_of, storage_error

Mapper = Callable[[Root, bytes, Record], MappedEntry | None]
Replaced = tuple[bytes, Record]  # a key, and its record when it was read


def stored_entry(root: Root, key: bytes, record: Record, *, live: bool = False) -> MappedEntry | None:
    """The segments of a record, read or mapped. None if one of them holds another put by now, or can't be seen.

    Raises StorageError, CorruptionError.
    """
    placed = placed_segments(root, record)
    mapping = map_file(None, mapped_size(record))
    for host, extent in placed:
        if not _bring(root, key, host, extent, mapping, live=live):
            return None
    return MappedEntry(record, mapping)


def placed_segments(root: Root, record: Record) -> Sequence[tuple[str, SegmentExtent]]:
    """The segments of a record, with the ids of the hosts that have written them."""
    own = root.settings.store
    if record.hosts is None:
        return [(own, extent) for extent in record.segments]
    return [(host.hex(), extent) for host, extent in zip(record.hosts, record.segments, strict=False)]


def mapped_size(record: Record) -> int:
    """How many addresses a value takes."""
    if record.start:
        return record.segments[0].size
    return max(record.nbytes, end_of(record.segments))


def _bring(root: Root, key: bytes, host: str, extent: SegmentExtent, mapping: Mapping, *, live: bool = False) -> bool:
    """Reads a whole segment to where it lies in a range of addresses, or maps it there. False: it isn't there."""
    assert root.shared is not None, "only there"
    path = segment_path(segments_of(root.path, host), extent.segment)
    try:
        file = open_stored(path, extent, host, live=live)
        if file is None:
            return False
        address = mapping.address + extent.base
        if root.shared.maps:
            syscalls.map_over(address, file.fd, extent.size)
        elif not read_stored(file, [(0, extent.size, address)]):
            return False
        return fits(file, extent, host)
    except OSError as error:
        raise storage_error(path, error, key.decode()) from error


def hold_stored(
    root: Root, keys: Sequence[bytes], deadline: float, others: Mapper
) -> tuple[list[MappedEntry | None], Replaced | None]:
    """As `get.hold`, by this host's catalog; what lies on other hosts is not read. The second result is damage.

    `others` maps what has no segments.
    """
    before: Replaced | None = None
    while True:
        held, replaced = _read_all(root, keys, others)
        if replaced is None or replaced == before or time.monotonic() > deadline:
            return held, replaced
        before = replaced


def _read_all(root: Root, keys: Sequence[bytes], others: Mapper) -> tuple[list[MappedEntry | None], Replaced | None]:
    records = root.catalog.view(lambda transaction: [transaction.record(key) for key in keys])
    held: list[MappedEntry | None] = []
    for key, record in zip(keys, records, strict=True):
        if record is None or record.hosts is not None:
            held.append(None if record is None else MappedEntry(record))
            continue
        entry = stored_entry(root, key, record, live=True) if record.segments else others(root, key, record)
        if entry is None:
            return [], (key, record)
        held.append(entry)
    return held, None
