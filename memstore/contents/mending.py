"""What a repair asks of values: headers made anew of records, and sharded values of the headers of their parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import xxhash

from memstore import structure
from memstore.contents.boxes import box_table
from memstore.contents.checksums import CHECKSUM_SIZE, compare, placed_objects
from memstore.contents.merge import merge
from memstore.contents.parts import RankPart, read_part
from memstore.engine import (
    HEAD_SIZE,
    PART_MARK,
    Content,
    FoundPart,
    Header,
    Record,
    SegmentExtent,
    belongs,
    names_put,
)
from memstore.errors import CorruptionError, PartialCommitError, ShardMismatchError

log = logging.getLogger("memstore")


def header_of(store: str, key: str, record: Record, content: memoryview) -> bytes | None:
    """The header that a put wrote, made anew of its record, for a file with that content and a damaged header.

    None if nothing shows that the content is that put's. Raises CorruptionError if it isn't.
    """
    if record.is_mutable:  # nothing tells whether the bytes are its rows
        return None
    plan = structure.plan_of(record.description)
    memory = np.frombuffer(content, np.uint8, record.nbytes, record.start)
    if plan.nbytes != record.nbytes:
        return None
    if record.checksums is None and not _names(content, store, record.put_id, record.version):
        return None
    compare(record, plan, memory)
    objects = record.objects
    if record.objects_checksum is not None:
        objects = placed_objects(record, key, store, content)
    header = Header(key, store, plan.description, objects, plan.header, checksums=len(record.checksums or b""))
    slack = record.size - record.start - record.nbytes
    if header.nbytes != record.start or slack < 0:
        return None
    return bytes(header.finish(record.put_id, record.nbytes, slack, record.checksums))


def header_of_part(store: str, key: str, record: Record, extent: SegmentExtent, content: memoryview) -> bytes | None:
    """As `header_of`, for one segment of a sharded value. The record alone can tell its value from then on.

    What its rank said of the value is nowhere else, so the header says nothing in its place, and calls all of the data
    slack. As long as there is the record, that is enough.
    """
    if record.checksums is None and not _names(content, store, extent.put_id, record.version):
        return None
    if not _fits(record, extent, content):
        raise CorruptionError("the bytes of a part don't fit the checksums of its boxes")
    header = Header(key, store, PART_MARK, b"", b"", room=extent.start)
    if header.nbytes != extent.start:
        return None
    return bytes(header.finish(extent.put_id, 0, extent.size - extent.start, None))


def _names(content: memoryview, store: str, put_id: int, version: int) -> bool:
    head = bytes(content[:HEAD_SIZE])
    return belongs(head, put_id, store) or names_put(head, put_id, version)


def _fits(record: Record, extent: SegmentExtent, content: memoryview) -> bool:
    """Whether all that the record knows to lie in a segment fits its checksum, where there is one."""
    plan, table, stored = structure.plan_of(record.description), box_table(record), record.checksums
    places = [
        (box.place, structure.box_bytes(plan.leaves[leaf], box), box.checksum)
        for leaf, boxes in table.boxes.items()
        for box in boxes
    ]
    for leaf in table.ranks:
        checksum = stored and stored[leaf * CHECKSUM_SIZE : (leaf + 1) * CHECKSUM_SIZE]
        places.append((plan.leaves[leaf].offset, plan.leaves[leaf].nbytes, checksum))
    for place, nbytes, checksum in places:
        start = place - extent.base
        if not 0 <= start < extent.size or checksum is None:
            continue
        if start + nbytes > extent.size or xxhash.xxh3_64_digest(content[start : start + nbytes]) != checksum:
            return False
    return True


def content_of_headers(key: str, parts: Sequence[FoundPart]) -> Content | None:
    """The value of parts of which nothing but their segments is left. None if they are not all of one value.

    A rank that held no bytes, and nothing else that others may lack, has no segment: see `part_drafts.py`.
    """
    try:
        found = [_read(part) for part in parts]
        content = merge(key, found, with_checksums=all(part.checksums is not None for part in parts))
    except (CorruptionError, ShardMismatchError, PartialCommitError) as error:
        log.warning("%r can't be made of the headers of its parts: %s", key, error)
        return None
    _warn_of_silent_ranks(key, found)
    return content


def _read(part: FoundPart) -> RankPart:
    said = read_part(part.said, part.extent)
    if part.checksums is None:
        return said
    written = [box.place is not None for leaf in said.said.value.leaves for box in leaf.boxes]
    if len(part.checksums) != CHECKSUM_SIZE * sum(written):
        raise CorruptionError("the header of a part has checksums of other boxes than it names")
    sums = (part.checksums[at : at + CHECKSUM_SIZE] for at in range(0, len(part.checksums), CHECKSUM_SIZE))
    return said._replace(sums=tuple(next(sums) if is_written else None for is_written in written))


def _warn_of_silent_ranks(key: str, found: Sequence[RankPart]) -> None:
    silent = set(range(found[0].said.value.world_size)) - {part.rank for part in found}
    if silent:
        log.warning(
            "%r is back without what only ranks %s held, if they held any: empty containers, and in stores of older "
            "versions objects and empty tensors, since who puts no bytes may have no file",
            *(key, ", ".join(map(str, sorted(silent)))),
        )
