"""Repair: makes a new catalog of what is whole.

The store has to be unused: whoever uses it holds a shared lock on its lock page, which is taken exclusively here.

1. Read the old catalog by a child process, and the headers of all segments (`salvage.py`).
2. Choose (`triage.py`): the entries that are to be, and what becomes of each file.
3. Headers that disagree with their entries are written anew. Files that hold what a record or nobody can vouch for are
   set aside, as ID.safetensors.damaged. A catalog is built in a folder beside the old one, and synced.
4. **Rename the new data.mdb over the old one: the moment of repair.** Before it, the store is as damaged as it was, and
   can be repaired again; what was set aside is then missing, and so lost, as it was.
5. Unlink the files that no entry names, and write the lock page anew, so that the next opener recovers.

The new catalog has rows in the tables entries, segments and counters, and in those of a store that was served
(`membership.py`): nothing is being filled, kept for reuse or leased any more, and no attempt waits for parts. Tables of
later versions are dropped on purpose, since nobody here can tell whether their rows are right; segments that only those
name are files without an entry.

The inodes of lock page and doorbell stay. Versions and numbers go on 2**32 above all that was seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import TypeVar

from memstore.engine import syscalls
from memstore.engine.catalog import Catalog, Transaction
from memstore.engine.files import LockFile, OwnedFile, other_size, write_slots
from memstore.engine.format import LIVE, Record, SegmentExtent, Slots
from memstore.engine.repair.membership import IsHome
from memstore.engine.repair.salvage import read_catalog, read_segments
from memstore.engine.repair.sharded import Merge
from memstore.engine.repair.triage import Choice, Mend
from memstore.engine.root import (
    CATALOG,
    CLUSTER,
    DOORBELL,
    LOCK,
    SEGMENTS,
    SETTINGS,
    Settings,
    check_filesystem,
    close_unused,
    folder,
    lock_holders,
    no_state,
    segments_of,
    shared_settings,
    state_of,
)
from memstore.engine.sync import deadline_after, read_notes
from memstore.errors import NotAStoreError, StoreTimeoutError
from memstore.info import Progress, RepairReport

log = logging.getLogger("memstore")

Name = TypeVar("Name")
Row = TypeVar("Row")

DAMAGED = ".damaged"
_NAMED = 8  # keys at most, in a warning
_ROWS_A_COMMIT = 4096


def repair_store(
    path: str, mend: Mend, merge: Merge, is_home: IsHome, timeout: float, progress: Progress | None
) -> RepairReport:
    """Repairs the store at `path`. Raises NotAStoreError without its settings, StoreTimeoutError while it is used.

    `progress` is told of segments whose headers were read.
    """
    deadline = deadline_after(timeout)
    folder.ensure_folder(path, None, create=False)
    path = os.path.realpath(path)
    close_unused()
    storage, shared = path, shared_settings(path)
    if shared is not None:
        path = state_of(shared)
        if not os.path.isdir(path):
            raise no_state(storage, path)
    with folder.locked(path, deadline, contextlib.nullcontext()) as fd:
        settings = folder.read_settings(path)
        segments = f"{path}/{SEGMENTS}"
        if settings is not None and settings.shared is not None:
            segments = segments_of(storage, settings.store)
        if settings is None and not os.path.isdir(segments):
            raise NotAStoreError(f"{path} is no store: it has neither {SETTINGS} nor {SEGMENTS}")
        if settings is None:
            raise NotAStoreError(f"{path} has no {SETTINGS}: write it as docs/format.md has it, then repair again")
        folder.check_folder(path, fd, settings)
        check_filesystem(path, settings.durability)
        folder.check_files(path, settings)
        for name in (f"{path}/catalog", f"{path}/{CATALOG}", segments):
            folder.create_folder(name, settings)
        with _alone(path, settings, deadline) as lock_fd:
            old = read_catalog(f"{path}/{CATALOG}", settings.store)
            files = {file.segment: file for file in read_segments(segments, progress)}
            notes = read_notes(syscalls.read_at(lock_fd, syscalls.PAGE, 0))
            noted, is_served = notes.batch, CLUSTER in settings.features
            choice = Choice(
                *(old, files, settings.store, noted, notes.publications_rung, mend, merge, is_home, is_served)
            )
            _apply(path, segments, settings, choice)
            _warn(path, settings, choice)
            swept = _sweep(choice)
            if settings.durable:
                syscalls.sync_folder(segments)
            _renew(lock_fd)
            _check_doorbell(path, settings)
    return RepairReport(_names(choice.entries), _names(choice.lost()), swept)


@contextlib.contextmanager
def _alone(path: str, settings: Settings, deadline: float) -> Generator[int]:
    """Holds the lock page exclusively; the root folder is locked, so nobody comes to use it."""
    name = f"{path}/{LOCK}"
    if not os.path.lexists(name):
        folder.create_file(path, LOCK, bytes(syscalls.PAGE), settings)
    file = LockFile(name, os.O_RDWR)
    try:
        if not syscalls.lock_exclusive(file.fd):
            gc.collect()  # what this process closed may be kept by the traceback of an error, in a cycle
        while not syscalls.lock_exclusive(file.fd):
            if time.monotonic() > deadline:
                status = syscalls.status(file.fd)
                pids = sorted(lock_holders().get((status.st_dev, status.st_ino), ()))
                who = f"pid {', '.join(map(str, pids))}" if pids else "processes that can't be seen from here"
                raise StoreTimeoutError(f"{path}: waited for {who} to close the store; a repair needs it for itself")
            time.sleep(0.01)
        yield file.fd
    finally:
        file.close()


# --- what is changed --------------------------------------------------------------------------------------------------


def _apply(path: str, segments: str, settings: Settings, choice: Choice) -> None:
    """Steps 3 and 4."""
    for record in choice.entries.values():
        for extent in choice.here(record):
            _mark_live(choice, record, extent, settings)
    for file in choice.quarantined():
        syscalls.rename(file.path, file.path + DAMAGED)
    fresh = f"{path}/{CATALOG}.new"
    shutil.rmtree(fresh, ignore_errors=True)  # of a repair that was killed
    try:
        folder.create_folder(fresh, settings)
        _build(fresh, settings, choice)
        _replace(f"{path}/{CATALOG}", fresh, keep=not choice.old.is_sound)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if settings.durable:
        for name in (f"{path}/{CATALOG}", f"{path}/catalog", segments):
            syscalls.sync_folder(name)


def _replace(present: str, fresh: str, *, keep: bool) -> None:
    """The new catalog takes the old one's place. With `keep` that isn't thrown away: inline values may be in it."""
    old = f"{present}/data.mdb"
    if keep and os.path.lexists(old):
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(old + DAMAGED)
        syscalls.link(old, old + DAMAGED)
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(f"{present}/lock.mdb")  # the old one's; missing, it is made again
    syscalls.rename(f"{fresh}/data.mdb", old)
    syscalls.rename(f"{fresh}/lock.mdb", f"{present}/lock.mdb")


def _mark_live(choice: Choice, record: Record, extent: SegmentExtent, settings: Settings) -> None:
    file = choice.files[extent.segment]
    found, header = file.found, choice.mended.get(extent.segment)
    slots = Slots(extent.put_id, LIVE, record.version, *record.batch_at(settings.store))
    if header is None and found is not None:
        if record.parts is None:  # it may have been put together with others
            slots = dataclasses.replace(slots, batch=found.batch, count=found.count)
        if (found.state, found.version, found.batch, found.count) == (LIVE, record.version, slots.batch, slots.count):
            return
    opened = OwnedFile(file.path, os.O_RDWR)
    try:
        if header is not None:
            syscalls.write_at(opened.fd, header, 0)
        write_slots(opened.fd, slots)
        if settings.durable:
            syscalls.sync(opened.fd)
    finally:
        opened.close()


def _build(where: str, settings: Settings, choice: Choice) -> None:
    catalog = Catalog(where, durable=settings.durable, writable=True)
    try:
        _write_rows(catalog, list(choice.entries.items()), Transaction.put_record)
        _write_rows(catalog, list(choice.rows().items()), Transaction.put_segment)
        if choice.membership.number:
            catalog.create_served()
            rows = list(choice.membership.rows.items())
            _write_rows(catalog, rows, lambda transaction, name, stored: transaction.put_row(*name, stored))
        counters = choice.counters()
        catalog.update(lambda transaction: transaction.put_counters(counters))
        catalog.update(lambda transaction: transaction.put_store_id(settings.store))
    finally:
        catalog.close()
    for name in ("data.mdb", "lock.mdb"):
        fd = syscalls.open_file(f"{where}/{name}", os.O_RDWR)
        try:
            folder.give_to_group(fd, settings)
            syscalls.sync(fd)
        finally:
            syscalls.close(fd)


def _write_rows(
    catalog: Catalog, rows: Sequence[tuple[Name, Row]], write: Callable[[Transaction, Name, Row], None]
) -> None:
    for i in range(0, len(rows), _ROWS_A_COMMIT):

        def act(transaction: Transaction, part: Sequence[tuple[Name, Row]] = rows[i : i + _ROWS_A_COMMIT]) -> None:
            for name, row in part:
                write(transaction, name, row)

        catalog.update(act)


def _sweep(choice: Choice) -> int:
    freed = 0
    for file in choice.deletable():
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(file.path)
            freed += file.size
    return freed


def _renew(fd: int) -> None:
    """Empties the lock page in place: its next opener sees that it is nobody's, makes the mutex and wakes all."""
    syscalls.truncate(fd, syscalls.PAGE)
    syscalls.write_at(fd, bytes(syscalls.PAGE), 0)


def _check_doorbell(path: str, settings: Settings) -> None:
    name = f"{path}/{DOORBELL}"
    if not os.path.lexists(name):
        folder.create_file(path, DOORBELL, bytes(syscalls.PAGE), settings)
        return
    fd = syscalls.open_file(name, os.O_RDWR)
    try:
        if syscalls.status(fd).st_size != syscalls.PAGE:
            syscalls.truncate(fd, syscalls.PAGE)
    finally:
        syscalls.close(fd)


def _warn(path: str, settings: Settings, choice: Choice) -> None:
    """Logs what no report can say: why keys are lost; and what nobody knows to be lost or old, or deleted and back."""
    old = choice.old
    for key in sorted(choice.lost() & old.records.keys())[:_NAMED]:
        for extent in choice.here(old.records[key]):
            file = choice.files.get(extent.segment)
            if file is not None and file.size != extent.size:
                what = other_size(file.size, extent.size)
                log.warning("%r can't be kept: %s: %s", *_names([key]), file.path, what)
    if choice.membership.is_lost:
        log.warning(
            "%s: it was served as a member of a cluster, and what said of which is lost: it can't be one any more. "
            "What it still has can be read and exported: remove the host from its cluster, and serve an empty store",
            path,
        )
    if old.is_sound:
        return
    inline = [key for key, record in choice.entries.items() if not record.segments]
    if old.is_older and inline:
        log.warning(
            "%s: the catalog is older than what lay beside it: %d values that lie in it may be older than what was "
            "put last, and keys may be back that were deleted since: %s",
            *(path, len(inline), _some(inline)),
        )
    if settings.inline_limit:
        log.warning(
            "%s: the catalog was not whole: values of up to %d bytes lie in it alone. %d are there; others may be "
            "lost, and nobody can say which",
            *(path, settings.inline_limit, len(inline)),
        )
    if choice.from_headers:
        log.warning(
            "%s: %d keys are back by what their files say. One whose delete was cut off by a kill may be among them: "
            "%s",
            *(path, len(choice.from_headers), _some(choice.from_headers)),
        )


def _some(keys: Collection[bytes]) -> str:
    more = len(keys) - _NAMED
    return ", ".join(map(repr, _names(keys)[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _names(keys: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(key.decode(errors="backslashreplace") for key in sorted(keys))
