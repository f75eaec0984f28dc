"""Extents: the files that hold the data of an entry, and where each of them lies in memory.

All extents of an entry are mapped into one range of addresses, each from its `base` on. So the offsets of leaves count
in one data section, and what reads leaves knows nothing of files. A record names no file (an inline value), one
segment, the segments of a sharded value, as msgpack of `[[segment, put_id, size, start, base], ...]`, or up to 16,384
external files (files of others, which were attached), as msgpack of `[[path, size, mtime_ns, inode, base], ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.errors import CorruptionError
from memstore.undecodable import UNDECODABLE

MAPPED_LIMIT = 1 << 46  # bytes of address space for one entry; there are 2^47
_ALIGNMENT = 1 << 16  # of bases: pages are that large on some machines


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
    """Where a file of that size goes behind `end`: one that huge pages can map starts on a multiple of them."""
    step = HUGE_PAGE if size >= HUGE_PAGE else _ALIGNMENT
    return -(-end // step) * step


def decode_external(stored: bytes) -> tuple[ExternalExtent, ...]:
    """The external files that a record names. Raises CorruptionError unless they lie one behind the other."""
    try:
        extents = _decode_external(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the names of its files can't be read: {error}") from None
    return _checked(extents)


def decode_segments(stored: bytes, *, of_one_host: bool = True) -> tuple[SegmentExtent, ...]:
    """The segments of a sharded value. Raises CorruptionError unless they lie one behind the other.

    Args:
        of_one_host: each is there once; on several hosts, segments may have the same number.
    """
    try:
        extents = _decode_segments(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the numbers of its segments can't be read: {error}") from None
    segments = {extent.segment for extent in extents}
    if (of_one_host and len(segments) < len(extents)) or not all(map(_is_possible, extents)):
        raise CorruptionError("the numbers of its segments are outside the range of segment numbers")
    return _checked(extents)


def _is_possible(extent: SegmentExtent) -> bool:
    return min(extent.segment, extent.put_id) > 0 and 0 <= extent.start <= extent.size


def _checked(extents: tuple[_ExtentT, ...]) -> tuple[_ExtentT, ...]:
    end = 0
    for extent in extents:
        if extent.base < end or extent.base % PAGE or extent.size <= 0 or extent.base + extent.size > MAPPED_LIMIT:
            path = extent.path if isinstance(extent, ExternalExtent) else None
            detail = f"{path or 'a segment'} would lie where no file can"
            raise CorruptionError(detail, path=path, detail=detail)
        end = extent.base + extent.size
    return extents


def end_of(extents: Sequence[Extent]) -> int:
    """Where the range of addresses ends that they take."""
    return extents[-1].base + extents[-1].size if extents else 0
