"""Repair: makes a new catalog of what is whole.

The store has to be unused: whoever uses it holds a shared lock on its lock page, which is taken exclusively here.

1. Take the store for oneself, and make its folders, if any is missing (`_taken`).
2. Read the old catalog by a child process, and the headers of all segments (`salvage.py`).
3. Choose (`Choice`): the entries that are to be, and what becomes of each file.
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

The rules of the choice: A sound catalog is the truth. Of a damaged one, each row that fits its checksum counts, and
files that say live stand for keys whose rows are gone, the highest version of each. What a killed writer, or a crash of
the host, left half published doesn't count, unless a row confirms it. Replaced versions that are kept stay beside the
present one, if rows have them; their headers say retired, so they never come in its place. A catalog that is whole, and
older than its files (see `protocols/recovery.py`), counts as a damaged one; there a header that says retired is
believed. A sharded entry has several segments, and is kept, or made of their headers (`merged`), only if all of them
are there. Parts that waited
for others are none: nobody is left who would bring these.

Of a store that is served as a member of a cluster, rows that name segments for other hosts count as records do: what is
lent. Copies are dropped, since they can be fetched again. Of a catalog that wasn't whole, sessions and calls are
dropped: a call that came again might be made twice, where its answer was lost; so it is refused, as one of a session
that has ended. Files that say live, and that nothing names, stand for keys of groups that this host owns by its
catalog; those of other groups are lent to nobody in particular: an audit asks the owners of their keys whether they are
needed. If the row is gone that says of which cluster the store is, or if the catalog is older than its files, the store
can't be a member any more. Its counters say that it was one, so each commit, and each get of what isn't there, raises
an error that says so.
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
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from memstore._info import Progress, RepairReport
from memstore._wording import first_of
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import LockFile, OwnedFile, map_file
from memstore.engine.files.segments import other_size, write_slots
from memstore.engine.format.headers import HeaderSlots, ParsedHeader
from memstore.engine.format.records import (
    FILLING,
    LIVE,
    PREPARED,
    RETIRED,
    Record,
    SegmentExtent,
    SegmentRow,
    encode_extents,
)
from memstore.engine.protocols.history import count_within
from memstore.engine.repair.salvage import (
    MergeFound,
    OldCatalog,
    SegmentFile,
    by_version,
    is_part,
    merged,
    read_catalog,
    read_segments,
)
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


# --- what is kept of a member of a cluster ---------------------------------------------------------------------------


IsJoining = Callable[[bytes], bool]
"""Says, by the row `cluster`, whether the root has keys of groups that it has not claimed yet."""

Rows = dict[tuple[str, bytes], bytes]


@dataclass(slots=True)
class KeptMembership:
    """The part that the repaired store has in a cluster.

    Attributes:
        number: as of its counters; 0: it is no member.
        rows: by table and key.
        segments: that these rows name.
        is_lost: it was a member, and nobody knows of which cluster.
        lost: keys of rows whose segments are gone.
    """

    number: int = 0
    rows: Rows = field(default_factory=Rows)
    segments: dict[int, SegmentRow] = field(default_factory=dict[int, SegmentRow])
    is_lost: bool = False
    lost: set[bytes] = field(default_factory=set[bytes])


def said_of(old: OldCatalog) -> bytes | None:
    """Returns the content of the row `cluster` of the old catalog, or None if it can't be believed."""
    stored = None if old.is_older else old.served.get((tables.CLUSTER, tables.MEMBERS))
    return None if stored is None else tables.members_body(stored)


def membership_of(
    old: OldCatalog, files: dict[int, SegmentFile], store: str, unnamed: Iterable[SegmentFile]
) -> KeptMembership:
    """Chooses what a store keeps that was served.

    Args:
        unnamed: files of this store that say live, and that no entry names.
    """
    if old.is_sound and not old.counters.membership:
        return KeptMembership()  # nobody had told it yet who the members are
    kept = KeptMembership(old.counters.membership + 1, is_lost=said_of(old) is None)
    dropped = {tables.COPIES} if old.is_sound else {tables.COPIES, tables.SESSIONS, tables.CALLS}
    if kept.is_lost:
        dropped.add(tables.CLUSTER)
    copied: set[int] = set()
    for (table, key), stored in old.served.items():
        named = tables.read_kept(table, key, stored).segments if table in tables.KEEPING else ()
        if table == tables.COPIES:
            copied.update(segment for segment, _ in named)
        if table not in dropped:
            _keep_row(kept, old, files, store, (table, key), named)
    for file in () if old.is_sound else unnamed:
        if file.found is not None and file.key is not None and file.segment not in copied | kept.segments.keys():
            put_id, number = file.found.put_id, tables.pack_number(file.found.put_id)
            lent = tables.KeptRow(((file.segment, put_id),), b"")
            kept.rows[tables.LENT, number] = tables.encode_kept(number, lent)
            kept.segments[file.segment] = SegmentRow(file.key, put_id, LIVE, file.size)
    return kept


def _keep_row(
    kept: KeptMembership,
    old: OldCatalog,
    files: dict[int, SegmentFile],
    store: str,
    name: tuple[str, bytes],
    named: Iterable[tuple[int, int]],
) -> None:
    """Keeps a row, if all segments are there that it names: pairs of segment and put id."""
    rows: dict[int, SegmentRow] = {}
    for segment, put_id in named:
        row, file = old.rows.get(segment), files.get(segment)
        # a file whose header is damaged may be that put's: who reads it finds out
        if file is None or (file.found is not None and (file.found.store, file.found.put_id) != (store, put_id)):
            kept.lost |= {row.key} if row is not None else set()
            return
        key = row.key if row is not None else file.key or b""
        rows[segment] = SegmentRow(key, put_id, LIVE, file.size)
    kept.rows[name] = old.served[name]
    kept.segments |= rows


# --- which entries the store is to hold, and what becomes of each file -----------------------------------------------


Mend = Callable[[str, bytes, Record, SegmentExtent, memoryview], "bytes | None"]
"""Called with store, key, record, one of its segments and the bytes of that file, whose header is damaged. Returns a
header made of the record; None if the bytes aren't those that the record calls for, or nothing tells.
"""

_FAR = 1 << 32  # beyond any version or number that somebody may have seen


@dataclass(slots=True)
class Choice:
    """The entries that the store is to hold, and what becomes of each file.

    Attributes:
        noted: the batch that was being published when the store was last used, or 0.
        publications_rung: how many publications the lock page has counted.
        is_served: it was served to other hosts, or about to be.
        spill: the folder of files that were moved.
        membership: what it keeps of that.
        entries: what the new catalog is made of.
        replaced: by key and version, the replaced versions that it keeps.
        mended: by segment, headers made of records.
        cut_off: batches that were being published and got no further.
        from_headers: keys whose entries are made of headers alone.
        incomplete: by key, segments of sharded entries that were published, and can't be made of what is there.
    """

    old: OldCatalog
    files: dict[int, SegmentFile]
    store: str
    noted: int
    publications_rung: int
    mend: Mend
    merge: MergeFound
    is_joining: IsJoining
    is_served: bool = False
    membership: KeptMembership = field(default_factory=KeptMembership)
    spill: str | None = None
    entries: dict[bytes, Record] = field(default_factory=dict[bytes, Record])
    replaced: dict[tuple[bytes, int], Record] = field(default_factory=dict[tuple[bytes, int], Record])
    mended: dict[int, bytes] = field(default_factory=dict[int, bytes])
    cut_off: set[int] = field(default_factory=set[int])
    from_headers: set[bytes] = field(default_factory=set[bytes])
    incomplete: dict[bytes, set[int]] = field(default_factory=dict[bytes, "set[int]"])

    def __post_init__(self) -> None:
        # which batches got no further than their headers
        if self.noted:
            self.cut_off.add(self.noted)
        known = self.old.counters.publications
        # if the lock page has counted more, a batch that the catalog calls unfinished may have been published since
        if not known or self.publications_rung <= known:
            self.cut_off |= self._unfinished()
        # whether the catalog can be believed
        if self._is_older():
            self.old.is_older, self.old.is_sound = True, False
        # entries of its records whose files are there
        by_put = self._by_put()
        for key, record in self.old.records.items():
            kept = self._keep(key, record, by_put) if record.segments else record
            if kept is not None:
                self.entries[key] = kept
        # entries of headers that are newer than any record; files of replaced versions never stand for the present one
        replaced = self._segments_of(self.old.replaced.values())
        published = [file for file in self._ours() if self._is_published(file) and file.segment not in replaced]
        for files in by_version(published):
            self._consider(files)
        # versions that were replaced, and are kept beside the present one: all pins are over
        older: dict[bytes, list[Record]] = {}
        for key, version in sorted(self.old.replaced):
            record = self.old.replaced[key, version]
            kept = self._keep(key, record, by_put) if record.segments else record
            if kept is not None and key in self.entries and version < self.entries[key].version:
                older.setdefault(key, []).append(kept)
        for key, records in older.items():
            if key in self.from_headers and self.entries[key].history is None:  # what its record said is lost
                self.entries[key] = msgspec.structs.replace(self.entries[key], history=(len(records) + 1, 0))
            most, most_bytes = self.entries[key].history or (1, 0)
            versions = [tables.KeptVersion(b"", one.version, one.held_bytes) for one in records]
            for one in records[len(records) - count_within(versions, most - 1, most_bytes) :]:
                self.replaced[key, one.version] = one
        # what the store keeps as a member of a cluster
        if self.is_served:
            used = self._used_here()
            unnamed = [file for file in published if file.segment not in used]
            self.membership = membership_of(self.old, self.files, self.store, unnamed)

    def _is_older(self) -> bool:
        """Returns whether a file or the lock page is newer than the catalog. If the catalog is gone, nobody can say."""
        old = self.old
        if not old.is_sound and not old.counters.publications:
            return False
        if self.publications_rung > old.counters.publications:
            return True
        published = [file.found for file in self._ours() if file.found is not None and self._is_published(file)]
        return any(
            found.version > old.counters.version or (not found.version and found.put_id > old.counters.number)
            for found in published
        )

    def _is_published(self, file: SegmentFile) -> bool:
        """Returns whether a file's header says that it was published, and nothing says that this was cut off."""
        found = file.found
        if found is None or found.state != LIVE or not found.put_id:
            return False
        state = self._state(file.segment, found.put_id)
        return state != RETIRED and (state == LIVE or found.batch not in self.cut_off)

    def _unfinished(self) -> set[int]:
        """Returns the batches of which some file says live, where its row says that it is being filled.

        Nobody syncs the lock page, so after a crash of the host no note tells of them. Or they were published, by the
        very transaction that the catalog has lost: then all of a batch is there, and may be taken.
        """
        batches: dict[int, list[ParsedHeader]] = {}
        filling: set[int] = set()
        for file in self._ours():
            found = file.found
            if found is not None and found.state == LIVE and found.put_id and found.batch:
                batches.setdefault(found.batch, []).append(found)
                if self._state(file.segment, found.put_id) in (FILLING, PREPARED):
                    filling.add(found.batch)
        counters = self.old.counters
        last = counters.version if self.old.is_sound or counters.version else None
        return {batch for batch in filling if not is_whole(batches[batch], last)}

    def _state(self, segment: int, put_id: int) -> int:
        """Returns the state that the catalog's row has for this put; 0 if there is no row."""
        row = self.old.rows.get(segment)
        return row.state if row is not None and row.put_id == put_id else 0

    def _ours(self) -> list[SegmentFile]:
        """Returns the files with a header of this store."""
        return [file for file in self.files.values() if file.found is not None and file.found.store == self.store]

    def _by_put(self) -> dict[int, SegmentFile]:
        return {file.found.put_id: file for file in self._ours() if file.found is not None}

    def _keep(self, key: bytes, record: Record, by_put: dict[int, SegmentFile]) -> Record | None:
        """Returns the record, if all of its segments are there, under whatever names; else None."""
        extents: list[SegmentExtent] = []
        here = record.here(self._member)
        for extent in record.segments:
            if extent not in here:  # on another host
                extents.append(extent)
                continue
            segment = self._place(key, record, extent, by_put)
            if segment is None:
                return None
            extents.append(msgspec.structs.replace(extent, segment=segment))
        # two files may have been exchanged: each put is found under its new name
        if record.parts is None:
            return msgspec.structs.replace(record, segment=extents[0].segment)
        return msgspec.structs.replace(record, parts=encode_extents(extents))

    def _place(self, key: bytes, record: Record, extent: SegmentExtent, by_put: dict[int, SegmentFile]) -> int | None:
        """Returns the number of the file that is one of a record's segments, or None if there is none."""
        named = self.files.get(extent.segment)
        for file in (named, by_put.get(extent.put_id)):
            if file is None or not _fits(file, key, record, extent, self.store):
                continue
            is_shared = record.is_delta and extent.put_id != record.put_id
            if is_shared or not (self.old.is_older and file.found is not None and file.found.state == RETIRED):
                return file.segment
        if record.is_delta:
            return None  # a header is made of a record that is one file's
        if named is None or named.size != extent.size or (named.found is not None and named.found.put_id):
            return None
        header = _mended(named, self.store, key, record, extent, self.mend)
        if header is None:
            return None
        self.mended[named.segment] = header
        return named.segment

    def _consider(self, files: Sequence[SegmentFile]) -> None:
        """Makes an entry of what the headers of one version say, if that is newer than all that is known of its key."""
        found, key = files[0].found, files[0].key
        if found is None or key is None or key in self.incomplete:
            return
        if self.is_served and not self._may_own(key):
            return  # another host owns it, and has the record
        known = [one.version for one in (self.old.records.get(key), self.entries.get(key)) if one is not None]
        if found.version <= max(*known, self.old.counters.version if self.old.is_sound else 0, 0):
            return
        record = merged(files, self.merge) if is_part(files[0]) else files[0].record
        if record is not None and record.is_delta:  # if the files are there that it shares
            record = self._keep(key, record, self._by_put())
        if record is None:
            self.incomplete[key] = {file.segment for file in files}
        else:
            before = self.old.records.get(key)
            if before is not None and before.history is not None:
                record = msgspec.structs.replace(record, history=before.history)
            self.entries[key] = record
            self.from_headers.add(key)

    def _may_own(self, key: bytes) -> bool:
        said = said_of(self.old)
        owned = (tables.OWNED, tables.group_row(key.partition(b"/")[0])) in self.old.served
        return said is None or owned or self.is_joining(said)

    def lost(self) -> set[bytes]:
        """Returns the keys that the store had, as far as anything tells, and that have no entry now."""
        known = {*self.old.records, *self.old.damaged, *self.incomplete, *self.membership.lost}
        if not self.old.is_sound:
            known |= {file.key for file in self.files.values() if file.found is None and file.key is not None}
        return known - set(self.entries)

    def used(self) -> set[int]:
        """Returns the segments of the entries that are kept, and of what other hosts need."""
        return self._used_here() | set(self.membership.segments)

    def _used_here(self) -> set[int]:
        return self._segments_of(self.entries.values()) | self._segments_of(self.replaced.values())

    def here(self, record: Record) -> tuple[SegmentExtent, ...]:
        """Returns the segments of a record that lie on this host."""
        return record.here(self._member)

    @property
    def _member(self) -> bytes:
        return bytes.fromhex(self.store) if self.is_served else b""

    def _segments_of(self, records: Iterable[Record]) -> set[int]:
        return {extent.segment for record in records for extent in self.here(record)}

    def quarantined(self) -> list[SegmentFile]:
        """Returns the files that nobody may delete: they have a record's bytes, or did have a header, and no entry."""
        known = [*self.old.records.values(), *self.old.replaced.values()]
        used, named = self.used(), self._segments_of(known).union(*self.incomplete.values())
        kept: list[SegmentFile] = []
        for file in self.files.values():
            found = file.found
            newer = self.entries.get(found.key.encode()) if found is not None and found.store == self.store else None
            is_outdone = found is not None and newer is not None and newer.version > found.version
            is_doubtful = not self.old.is_sound and (found is None or (found.state == LIVE and found.put_id == 0))
            if file.segment not in used and (is_doubtful or (file.segment in named and not is_outdone)):
                kept.append(file)
        return kept

    def deletable(self) -> list[SegmentFile]:
        """Returns the files that no entry names and no quarantine keeps, but for those of another store."""
        keep = self.used() | {file.segment for file in self.quarantined()}
        return [
            file
            for file in self.files.values()
            if file.segment not in keep and (file.found is None or file.found.store == self.store)
        ]

    def rows(self) -> dict[int, SegmentRow]:
        """Returns the rows of the segments that are kept."""
        moved, named = self.moved(), dict[int, SegmentRow]()
        for key, record in [*self.entries.items(), *((key, one) for (key, _), one in self.replaced.items())]:
            for extent in self.here(record):
                shared = named[extent.segment].shared + 1 if extent.segment in named else 0
                size = 0 if extent.segment in moved else extent.size
                named[extent.segment] = SegmentRow(key, extent.put_id, LIVE, size, shared)
        return {**self.membership.segments, **named}

    def moved(self) -> dict[int, int]:
        """Returns the sizes of the segments that are kept in the spill folder."""
        spill, files = self.spill, [self.files[segment] for segment in self._used_here()]
        return {file.segment: file.size for file in files if spill and os.path.dirname(file.path) == spill}

    def quotas(self) -> dict[bytes, tables.QuotaRow]:
        """Returns the quotas, by prefix, with what their keys take now."""
        taken = [*self.entries.items(), *((key, record) for (key, _), record in self.replaced.items())]
        used = {
            prefix: sum(record.held_bytes for key, record in taken if key.startswith(prefix))
            for prefix in self.old.quotas
        }
        return {prefix: tables.QuotaRow(prefix, limit, used[prefix]) for prefix, limit in self.old.quotas.items()}

    def counters(self) -> Counters:
        old, found = self.old, [file.found for file in self._ours() if file.found]
        records = [*old.records.values(), *self.entries.values(), *self.replaced.values()]
        numbers = (
            *(record.put_id for record in records),
            *(number for record in records for one in record.segments for number in (one.put_id, one.segment)),
            *(number for segment, row in old.rows.items() for number in (row.put_id, segment)),
            *(row.put_id for row in self.membership.segments.values()),
            *(one.put_id for one in found),
            *self.files,
        )
        versions = (*(record.version for record in records), *(one.version for one in found))
        return Counters(
            version=max(old.counters.version, *versions, 0) + _FAR,
            number=max(old.counters.number, *numbers, 0) + _FAR,
            sequence=old.counters.sequence + _FAR,
            publications=max(old.counters.publications, self.publications_rung if old.is_older else 0) + _FAR,
            live=sum(row.nbytes for row in self.rows().values()),
            capacity=old.counters.capacity,
            membership=self.membership.number,
            quotas=len(old.quotas),
        )


def is_whole(batch: Sequence[ParsedHeader], last: int | None) -> bool:
    """Returns whether these segments are all that the batch changed, right after version `last`, where that is known.

    A batch's count is that of its segments, of which a version may have several. Files are told apart by their put ids:
    somebody may have copied one. A batch with values that have no file skips one version number before its first, see
    `put.py`, and so is never whole.
    """
    versions, puts = {found.version for found in batch}, {found.put_id for found in batch}
    first = min(versions) if last is None else last + 1
    has_no_gap = versions == set(range(first, first + len(versions)))
    return has_no_gap and all(found.count == len(puts) for found in batch)


def _fits(file: SegmentFile, key: bytes, record: Record, extent: SegmentExtent, store: str) -> bool:
    found = file.found
    if found is None or (found.store, file.key, found.put_id, found.start, file.size) != (
        *(store, key, extent.put_id, extent.start, extent.size),
    ):
        return False
    if record.is_delta:
        return True
    return is_part(file) if record.parts is not None and not record.start else found.nbytes == record.nbytes


def _mended(
    file: SegmentFile, store: str, key: bytes, record: Record, extent: SegmentExtent, mend: Mend
) -> bytes | None:
    with OwnedFile(file.path, os.O_RDONLY) as opened:
        mapping = map_file(opened.fd, file.size)
    with mapping.view() as content:
        return mend(store, key, record, extent, content)
