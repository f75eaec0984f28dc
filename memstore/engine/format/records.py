"""Records: what the catalog stores of a version of a key, as types and as bytes; and the rows of segments.

A record is msgpack (by msgspec) behind an xxh3 checksum over the key and itself, so that a flipped bit in the
catalog's file, which LMDB returns silently, is an error and never a wrong value.

*Extents* are the files that hold the data of an entry, and where each of them lies in memory. All extents of an entry
are mapped into one range of addresses, each from its `base` on. So the offsets of leaves count in one data section, and
what reads leaves knows nothing of files. A record names no file (an inline value), one segment, the segments of a
sharded value, as msgpack of `[[segment, put_id, size, start, base], ...]`, or up to 16,384 external files (files of
others, which were attached), as msgpack of `[[path, size, mtime_ns, inode, base], ...]`.

What the data means is said by a *description*, which is opaque here, but for that of an entry whose rows are written in
place (decision 015): a mark that no msgpack starts with, and msgpack of `[kind, plan, options]`. The plan is what any
description is; it tells of all rows that the entry has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
import xxhash

from memstore._info import Kind
from memstore._parsing import UNDECODABLE
from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.errors import CorruptionError

Path = tuple[str | int, ...]

OBJECTS_IN_RECORD = 1536  # bytes; a larger record takes pages of its own in the catalog, so the header alone has them


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a value. Offsets and sizes in bytes, from the start of the data section of its segment.

    Leaves whose byte ranges overlap are tied: they share one storage when they are got.
    """

    name: Path
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # in elements; None: contiguous
    offset: int
    nbytes: int  # of the span: from the first byte of the leaf to its last


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A version of a key.

    `segment` is 0 for a value that lies in `inline`, in the files that `adopted` names, or in several segments: those
    of a sharded value stand in `parts`, with `put_id` that of the first, and `size` their number.

    A version that shares the files of earlier ones stands in `parts` too, without `boxes`: see `protocols/deltas.py`.

    `hosts` is None where all bytes are on this host. Else it names the member of the cluster where each segment of
    `parts` lies, or the external files do; a value in a single segment stands in `parts` then too, and keeps its
    `start`, which is 0 for a sharded one.

    `history` is None where a version that is replaced goes at once. Else it says how many of the last versions stay
    readable, with the present one, and how many bytes the replaced ones may take (0: any): see `protocols/history.py`.

    `origins` is None where all bytes were first put as this version. Else it says which were not: `OriginRange`.
    """

    version: int
    put_id: int
    segment: int
    size: int  # of the file
    start: int  # of the data section in it
    nbytes: int  # of the data section
    created: float  # Unix seconds
    description: bytes  # structure and leaves, opaque here: see memstore/structure/plans.py
    objects: bytes  # the leaves that are no tensors, msgpack; empty if there are none, or `objects_checksum` says
    inline: bytes | None = None
    checksums: bytes | None = None  # xxh3-64 of each leaf's bytes, big-endian, where the store has them
    objects_checksum: bytes | None = None  # xxh3-64 of objects that are too large for here: the header has them
    adopted: bytes | None = None  # the external files that hold the data: `encode_extents`
    parts: bytes | None = None  # the segments that hold the parts of a sharded value: `encode_extents`
    boxes: bytes | None = None  # of a sharded value, opaque here: see memstore/contents/reading.py
    hosts: tuple[bytes, ...] | None = None
    history: tuple[int, int] | None = None
    origins: bytes | None = None

    @property
    def kind(self) -> Kind:
        if self.is_mutable:
            return self.mutable_kind
        if self.adopted is not None:
            return "adopted"
        if self.parts is not None and not self.start and self.boxes is not None:
            return "sharded"
        return "segment" if self.segment or self.parts is not None else "inline"

    @property
    def is_delta(self) -> bool:
        """Whether it shares files with earlier versions: its own is the last of `parts`, and has its put id."""
        return self.parts is not None and self.boxes is None and self.hosts is None and not self.start

    @property
    def is_mutable(self) -> bool:
        """Whether its rows are written in place: see `MutableDescription`."""
        return (self.segment != 0 or self.hosts is not None) and self.description.startswith(MUTABLE_MARK)

    @property
    def mutable_kind(self) -> MutableKind:
        """The kind of a mutable entry. Raises CorruptionError."""
        return decode_mutable(self.description).kind

    @property
    def segments(self) -> tuple[SegmentExtent, ...]:
        """The segments that hold the value's bytes; none where it is inline, or in external files."""
        if self.segment:
            return (SegmentExtent(self.segment, self.put_id, self.size, self.start),)
        return () if self.parts is None else decode_segments(self.parts, of_one_host=self.hosts is None)

    @property
    def held_bytes(self) -> int:
        """The bytes that the version takes: of its files, or else of its row. External files count for nothing."""
        return sum(one.size for one in self.segments) or len(self.inline or b"") + len(self.objects)

    def here(self, member: bytes) -> tuple[SegmentExtent, ...]:
        """Returns the segments that lie on this host, whose id in its cluster is `member`."""
        if self.hosts is None:
            return self.segments
        return tuple(one for one, host in zip(self.segments, self.hosts, strict=False) if host == member)

    def batch_at(self, store: str) -> tuple[int, int]:
        """Returns what headers in the store of that id say of their batch: its number, and how many segments it has.

        Each host publishes its own parts of a value as a batch of its own.
        """
        if self.hosts is None:
            return self.put_id, len(self.segments)
        here = self.here(bytes.fromhex(store))
        return here[0].put_id, len(here)

    def elsewhere(self, member: bytes) -> tuple[tuple[bytes, SegmentExtent], ...]:
        """Returns the segments that lie on other hosts, with the ids of these."""
        if self.hosts is None:
            return ()
        pairs = zip(self.hosts, self.segments, strict=False)
        return tuple((host, one) for host, one in pairs if host != member)

    @property
    def extents(self) -> Sequence[Extent]:
        """The places of the data: none, if it is inline. Raises CorruptionError."""
        return self.segments if self.adopted is None else decode_external(self.adopted)


class SegmentRow(msgspec.Struct, frozen=True, array_like=True):
    """The catalog's row of a segment's file. The catalog alone says what is live."""

    key: bytes
    put_id: int
    state: int  # FILLING, PREPARED, LIVE or RETIRED
    nbytes: int  # of the file; 0 where it was moved: a row of `spilled` has its bytes
    shared: int = 0  # versions that name it beside the first: see `protocols/deltas.py`


FILLING, LIVE, RETIRED = 1, 2, 3
PREPARED = 4  # sealed, and kept by a row of `pending`: in rows only, the file's header says filling
STATE_NAMES = {FILLING: "filling", LIVE: "live", RETIRED: "retired"}

_encoder = msgspec.msgpack.Encoder()
_encode, _encode_into = _encoder.encode, _encoder.encode_into
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_row = msgspec.msgpack.Decoder(SegmentRow).decode
_digest = xxhash.xxh3_64_digest
_CHECKSUM = 8  # bytes of xxh3-64, in front
LARGE_ROW = 4096  # bytes: from here on a hash in two steps costs less than a copy that puts key and body together


def with_checksum(key: bytes, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + body) + body


def checked(key: bytes, stored: bytes | memoryview, size: int | None = None) -> bytes:
    """Returns the body that was stored under this key, `size` bytes long. Raises CorruptionError."""
    body = bytes(stored[_CHECKSUM:])
    if bytes(stored[:_CHECKSUM]) != xxhash.xxh3_64_digest(key + body) or size not in (None, len(body)):
        raise CorruptionError(f"the checksum of row {key!r} in the catalog doesn't fit")
    return body


# What a catalog has in place of a record that was damaged on the host that owned the key before. No checksum.
DAMAGED_BEFORE = b"damaged"
# msgpack's heads of arrays of that length: of records without their last three fields, two, one, and whole
_FOUR = b"\x94"  # of a segment's row
_FIFTEEN, _SIXTEEN, _SEVENTEEN, _EIGHTEEN = b"\x9f", b"\xdc\x00\x10", b"\xdc\x00\x11", b"\xdc\x00\x12"


def _hash(key: bytes, body: bytes | memoryview) -> bytes:
    """Returns the checksum of a large row, as `_digest(key + body)`."""
    state = xxhash.xxh3_64(key)
    state.update(body)
    return state.digest()


def encode_record(key: bytes, record: Record) -> bytes | bytearray:
    """Encodes a record for its row.

    Without `origins`, `history` and `hosts`, it is what a store writes that never had any, byte for byte: an array
    without its last fields. A record with a large value is put together in place: each copy of 64 KiB is a tenth of
    its put.
    """
    head, without = _EIGHTEEN, 0
    if record.origins is None:
        head, without = _SEVENTEEN, 1
        if record.history is None:
            head, without = (_FIFTEEN, 3) if record.hosts is None else (_SIXTEEN, 2)
    if record.inline is None or len(record.inline) < LARGE_ROW:
        body = _encode(record)
        if without:
            body = head + body[len(_EIGHTEEN) : -without]
        return _digest(key + body) + body
    row = bytearray(_CHECKSUM)
    start = _CHECKSUM + len(head) - len(_EIGHTEEN)  # the longer head begins where the checksum comes
    _encode_into(record, row, start)
    row[_CHECKSUM : _CHECKSUM + len(head)] = head
    if without:
        del row[-without:]
    row[:_CHECKSUM] = _hash(key, memoryview(row)[_CHECKSUM:])
    return row


def decode_record(key: bytes, stored: bytes | memoryview) -> Record:
    """Decodes a record. Raises CorruptionError unless the bytes are those that were stored for this key."""
    if len(stored) < LARGE_ROW:
        body = stored[_CHECKSUM:]
        digest = _digest(key + body)
    else:
        body = memoryview(stored)[_CHECKSUM:]
        digest = _hash(key, body)
    if stored[:_CHECKSUM] != digest:
        raise _wrong_checksum(key, stored)
    try:
        return _decode_record(body)
    except UNDECODABLE as error:
        raise _damaged_record(key, f"its record can't be read: {error}") from None


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a record."""

    version: int
    put_id: int
    segment: int
    size: int


class _LongHead(_Head, frozen=True, array_like=True):
    start: int
    nbytes: int
    created: float
    description: bytes


_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_long_head = msgspec.msgpack.Decoder(_LongHead).decode


class Replaced(NamedTuple):
    """The facts that a put needs of the record that it replaces.

    Attributes:
        segments: those that it had; with `record`, ask that.
        mutable: what kind it was, if it was mutable.
        record: if it names other hosts, or has a history or origins.
    """

    segments: tuple[int, ...]
    mutable: MutableKind | None
    record: Record | None = None


def replaced_by(key: bytes, stored: bytes | memoryview) -> Replaced:
    """Decodes what a put needs of a record, in less time than `decode_record`."""
    if len(stored) < LARGE_ROW:
        body = stored[_CHECKSUM:]
        digest = _digest(key + body)
    else:
        body = memoryview(stored)[_CHECKSUM:]
        digest = _hash(key, body)
    if stored[:_CHECKSUM] != digest:
        raise _wrong_checksum(key, stored)
    try:
        head = _decode_head(body)
        if body[0] == _SIXTEEN[0]:
            record = _decode_record(body)
            return Replaced((), record.mutable_kind if record.is_mutable else None, record)
        if head.segment:
            description = _decode_long_head(body).description
            return Replaced((head.segment,), decode_mutable(description).kind if is_mutable(description) else None)
        segments = tuple(extent.segment for extent in _decode_record(body).segments) if head.size else ()
        return Replaced(segments, None)
    except UNDECODABLE as error:
        raise _damaged_record(key, f"its record can't be read: {error}") from None


def encode_row(key: bytes, row: SegmentRow) -> bytes:
    """Encodes a row. `key` is that of the table, the segment's id."""
    body = _encode(row)
    if not row.shared:  # as a store writes it that never had a delta, byte for byte
        body = _FOUR + body[1:-1]
    return _digest(key + body) + body


def decode_row(key: bytes, stored: bytes | memoryview) -> SegmentRow:
    body = checked(key, stored)
    try:
        return _decode_row(body)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's segments can't be read: {error}", detail=str(error)) from None


def _wrong_checksum(key: bytes, stored: bytes | memoryview) -> CorruptionError:
    if bytes(stored) == DAMAGED_BEFORE:
        return _damaged_record(key, "its record was damaged on the host that owned it before")
    return _damaged_record(key, "the checksum of its record doesn't fit")


def _damaged_record(key: bytes, detail: str) -> CorruptionError:
    name = key.decode(errors="backslashreplace")
    return CorruptionError(f"{name!r} in the catalog: {detail}", key=name, detail=detail)


# --- extents ---------------------------------------------------------------------------------------------------------


MAPPED_LIMIT = 1 << 46  # bytes of address space for one entry; there are 2^47
_BASE_ALIGNMENT = 1 << 16  # of bases: pages are that large on some machines


class SegmentExtent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment of the store, with the put that filled it."""

    segment: int
    put_id: int
    size: int  # of the file
    start: int  # of the data section in the file
    base: int = 0


class ExternalExtent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An external file as it was when it was attached. All of it belongs to the data section."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    base: int


Extent = SegmentExtent | ExternalExtent
_ExtentT = TypeVar("_ExtentT", SegmentExtent, ExternalExtent)

encode_extents = msgspec.msgpack.Encoder().encode
_decode_external = msgspec.msgpack.Decoder(tuple[ExternalExtent, ...]).decode
_decode_segments = msgspec.msgpack.Decoder(tuple[SegmentExtent, ...]).decode


def base_after(end: int, size: int) -> int:
    """Returns where a file of that size goes behind `end`. One that huge pages can map starts on a multiple of them."""
    step = HUGE_PAGE if size >= HUGE_PAGE else _BASE_ALIGNMENT
    return -(-end // step) * step


def decode_external(stored: bytes) -> tuple[ExternalExtent, ...]:
    """Decodes the external files that a record names. Raises CorruptionError unless they lie one behind the other."""
    try:
        extents = _decode_external(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the names of its files can't be read: {error}") from None
    return _placed_in_order(extents)


def decode_segments(stored: bytes, *, of_one_host: bool = True) -> tuple[SegmentExtent, ...]:
    """Decodes the segments of a sharded value. Raises CorruptionError unless they lie one behind the other.

    Args:
        of_one_host: each is there once; on several hosts, segments may have the same number.
    """
    try:
        extents = _decode_segments(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the numbers of its segments can't be read: {error}") from None
    segments = {one.segment for one in extents}
    are_possible = all(min(one.segment, one.put_id) > 0 and 0 <= one.start <= one.size for one in extents)
    if (of_one_host and len(segments) < len(extents)) or not are_possible:
        raise CorruptionError("the numbers of its segments are outside the range of segment numbers")
    return _placed_in_order(extents)


def _placed_in_order(extents: tuple[_ExtentT, ...]) -> tuple[_ExtentT, ...]:
    end = 0
    for extent in extents:
        if extent.base < end or extent.base % PAGE or extent.size <= 0 or extent.base + extent.size > MAPPED_LIMIT:
            path = extent.path if isinstance(extent, ExternalExtent) else None
            detail = f"{path or 'a segment'} would lie where no file can"
            raise CorruptionError(detail, path=path, detail=detail)
        end = extent.base + extent.size
    return extents


def end_of(extents: Sequence[Extent]) -> int:
    """Returns where the range of addresses ends that they take."""
    return extents[-1].base + extents[-1].size if extents else 0


# --- origins ---------------------------------------------------------------------------------------------------------


class OriginRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a data section, and where they were first put. What has one origin is the same, whoever has it.

    Attributes:
        offset, nbytes: in the data section.
        host, put_id: the put, by the id of its host.
        at: the offset in the data section of that put.
    """

    offset: int
    nbytes: int
    host: bytes
    put_id: int
    at: int


encode_origins = msgspec.msgpack.Encoder().encode
_decode_origins = msgspec.msgpack.Decoder(tuple[OriginRange, ...]).decode


def decode_origins(stored: bytes, nbytes: int) -> tuple[OriginRange, ...]:
    """Decodes ranges of so many bytes. Raises CorruptionError unless they lie in these, one behind the other."""
    try:
        found, end = _decode_origins(stored), 0
    except UNDECODABLE as error:
        raise CorruptionError(f"what it says of the versions whose bytes it has can't be read: {error}") from None
    for one in found:
        if one.offset < end or min(one.nbytes, one.put_id) <= 0 or one.at < 0 or one.offset + one.nbytes > nbytes:
            raise CorruptionError("what it says of the versions whose bytes it has lies where none of its bytes do")
        end = one.offset + one.nbytes
    return found


# --- the description of a mutable entry ------------------------------------------------------------------------------


MUTABLE_MARK = b"\xc1rows"

MutableKind = Literal["dataset", "buffer"]


class MutableDescription(msgspec.Struct, frozen=True, array_like=True):
    """The description of a mutable entry. `options` is what the kind fixes at creation besides, opaque here."""

    kind: MutableKind
    plan: bytes
    options: bytes = b""


_decode_mutable = msgspec.msgpack.Decoder(MutableDescription).decode


def is_mutable(description: bytes) -> bool:
    return description.startswith(MUTABLE_MARK)


def encode_mutable(description: MutableDescription) -> bytes:
    return MUTABLE_MARK + msgspec.msgpack.encode(description)


def decode_mutable(description: bytes) -> MutableDescription:
    """Decodes the description of a mutable entry. Raises CorruptionError."""
    try:
        return _decode_mutable(memoryview(description)[len(MUTABLE_MARK) :])
    except UNDECODABLE as error:
        raise CorruptionError(f"what it says of its rows can't be read: {error}") from None


def plan_bytes(description: bytes) -> bytes:
    """Returns the plan of any entry: of a mutable one that of all rows. Raises CorruptionError."""
    return decode_mutable(description).plan if is_mutable(description) else description
