"""Triage: which entries a repaired store is to hold, and what becomes of each of its files.

A sound catalog is the truth. Of a damaged one, each row that fits its checksum counts, and files that say live stand
for keys whose rows are gone, the highest version of each. What a killed writer, or a crash of the host, left half
published doesn't count, unless a row confirms it.

A catalog that is whole, and older than its files (see `rollback.py`), counts as a damaged one; there a header that says
retired is believed.

A sharded entry has several segments, and is kept, or made of their headers (`sharded.py`), only if all of them are
there. Parts that waited for others are none: nobody is left who would bring these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from memstore.engine.catalog import Counters
from memstore.engine.files import OwnedFile, map_file
from memstore.engine.format import (
    FILLING,
    LIVE,
    PREPARED,
    RETIRED,
    Found,
    Record,
    SegmentExtent,
    SegmentRow,
    encode_extents,
)
from memstore.engine.repair.membership import IsHome, Membership, membership_of, said_of
from memstore.engine.repair.salvage import OldCatalog, SegmentFile
from memstore.engine.repair.sharded import Merge, by_version, is_part, merged

Mend = Callable[[str, bytes, Record, SegmentExtent, memoryview], "bytes | None"]
"""Called with store, key, record, one of its segments and the bytes of that file, whose header is damaged. Returns a
header made of the record; None if the bytes aren't those that the record calls for, or nothing tells.
"""

_FAR = 1 << 32  # beyond any version or number that somebody may have seen


@dataclass(slots=True)
class Choice:
    """What the store is to hold.

    Attributes:
        noted: the batch that was being published when the store was last used, or 0.
        publications_rung: how many publications the lock page has counted.
        is_served: it was served to other hosts, or about to be.
        membership: what it keeps of that.
        entries: what the new catalog is made of.
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
    merge: Merge
    is_home: IsHome
    is_served: bool = False
    membership: Membership = field(default_factory=Membership)
    entries: dict[bytes, Record] = field(default_factory=dict[bytes, Record])
    mended: dict[int, bytes] = field(default_factory=dict[int, bytes])
    cut_off: set[int] = field(default_factory=set[int])
    from_headers: set[bytes] = field(default_factory=set[bytes])
    incomplete: dict[bytes, set[int]] = field(default_factory=dict[bytes, "set[int]"])

    def __post_init__(self) -> None:
        if self.noted:
            self.cut_off.add(self.noted)
        known = self.old.counters.publications
        # if the lock page has counted more, a batch that the catalog calls unfinished may have been published since
        if not known or self.publications_rung <= known:
            self.cut_off |= self._unfinished()
        if self._is_older():
            self.old.is_older, self.old.is_sound = True, False
        by_put = {file.found.put_id: file for file in self._ours() if file.found is not None}
        for key, record in self.old.records.items():
            kept = self._keep(key, record, by_put) if record.segments else record
            if kept is not None:
                self.entries[key] = kept
        published = [file for file in self._ours() if self._is_published(file)]
        for files in by_version(published):
            self._consider(files)
        if self.is_served:
            used = self._used_here()
            unnamed = [file for file in published if file.segment not in used]
            self.membership = membership_of(self.old, self.files, self.store, unnamed)

    def _is_older(self) -> bool:
        """Whether a file or the lock page is newer than the catalog. If the catalog is gone, nobody can say."""
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
        """Whether a file's header says that it was published, and nothing says that this was cut off."""
        found = file.found
        if found is None or found.state != LIVE or not found.put_id:
            return False
        state = self._state(file.segment, found.put_id)
        return state != RETIRED and (state == LIVE or found.batch not in self.cut_off)

    def _unfinished(self) -> set[int]:
        """Batches of which some file says live, where its row says that it is being filled.

        Nobody syncs the lock page, so after a crash of the host no note tells of them. Or they were published, by the
        very transaction that the catalog has lost: then all of a batch is there, and may be taken.
        """
        batches: dict[int, list[Found]] = {}
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
        """The state that the catalog's row has for this put; 0 if there is no row."""
        row = self.old.rows.get(segment)
        return row.state if row is not None and row.put_id == put_id else 0

    def _ours(self) -> list[SegmentFile]:
        """The files with a header of this store."""
        return [file for file in self.files.values() if file.found is not None and file.found.store == self.store]

    def _keep(self, key: bytes, record: Record, by_put: dict[int, SegmentFile]) -> Record | None:
        """The record, if all of its segments are there, under whatever names; None if they aren't."""
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
        return _at(record, extents)

    def _place(self, key: bytes, record: Record, extent: SegmentExtent, by_put: dict[int, SegmentFile]) -> int | None:
        """The file that is one of a record's segments; None if there is none."""
        named = self.files.get(extent.segment)
        for file in (named, by_put.get(extent.put_id)):
            if file is not None and _fits(file, key, record, extent, self.store) and not self._is_past(file):
                return file.segment
        if named is None or named.size != extent.size or (named.found is not None and named.found.put_id):
            return None
        header = _mended(named, self.store, key, record, extent, self.mend)
        if header is None:
            return None
        self.mended[named.segment] = header
        return named.segment

    def _is_past(self, file: SegmentFile) -> bool:
        return self.old.is_older and file.found is not None and file.found.state == RETIRED

    def _consider(self, files: Sequence[SegmentFile]) -> None:
        """Makes an entry of what the headers of one version say, if that is newer than all that is known of its key."""
        found, key = files[0].found, files[0].key
        if found is None or key is None or key in self.incomplete:
            return
        said = said_of(self.old) if self.is_served else None
        if said is not None and not self.is_home(said, key):
            return  # its home is on another host, which has the record
        known = [one.version for one in (self.old.records.get(key), self.entries.get(key)) if one is not None]
        if found.version <= max(*known, self.old.counters.version if self.old.is_sound else 0, 0):
            return
        record = merged(files, self.merge) if is_part(files[0]) else files[0].record
        if record is None:
            self.incomplete[key] = {file.segment for file in files}
        else:
            self.entries[key] = record
            self.from_headers.add(key)

    def lost(self) -> set[bytes]:
        """Keys that the store had, as far as anything tells, and that have no entry now."""
        known = {*self.old.records, *self.old.damaged, *self.incomplete, *self.membership.lost}
        if not self.old.is_sound:
            known |= {file.key for file in self.files.values() if file.found is None and file.key is not None}
        return known - set(self.entries)

    def used(self) -> set[int]:
        """Segments of the entries that are kept, and of what other hosts need."""
        return self._used_here() | set(self.membership.segments)

    def _used_here(self) -> set[int]:
        return self._segments_of(self.entries.values())

    def here(self, record: Record) -> tuple[SegmentExtent, ...]:
        """The segments of a record that lie on this host."""
        return record.segments if record.hosts is None else record.here(self._member)

    @property
    def _member(self) -> bytes:
        return bytes.fromhex(self.store) if self.is_served else b""

    def _segments_of(self, records: Iterable[Record]) -> set[int]:
        return {extent.segment for record in records for extent in self.here(record)}

    def quarantined(self) -> list[SegmentFile]:
        """Files that nobody may delete: they have the bytes of a record, or did have a header, and no entry."""
        used, named = self.used(), self._segments_of(self.old.records.values()).union(*self.incomplete.values())
        return [
            file
            for file in self.files.values()
            if file.segment not in used
            and ((file.segment in named and not self._is_outdone(file)) or self._is_doubtful(file))
        ]

    def _is_outdone(self, file: SegmentFile) -> bool:
        """Whether a newer version of the file's key was found."""
        found = file.found
        known = self.entries.get(found.key.encode()) if found else None
        return found is not None and known is not None and found.store == self.store and known.version > found.version

    def _is_doubtful(self, file: SegmentFile) -> bool:
        if self.old.is_sound:
            return False
        return file.found is None or (file.found.state == LIVE and file.found.put_id == 0)

    def deletable(self) -> list[SegmentFile]:
        """Files that no entry names and no quarantine keeps, but for those of another store."""
        keep = self.used() | {file.segment for file in self.quarantined()}
        return [
            file
            for file in self.files.values()
            if file.segment not in keep and (file.found is None or file.found.store == self.store)
        ]

    def rows(self) -> dict[int, SegmentRow]:
        """Of the segments that are kept."""
        named = {
            extent.segment: SegmentRow(key, extent.put_id, LIVE, extent.size)
            for key, record in self.entries.items()
            for extent in self.here(record)
        }
        return {**self.membership.segments, **named}

    def counters(self) -> Counters:
        old, found = self.old, [file.found for file in self._ours() if file.found]
        records = [*old.records.values(), *self.entries.values()]
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
        )


def is_whole(batch: Sequence[Found], last: int | None) -> bool:
    """Whether these segments are all that the batch changed, right after version `last`, where that is known.

    A batch's count is that of its segments, of which a version may have several. Files are told apart by their put ids:
    somebody may have copied one. A batch with values that have no file skips one version number before its first, see
    `commit.py`, and so is never whole.
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
    return is_part(file) if record.parts is not None and not record.start else found.nbytes == record.nbytes


def _at(record: Record, extents: Sequence[SegmentExtent]) -> Record:
    """Two files may have been exchanged: each put is found under its new name."""
    if record.parts is None:
        return msgspec.structs.replace(record, segment=extents[0].segment)
    return msgspec.structs.replace(record, parts=encode_extents(extents))


def _mended(
    file: SegmentFile, store: str, key: bytes, record: Record, extent: SegmentExtent, mend: Mend
) -> bytes | None:
    opened = OwnedFile(file.path, os.O_RDONLY)
    try:
        mapping = map_file(opened.fd, file.size)
    finally:
        opened.close()
    with mapping.view() as content:
        return mend(store, key, record, extent, content)
