"""Extents: the files that hold the data of an entry, and where each of them lies in memory.

All extents of an entry are mapped into one range of addresses, each from its `base` on. So the offsets of leaves count
in one data section, and what reads leaves knows nothing of files. A record names no file (an inline value), one
segment, or up to 16,384 external files (files of others, which were attached), as msgpack of `[[path, size, mtime_ns,
inode, base], ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memstore.engine.format.record import Record
from memstore.engine.syscalls import PAGE
from memstore.errors import CorruptionError

MAPPED_LIMIT = 1 << 46  # bytes of address space for one entry; there are 2^47


class SegmentExtent(msgspec.Struct, frozen=True, gc=False):
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

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[ExternalExtent, ...]).decode


def extents_of(record: Record) -> Sequence[Extent]:
    """Where the data of an entry lies; nowhere, if it is inline. Raises CorruptionError."""
    if record.segment:
        return (SegmentExtent(record.segment, record.put_id, record.size, record.start),)
    return () if record.adopted is None else decode_external(record.adopted)


def encode_external(extents: Sequence[ExternalExtent]) -> bytes:
    return _encode(extents)


def decode_external(stored: bytes) -> tuple[ExternalExtent, ...]:
    """The external files that a record names. Raises CorruptionError unless they lie one behind the other."""
    try:
        extents = _decode(stored)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"the names of its files can't be read: {error}") from None
    end = 0
    for extent in extents:
        if extent.base < end or extent.base % PAGE or extent.size <= 0 or extent.base + extent.size > MAPPED_LIMIT:
            detail = f"{extent.path} would lie where no file can"
            raise CorruptionError(detail, path=extent.path, detail=detail)
        end = extent.base + extent.size
    return extents
