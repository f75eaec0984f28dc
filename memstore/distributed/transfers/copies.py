"""Copies: values of other hosts in segments of this one, for all of its processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import abc
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from memstore._telling import told
from memstore.distributed.catalog import CatalogTables, Copy, look, record_of, run
from memstore.distributed.rules import KEY_LIMIT, Entry, Member, Place
from memstore.distributed.transfers.messages import Ranges, merged, one_range, together
from memstore.distributed.transfers.receiving import SegmentRanges, Stream, Streams, ask_ahead, read_ranges
from memstore.distributed.transfers.relays import PART_COPY_MARK, Filling, passed_on
from memstore.engine import (
    DOORBELL,
    HEADER_LIMIT,
    PART_MARK,
    Change,
    Content,
    Draft,
    Header,
    LockFile,
    MappedEntry,
    Mapping,
    Moved,
    ParsedHeader,
    Record,
    Root,
    SealedSegment,
    SegmentExtent,
    SegmentWriter,
    Transaction,
    WritableMemory,
    copy_header,
    decode_origins,
    encode_entries,
    encode_extents,
    encode_origins,
    fence,
    fill_and_publish,
    in_both,
    make_room_and_retry,
    map_entry,
    origins_of,
    segment_path,
    syscalls,
)
from memstore.engine.syscalls import PAGE
from memstore.errors import CorruptionError, StoreFullError, StoreTimeoutError

# --- Fetching a copy -------------------------------------------------------------------------------------------------
# 1. Where the value is a delta, map the copy of the key that is there, of an earlier version. Bytes that have the same
#    origin there (`engine.OriginRange`) need not come.
# 2. Ask for the data, and over another stream for the header of the segment; make one for this store
#    (`engine.copy_header`) while the data is on its way.
# 3. Claim and fill a segment as a put does; the bytes come straight from the socket, and then those of the earlier
#    version. A kill leaves what it leaves in any put: a filling row with an unlocked file, which is swept.
# 4. Name it in the table `copies`, by one transaction, which retires an older copy of the key. Its record says of all
#    bytes what their origins are: by the put id of the copy nobody else knows them.

Result = TypeVar("Result")

_AT_ONCE = 1 << 20  # bytes: less comes with the header, by one request, and is copied once more
_COPIED_AT_ONCE = 64 << 20  # bytes of an earlier version, between two signs for those that wait for the copy


class GoneError(Exception):
    """The segment holds another put by now."""


def places_of(record: Record) -> tuple[Place, ...]:
    pairs = zip(record.hosts or (), record.segments, strict=False)
    return tuple(Place(host, extent.put_id, extent.segment) for host, extent in pairs)


def find_copy(root: Root, key: bytes, deadline: float) -> Copy | None:
    return look(root, lambda tables: tables.copy(key), deadline)


def find_replica(root: Root, key: bytes, version: int, deadline: float) -> Record | None:
    """Returns the record of a version of which this host has a replica: see `rules/replicas.py`."""
    member = root.member_id()
    backup = look(root, lambda tables: tables.backup(key), deadline)
    if backup is None or backup.version != version or backup.is_mutable:
        return None
    if not backup.places or any(place.host != member for place in backup.places):
        return None
    return record_of(Entry(version, backup.body, backup.places), member)


def map_copy(root: Root, key: bytes, copy: Copy, version: int) -> MappedEntry | None:
    """Maps a copy. Returns None where it was dropped meanwhile."""
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
    (extent,), (place,) = record.segments, places_of(record)
    start, end = record.start, record.start + record.nbytes
    is_small = end <= _AT_ONCE
    asked: list[Stream] = []

    # 1. What an earlier version has.
    earlier = None if is_small else _find_earlier(root, key, record, deadline)
    wanted = one_range(start, end)
    if earlier is not None:
        wanted = wanted.without(earlier.ranges(start))

    def read(ranges: Ranges, origin: int, ahead: Sequence[Stream] = (), filling: Filling | None = None) -> None:
        part = SegmentRanges(extent, ranges, origin, filling)
        if not read_ranges(streams, [(member, [part])], deadline, ahead):
            raise GoneError

    def fill(memory: WritableMemory) -> bytes | None:
        address: int = memory.__array_interface__["data"][0]
        if is_small:
            syscalls.copy(address, syscalls.buffer_address(head) + start, record.nbytes)
        else:
            ahead = asked.copy()
            asked.clear()  # when it is filled again, after a sweep, it asks again
            if filling is not None and isinstance(memory, SegmentWriter) and memory.is_mapped:
                filling.fills(memory.segment, memory.size, header.nbytes - start)
            read(wanted, address - start, ahead, filling)
            if earlier is not None:
                earlier.copy_to(address, filling)
        return record.checksums

    nbytes, whole = wanted.nbytes, one_range(start, end)
    with told("fetch", root.path, (key.decode(),), nbytes), passed_on(root, key, place, whole, nbytes) as filling:
        try:
            # 2. Ask for the data, and over another stream for the header; little data comes with it.
            if not is_small:
                asked += ask_ahead(streams, member, [SegmentRanges(extent, wanted, 0, filling)], deadline)
            head = bytearray(end if is_small else start)
            read(one_range(0, len(head)), syscalls.buffer_address(head))
            header, found = copy_header(memoryview(head)[:start], extent.size, root.settings.store)
            _compare(key, record, extent, found)

            # 3. and 4. Claim, fill, publish.
            content = Content(
                record.description, record.objects, record.nbytes, objects_checksum=record.objects_checksum
            )
            draft = Draft(key, content, header=header, fill=fill)
            origins = encode_origins(origins_of(record, place.host))
            local = msgspec.structs.replace(record, parts=None, hosts=None, origins=origins)
            copy = _put_copy(root, (place,), draft, local, deadline)
        finally:
            for stream in asked:  # what was asked for, and not read, isn't needed
                stream.close()
    return map_copy(root, key, copy, record.version)


class _EarlierCopy(NamedTuple):
    """A copy of an earlier version of a key, mapped, and the bytes that the version which is fetched has of it.

    Attributes:
        address: of its data section.
        moved: of the data section that is fetched, and of its own.
    """

    mapping: Mapping
    address: int
    moved: Sequence[Moved]

    def ranges(self, start: int) -> Ranges:
        """Returns the ranges that need not come, of a file whose data section starts there."""
        starts = np.array([offset for offset, _, _ in self.moved], np.int64) + start
        return merged(starts, starts + np.array([nbytes for _, _, nbytes in self.moved], np.int64))

    def copy_to(self, address: int, filling: Filling | None) -> None:
        """Copies them into a data section, and gives signs to those that wait for the copy."""
        for offset, at, nbytes in self.moved:
            for done in range(0, nbytes, _COPIED_AT_ONCE):
                size = min(nbytes - done, _COPIED_AT_ONCE)
                syscalls.copy(address + offset + done, self.address + at + done, size)
                if filling is not None:
                    filling.give_sign()


def _find_earlier(root: Root, key: bytes, record: Record, deadline: float) -> _EarlierCopy | None:
    """Maps the copy of an earlier version. Returns None where it is gone, or has no bytes of a delta's."""
    copy = None if record.origins is None else find_copy(root, key, deadline)
    if record.origins is None or copy is None or not copy.record.start:
        return None
    (local,) = copy.record.segments
    moved = in_both(decode_origins(record.origins, record.nbytes), origins_of(copy.record, root.member_id()))
    if not moved:
        return None
    with root.guard:
        mapping = root.storage.map_segment(local)
    return None if mapping is None else _EarlierCopy(mapping, mapping.address + local.start, moved)


def _put_copy(root: Root, places: tuple[Place, ...], draft: Draft, record: Record, deadline: float) -> Copy:
    """Claims and fills a segment for a draft, and names it in the table `copies`, in place of an older one of its key.

    Args:
        record: of the copy, but for its segment.
    """

    def publish(changes: list[Change]) -> Copy:
        (sealed,) = changes[0].segments
        local = msgspec.structs.replace(
            record, segment=sealed.segment, put_id=sealed.put_id, size=sealed.size, start=sealed.start
        )
        run(root, lambda tables: tables.put_copy(draft.key, places, local), deadline, sealed=(sealed,))
        return Copy(places, local)

    def make(root: Root, draft: Draft, deadline: float) -> Copy:
        return fill_and_publish(root, [draft], publish, deadline)

    copy = make_room_and_retry(make, root, draft, deadline, draft.key.decode())  # a sweep drops all other copies
    trim(root, deadline, keep=draft.key)
    return copy


def _compare(key: bytes, record: Record, extent: SegmentExtent, found: ParsedHeader) -> None:
    """Raises CorruptionError unless the header is that of the segment which the record names."""
    said = (found.key, found.put_id, found.nbytes, found.description, found.checksums or None)
    name = key.decode()
    if said != (name, extent.put_id, record.nbytes, record.description, record.checksums or None):
        raise CorruptionError(key=name, detail="its record and the header of its segment, on another host, differ")


# --- Taking over -----------------------------------------------------------------------------------------------------
# A record names segments of a host that is drained. Each of them is copied to a file of this host, which is the
# record's from then on: `rules/draining.py` has the transaction.


def take_values(
    root: Root,
    values: Sequence[tuple[bytes, Record]],
    host: bytes | None,
    fetch: FetchRanges,
    publish: Callable[[Sequence[Record], Sequence[SealedSegment]], Result],
    deadline: float,
) -> Result:
    """Copies the segments of values that lie on one host to files of this one. What has none is named as it is.

    Args:
        values: keys, each with its record.
        host: None: whatever lies on others is copied.
        publish: makes these files live. It is given the records as they are to be, which name them.

    Raises:
        GoneError: the bytes aren't there any more. And what `publish` and `fetch` raise.
        StoreFullError, CorruptionError, StoreTimeoutError, ResourceLimitError.
    """
    own = root.member_id()
    taken = [
        (value, number)
        for value, (_, record) in enumerate(values)
        for number, one in enumerate(record.hosts or ())
        if one == host or (host is None and one != own)
    ]
    drafts = [
        _draft_of(root, key, record, (record.hosts or ())[number], record.segments[number], fetch, deadline)
        for (key, record), number in ((values[value], number) for value, number in taken)
    ]

    def name(changes: list[Change]) -> Result:
        sealed = [segment for change in changes for segment in change.segments]
        extents = [list(record.segments) for _, record in values]
        hosts = [list(record.hosts or ()) for _, record in values]
        for (value, number), one in zip(taken, sealed, strict=True):
            base = extents[value][number].base  # the others stay where they are in the value's range of addresses
            extents[value][number] = SegmentExtent(one.segment, one.put_id, one.size, one.start, base)
            hosts[value][number] = own
        named = [
            msgspec.structs.replace(
                record, put_id=of[0].put_id, size=len(of), parts=encode_extents(of), hosts=tuple(lying)
            )
            if lying
            else record
            for (_, record), of, lying in zip(values, extents, hosts, strict=True)
        ]
        return publish(named, sealed)

    def make(root: Root, drafts: Sequence[Draft], deadline: float) -> Result:
        return fill_and_publish(root, drafts, name, deadline)

    return make_room_and_retry(make, root, drafts, deadline, values[0][0].decode() if len(values) == 1 else None)


def read_file(path: str, wanted: SegmentRanges) -> bool:
    """Copies ranges of a file of this host into memory. Returns False if it is gone, or shorter."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        pieces = wanted.pieces
        for offset, address, size in zip(wanted.ranges.starts, pieces.addresses, pieces.sizes, strict=True):
            at, left = int(offset), int(size)
            memory = syscalls.memory_at(int(address), left)
            while left:
                count = os.preadv(fd, [memory[-left:]], at)
                if not count:
                    return False
                at, left = at + count, left - count
        return True
    finally:
        os.close(fd)


def _draft_of(
    root: Root, key: bytes, record: Record, host: bytes, extent: SegmentExtent, fetch: FetchRanges, deadline: float
) -> Draft:
    """Makes a draft of a copy, whose data begins where it does in the segment: a sharded value's boxes say so."""

    def read(first: int, last: int, origin: int) -> None:
        if first < last and not fetch({host: [SegmentRanges(extent, one_range(first, last), origin)]}, deadline):
            raise GoneError

    if extent.start > HEADER_LIMIT + PAGE:
        raise CorruptionError(key=key.decode(), detail="its record says that its header is larger than one can be")
    head = bytearray(extent.start)
    read(0, extent.start, syscalls.buffer_address(head))
    header, found = copy_header(memoryview(head), extent.size, root.settings.store, room=extent.start)
    nbytes = found.nbytes
    if record.start:
        _compare(key, record, extent, found)
    elif (found.key, found.put_id) != (key.decode(), extent.put_id) or not found.description.startswith(PART_MARK):
        raise CorruptionError(key=key.decode(), detail="its record and the header of a part, on another host, differ")
    elif found.description == PART_MARK:  # a repair has made it, and calls all of the data slack
        nbytes = extent.size - extent.start
        entries = encode_entries([("part", "U8", [nbytes], 0, nbytes)])
        header = Header(found.key, root.settings.store, PART_MARK, b"", entries, room=extent.start)
    if header.nbytes != extent.start:
        raise CorruptionError(key=key.decode(), detail="the header of its segment, on another host, can't be copied")

    def fill(memory: WritableMemory) -> bytes | None:
        address: int = memory.__array_interface__["data"][0]
        read(extent.start, extent.start + nbytes, address - extent.start)
        return found.checksums

    size = 0 if record.start else extent.start + nbytes  # another part begins behind it
    return Draft(key, Content(found.description, b"", nbytes), header=header, fill=fill, size=size)


# --- Parts of sharded values -----------------------------------------------------------------------------------------
# A host fetches each page of a part once, whatever its processes want of it: the value, boxes of it, or rows.
#
# 1. The process that needs bytes of a part first makes its copy: a segment with room for the part, and behind that a
#    byte for each page, which is 1 once the page is there. The table `copies` names it at once, though no page is
#    there yet, with the place and put id of the part. A kill before that leaves a filling row, which is swept.
# 2. Each process maps the copy twice: copy-on-write where the value's readers look, and shared, to fill it.
# 3. It looks which of its pages are there. It fetches the others under a lock of the part, where it looks again, and
#    marks them when all have come whole. A kill leaves them unmarked: the next one fetches them again.
#
# A page that is marked is never written again. Where bytes of a part lie in memory of the process alone by then, they
# have been read there, so it maps no copy of that part any more.

_LEAST_PART = 256 << 10  # bytes: to make a copy takes as long as to fetch so many
_MOST_ROUNDED = 4  # times the bytes that are wanted, which whole pages may take
_CHEAP_SHARE = 64  # of what the store may hold: a larger copy is made by whoever wants a good deal of the part
_GOOD_DEAL = 16  # the share of a part
_LOOKS_AGAIN = 1.0  # seconds


class FetchRanges(Protocol):
    """Fetches parts of other hosts' segments, by the ids of these. False: one of them is gone.

    Raises HomeUnavailableError; StorageError on storage that hosts share.
    """

    def __call__(self, hosts: abc.Mapping[bytes, Sequence[SegmentRanges]], deadline: float) -> bool: ...


class PartCopies:
    """The copies on this host of one value's parts, which lie on others. One a held value; thread-safe.

    Args:
        elsewhere: the parts, with the ids of their hosts.
        mapping: the range of addresses of the value.
    """

    def __init__(
        self, root: Root, key: bytes, elsewhere: Sequence[tuple[bytes, SegmentExtent]], mapping: Mapping
    ) -> None:
        parts = [_Part(root, key, number, *found, mapping) for number, found in enumerate(elsewhere)]
        self._parts = sorted(parts, key=lambda part: part.name)  # all lock in this order: nobody waits in a ring
        self._nbytes = sum(extent.size for _, extent in elsewhere)
        self._root, self._what = root, f"fetches parts of {key.decode()!r} from another host"
        self._lock, self._pid = threading.Lock(), os.getpid()

    def fetch(self, lacking: Ranges, fetch: FetchRanges, deadline: float) -> Ranges | None:
        """Fetches what lacks of parts that have copies here, or get them now, in whole pages.

        Args:
            lacking: ranges of the value's addresses, from the first one on.

        Returns:
            What is there now. None: a segment is gone.

        Raises:
            StoreTimeoutError: another process fetches it, and was not done in time.
            And what `fetch` raises.
        """
        found: list[Ranges] = []
        hosts: dict[bytes, list[SegmentRanges]] = {}
        missed: list[tuple[_Part, Ranges]] = []
        with contextlib.ExitStack() as locks:
            for part in self._parts:
                wanted = part.cut(lacking)
                if not wanted or not self._opens(part, wanted, deadline):
                    continue
                pages = part.pages_of(wanted)
                if part.missing(pages):
                    locks.enter_context(one_fetcher(self._root, part.name, self._what, deadline))
                if missing := part.missing(pages):
                    filling = locks.enter_context(part.passed_on(missing))
                    hosts.setdefault(part.host, []).append(SegmentRanges(part.extent, missing, part.address, filling))
                    missed.append((part, missing))
                found.append(Ranges(pages.starts + part.extent.base, pages.stops + part.extent.base))
            if hosts and not fetch(hosts, deadline):
                return None
            for part, missing in missed:
                part.mark(missing)
        return together(found)

    def has_or_wants(self, wanted: Ranges, deadline: float) -> bool:
        """Whether these ranges are here already, or are long enough to be fetched in whole pages."""
        parts = [(part, inside) for part in self._parts if (inside := part.cut(wanted))]
        for part, inside in parts:
            pages = part.pages_of(inside)
            is_long = pages.nbytes <= inside.nbytes * 5 // 4
            if not self._opens(part, inside, deadline, makes=is_long) or (not is_long and part.missing(pages)):
                return False
        return bool(parts)

    def _opens(self, part: _Part, wanted: Ranges, deadline: float, *, makes: bool = True) -> bool:
        if part.is_open is not None:
            return part.is_open
        if not makes and time.monotonic() < part.looks_again:
            return False
        if self._pid != os.getpid():  # the lock is the parent's
            self._lock, self._pid = threading.Lock(), os.getpid()
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise StoreTimeoutError(f"another thread {self._what}, and was not done within the timeout")
        try:
            if part.is_open is None:
                room = room_of(self._root)
                fits = makes and (not room or self._nbytes <= room // 2)  # else each one would drop the one before
                part.open(wanted, room if fits else None, self._what, deadline, makes=makes)
        finally:
            self._lock.release()
        return bool(part.is_open)


class _Part:
    """A part of another host, and its copy.

    Attributes:
        name: of the part, among all that there are.
        address: where the first byte of its file lies in the copy, to be filled.
        is_open: the copy is mapped; False: it never will be; None: nobody has needed it yet.
        looks_again: until when (monotonic) who needs short rows alone doesn't ask again whether there is a copy.
    """

    def __init__(
        self, root: Root, key: bytes, number: int, host: bytes, extent: SegmentExtent, mapping: Mapping
    ) -> None:
        self._root, self._mapping, self.host, self.extent = root, mapping, host, extent
        self._key = b"%b\x1f%d" % (key, number)  # of its row in `copies`: the part of the next version takes its place
        self._place = Place(host, extent.put_id, extent.segment)
        self.name = msgspec.msgpack.encode(self._place)
        self._end = -(-extent.size // PAGE) * PAGE  # of the part, in the copy: the marks follow
        self.is_open: bool | None = None
        self.looks_again = 0.0
        self.address = 0
        self._copy: Mapping | None = None
        self._marks = np.zeros(0, np.uint8)

    def cut(self, ranges: Ranges) -> Ranges:
        """Cuts ranges of the value to the data of this part. Returns them as ranges of its file."""
        extent = self.extent
        inside = ranges.cut(extent.base + extent.start, extent.base + extent.size)
        return Ranges(inside.starts - extent.base, inside.stops - extent.base)

    def pages_of(self, wanted: Ranges) -> Ranges:
        pages = merged(wanted.starts // PAGE * PAGE, -(-wanted.stops // PAGE) * PAGE)
        return pages.cut(self.extent.start, self.extent.size)

    def missing(self, pages: Ranges) -> Ranges:
        firsts, ends = pages.starts // PAGE, -(-pages.stops // PAGE)
        absent = [first + np.flatnonzero(self._marks[first:end] == 0) for first, end in zip(firsts, ends, strict=True)]
        numbers = np.concatenate(absent)
        return merged(numbers * PAGE, (numbers + 1) * PAGE).cut(self.extent.start, self.extent.size)

    def passed_on(self, wanted: Ranges) -> contextlib.AbstractContextManager[Filling | None]:
        return passed_on(self._root, self._key, self._place, wanted)

    def mark(self, pages: Ranges) -> None:
        fence()  # who sees a mark sees the bytes
        for first, end in zip((pages.starts // PAGE).tolist(), (-(-pages.stops // PAGE)).tolist(), strict=True):
            self._marks[first:end] = 1

    def open(self, wanted: Ranges, room: int | None, what: str, deadline: float, *, makes: bool) -> None:
        """Maps the copy, and makes it first if it is worth that.

        Args:
            room: of the store, 0 if nobody knows; None: none for another copy.
            what: what this process does, for others that wait for it.
            makes: False: only a copy that is there is mapped, and the next call decides.
        """
        copy = self._find(deadline)
        if copy is None and room is not None and self._is_worth_it(wanted, room):
            with one_fetcher(self._root, self._key, what, deadline):
                copy = self._find(deadline)
                if copy is None:
                    with contextlib.suppress(StoreFullError):
                        copy = self._make(deadline)
        if copy is not None:
            self.is_open = self._map(copy.record)
        elif makes:
            self.is_open = False
        self.looks_again = time.monotonic() + _LOOKS_AGAIN

    def _find(self, deadline: float) -> Copy | None:
        copy = find_copy(self._root, self._key, deadline)
        return copy if copy is not None and copy.places == (self._place,) else None

    def _is_worth_it(self, wanted: Ranges, room: int) -> bool:
        size = self.extent.size
        return (
            size >= _LEAST_PART
            and self.extent.start <= HEADER_LIMIT
            and len(self._key) <= KEY_LIMIT
            and self.pages_of(wanted).nbytes <= _MOST_ROUNDED * wanted.nbytes
            and (not room or size <= room // _CHEAP_SHARE or wanted.nbytes * _GOOD_DEAL >= size)
        )

    def _make(self, deadline: float) -> Copy | None:
        """Raises StoreFullError, StoreTimeoutError."""
        root, extent, name = self._root, self.extent, self._key.decode()
        nbytes = self._end + self._end // PAGE - extent.start
        entries = encode_entries([("part", "U8", [nbytes], 0, nbytes)])
        header = Header(name, root.settings.store, PART_COPY_MARK, b"", entries, room=extent.start)
        if header.nbytes != extent.start:  # readers look for its bytes where they lie in the part
            return None

        def fill(memory: WritableMemory) -> None:
            np.asarray(memory)[self._end - extent.start :] = 0  # the file may have had another value

        draft = Draft(self._key, Content(PART_COPY_MARK, b"", nbytes), header=header, fill=fill)
        local = Record(0, 0, 0, 0, 0, nbytes, 0.0, PART_COPY_MARK, b"")
        return _put_copy(root, (self._place,), draft, local, deadline)

    def _map(self, record: Record) -> bool:
        """Maps the copy. Returns False where it was dropped meanwhile, or this process may not write it."""
        root, extent = self._root, self.extent
        (local,) = record.segments
        if local.start != extent.start or record.nbytes < self._end + self._end // PAGE - extent.start:
            return False
        with root.guard, contextlib.suppress(PermissionError):
            copy = root.storage.map_segment(local, writable=True)
            if copy is not None and root.storage.map_over(local, self._mapping, extent.base, extent.size):
                self._copy, self.address = copy, copy.address
                self._marks = np.asarray(copy)[self._end : self._end + self._end // PAGE]
                note_use(root, record)
                return True
        return False


# --- One process fetches, the others wait ----------------------------------------------------------------------------
# The one that fetches has locked a byte of the store's doorbell file, by the hash of what is fetched. There is nothing
# to clean up after a kill: the kernel gives up the lock, and the next one that waits fetches. Nobody is woken: a waiter
# tries again soon, which takes a microsecond, and looks whether the value is there by now.

_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.005  # seconds
_FIRST_BYTE = 1 << 20  # far behind the end of the file


@contextlib.contextmanager
def one_fetcher(root: Root, name: bytes, what: str, deadline: float) -> Generator[None]:
    """Waits until no other process or thread of this host fetches what has that name, and keeps others from it.

    Args:
        what: for the error: what the others do.

    Raises:
        StoreTimeoutError: another one still does.
    """
    with root.guard:
        file = LockFile(f"{root.state}/{DOORBELL}", os.O_RDWR)
    at = _FIRST_BYTE + (xxhash.xxh3_64_intdigest(name) >> 2)
    try:
        wait = _FIRST_WAIT
        while not syscalls.lock_byte(file.fd, at):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"another process of this host {what}, and was not done within the timeout")
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        try:
            yield
        finally:
            syscalls.unlock_byte(file.fd, at)  # else a subprocess that is being started would keep it, until its exec
    finally:
        file.close()


# --- Which copies stay -----------------------------------------------------------------------------------------------
# Those that somebody has used lately.
#
# Who maps a copy notes that now and then, by the time of the file's last change, which nothing else looks at. When
# copies take more than half of what the store may, those that nobody has used for longest are dropped.

_NOTED_EVERY = 30.0  # seconds
_PAGE = 256  # copies of one transaction


def drop_copy(root: Root, key: bytes, places: Sequence[Place], deadline: float) -> None:
    """Unless the key has a copy of other places by now."""

    def drop(tables: CatalogTables) -> None:
        found = tables.copy(key)
        if found is not None and found.places == tuple(places):
            tables.delete_copy(key)

    run(root, drop, deadline)


def trim(root: Root, deadline: float, *, keep: bytes | None = None) -> int:
    """Drops the copies that nobody has used for longest, until the others take at most half of what the store may.

    Args:
        keep: the key of one that stays.

    Returns:
        How many were dropped.
    """
    room = room_of(root) // 2
    if not room or root.catalog.view(Transaction.counters).live <= room:  # copies are live files, among others
        return 0
    copies = _all_copies(root, deadline)
    over = sum(copy.record.size for _, copy in copies) - room
    dropped = 0
    for key, copy in sorted(copies, key=lambda found: _last_use(root, found[1].record)):
        if over <= 0:
            break
        if key != keep:
            drop_copy(root, key, copy.places, deadline)
            over -= copy.record.size
            dropped += 1
    return dropped


def _all_copies(root: Root, deadline: float) -> list[tuple[bytes, Copy]]:
    found: list[tuple[bytes, Copy]] = []
    after = b""
    while page := look(root, lambda tables, after=after: tables.copies(after, _PAGE), deadline):
        found += page
        after = page[-1][0]
    return found


def room_of(root: Root) -> int:
    """How many bytes the store may take: its capacity, or all of the file system. 0: nobody knows."""
    capacity = root.catalog.view(Transaction.counters).capacity
    if capacity:
        return capacity
    status = os.fstatvfs(root.segments_fd)
    return status.f_blocks * status.f_frsize


def _last_use(root: Root, record: Record) -> float:
    try:
        return os.stat(segment_path(root.segments, record.segment)).st_mtime
    except OSError:
        return 0.0


def note_use(root: Root, record: Record) -> None:
    """At most twice a minute, if it was noted that long ago: a look takes a microsecond, and a get needs no write."""
    path = segment_path(root.segments, record.segment)
    with contextlib.suppress(OSError):  # another user's; or it was dropped just now
        if time.time() - os.stat(path).st_mtime > _NOTED_EVERY:
            os.utime(path)
