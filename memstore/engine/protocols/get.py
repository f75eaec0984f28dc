"""Gets: how entries are read.

1. Read the record; no transaction outlives the call. Inline values are done.
2. Open the segment, lock it shared without waiting, **then** compare the put id in its header with the record's
   (`root.storage.map`). A refused lock, a missing file, another put id, or a state that isn't live says that the entry
   was replaced since its record was read. Try again (`Store.get` twice, `get_many` once), then do the same under the
   store's mutex, where nobody can replace it: progress is certain, and a misfit is damage. In mode "r", which never
   takes the mutex, and on storage that hosts share, try until the deadline; the same misfit twice in a row is damage.
   External files are compared with what the record says of them (`map_external`) instead of being locked.
3. Check the size, map privately, close the file: the mapping keeps the lock (where it doesn't, the file stays open
   beside it). A reader that dies leaves nothing to clean up: the kernel unmaps the file and gives up the lock.

Where there is no record, or it says that bytes lie on other hosts, and the store is served, it goes on elsewhere
(`elsewhere.py`). What a record has without `hosts` is right, whoever owns its key by now.

All of it runs under `root.guard`, so that no forked child inherits the file descriptor, and with it the lock.

On storage that hosts share (`root/shared.py`), step 2 copies the bytes of each segment into memory of this process; or,
where the store was made so, maps the files. Nothing is locked. A file that isn't the one says that the value was
replaced since its record was read, and removed. This host's own writes are seen by it at once. None of that holds the
guard: a forked child that has a file open has no lock by that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from memstore.engine.files.mapping import map_external
from memstore.engine.files.segments import other_size
from memstore.engine.format.records import MUTABLE_MARK, Record, decode_external
from memstore.engine.protocols.elsewhere import MappedEntry, elsewhere_of, is_served
from memstore.engine.root.roots import Root, reopen_root
from memstore.engine.root.storage import mapped_size
from memstore.errors import ContentionError, CorruptionError, StorageError

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
    if lazily and not root.storage.maps_at_once and is_served(root):  # what isn't read takes no time
        return elsewhere_of(root).hold(keys, deadline, may_lock=may_lock, lazily=True, max_age=max_age)
    held = _hold_here(root, keys, deadline, may_lock=may_lock)
    if all(entry is not None and entry.record.hosts is None for entry in held) or not is_served(root):
        return held
    return elsewhere_of(root).hold(keys, deadline, may_lock=may_lock, lazily=lazily, max_age=max_age)


def _hold_here(root: Root, keys: Sequence[bytes], deadline: float, *, may_lock: bool) -> list[MappedEntry | None]:
    """Maps entries by this host's catalog. What lies on other hosts is not mapped."""
    held, before = _map_all(root, keys)
    if before is None:
        return held
    held, replaced = _map_all(root, keys)
    mutex_helps = root.storage.maps_at_once  # a read of bytes would keep all others
    if replaced is not None and may_lock and mutex_helps:
        held, replaced = root.mutex.run(_map_all, deadline, root, keys)
        before = replaced  # nobody replaces it under the mutex
    while replaced is not None:
        if replaced == before:  # twice the same, so nobody replaced it
            raise damaged_entry(root, *replaced)
        if time.monotonic() > deadline:
            name = replaced[0].decode()
            advice = (
                "open the store with mode 'r+', which may wait for its writers" if mutex_helps else "take a longer one"
            )
            raise ContentionError(
                f"{name!r} was replaced each time it was read, until the timeout: {advice}, or get less often", key=name
            )
        time.sleep(_RETRY_EVERY)
        before = replaced
        held, replaced = _map_all(root, keys)
    return held


MISFIT: Any = object()


def hold_at_once(root: Root, key: bytes) -> MappedEntry | None:
    """Maps the entry of one key, in one try.

    Returns MISFIT if it was replaced meanwhile, names several files, or is a mutable entry, which isn't for everybody.
    """
    with root.guard:
        # 1. Read the record
        record = root.catalog.read(key)
        if record is None:
            return None
        if record.description.startswith(MUTABLE_MARK):
            return MISFIT
        if not record.segment:
            return MappedEntry(record) if record.adopted is record.parts is None else MISFIT
        if not root.storage.maps_at_once:
            return MISFIT
        # 2. Open, lock and compare the segment, 3. map it: see `map_segment` in `engine/files/segments.py`
        try:
            mapping = root.storage.map(record, live=True)
        except CorruptionError as error:
            raise _of_key(error, key) from None
        return MISFIT if mapping is None else MappedEntry(record, mapping)


def _map_all(root: Root, keys: Sequence[bytes]) -> tuple[list[MappedEntry | None], _Replaced | None]:
    """Maps entries once. The second result is the first that was replaced since its record was read, if any."""
    held: list[MappedEntry | None] = []
    with root.reading():
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
    """Maps the extents of a record; None if a segment holds another put by now. Call it within `root.reading()`.

    All of them lie on this host, or are seen from it: segments of others may have the same numbers.

    With `live`, also None if it was replaced: a reference to a version doesn't mind.
    """
    assert record.hosts is None or root.storage.sees_all_hosts, "its bytes lie on other hosts"
    try:
        if record.adopted is not None:
            files = decode_external(record.adopted)
            with root.guard:
                return MappedEntry(record, map_external(files, mapped_size(record, files)))
        if not record.size:  # no segment, nor several
            return MappedEntry(record)
        mapping = root.storage.map(record, live=live)
        return None if mapping is None else MappedEntry(record, mapping)
    except (CorruptionError, StorageError) as error:
        raise _of_key(error, key) from error.__cause__


def _of_key(error: CorruptionError | StorageError, key: bytes) -> CorruptionError | StorageError:
    """Makes the same error with the key."""
    name, text = key.decode(), f"{key.decode()!r}: {error}"
    if isinstance(error, StorageError):
        return StorageError(text, key=name, code=error.errno, path=error.path, host=error.host)
    return CorruptionError(text, key=name, path=error.path, detail=error.detail)


def damaged_entry(root: Root, key: bytes, record: Record) -> CorruptionError:
    """Returns the error to raise. Raises NotAStoreError itself if the store is gone, or is being removed."""
    if record.adopted is not None:
        try:
            map_entry(root, key, record)
        except CorruptionError as error:
            return error
    root.check_missing()
    root.storage.check_spill()
    name, files = key.decode(), files_of(root, record)
    for _, path, extent in root.storage.placed(record):
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
    if record.adopted is not None:
        return tuple(extent.path for extent in decode_external(record.adopted))
    return tuple(place.path for place in root.storage.placed(record))
