"""Drafts of deltas: puts of values that share the bytes of unchanged leaves with an earlier version of their key."""

from __future__ import annotations

import functools

import numpy as np
import torch

from memstore import structure
from memstore.contents.parts import CHECKSUM_SIZE
from memstore.contents.reading import locate
from memstore.contents.writing import leaf_checksums
from memstore.engine import (
    DELTA_BASE,
    OBJECTS_IN_RECORD,
    Content,
    DeltaDraft,
    DeltaHeader,
    Draft,
    Header,
    Leaf,
    MappedEntry,
    Root,
    WritableMemory,
    encode_delta,
    end_of,
    same_bytes,
)
from memstore.structure import FlatValue

_LEAST = 1 << 20  # bytes of a value: the record of a smaller delta takes what its file saves
_MOST_EXTENTS = 16  # files of a version: each of them is opened and mapped by every get
_MOST_CHANGED = 0.5  # of the bytes: beyond, a delta saves little, and keeps the files of earlier versions


def draft_delta(root: Root, key: bytes, flat: FlatValue, base: MappedEntry, expect: int | None) -> Draft | None:
    """Returns what the engine is to store of a value, beside the files of an earlier version; None if all of it.

    Args:
        base: the earlier version. It has to be held until the draft is put.
    """
    record, objects = base.record, flat.objects
    if flat.plan.inline or flat.plan.nbytes < _LEAST or len(objects) > OBJECTS_IN_RECORD:
        return None
    if base.mapping is None or record.boxes is not None or record.adopted is not None or record.is_mutable:
        return None
    found = locate(root, key.decode(), base)
    address = found.memory.__array_interface__["data"][0]

    def is_same(tensor: torch.Tensor, leaf: Leaf) -> bool:
        return same_bytes(tensor.data_ptr(), address + leaf.offset, leaf.nbytes)

    delta = structure.compare_leaves(flat, found.plan, is_same)
    if delta is None or delta.part.plan.nbytes > _MOST_CHANGED * flat.plan.nbytes:
        return None
    earlier, ahead = found.plan.leaves, record.start
    places = [earlier[j].offset + ahead for j in delta.kept.values()]
    shares = tuple(one for one in record.segments if any(one.base <= place < one.base + one.size for place in places))
    if not 0 < len(shares) < _MOST_EXTENTS:
        return None
    own, settings, room = -(-end_of(shares) // DELTA_BASE) * DELTA_BASE, root.settings, 0
    checksums = CHECKSUM_SIZE * len(flat.plan.leaves) if settings.checksum else 0
    while True:  # the description names places behind the header that it is in
        plan = delta.place(earlier, ahead, own + room)
        said = encode_delta(DeltaHeader(plan.description, plan.nbytes, shares, own))
        header = Header(
            key.decode(), settings.store, said, objects, delta.part.plan.header, checksums=checksums, room=room
        )
        if header.nbytes == room:
            break
        room = header.nbytes
    fill = functools.partial(_fill, delta, record.checksums if settings.checksum else None, settings.checksum)
    content = Content(plan.description, objects, plan.nbytes)
    return Draft(key, content, expect, header, fill, delta=DeltaDraft(delta.part.plan.nbytes, shares, own))


def _fill(
    delta: structure.DeltaLeaves, before: bytes | None, has_checksums: bool, memory: WritableMemory
) -> bytes | None:
    """Copies the changed leaves. Returns the checksums of all leaves, if the store has them."""
    array = np.asarray(memory)
    structure.fill(delta.part, array)
    if not has_checksums:
        return None
    computed = leaf_checksums(delta.part.plan, array.data)
    sums: dict[int, bytes] = {}
    for number, i in enumerate(delta.changed):
        sums[i] = computed[number * CHECKSUM_SIZE : (number + 1) * CHECKSUM_SIZE]
    for i, j in delta.kept.items():
        assert before is not None, "a store with checksums has them of each version"
        sums[i] = before[j * CHECKSUM_SIZE : (j + 1) * CHECKSUM_SIZE]
    same = delta.flat.plan.same
    return b"".join(sums[same.get(i, i)] for i in range(len(delta.flat.plan.leaves)))
