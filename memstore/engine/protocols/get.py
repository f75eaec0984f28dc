"""How entries are read: the protocol of get.

1. Read the record; no transaction outlives the call. Inline values are done.
2. Open the segment, lock it shared without waiting, **then** compare the put id in its header with the record's. A
   refused lock, a missing file, another id, or a state that isn't live: it was replaced since. Start again once, then
   do the same under the store's mutex, where nobody can replace it: progress is certain, and a misfit is damage. Files
   of others are compared with what the record says of them (`external.py`) instead of being locked.
3. Check the size, map privately, close the file: the mapping keeps the lock (where it doesn't, the file stays open
   beside it). A reader that dies owes nothing.

All of it under the process's guard, so that no forked child inherits the file descriptor, and with it the lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from memstore.engine.files import Mapping, map_segment, map_sources, read_sources, segment_path
from memstore.engine.format import Record
from memstore.engine.root import Root, reopen_root
from memstore.errors import ContentionError, CorruptionError

Held = tuple[Record, Mapping | None, int]  # the mapping, and where the data starts. None for inline values
_RETRY_EVERY = 0.0005  # seconds, in mode "r"


def hold(root: Root, keys: Sequence[bytes], deadline: float, *, may_lock: bool) -> list[Held | None]:
    """The records of one moment, with their segments mapped; None where there is no such key.

    Raises NotAStoreError if files are missing because the path names another folder by now, and CorruptionError else.
    """
    if root.catalog.is_released:
        reopen_root(root, deadline)
    held, before = _try(root, keys)
    if before is None:
        return held
    held, misfit = _try(root, keys)
    if misfit is not None and may_lock:
        held, misfit = root.mutex.run(lambda: _try(root, keys), deadline)
        if misfit is not None:
            raise _damaged(root, *misfit)
    while misfit is not None and time.monotonic() < deadline:  # mode "r" never takes the mutex
        if misfit == before:  # twice the same, so nobody replaced it
            raise _damaged(root, *misfit)
        time.sleep(_RETRY_EVERY)
        before = misfit
        held, misfit = _try(root, keys)
    if misfit is None:
        return held
    name = misfit[0].decode()
    raise ContentionError(
        f"{name!r} was replaced each time it was read, until the timeout: open the store with mode 'r+', which may "
        "wait for its writers, or get less often",
        key=name,
    )


MISFIT: Any = object()


def hold_at_once(root: Root, key: bytes) -> Held | None:
    """As `hold` of one key that nobody replaces meanwhile; MISFIT where somebody does, or files of others don't fit."""
    with root.guard:
        record = root.catalog.read(key)
        if record is None:
            return None
        if record.segment:
            mapped = map_record(root, key, record, live=True)
            return MISFIT if mapped is None else (record, *mapped)
        return MISFIT if record.adopted is not None else (record, None, 0)


def _try(root: Root, keys: Sequence[bytes]) -> tuple[list[Held | None], tuple[bytes, Record] | None]:
    """Also the key and record whose segment was not there, if any."""
    held: list[Held | None] = []
    with root.guard:
        if len(keys) == 1:
            records = [root.catalog.read(keys[0])]
        else:
            records = root.catalog.view(lambda transaction: [transaction.record(key) for key in keys])
        for key, record in zip(keys, records, strict=True):
            if record is None:
                held.append(None)
            elif not record.has_files:
                held.append((record, None, 0))
            else:
                try:
                    mapped = map_record(root, key, record, live=True)
                except CorruptionError:
                    if record.adopted is None:
                        raise
                    mapped = None  # a file of others was replaced, and maybe attached anew since the record was read
                if mapped is None:
                    return [], (key, record)
                held.append((record, *mapped))
    return held, None


def map_record(root: Root, key: bytes, record: Record, *, live: bool = False) -> tuple[Mapping | None, int] | None:
    """Maps what a record names; None if its segment holds another put by now. Call it under the guard.

    With `live`, also None if it was replaced: a reference to a version doesn't mind.
    """
    try:
        if record.adopted is not None:
            return map_sources(read_sources(record.adopted)), 0
        path = segment_path(root.segments, record.segment)
        return map_segment(
            path, record, store=root.settings.store, dir_fd=root.segments_fd, live=live, keep_open=root.locks_need_files
        )
    except CorruptionError as error:
        name = key.decode()
        raise CorruptionError(f"{name!r}: {error}", key=name, path=error.path, detail=error.detail) from None


def _damaged(root: Root, key: bytes, record: Record) -> CorruptionError:
    if record.adopted is not None:
        try:
            map_record(root, key, record)
        except CorruptionError as error:
            return error
    root.check_in_place()
    name, path = key.decode(), segment_path(root.segments, record.segment)
    detail = (
        f"the file is missing, is locked by somebody else, is not that of put {record.put_id:#x} of this store, or "
        "says that it was replaced: unless it is locked, run memstore.repair"
    )
    return CorruptionError(key=name, path=path, detail=detail)


def files_of(root: Root, record: Record) -> tuple[str, ...]:
    """The paths of the bytes of a version."""
    if record.adopted is not None:
        return tuple(file.path for file in read_sources(record.adopted))
    return (segment_path(root.segments, record.segment),) if record.segment else ()
