"""Repair: makes a new catalog of what is whole.

The store has to be unused: whoever uses it holds a shared lock on its lock page, which is taken exclusively here.

1. Take the store for oneself, and make its folders, if any is missing (`_taken`).
2. Read the old catalog by a child process, and the headers of all segments (`salvage.py`).
3. Choose (`Choice` in `choice.py`, which has the rules): the entries that are to be, and what becomes of each file.
4. Headers that disagree with their entries are written anew. Files that hold what a record or nobody can vouch for are
   set aside, as ID.safetensors.damaged.
5. A catalog is built in a folder beside the old one, and synced.
6. **Rename the new data.mdb over the old one: the moment of repair.** Before it, the store is as damaged as it was, and
   can be repaired again; what was set aside is then missing, and so lost, as it was.
7. Unlink the files that no entry names, and write the lock page anew, so that the next opener recovers.

The new catalog has rows in the tables entries, history, quotas, spilled, segments and counters, and in those of a store
that was served (`KeptMembership`): nothing is being filled, kept for reuse, leased or pinned any more, and no attempt
waits for parts. Tables of later versions are dropped on purpose: nobody here can tell whether their rows are right.
Segments that only those name are files without an entry.

Versions and numbers go on 2**32 above all that was seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

from memstore._info import Progress, RepairReport
from memstore._wording import first_of
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import LockFile, OwnedFile
from memstore.engine.files.segments import other_size, write_slots
from memstore.engine.format.headers import HeaderSlots
from memstore.engine.format.records import LIVE, RETIRED, Record, SegmentExtent
from memstore.engine.repair.choice import Choice, IsJoining, Mend
from memstore.engine.repair.salvage import MergeFound, OldCatalog, SegmentFile, read_catalog, read_segments
from memstore.engine.root import folder
from memstore.engine.root.filesystem import check_filesystem, lockers_of
from memstore.engine.root.folder import CATALOG, CLUSTER, DOORBELL, LOCK, SEGMENTS, SETTINGS, Settings
from memstore.engine.root.roots import close_unused
from memstore.engine.root.shared import no_state, segments_of, shared_settings, state_of
from memstore.engine.root.spill import missing_spill, spill_folder
from memstore.engine.sync.pages import emptied, read_notes
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import NotAStoreError, StoreTimeoutError

log = logging.getLogger("memstore")

Name = TypeVar("Name")
Row = TypeVar("Row")

DAMAGED = ".damaged"
_NAMED = 8  # keys at most, in a warning
_ROWS_A_COMMIT = 4096


def repair_store(
    path: str, mend: Mend, merge: MergeFound, is_joining: IsJoining, timeout: float, progress: Progress | None
) -> RepairReport:
    """Repairs the store at `path`. Raises NotAStoreError without its settings, StoreTimeoutError while it is used.

    `progress` is told of segments whose headers were read.
    """
    with _taken(path, deadline_after(timeout)) as (path, segments, settings, lock_fd):  # step 1
        # 2. Read what is left.
        old = read_catalog(f"{path}/{CATALOG}", settings.store)
        spill = spill_folder(settings)
        if spill is not None and not os.path.isdir(spill):  # what lies there would be given up for lost
            if old.spilled or not old.is_sound:
                raise missing_spill(path, spill)
            spill = None
        found = list(read_segments([segments] if spill is None else [segments, spill], progress))
        files = _one_of_each(found, old)
        notes = read_notes(syscalls.read_at(lock_fd, syscalls.PAGE, 0))

        # 3. Choose. Up to here no file was changed.
        choice = Choice(
            old,
            files,
            settings.store,
            noted=notes.batch,
            publications_rung=notes.publications_rung,
            mend=mend,
            merge=merge,
            is_joining=is_joining,
            is_served=CLUSTER in settings.features,
            spill=spill,
        )

        # 4. Mend headers, set files aside. A kill leaves a store that is as damaged as before, and can be repaired
        # again: it finds mended headers whole, and what was set aside missing, and so lost, as it was.
        for record in choice.entries.values():
            for extent in choice.here(record):
                _mark(choice, record, extent, settings)
        for record in choice.replaced.values():
            for extent in choice.here(record):
                _mark(choice, record, extent, settings, RETIRED)
        for file in choice.quarantined():
            syscalls.rename(file.path, file.path + DAMAGED)

        # 5. Build a catalog beside the old one. A kill leaves its folder, which the next repair removes.
        present, fresh = f"{path}/{CATALOG}", f"{path}/{CATALOG}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            folder.create_folder(fresh, settings)
            _build(fresh, settings, choice)
            if not old.is_sound and os.path.lexists(f"{present}/data.mdb"):  # inline values may be in it
                with contextlib.suppress(FileNotFoundError):
                    syscalls.unlink(f"{present}/data.mdb{DAMAGED}")
                syscalls.link(f"{present}/data.mdb", f"{present}/data.mdb{DAMAGED}")
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(f"{present}/lock.mdb")  # the old one's; missing, it is made again

            # 6. Publish: the first rename is the moment of repair. A kill behind it leaves a repaired store, with
            # files that no entry names, which the next repair removes.
            syscalls.rename(f"{fresh}/data.mdb", f"{present}/data.mdb")
            syscalls.rename(f"{fresh}/lock.mdb", f"{present}/lock.mdb")
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        if settings.durable:
            for name in (present, f"{path}/catalog", segments):
                syscalls.sync_folder(name)
        _warn(path, settings, choice)

        # 7. Give back the files that no entry names, and empty the lock page: its next opener sees that it is
        # nobody's, makes the mutex and wakes all. The inodes of lock page and doorbell stay.
        swept = 0
        second = [file for file in found if files[file.segment] is not file]  # of a move that a kill has cut short
        for file in [*choice.deletable(), *second]:
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(file.path)
                swept += file.size
        if settings.durable:
            for name in (segments, *([] if spill is None else [spill])):
                syscalls.sync_folder(name)
        page = emptied(syscalls.read_at(lock_fd, syscalls.PAGE, 0), is_member=choice.membership.number > 0)
        syscalls.truncate(lock_fd, syscalls.PAGE)
        syscalls.write_at(lock_fd, page, 0)
        _mend_doorbell(path, settings)
    return RepairReport(_names(choice.entries), _names(choice.lost()), swept)


def _one_of_each(found: Sequence[SegmentFile], old: OldCatalog) -> dict[int, SegmentFile]:
    """Returns the file of each segment. Where one was being moved there are two: that of the put that its row names.

    Else it is the one whose header says more, and of two that are the same the one that wasn't moved.
    """
    files: dict[int, SegmentFile] = {}

    def merit(file: SegmentFile) -> tuple[bool, int]:
        row, put_id = old.rows.get(file.segment), 0 if file.found is None else file.found.put_id
        return put_id > 0 and row is not None and row.put_id == put_id, put_id

    for file in found:
        other = files.get(file.segment)
        if other is None or merit(file) > merit(other):
            files[file.segment] = file
    return files


class _Taken(NamedTuple):
    """A store that nobody else uses. `path` is that of its state, `segments` that of the folder of its segments."""

    path: str
    segments: str
    settings: Settings
    lock_fd: int


@contextlib.contextmanager
def _taken(path: str, deadline: float) -> Generator[_Taken]:
    """Takes a store for oneself, and makes folders that are missing. A kill leaves these, or an empty lock page.

    The folder is locked, so that nobody comes to use the store, and then the lock page, which is shared by who does.
    """
    folder.ensure_folder(path, None, create=False)
    storage = path = os.path.realpath(path)
    close_unused()
    shared = shared_settings(path)
    if shared is not None:
        path = state_of(shared)
        if not os.path.isdir(path):
            raise no_state(storage, path)
    with folder.locked(path, deadline, contextlib.nullcontext()) as fd:
        settings, segments = folder.read_settings(path), f"{path}/{SEGMENTS}"
        if settings is None:
            if os.path.isdir(segments):
                raise NotAStoreError(f"{path} has no {SETTINGS}: write it as docs/format.md has it, then repair again")
            raise NotAStoreError(f"{path} is no store: it has neither {SETTINGS} nor {SEGMENTS}")
        if settings.shared is not None:
            segments = segments_of(storage, settings.store)
        folder.check_folder(path, fd, settings)
        check_filesystem(path, settings.durability)
        folder.check_files(path, settings)
        for name in (f"{path}/catalog", f"{path}/{CATALOG}", segments):
            folder.create_folder(name, settings)
        if not os.path.lexists(f"{path}/{LOCK}"):
            folder.create_file(path, LOCK, bytes(syscalls.PAGE), settings)
        with LockFile(f"{path}/{LOCK}", os.O_RDWR) as file:
            if not syscalls.lock_exclusive(file.fd):
                gc.collect()  # what this process closed may be kept by the traceback of an error, in a cycle
            while not syscalls.lock_exclusive(file.fd):
                if time.monotonic() > deadline:
                    pids = lockers_of(file.fd)
                    who = f"pid {', '.join(map(str, pids))}" if pids else "processes that can't be seen from here"
                    raise StoreTimeoutError(
                        f"{path}: waited for {who} to close the store; a repair needs it for itself"
                    )
                time.sleep(0.01)
            yield _Taken(path, segments, settings, file.fd)


# --- what is changed --------------------------------------------------------------------------------------------------


def _mark(choice: Choice, record: Record, extent: SegmentExtent, settings: Settings, state: int = LIVE) -> None:
    """Writes a segment's header anew, where it doesn't say what the record says. That of a replaced one is retired."""
    if record.is_delta and extent.put_id != record.put_id:
        return  # another version's, whose header says retired
    file = choice.files[extent.segment]
    found, header = file.found, choice.mended.get(extent.segment)
    slots = HeaderSlots(extent.put_id, state, record.version, *record.batch_at(settings.store))
    if header is None and found is not None:
        if record.parts is None or record.is_delta:  # it may have been put together with others
            slots = dataclasses.replace(slots, batch=found.batch, count=found.count)
        if (found.state, found.version, found.batch, found.count) == (state, record.version, slots.batch, slots.count):
            return
    with OwnedFile(file.path, os.O_RDWR) as opened:
        if header is not None:
            syscalls.write_at(opened.fd, header, 0)
        write_slots(opened.fd, slots)
        if settings.durable:
            syscalls.sync(opened.fd)


def _build(where: str, settings: Settings, choice: Choice) -> None:
    """Writes the new catalog into the folder `where`, and syncs it."""
    catalog = Catalog(where, durable=settings.durable, writable=True)
    try:
        _write_rows(catalog, list(choice.entries.items()), Transaction.put_record)
        _write_rows(catalog, list(choice.replaced.items()), _put_replaced)
        _write_rows(catalog, list(choice.quotas().items()), _put_quota)
        _write_rows(catalog, list(choice.rows().items()), Transaction.put_segment)
        _write_rows(catalog, list(choice.moved().items()), _put_moved)
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
        with syscalls.file_open(f"{where}/{name}", os.O_RDWR) as fd:
            folder.give_to_group(fd, settings)
            syscalls.sync(fd)


def _write_rows(
    catalog: Catalog, rows: Sequence[tuple[Name, Row]], write: Callable[[Transaction, Name, Row], None]
) -> None:
    """Writes rows in transactions of some thousand: one of all would keep as many pages in memory."""
    for i in range(0, len(rows), _ROWS_A_COMMIT):

        def act(transaction: Transaction, part: Sequence[tuple[Name, Row]] = rows[i : i + _ROWS_A_COMMIT]) -> None:
            for name, row in part:
                write(transaction, name, row)

        catalog.update(act)


def _put_replaced(transaction: Transaction, name: tuple[bytes, int], record: Record) -> None:
    tables.put_version(transaction, name[0], record)


def _put_moved(transaction: Transaction, segment: int, size: int) -> None:
    transaction.put_row(tables.SPILLED, tables.pack_number(segment), tables.pack_number(size))


def _put_quota(transaction: Transaction, _: bytes, row: tables.QuotaRow) -> None:
    tables.put_quota(transaction, row)


def _mend_doorbell(path: str, settings: Settings) -> None:
    """Makes the doorbell's file, or gives it its size again."""
    name = f"{path}/{DOORBELL}"
    if not os.path.lexists(name):
        folder.create_file(path, DOORBELL, bytes(syscalls.PAGE), settings)
        return
    with syscalls.file_open(name, os.O_RDWR) as fd:
        if syscalls.status(fd).st_size != syscalls.PAGE:
            syscalls.truncate(fd, syscalls.PAGE)


def _warn(path: str, settings: Settings, choice: Choice) -> None:
    """Logs what no report can say: why keys are lost; and what nobody knows to be lost or old, or deleted and back."""
    old = choice.old
    for key in sorted(choice.lost() & old.records.keys())[:_NAMED]:
        for extent in choice.here(old.records[key]):
            file = choice.files.get(extent.segment)
            if file is not None and file.size != extent.size:
                what = other_size(file.size, extent.size)
                log.warning("%r can't be kept: %s: %s", *_names([key]), file.path, what)
    gone = sorted(old.replaced.keys() - choice.replaced.keys())
    if gone:
        shown = first_of([f"{version} of {name!r}" for key, version in gone for name in _names([key])], _NAMED)
        log.warning("%s: %d versions that were replaced, and were kept, are lost: %s", path, len(gone), shown)
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


def _some(keys: Iterable[bytes]) -> str:
    return first_of(list(map(repr, _names(keys))), _NAMED)


def _names(keys: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(key.decode(errors="backslashreplace") for key in sorted(keys))
