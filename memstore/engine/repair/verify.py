"""Verify: is all that the catalog names there, and as it was put?

1. The catalog, all of it, by a child process (`survey.py`). If that can't read it to its end, nothing here touches it.
2. The files that every process of the store maps or reads when it opens.
3. Each key whose bytes lie on this host: its record (read again, so that what is replaced meanwhile is looked at
   anew), the whole headers of its segments, and by `check`, which knows what values are, the bytes.

Nothing is copied: bytes are checked where they are mapped, and no mapping outlives its key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from memstore._info import Progress, VerifyReport
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.files.segments import segment_path
from memstore.engine.format.headers import DELTA_MARK, PART_MARK, ParsedHeader, read_header
from memstore.engine.format.records import LIVE, RETIRED, Record, SegmentExtent
from memstore.engine.index import find, keys_of_bytes_here
from memstore.engine.protocols.elsewhere import MappedEntry
from memstore.engine.protocols.get import hold
from memstore.engine.protocols.history import hold_version_of
from memstore.engine.protocols.recovery import check_publications
from memstore.engine.repair.survey import Damage, survey
from memstore.engine.root import folder
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import (
    CorruptionError,
    HomeUnavailableError,
    MemstoreError,
    ResourceLimitError,
    error_of_lack,
    in_callers_code,
    way_out,
)

Check = Callable[
    [Root, str, MappedEntry, Callable[[int], None]], bool
]  # whether there were checksums; called with bytes done

_TRIES = 8  # for a key that is replaced while it is looked at


def verify_store(
    root: Root, keys: Iterable[bytes] | None, check: Check, progress: Progress | None, timeout: float, *, may_lock: bool
) -> VerifyReport:
    """Looks at `keys`, or at all. Damage is reported; nothing is raised for it. `timeout` is for each wait.

    Raises ResourceLimitError if something is lacking to look.
    """
    chosen = None if keys is None else list(dict.fromkeys(keys))
    # 1. The catalog. No step changes anything: a kill leaves the store as it is.
    found = survey(f"{root.state}/{folder.CATALOG}", locked=True)
    damaged = list(_of_the_catalog(root, found.damage, chosen))

    # 2. The files that every process of the store maps or reads when it opens
    damaged += _of_the_folder(root)
    if found.lack:
        text = f"{root.path} can't be looked at: {found.refused}: {way_out(found.lack)}"
        raise ResourceLimitError(text, code=found.lack)
    if found.broken or found.refused:
        root.check_in_place()
        path = f"{root.state}/{folder.CATALOG}/data.mdb"
        detail = f"{found.broken}: close the store everywhere, and run memstore.repair"
        if found.refused:
            detail = f"it can't be looked at: {found.refused}"
        broken = CorruptionError(path=path, detail=detail)
        return VerifyReport(0, 0, (broken, *damaged), ok=False)
    try:
        check_publications(root)
    except CorruptionError as error:
        damaged.append(_told(error))

    # 3. Each key: its headers, and by `check` its bytes
    asked = () if progress is None or chosen is None else chosen  # who hears of no progress doesn't wait for sizes
    step = _Steps(progress, found.nbytes if chosen is None else _bytes_of(root, asked, timeout))
    checked = unchecked = 0
    for key in keys_of_bytes_here(root) if chosen is None else chosen:
        try:
            outcome = look_at(root, key, check, step, timeout, may_lock=may_lock)
            look_at_replaced(root, key, check, step, timeout, may_lock=may_lock)
        except CorruptionError as error:
            damaged.append(_told(error))
        except HomeUnavailableError as error:  # nobody says what these bytes should be
            if chosen is None:
                unchecked += 1
            else:
                damaged.append(_unreadable(root, key, error))
        except (MemstoreError, OSError) as error:  # a stopped writer, for instance: nobody knows
            _raise_if_lack(root, error)
            damaged.append(_unreadable(root, key, error))
        else:
            checked += outcome is True
            unchecked += outcome is False
            if outcome is None and chosen is not None:
                detail = "there is no such key"
                damaged.append(CorruptionError(key=_name(key), detail=detail))
    step.finish()
    root.check_in_place()  # else what was looked at is another store by now, in part
    return VerifyReport(checked, unchecked, tuple(damaged), ok=not damaged)


class _Steps:
    """Tells of progress. Keys come and go meanwhile, so the sum is held to what was announced."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        if self._progress is not None:
            with in_callers_code():
                self._progress(self._done, self._total)

    def finish(self) -> None:
        self(self._total - self._done)


def _bytes_of(root: Root, keys: Iterable[bytes], timeout: float) -> int:
    total = 0
    for key in keys:
        with contextlib.suppress(MemstoreError):
            record = find(root, key, timeout)
            total += record.nbytes if record else 0
    return total


def look_at(
    root: Root, key: bytes, check: Check, done: Callable[[int], None], timeout: float, *, may_lock: bool
) -> bool | None:
    """Compares a key's bytes. Returns whether there were checksums; None if there is no such key.

    Raises CorruptionError.
    """
    name = _name(key)
    for _ in range(_TRIES):
        (held,) = hold(root, (key,), deadline_after(timeout), may_lock=may_lock)
        if held is None:
            return None
        try:
            _check_headers(root, name, held)
            return check(root, name, held, done)
        except CorruptionError:
            # The header of what was replaced meanwhile says so, for one.
            record = find(root, key, timeout)
            if record is not None and record.put_id == held.record.put_id:
                raise
    return False


def look_at_replaced(
    root: Root, key: bytes, check: Check, done: Callable[[int], None], timeout: float, *, may_lock: bool
) -> None:
    """Compares the bytes of versions that were replaced, and are kept. Raises CorruptionError.

    The bytes that lie on other hosts are left to those.
    """
    for kept in root.catalog.view(tables.kept_versions, key):
        try:
            record = root.catalog.view(tables.kept_record, key, kept.version)
            if record is None or record.hosts is not None:
                continue
            held = hold_version_of(root, key, kept.version, deadline_after(timeout), may_lock=may_lock)
            if held is not None:
                _check_headers(root, _name(key), held, state=RETIRED)
                check(root, _name(key), held, done)
        except CorruptionError as error:
            if kept in root.catalog.view(tables.kept_versions, key):  # it didn't go meanwhile
                detail = f"version {kept.version}, which was replaced and is kept: {error.detail}"
                raise CorruptionError(key=_name(key), path=error.path, detail=detail) from None


def _check_headers(root: Root, name: str, held: MappedEntry, *, state: int = LIVE) -> None:
    record = held.record
    for host, path, extent in root.storage.placed(record):
        if host != root.settings.store and not root.storage.sees_all_hosts:
            continue  # the headers of others stay where they are: those hosts look at them
        try:
            with held.header(extent) as header:
                found = read_header(header, extent.size)
            if record.is_delta:
                _compare_delta(record, extent, found, _expected(record, extent, name, host), state)
                continue
            expected = {**_expected(record, extent, name, host), "state": state}
            if not root.owners.is_alone and not found.version:  # of bytes that another host owns
                expected["version"] = 0
            if not root.owners.is_alone and record.parts is not None:  # published by itself: lent, or taken over
                expected["batch"] = (found.batch, found.count)
            _compare(_said(found, record.parts is not None), expected)
        except CorruptionError as error:
            raise CorruptionError(key=name, path=path, detail=error.detail) from None


_Facts = dict[str, object]


def _compare_delta(record: Record, extent: SegmentExtent, found: ParsedHeader, expected: _Facts, state: int) -> None:
    """Compares a header of a version that shares files. Those that it shares are another version's, and retired."""
    said = _said(found, True)
    names = ("put id", "store", "key")
    if extent.put_id == record.put_id:
        names = (*names, "version", "state", "kind", "checksums")
        expected = {**expected, "state": state, "kind": DELTA_MARK, "checksums": record.checksums or None}
        said |= {"kind": found.description[: len(DELTA_MARK)], "checksums": found.checksums}
    _compare({name: said[name] for name in names}, expected)


def _said(found: ParsedHeader, is_part: bool) -> _Facts:
    facts: _Facts = {
        "state": found.state,
        "put id": found.put_id,
        "version": found.version,
        "store": found.store,
        "key": found.key,
    }
    if is_part:
        return {**facts, "batch": (found.batch, found.count), "kind": found.description[: len(PART_MARK)]}
    return {**facts, "size of data": found.nbytes, "description": found.description, "checksums": found.checksums}


def _expected(record: Record, extent: SegmentExtent, name: str, store: str) -> _Facts:
    """Returns what a header of this store has to say. A part describes itself, which its record doesn't repeat.

    Its digest vouches for that.
    """
    facts: _Facts = {"put id": extent.put_id, "version": record.version, "store": store, "key": name}
    if record.parts is not None:
        return {**facts, "batch": record.batch_at(store), "kind": PART_MARK}
    return {
        **facts,
        "size of data": record.nbytes,
        "description": record.description,
        "checksums": record.checksums or None,
    }


def _compare(said: _Facts, expected: _Facts) -> None:
    for what, there in said.items():
        if there != expected[what]:
            values = f": {there!r}, not {expected[what]!r}" if isinstance(there, (int, str, tuple)) else ""
            raise CorruptionError(f"header and record differ in {what}{values}")


def _of_the_catalog(root: Root, damage: Iterable[Damage], chosen: list[bytes] | None) -> Iterator[CorruptionError]:
    for one in damage:
        if one.is_record or (chosen is not None and one.key not in chosen):
            continue  # each record is read again, with its key; or it isn't asked for
        path = f"{root.state}/{folder.CATALOG}/data.mdb"
        if one.segment:
            path = segment_path(root.segments, one.segment)
        name = None if one.key is None else _name(one.key)
        yield CorruptionError(key=name, path=path, detail=one.detail)


def _of_the_folder(root: Root) -> Iterator[CorruptionError]:
    try:
        settings, ours = folder.read_settings(root.state), root.settings
        # other processes may have added features since
        if (
            settings is None
            or msgspec.structs.replace(settings, format=ours.format, features=ours.features, spill=ours.spill) != ours
        ):
            raise MemstoreError("it is missing, or was changed since the store was opened")
    except (MemstoreError, OSError) as error:
        _raise_if_lack(root, error)
        path = f"{root.state}/{folder.SETTINGS}"
        yield CorruptionError(path=path, detail=str(error))
    for name in (folder.LOCK, folder.DOORBELL):
        path = f"{root.state}/{name}"
        try:
            detail = "" if (size := os.lstat(path).st_size) == syscalls.PAGE else f"{size:,} bytes, not {syscalls.PAGE}"
        except OSError as error:
            detail = error.strerror or str(error)
        if detail:
            yield CorruptionError(path=path, detail=detail)


def _raise_if_lack(root: Root, error: Exception) -> None:
    """Raises ResourceLimitError if this process lacks something, which says nothing of the bytes."""
    if isinstance(error, ResourceLimitError):
        raise error
    lack = error_of_lack(error, root.path)
    if lack is not None:
        raise lack from error


def _unreadable(root: Root, key: bytes, error: Exception) -> CorruptionError:
    return CorruptionError(key=_name(key), path=root.path, detail=f"it can't be looked at: {error}")


def _told(error: CorruptionError) -> CorruptionError:
    """Returns the error without its traceback, which would keep the store open as long as the report."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error


def _name(key: bytes) -> str:
    return key.decode(errors="backslashreplace")
