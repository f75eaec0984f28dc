"""Sharded puts of plain bytes, straight through the engine: the value of a key is what each rank has put, by rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import AttemptOutcome, PendingPart, Transaction
from memstore.engine.files.segments import segment_path
from memstore.engine.format.records import (
    FILLING,
    LIVE,
    PREPARED,
    RETIRED,
    SegmentExtent,
    base_after,
    encode_extents,
    end_of,
)
from memstore.engine.protocols import attempts, sharded_put
from memstore.engine.protocols.attempts import Participant
from memstore.engine.protocols.change import Content
from memstore.engine.protocols.get import hold
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import ShardMismatchError
from tests.engine.bytes_store import INLINE, draft
from tests.inside import counters_of


def rank(
    number: int, attempt: str = "first", *, world: int = 2, lease: float = 60.0, key: bytes = b"key"
) -> Participant:
    return Participant(key, attempt, number, world, lease)


def prepare(root: Root, member: Participant, data: bytes, *, expect: int | None = None) -> AttemptOutcome | Participant:
    """`data` is longer than INLINE, or empty: the rank holds no bytes then."""
    assert not data or len(data) > INLINE
    part = draft(root, member.key, data, expect)
    return sharded_put.prepare(root, member, part, lambda: b"%d" % len(data), deadline_after(10))


def part(root: Root, member: Participant, data: bytes, *, expect: int | None = None) -> Participant:
    """As `prepare`, of an attempt that has no outcome."""
    found = prepare(root, member, data, expect=expect)
    assert isinstance(found, Participant), found
    return found


def outcome(root: Root, member: Participant, seconds: float = 0.0) -> AttemptOutcome | None:
    """Publishes the attempt if it is complete."""
    return sharded_put.outcome_of(root, member, merge, deadline_after(seconds), deadline_after(10))


def version(root: Root, member: Participant, seconds: float = 0.0) -> int:
    found = outcome(root, member, seconds)
    assert found is not None, "it is pending"
    return attempts.version_of_outcome(found)


def merge(parts: Sequence[PendingPart], said: Sequence[bytes]) -> Content:
    """Ranks agree unless one says that it doesn't."""
    if b"666666" in said:
        raise ShardMismatchError("they disagree", key=parts[0].key.decode())
    extents: list[SegmentExtent] = []
    for one in parts:
        if one.segment:
            base = base_after(end_of(extents), one.size)
            extents.append(SegmentExtent(one.segment, one.put_id, one.size, one.start, base))
    sizes = [int(size) for size in said]
    return Content(b",".join(said), b"", sum(sizes), parts=encode_extents(extents))


def get(root: Root, key: bytes = b"key") -> list[bytes] | None:
    """What each rank has put. None: there is no such key."""
    (found,) = hold(root, [key], deadline_after(10), may_lock=True)
    if found is None:
        return None
    extents, values = list(found.record.segments), list[bytes]()
    for size in map(int, found.record.description.split(b",")):
        at = extents.pop(0) if size else None
        if at is None:
            values.append(b"")
        else:
            start = at.base + at.start
            values.append(np.asarray(found.mapping)[start : start + size].tobytes())
    return values


def parts_of(root: Root) -> list[PendingPart]:
    with root.guard:
        return root.catalog.view(lambda transaction: tables.parts_of(transaction))


def outcomes_of(root: Root) -> list[AttemptOutcome]:
    with root.guard:
        return root.catalog.view(lambda transaction: tables.all_outcomes(transaction))


def age(root: Root, *, outcomes: bool = False) -> None:
    """As if the leases of all parts, or the time of all outcomes, were over."""

    def write(transaction: Transaction) -> None:
        for one in tables.parts_of(transaction):
            tables.renew_part(transaction, msgspec.structs.replace(one, expires=0))
        for other in tables.all_outcomes(transaction) if outcomes else ():
            tables.put_outcome(transaction, msgspec.structs.replace(other, expires=0))

    root.mutex.run(lambda: root.catalog.update(write), deadline_after(10))


def check_rows(root: Root) -> None:
    """Parts, rows, files and counters say the same."""
    with root.guard:
        rows = dict(root.catalog.view(lambda transaction: list(transaction.segments())))
    prepared = {segment for segment, row in rows.items() if row.state == PREPARED}
    assert prepared == {one.segment for one in parts_of(root) if one.segment}
    sums = {state: sum(row.nbytes for row in rows.values() if row.state == state) for state in (LIVE, RETIRED)}
    filling = sum(row.nbytes for row in rows.values() if row.state in (FILLING, PREPARED))
    assert sorted(os.listdir(root.segments)) == sorted(os.path.basename(segment_path(".", segment)) for segment in rows)
    counters = counters_of(root)
    assert (counters.live, counters.retired + counters.held) == (sums[LIVE], sums[RETIRED])
    assert counters.filling == filling
    assert counters.publications == root.mutex.notes.publications_rung
    names = {(one.key, one.attempt) for one in parts_of(root)}
    both = names & {(one.key, one.attempt) for one in outcomes_of(root)}
    assert not both, "an attempt has an outcome, and is pending"
