"""The checksums of a value's bytes: xxh3-64, one for each leaf, and one for objects that don't fit into the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from memstore import structure
from memstore.engine import Record, leading_base64, objects_at, read_objects
from memstore.errors import CorruptionError
from memstore.sharding import NO_BOXES, Boxes, StoredBox
from memstore.structure import render_path

CHECKSUM_SIZE = 8  # bytes a leaf


def leaf_checksums(plan: structure.Plan, data: memoryview) -> bytes:
    """Computes the checksums of all leaves of a data section, in their order."""
    return b"".join(xxhash.xxh3_64_digest(data[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in plan.leaves)


class DamagedBytesError(CorruptionError):
    """Bytes that don't fit their checksum. `place` is that of the first of them, in the data section."""

    def __init__(self, detail: str, place: int) -> None:
        super().__init__(detail)
        self.place = place


class Checksums:
    """The checksums of a record's leaves, and of their boxes; none where the store has none.

    Raises CorruptionError if they are of other leaves.
    """

    def __init__(self, record: Record, plan: structure.Plan, boxes: Boxes, memory: np.ndarray) -> None:
        stored = record.checksums
        if stored is not None and len(stored) != CHECKSUM_SIZE * len(plan.leaves):
            raise CorruptionError(f"{len(stored):,} bytes of checksums for {len(plan.leaves):,} leaves")
        self._stored, self._plan, self._boxes, self._data = stored, plan, boxes, memory.data

    def compare(self, i: int) -> None:
        """Compares a leaf that lies whole, or all of its boxes. Raises CorruptionError if one differs."""
        leaf, boxes = self._plan.leaves[i], structure.boxes_of_leaf(self._plan, self._boxes, i)
        if boxes:
            self.compare_boxes(i, boxes)
        elif self._stored is not None:
            checksum = self._stored[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
            if xxhash.xxh3_64_digest(self._data[leaf.offset : leaf.offset + leaf.nbytes]) != checksum:
                raise DamagedBytesError(f"the bytes of {render_path(leaf.name)} don't fit their checksum", leaf.offset)

    def compare_boxes(self, i: int, boxes: Sequence[StoredBox]) -> None:
        leaf = self._plan.leaves[i]
        for box in boxes:
            data = self._data[box.place : box.place + structure.box_bytes(leaf, box)]
            if box.checksum is not None and xxhash.xxh3_64_digest(data) != box.checksum:
                (offsets, shape), rank = box.box, box.rank
                where = f"its box at {list(offsets)}, of shape {list(shape)}, put by rank {rank},"
                detail = f"the bytes of {render_path(leaf.name)}, {where} don't fit their checksum"
                raise DamagedBytesError(detail, box.place)


def compare(
    record: Record,
    plan: structure.Plan,
    memory: np.ndarray,
    boxes: Boxes = NO_BOXES,
    done: Callable[[int], None] | None = None,
) -> None:
    """Compares the leaves with their checksums, if the record has any, and raises CorruptionError if one differs.

    `done` is called with how many bytes of the data section were passed since its last call.
    """
    if record.checksums is None and not boxes:
        return
    checksums, reached = Checksums(record, plan, boxes, memory), 0
    for i, leaf in enumerate(plan.leaves):
        checksums.compare(i)
        if done is None:
            continue
        if i in boxes:
            done(sum(structure.box_bytes(leaf, box) for box in boxes[i]))
        elif i not in plan.same or plan.same[i] not in boxes:
            end = leaf.offset + leaf.nbytes
            done(max(end - reached, 0))
            reached = max(end, reached)


def checked_objects(record: Record, header: bytes) -> bytes:
    """Reads the objects of a value whose record has no room for them: they are in the header of its segment."""
    return _checked(record, read_objects(header))


def placed_objects(record: Record, key: str, store: str, content: memoryview) -> bytes:
    """Reads the objects in a header that may be damaged elsewhere: they are found by their place in it."""
    at = objects_at(key, store, len(record.checksums or b""))
    return _checked(record, leading_base64(bytes(content[at : record.start])))


def _checked(record: Record, objects: bytes) -> bytes:
    if xxhash.xxh3_64_digest(objects) != record.objects_checksum:
        raise CorruptionError("the objects in the header don't fit their checksum")
    return objects
