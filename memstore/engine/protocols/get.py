"""Gets: how entries are read.

1. Read the record; no transaction outlives the call. Inline values are done.
2. Open the segment, lock it shared without waiting, **then** compare the put id in its header with the record's
   (`map_entry`). A refused lock, a missing file, another put id, or a state that isn't live says that the entry was
   replaced since its record was read. Try again (`Store.get` twice, `get_many` once), then do the same under the
   store's mutex, where nobody can replace it: progress is certain, and a misfit is damage. In mode "r", which never
   takes the mutex, try until the deadline; the same misfit twice in a row is damage. External files are compared with
   what the record says of them (`map_external`) instead of being locked.
3. Check the size, map privately, close the file: the mapping keeps the lock (where it doesn't, the file stays open
   beside it). A reader that dies leaves nothing to clean up: the kernel unmaps the file and gives up the lock.

Where there is no record, or it says that bytes lie on other hosts, and the store is served, it goes on elsewhere
(`elsewhere.py`). What a record has without `hosts` is right, wherever the home of its key is by now.

All of it runs under `root.guard`, so that no forked child inherits the file descriptor, and with it the lock.

On storage that hosts share (`hold_stored`), step 2 copies the bytes of each segment into memory of this process; or,
where the store was made so, maps the files. Nothing is locked. A file that isn't the one says that the value was
replaced since its record was read, and removed: read the record again. The same misfit twice is damage, since this
host's own writes are seen by it at once. None of that holds the guard: a forked child that has a file open has no lock
by that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from memstore.engine import syscalls
from memstore.engine.files import (
    Mapping,
    address_in,
    fits,
    map_external,
    map_file,
    map_segment,
    map_segments,
    open_stored,
    other_size,
    read_stored,
    segment_path,
)
from memstore.engine.format import Extent, Record, SegmentExtent, base_after, decode_external, end_of
from memstore.engine.protocols.elsewhere import MappedEntry, elsewhere_of, is_served
from memstore.engine.root import Root, reopen_root, segments_of, storage_error
from memstore.errors import ContentionError, CorruptionError

_RETRY_EVERY = 0.0005  # seconds, in mode "r"
_Replaced = tuple[bytes, Record]  # a key, and its record when it was read


def hold(
    root: Root,
    keys: Sequence[bytes],
    deadline: float,
    *,
    may_lock: bool,
    lazily: bool = False,
    max_age: float | None = None,
) -> list[MappedEntry | None]:
    """Maps the entries of one moment; None where there is no such key. `lazily`, `max_age` as in `Elsewhere.hold`.

    Raises:
        NotAStoreError: files are missing, because the path names another folder by now.
        CorruptionError: else.
        CrossHostError, HomeUnavailableError, StaleMembershipError: of a store on several hosts.
    """
    if root.catalog.is_released:
        reopen_root(root, deadline)
    if lazily and root.shared is not None and is_served(root):
        return elsewhere_of(root).hold(keys, deadline, may_lock=may_lock, lazily=True, max_age=max_age)
    held = _hold_here(root, keys, deadline, may_lock=may_lock)
    if all(entry is not None and entry.record.hosts is None for entry in held) or not is_served(root):
        return held
    return elsewhere_of(root).hold(keys, deadline, may_lock=may_lock, lazily=lazily, max_age=max_age)


def _hold_here(root: Root, keys: Sequence[bytes], deadline: float, *, may_lock: bool) -> list[MappedEntry | None]:
    """Maps entries by this host's catalog. What lies on other hosts is not mapped."""
    if root.shared is not None:
        held, replaced = hold_stored(root, keys, deadline, _map_guarded)
        if replaced is not None:
            raise damaged_entry(root, *replaced)
        return held
    held, before = _map_all(root, keys)
    if before is None:
        return held
    held, replaced = _map_all(root, keys)
    if replaced is not None and may_lock:
        held, replaced = root.mutex.run(_map_all, deadline, root, keys)
        if replaced is not None:
            raise damaged_entry(root, *replaced)
    while replaced is not None and time.monotonic() < deadline:  # mode "r" never takes the mutex
        if replaced == before:  # twice the same, so nobody replaced it
            raise damaged_entry(root, *replaced)
        time.sleep(_RETRY_EVERY)
        before = replaced
        held, replaced = _map_all(root, keys)
    if replaced is None:
        return held
    name = replaced[0].decode()
    raise ContentionError(
        f"{name!r} was replaced each time it was read, until the timeout: open the store with mode 'r+', which may "
        "wait for its writers, or get less often",
        key=name,
    )


MISFIT: Any = object()


def hold_at_once(root: Root, key: bytes) -> MappedEntry | None:
    """Maps the entry of one key, in one try. Returns MISFIT if it was replaced meanwhile, or names several files."""
    with root.guard:
        # 1. Read the record
        record = root.catalog.read(key)
        if record is None:
            return None
        # 2. Open, lock and compare the segment, 3. map it: see `map_segment`
        if record.segment:
            return MISFIT if root.shared is not None else map_entry(root, key, record, live=True) or MISFIT
        return MappedEntry(record) if record.adopted is record.parts is None else MISFIT


def _map_all(root: Root, keys: Sequence[bytes]) -> tuple[list[MappedEntry | None], _Replaced | None]:
    """Maps entries once. The second result is the first that was replaced since its record was read, if any."""
    held: list[MappedEntry | None] = []
    with root.guard:
        if len(keys) == 1:
            records = [root.catalog.read(keys[0])]
        else:
            records = root.catalog.view(lambda transaction: [transaction.record(key) for key in keys])
        for key, record in zip(keys, records, strict=True):
            if record is None or record.hosts is not None:
                held.append(None if record is None else MappedEntry(record))
                continue
            try:
                mapped = map_entry(root, key, record, live=True)
            except CorruptionError:
                if record.adopted is None:
                    raise
                mapped = None  # an external file was replaced, and maybe attached anew since the record was read
            if mapped is None:
                return [], (key, record)
            held.append(mapped)
    return held, None


def map_entry(root: Root, key: bytes, record: Record, *, live: bool = False) -> MappedEntry | None:
    """Maps the extents of a record; None if a segment holds another put by now. Call it under the guard.

    All of them lie on this host: segments of others may have the same numbers.

    With `live`, also None if it was replaced: a reference to a version doesn't mind.
    """
    assert record.hosts is None, "its bytes lie on other hosts"
    try:
        if root.shared is not None and record.segments:
            return stored_entry(root, key, record, live=live)
        store, dir_fd, keep_open = root.settings.store, root.segments_fd, root.locks_need_files
        if record.segment:
            path = segment_path(root.segments, record.segment)
            extent = SegmentExtent(record.segment, record.put_id, record.size, record.start)
            mapping = map_segment(path, extent, store=store, dir_fd=dir_fd, live=live, keep_open=keep_open)
            return None if mapping is None else MappedEntry(record, mapping)
        if record.adopted is not None:
            files = decode_external(record.adopted)
            _check_room(record, files)
            return MappedEntry(record, map_external(files, record.nbytes))
        if record.parts is not None and (extents := record.segments):
            segments = [(segment_path(root.segments, extent.segment), extent) for extent in extents]
            mapping = map_segments(
                segments, mapped_size(record), store=store, dir_fd=dir_fd, live=live, keep_open=keep_open
            )
            return None if mapping is None else MappedEntry(record, mapping)
        return MappedEntry(record)
    except CorruptionError as error:
        name = key.decode()
        raise CorruptionError(f"{name!r}: {error}", key=name, path=error.path, detail=error.detail) from None


def _map_guarded(root: Root, key: bytes, record: Record) -> MappedEntry | None:
    with root.guard:
        return map_entry(root, key, record, live=True)


def map_beside(root: Root, extents: Sequence[SegmentExtent], size: int) -> Mapping | None:
    """Maps segments of this host at their bases, in a range of addresses that is zeros elsewhere, for others' bytes.

    None if one of them holds another put by now. Call it under the guard.
    """
    store, dir_fd = root.settings.store, root.segments_fd
    segments = [(segment_path(root.segments, extent.segment), extent) for extent in extents]
    return map_segments(segments, size, store=store, dir_fd=dir_fd, keep_open=root.locks_need_files)


def _check_room(record: Record, extents: Sequence[Extent]) -> None:
    """Raises CorruptionError where the room behind the files is more than leaves can need that are put together."""
    end = base_after(end_of(extents), 0)
    if record.nbytes - end > end * len(extents):
        raise CorruptionError(f"{record.nbytes:,} bytes can't come of {end:,} bytes of files")


def damaged_entry(root: Root, key: bytes, record: Record) -> CorruptionError:
    """Returns the error to raise. Raises NotAStoreError itself if the store is gone, or is being removed."""
    if record.adopted is not None:
        try:
            map_entry(root, key, record)
        except CorruptionError as error:
            return error
    root.check_missing()
    name, files = key.decode(), files_of(root, record)
    for path, extent in zip(files, record.segments, strict=False):
        with contextlib.suppress(OSError):
            if (size := os.stat(path, follow_symlinks=False).st_size) < extent.size:
                return CorruptionError(key=name, path=path, detail=other_size(size, extent.size))
    path = " or ".join(files)
    detail = (
        f"the file is missing, is locked by somebody else, is not that of put {record.put_id:#x} of this store, or "
        "says that it was replaced: unless it is locked, run memstore.repair"
    )
    return CorruptionError(key=name, path=path, detail=detail)


def files_of(root: Root, record: Record) -> tuple[str, ...]:
    """Returns the paths of the bytes of a version."""
    if root.shared is not None and record.segments:
        placed = placed_segments(root, record)
        return tuple(segment_path(segments_of(root.path, host), extent.segment) for host, extent in placed)
    return tuple(
        segment_path(root.segments, extent.segment) if isinstance(extent, SegmentExtent) else extent.path
        for extent in record.extents
    )


# --- on storage that hosts share -------------------------------------------------------------------------------------


Mapper = Callable[[Root, bytes, Record], MappedEntry | None]
Replaced = tuple[bytes, Record]  # a key, and its record when it was read


def stored_entry(root: Root, key: bytes, record: Record, *, live: bool = False) -> MappedEntry | None:
    """Reads or maps the segments of a record. None if one of them holds another put by now, or can't be seen.

    Raises StorageError, CorruptionError.
    """
    placed = placed_segments(root, record)
    mapping = map_file(None, mapped_size(record))
    for host, extent in placed:
        if not _bring(root, key, host, extent, mapping, live=live):
            return None
    return MappedEntry(record, mapping)


def placed_segments(root: Root, record: Record) -> Sequence[tuple[str, SegmentExtent]]:
    """Returns the segments of a record, with the ids of the hosts that have written them."""
    own = root.settings.store
    if record.hosts is None:
        return [(own, extent) for extent in record.segments]
    return [(host.hex(), extent) for host, extent in zip(record.hosts, record.segments, strict=False)]


def mapped_size(record: Record) -> int:
    """Returns how many addresses a value in segments takes: at least those of all its files, whatever the record says.

    Raises CorruptionError where it says more than can be.
    """
    extents = record.segments
    if not record.start:  # a sharded value: leaves that are put together lie behind the files
        _check_room(record, extents)
    return max(end_of(extents), 0 if record.start else record.nbytes)


def _bring(root: Root, key: bytes, host: str, extent: SegmentExtent, mapping: Mapping, *, live: bool = False) -> bool:
    """Reads a whole segment to where it lies in a range of addresses, or maps it there. False: it isn't there."""
    assert root.shared is not None, "only there"
    path = segment_path(segments_of(root.path, host), extent.segment)
    try:
        file = open_stored(path, extent, host, live=live)
        if file is None:
            return False
        address = address_in(mapping, extent.base, extent.size)
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
    """Reads entries by this host's catalog; what lies on other hosts is not read. The second result is damage.

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
