"""Copies: values of other hosts in segments of this one, for all of its processes.

1. Ask for the data, and over another stream for the header of the segment; make one for this store
   (`engine.copy_header`) while the data is on its way.
2. Claim and fill a segment as a put does; the bytes come straight from the socket. A kill leaves what it leaves in any
   put: a filling row with an unlocked file, which is swept.
3. Name it in the table `copies`, by one transaction, which retires an older copy of the key.

How long copies stay, `trimming.py` says.
"""

from __future__ import annotations

import msgspec

from memstore.distributed.catalog import Copy, look, run
from memstore.distributed.rules import Member, Place
from memstore.distributed.transfers.asking import Part
from memstore.distributed.transfers.ranges import one_range
from memstore.distributed.transfers.receiving import ask_ahead, read_ranges
from memstore.distributed.transfers.streams import Stream, Streams
from memstore.distributed.transfers.trimming import note_use, room_of, trim
from memstore.engine import (
    Change,
    Content,
    Draft,
    MappedEntry,
    ParsedHeader,
    Record,
    Root,
    SegmentExtent,
    WritableMemory,
    copy_header,
    fill_and_publish,
    map_entry,
    retry_after_sweep,
    syscalls,
)
from memstore.errors import CorruptionError

_AT_ONCE = 1 << 20  # bytes: less comes with the header, by one request, and is copied once more


class GoneError(Exception):
    """The segment holds another put by now."""


def places_of(record: Record) -> tuple[Place, ...]:
    pairs = zip(record.hosts or (), record.segments, strict=False)
    return tuple(Place(host, extent.put_id, extent.segment) for host, extent in pairs)


def find_copy(root: Root, key: bytes, deadline: float) -> Copy | None:
    return look(root, lambda tables: tables.copy(key), deadline)


def map_copy(root: Root, key: bytes, copy: Copy, version: int) -> MappedEntry | None:
    """None: it was dropped meanwhile."""
    record = copy.record
    if record.version != version:  # its owner has given it another version
        record = msgspec.structs.replace(record, version=version)
    with root.guard:
        held = map_entry(root, key, record)
    if held is not None:
        note_use(root, record)
    return held


# --- fetching ---------------------------------------------------------------------------------------------------------


def is_worth_it(root: Root, record: Record) -> bool:
    """Whether the value may have a copy: it lies in one plain segment, and is not most of what the store may hold."""
    room = room_of(root)
    return record.start > 0 and root.lock is not None and (not room or record.nbytes <= room // 2)


def fetch_copy(
    root: Root, key: bytes, record: Record, streams: Streams, member: Member, deadline: float
) -> MappedEntry | None:
    """Copies a value to this host, and maps the copy. None: that was dropped at once, since others need its room.

    Raises:
        GoneError: its bytes aren't there any more.
        StoreFullError: there is no room, also without all other copies.
        HomeUnavailableError, CorruptionError, StoreTimeoutError, ResourceLimitError.
    """
    (extent,) = record.segments
    source = _Source(streams, member, extent)
    try:
        copy = _fetch(root, key, record, source, deadline)
    finally:
        source.close()
    trim(root, deadline, keep=key)
    return map_copy(root, key, copy, record.version)


class _Source:
    """The segment of the other host."""

    def __init__(self, streams: Streams, member: Member, extent: SegmentExtent) -> None:
        self._streams, self._member, self.extent = streams, member, extent
        self._asked: list[Stream] = []

    def read(self, start: int, stop: int, origin: int, deadline: float, *, is_asked: bool = False) -> None:
        """Receives a range; `origin` is where byte 0 of the file would lie. Raises GoneError.

        With `is_asked`, it is the one that was asked for.
        """
        part = Part(self.extent, one_range(start, stop), origin)
        asked: list[Stream] = []
        if is_asked:
            asked, self._asked = self._asked, asked
        if not read_ranges(self._streams, [(self._member, [part])], deadline, asked):
            raise GoneError

    def ask(self, start: int, stop: int, deadline: float) -> None:
        """A range that will be read: it is on its way meanwhile."""
        part = Part(self.extent, one_range(start, stop), 0)
        self._asked = ask_ahead(self._streams, self._member, [part], deadline)

    def close(self) -> None:
        """What was asked for, and not read, isn't needed."""
        for stream in self._asked:
            stream.close()


def _fetch(root: Root, key: bytes, record: Record, source: _Source, deadline: float) -> Copy:
    extent, end = source.extent, record.start + record.nbytes
    is_small = end <= _AT_ONCE
    if not is_small:
        source.ask(record.start, end, deadline)
    first = bytearray(end if is_small else record.start)
    source.read(0, len(first), syscalls.buffer_address(first), deadline)
    header, found = copy_header(memoryview(first)[: record.start], extent.size, root.settings.store)
    _compare(key, record, extent, found)

    def receive(memory: WritableMemory) -> bytes | None:
        address: int = memory.__array_interface__["data"][0]
        if is_small:
            syscalls.copy(address, syscalls.buffer_address(first) + record.start, record.nbytes)
        else:
            source.read(record.start, end, address - record.start, deadline, is_asked=True)
        return record.checksums

    def publish(changes: list[Change]) -> Copy:
        (sealed,) = changes[0].segments
        local = msgspec.structs.replace(
            record,
            segment=sealed.segment,
            put_id=sealed.put_id,
            size=sealed.size,
            start=sealed.start,
            parts=None,
            hosts=None,
        )
        places = places_of(record)
        run(root, lambda tables: tables.put_copy(key, places, local), deadline, sealed=(sealed,))
        return Copy(places, local)

    content = Content(record.description, record.objects, record.nbytes, objects_checksum=record.objects_checksum)
    draft = Draft(key, content, header=header, fill=receive)

    def make(root: Root, draft: Draft, deadline: float) -> Copy:
        return fill_and_publish(root, [draft], publish, deadline)

    return retry_after_sweep(make, root, draft, deadline, key.decode())  # a sweep drops all other copies


def _compare(key: bytes, record: Record, extent: SegmentExtent, found: ParsedHeader) -> None:
    """Raises CorruptionError unless the header is that of the segment which the record names."""
    said = (found.key, found.put_id, found.nbytes, found.description, found.checksums or None)
    name = key.decode()
    if said != (name, extent.put_id, record.nbytes, record.description, record.checksums or None):
        raise CorruptionError(key=name, detail="its record and the header of its segment, on another host, differ")
