"""Sharded entries in a repair: the segments of one version, told by their headers alone.

Each part of a sharded put has a segment, whose header has what its rank says of the value (behind PART_MARK). All of
them were published as one batch, under one version: if they are all there, `Merge` makes the entry of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from memstore.engine.format import PART_MARK, Record, SegmentExtent
from memstore.engine.protocols import Content
from memstore.engine.repair.salvage import SegmentFile


class FoundPart(NamedTuple):
    """A part by its header.

    Attributes:
        said: what it says of the value.
        checksums: of the tensors in its segment, one behind the other; None where the store has none.
    """

    said: bytes
    checksums: bytes | None
    extent: SegmentExtent


Merge = Callable[[str, Sequence[FoundPart]], "Content | None"]
"""Called with a key and all parts of one version. Returns what its record says; None if they are not one value."""


def is_part(file: SegmentFile) -> bool:
    return file.record is not None and file.record.description.startswith(PART_MARK)


def by_version(files: Iterable[SegmentFile]) -> list[list[SegmentFile]]:
    """The newest version first: each by itself, but segments of parts with those that were published with them.

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
    return sorted([*alone, *(list(one.values()) for one in parts.values())], key=_version, reverse=True)


def _version(files: Sequence[SegmentFile]) -> int:
    return files[0].found.version if files[0].found is not None else 0


def merged(files: Sequence[SegmentFile], merge: Merge) -> Record | None:
    """The record of the version that the segments hold. None if one is missing, or they are not one value."""
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
