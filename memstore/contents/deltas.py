"""Drafts of deltas: puts of values that share the bytes of unchanged leaves with an earlier version of their key.

`draft_delta` makes that of a store of one host, which shares files. In a store of several hosts, `with_origins` says of
a whole draft which bytes other hosts may have. `put_deltas_whole` lets a store of the one kind become one of the other.
"""

from __future__ import annotations

import contextlib
import functools

import msgspec
import numpy as np
import torch

from memstore import structure
from memstore.contents.reading import CHECKSUM_SIZE, Located, locate
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
    carry,
    deltas_here,
    encode_delta,
    encode_origins,
    end_of,
    hold_version_of,
    origins_of,
    put,
    same_bytes,
)
from memstore.errors import VersionConflictError
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
    delta = _compare(flat, found)
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


def with_origins(root: Root, draft: Draft, flat: FlatValue, base: MappedEntry) -> Draft:
    """Returns a draft that says which of its bytes are those of an earlier version, and where they were first put.

    Args:
        base: the earlier version. Its bytes are here, or nothing is said.
    """
    record = base.record
    if draft.header is None or flat.plan.nbytes < _LEAST or base.mapping is None or base.absent is not None:
        return draft
    if not record.segment or record.is_mutable:
        return draft
    found = locate(root, draft.key.decode(), base)
    delta = _compare(flat, found)
    if delta is None:
        return draft
    leaves, earlier = flat.plan.leaves, found.plan.leaves
    kept = sorted((leaves[i].offset, earlier[j].offset, leaves[i].nbytes) for i, j in delta.kept.items())
    origins = carry(origins_of(record, root.member_id()), kept)
    if not origins:
        return draft
    content = msgspec.structs.replace(draft.content, origins=encode_origins(origins))
    return msgspec.structs.replace(draft, content=content)


def _compare(flat: FlatValue, found: Located) -> structure.DeltaLeaves | None:
    """Compares the leaves of a value with those of an earlier one: see `structure.compare_leaves`."""
    address = found.memory.__array_interface__["data"][0]

    def is_same(tensor: torch.Tensor, leaf: Leaf) -> bool:
        return same_bytes(tensor.data_ptr(), address + leaf.offset, leaf.nbytes)

    return structure.compare_leaves(flat, found.plan, is_same)


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


# --- Deltas put whole ------------------------------------------------------------------------------------------------


def put_deltas_whole(root: Root, deadline: float) -> None:
    """Puts each present value that shares files anew, in a file of its own. Raises what `engine.put` raises."""
    for key, version in deltas_here(root):
        held = hold_version_of(root, key, version, deadline, may_lock=True)
        if held is not None:
            with contextlib.suppress(VersionConflictError):  # it was replaced, or is an earlier one that is kept
                put(root, [_draft_whole(root, key, held)], deadline)


def _draft_whole(root: Root, key: bytes, held: MappedEntry) -> Draft:
    found, record = locate(root, key.decode(), held), held.record
    plan = structure.gathered(found.plan)
    checksums = record.checksums if root.settings.checksum else None

    def fill(memory: WritableMemory) -> bytes | None:
        whole = np.asarray(memory)
        for old, new in zip(found.plan.leaves, plan.leaves, strict=True):
            whole[new.offset : new.offset + new.nbytes] = found.memory[old.offset : old.offset + old.nbytes]
        return checksums

    size = len(checksums or b"")
    store = root.settings.store
    header = Header(key.decode(), store, plan.description, found.objects, plan.header, checksums=size)
    content = Content(plan.description, found.objects, plan.nbytes)
    return Draft(key, content, record.version, header, fill)
