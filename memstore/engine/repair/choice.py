"""Choice of a repair: which entries the new catalog has, and what becomes of each file.

A sound catalog is the truth. Of a damaged one, each row that fits its checksum counts, and files that say live stand
for keys whose rows are gone, the highest version of each. What a killed writer, or a crash of the host, left half
published doesn't count, unless a row confirms it. Replaced versions that are kept stay beside the present one, if rows
have them; their headers say retired, so they never come in its place. A catalog that is whole, and older than its files
(see `protocols/recovery.py`), counts as a damaged one; there a header that says retired is believed. A sharded entry
has several segments, and is kept, or made of their headers (`merged`), only if all of them are there. Parts that waited
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

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Counters
from memstore.engine.files.mapping import OwnedFile, map_file
from memstore.engine.format.headers import ParsedHeader
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
from memstore.engine.repair.salvage import MergeFound, OldCatalog, SegmentFile, by_version, is_part, merged

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
        moved, lent, named = self.moved(), self.membership.segments, dict[int, SegmentRow]()
        for key, record in [*self.entries.items(), *((key, one) for (key, _), one in self.replaced.items())]:
            for extent in self.here(record):
                shared = named[extent.segment].shared + 1 if extent.segment in named else 0
                size = 0 if extent.segment in moved else extent.size
                named[extent.segment] = SegmentRow(key, extent.put_id, LIVE, size, shared)
        away = {one: msgspec.structs.replace(lent[one], nbytes=0) for one in lent if one in moved}
        return {**lent, **away, **named}

    def moved(self) -> dict[int, int]:
        """Returns the sizes of the segments that are kept in the spill folder."""
        spill, files = self.spill, [self.files[segment] for segment in self.used()]
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
