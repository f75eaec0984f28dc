"""The checksums of a value's bytes: xxh3-64, one for each leaf, and one for objects that don't fit into the record."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from memstore import structure
from memstore.engine import Record, leading_base64, objects_at, read_objects
from memstore.errors import CorruptionError

CHECKSUM_SIZE = 8  # bytes a leaf


def leaf_checksums(plan: structure.Plan, data: memoryview) -> bytes:
    """Those of all leaves of a data section, in their order."""
    return b"".join(xxhash.xxh3_64_digest(data[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in plan.leaves)


def compare(
    record: Record, plan: structure.Plan, memory: np.ndarray, done: Callable[[int], None] | None = None
) -> None:
    """Compares the leaves with their checksums, if the record has any, and raises CorruptionError if one differs.

    `done` is called with how many bytes of the data section were passed since its last call.
    """
    stored = record.checksums
    if stored is None:
        return
    if len(stored) != CHECKSUM_SIZE * len(plan.leaves):
        detail = f"{len(stored):,} bytes of checksums for {len(plan.leaves):,} leaves"
        raise CorruptionError(detail)
    data, reached = memory.data, 0
    for i, leaf in enumerate(plan.leaves):
        end = leaf.offset + leaf.nbytes
        if xxhash.xxh3_64_digest(data[leaf.offset : end]) != stored[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]:
            detail = f"the bytes of leaf {leaf.name} don't fit their checksum"
            raise CorruptionError(detail)
        if done is not None:
            done(max(end - reached, 0))
        reached = max(end, reached)


def checked_objects(record: Record, header: bytes) -> bytes:
    """The objects of a value whose record has no room for them: they are in the header of its segment."""
    return _checked(record, read_objects(header))


def placed_objects(record: Record, key: str, store: str, content: memoryview) -> bytes:
    """As `checked_objects`, of a header that may be damaged elsewhere: the objects are found by their place in it."""
    at = objects_at(key, store, len(record.checksums or b""))
    return _checked(record, leading_base64(bytes(content[at : record.start])))


def _checked(record: Record, objects: bytes) -> bytes:
    if xxhash.xxh3_64_digest(objects) != record.objects_checksum:
        detail = "the objects in the header don't fit their checksum"
        raise CorruptionError(detail)
    return objects
