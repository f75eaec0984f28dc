"""Salvage: what is left of a damaged store, the rows that can be read and the segments' headers. It changes nothing.

Each part of a sharded put has a segment, whose header has what its rank says of the value (behind PART_MARK). All of
them were published as one batch, under one version: if they are all there, a `MergeFound` makes the entry of them
(`merged`).
"""

from __future__ import annotations

import dataclasses
import errno
import operator
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from memstore._arguments import KEY_LIMIT
from memstore._info import Progress
from memstore._parsing import UNDECODABLE
from memstore.engine import syscalls
from memstore.engine.catalog.environment import has_gone_back
from memstore.engine.catalog.tables import (
    HISTORY,
    QUOTAS,
    SERVED,
    SPILLED,
    Counters,
    read_counters,
    read_quota,
    read_segment,
    read_version,
)
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.format.headers import (
    DELTA_MARK,
    HEAD_SIZE,
    PART_MARK,
    ParsedHeader,
    decode_delta,
    header_size,
    read_header,
)
from memstore.engine.format.records import (
    FILLING,
    LIVE,
    OBJECTS_IN_RECORD,
    Record,
    SegmentExtent,
    SegmentRow,
    decode_record,
    encode_extents,
    is_mutable,
)
from memstore.engine.protocols.change import Content
from memstore.engine.repair.survey import survey
from memstore.engine.sync.pages import CONTROL_SIZE, check_page
from memstore.errors import CorruptionError, ResourceLimitError, in_callers_code

_ANY_CAPACITY = 1 << 62  # rows: what a mutable entry has room for, its description says, which is opaque here
_NAME = re.compile(r"([0-9a-f]{16})\.safetensors")
_KEY = re.compile(rb'"digest":"[0-9a-f]{16}","key":("(?:[^"\\]|\\.){1,3000}")')  # where it stands in an undamaged one


@dataclass(slots=True)
class OldCatalog:
    """The rest of a catalog: the rows that fit their checksums.

    Attributes:
        is_sound: all rows are there and fit one another, so that what isn't there never was.
        is_older: what is there may be all of an earlier moment: whole, and not the truth.
        replaced: by key and version, the records of replaced versions that are kept.
        quotas: by prefix, how many bytes its keys may take.
        spilled: segments whose files lie in the spill folder.
        damaged: keys whose records are damaged.
        served: by table and key, the rows of a store that was served to other hosts.
    """

    is_sound: bool = False
    is_older: bool = False
    records: dict[bytes, Record] = field(default_factory=dict[bytes, Record])
    quotas: dict[bytes, int] = field(default_factory=dict[bytes, int])
    replaced: dict[tuple[bytes, int], Record] = field(default_factory=dict[tuple[bytes, int], Record])
    spilled: set[int] = field(default_factory=set[int])
    rows: dict[int, SegmentRow] = field(default_factory=dict[int, SegmentRow])
    damaged: set[bytes] = field(default_factory=set[bytes])
    served: dict[tuple[str, bytes], bytes] = field(default_factory=dict[tuple[str, bytes], bytes])
    counters: Counters = field(default_factory=Counters)


def read_catalog(folder: str, store: str) -> OldCatalog:
    """Reads the catalog by a child process. That of another store counts for nothing.

    Raises ResourceLimitError if no child could look at it.
    """
    old = OldCatalog()
    owners: list[bytes] = []

    def keep(table: str, key: bytes, value: bytes) -> None:
        if table == "entries":
            old.records[key] = decode_record(key, value)
        elif table == "segments":
            segment, row = read_segment(key, value)
            old.rows[segment] = row
        elif table == HISTORY:
            name, record = read_version(key, value)
            old.replaced[name, record.version] = record
        elif table == SPILLED:
            old.spilled.add(int.from_bytes(key, "big"))
        elif table == QUOTAS:
            quota = read_quota(key, value)
            old.quotas[quota.prefix] = quota.limit
        elif table in SERVED:
            old.served[table, key] = value
        elif (table, key) == ("counters", b"counters"):
            old.counters = read_counters(value)
        elif (table, key) == ("counters", b"store"):
            owners.append(value)

    found = survey(folder, locked=False, on_row=keep)
    if found.refused:  # to go on would throw away what nobody has looked at
        raise ResourceLimitError(f"{folder}: nothing was changed: {found.refused}", code=found.lack or errno.EAGAIN)
    old.damaged = {one.key for one in found.damage if one.is_record and one.key is not None}
    old.is_older = has_gone_back(folder)
    expected = store.encode()
    old.is_sound = found.is_sound and owners == [expected] and not old.is_older
    for owner in owners:  # a flipped bit changes a digit or two; the ids of two stores differ in nearly all places
        if len(owner) != len(expected) or sum(map(operator.ne, owner, expected)) > 2:
            return OldCatalog()
    return old


@dataclass(slots=True)
class SegmentFile:
    """A file that has the name of a segment. `found` is None where its header can't be read; `key` is a guess then.

    So it is where the control page of a mutable entry isn't whole.

    Attributes:
        found: without what `record` has, and its objects: all files of a store are in memory at once.
        record: what the catalog would say of it.
    """

    path: str
    segment: int
    size: int
    found: ParsedHeader | None = None
    record: Record | None = None
    key: bytes | None = None


def _record(found: ParsedHeader, segment: int, size: int, changed: float) -> Record:
    if found.description.startswith(DELTA_MARK):
        said = decode_delta(found.description)
        own = SegmentExtent(segment, found.put_id, size, found.start, said.own)
        return Record(
            version=found.version,
            put_id=found.put_id,
            segment=0,
            size=1,
            start=0,
            nbytes=said.nbytes,
            created=changed,
            description=said.description,
            objects=found.objects,
            checksums=found.checksums,
            parts=encode_extents((*said.shares, own)),
        )
    large = len(found.objects) > OBJECTS_IN_RECORD
    return Record(
        version=found.version,
        put_id=found.put_id,
        segment=segment,
        size=size,
        start=found.start,
        nbytes=found.nbytes,
        created=changed,
        description=found.description,
        objects=b"" if large else found.objects,
        checksums=found.checksums,
        objects_checksum=xxhash.xxh3_64_digest(found.objects) if large else None,
    )


def read_segments(folders: Sequence[str], progress: Progress | None) -> Iterator[SegmentFile]:
    """Yields every regular file that is named as a segment; other files are left alone."""
    paths = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]
    total = sum(os.lstat(path).st_size for path in paths)
    seen = 0
    for path in paths:
        try:
            file = _read_segment(path, int(os.path.basename(path)[:16], 16))
        except OSError:  # a link, a folder, another user's
            continue
        if file is not None:
            yield file
            seen += file.size
        if progress is not None:
            with in_callers_code():
                progress(min(seen, total), total)


def _read_segment(path: str, segment: int) -> SegmentFile | None:
    with OwnedFile(path, os.O_RDONLY) as opened:
        status = syscalls.status(opened.fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        file = SegmentFile(path, segment, status.st_size)
        head = syscalls.read_at(opened.fd, HEAD_SIZE, 0)
        try:
            header = syscalls.read_at(opened.fd, header_size(head, status.st_size), 0)
            found = read_header(header, status.st_size)
            if is_mutable(found.description):
                check_page(syscalls.read_at(opened.fd, CONTROL_SIZE, found.start), _ANY_CAPACITY)
            file.key = found.key.encode()
            file.record = _record(found, segment, status.st_size, status.st_mtime)
            file.found = dataclasses.replace(found, description=b"", objects=b"", checksums=None)
        except CorruptionError:
            file.key = _guess_key(syscalls.read_at(opened.fd, HEAD_SIZE + 6 * KEY_LIMIT, 0))
        return file


def _guess_key(head: bytes) -> bytes | None:
    match = _KEY.search(head)
    try:
        return msgspec.json.decode(match[1], type=str).encode() if match else None
    except UNDECODABLE:
        return None


# --- the segments of one version of a sharded entry, by their headers alone ------------------------------------------


class FoundPart(NamedTuple):
    """A part by its header.

    Attributes:
        said: what it says of the value.
        checksums: of the tensors in its segment, one behind the other; None where the store has none.
    """

    said: bytes
    checksums: bytes | None
    extent: SegmentExtent


MergeFound = Callable[[str, Sequence[FoundPart]], "Content | None"]
"""Called with a key and all parts of one version. Returns what its record says; None if they are not one value."""


def is_part(file: SegmentFile) -> bool:
    return file.record is not None and file.record.description.startswith(PART_MARK)


def by_version(files: Iterable[SegmentFile]) -> list[list[SegmentFile]]:
    """Groups the files by version, the newest first: segments of parts with those that were published with them.

    Of a part and its copy one counts.
    """
    alone: list[list[SegmentFile]] = []
    parts: dict[tuple[bytes | None, int, int], dict[int, SegmentFile]] = {}
    for file in files:
        if not is_part(file):
            alone.append([file])
        elif file.found is not None:
            together = file.key, file.found.batch, file.found.version
            parts.setdefault(together, {}).setdefault(file.found.put_id, file)
    groups = [*alone, *(list(one.values()) for one in parts.values())]
    return sorted(groups, key=lambda files: files[0].found.version if files[0].found is not None else 0, reverse=True)


def merged(files: Sequence[SegmentFile], merge: MergeFound) -> Record | None:
    """Returns the record of the version in the segments, or None if one is missing, or they are not one value."""
    records = [file.record for file in files if file.record is not None]
    found = {(file.found.batch, file.found.count) for file in files if file.found is not None}
    (batch, count), *others = found
    if others or count != len(records):
        return None
    parts = [FoundPart(one.description, one.checksums, extent) for one in records for extent in one.segments]
    content = merge((files[0].key or b"").decode(), parts)
    if content is None or content.parts is None:
        return None
    return Record(
        version=records[0].version,
        put_id=batch,
        segment=0,
        size=len(records),
        start=0,
        nbytes=content.nbytes,
        created=max(one.created for one in records),
        description=content.description,
        objects=content.objects,
        checksums=content.checksums,
        parts=content.parts,
        boxes=content.boxes,
    )


# --- the values that a host has left on storage that hosts share, by their headers alone -----------------------------


def read_left(folder: str, store: str, merge: MergeFound) -> list[tuple[bytes, Record]]:
    """Returns the newest value of each key that a host has put for itself, by key. It only reads, and locks nothing.

    A header says retired before a delete, or a put without a file, is acknowledged. So of each key the newest version
    counts, and only if it says live. Of what was being published last, all has to be there: no note is left that says
    that it got no further. So has each part of a sharded value, always. Rows that are written in place are left out.

    Args:
        folder: of its segments.
        store: its id, which the headers have.
        merge: returns None unless the parts are those of all ranks: others may lie on other hosts.

    Raises OSError; a folder that isn't there has nothing.
    """
    if not os.path.isdir(folder):
        return []
    newest: dict[bytes, SegmentFile] = {}
    parts: dict[tuple[bytes, int], list[SegmentFile]] = {}
    puts: dict[int, SegmentFile] = {}
    batches: dict[int, list[ParsedHeader]] = {}
    last = 0
    for file in read_segments([folder], None):
        found = file.found
        if found is None or file.key is None or found.store != store or not found.put_id or found.state == FILLING:
            continue
        puts[found.put_id] = file
        batches.setdefault(found.batch, []).append(found)
        last = max(last, found.version)
        other = newest.get(file.key)
        if found.version and (other is None or other.found is None or found.version > other.found.version):
            newest[file.key] = file
        if is_part(file):
            parts.setdefault((file.key, found.version), []).append(file)
    left: list[tuple[bytes, Record]] = []
    for key, file in sorted(newest.items()):
        found, record = file.found, file.record
        if found is None or record is None or found.state != LIVE or record.is_mutable:
            continue
        if is_part(file):
            whole = _merge_left(parts[key, found.version], merge)
            left += [] if whole is None else [(key, whole)]
            continue
        batch = batches[found.batch]
        if len(batch) < found.count and max(one.version for one in batch) == last:
            continue
        shares = [extent for extent in record.segments if extent.put_id != found.put_id]
        if all(extent.put_id in puts and puts[extent.put_id].segment == extent.segment for extent in shares):
            left.append((key, record))
    return left


def _merge_left(files: Sequence[SegmentFile], merge: MergeFound) -> Record | None:
    """Returns the record of a sharded value whose parts all say live."""
    groups = by_version(files)
    is_live = all(file.found is not None and file.found.state == LIVE for file in files)
    return merged(groups[0], merge) if is_live and len(groups) == 1 else None
