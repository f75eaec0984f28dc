"""Sharded puts: several ranks put parts, which become one version at one moment, or never. Decision 012 has the rules.

1. *Prepare*: a rank fills a segment as in any put. Then, in one hold of the store's mutex, its row becomes *prepared*,
   and a row of `pending` keeps it from now on, so that the rank may exit. A kill before leaves what a put leaves; after
   it, a part that waits for the others until its lease is over.
2. *Publish*: who finds all parts there merges them outside of the mutex, and commits them by steps 4 and 5 of a put
   (`commit.py`), with its own transaction: the attempt must have no outcome, and its parts must be those that were
   merged; their rows go, and the version becomes the outcome. A kill before the commit leaves headers that say live:
   the mutex's next owner puts them back, since rows of `pending` still name the segments (`recovery.py`).
3. *Give up*: a timeout, an error of a rank, or `abort` ends an attempt, unless it has an outcome: its segments are
   retired, and the error becomes its outcome. So what raised never publishes later.
4. *Expire*: what is over is ended in the same way, by whoever prepares or sweeps next.

Whatever completes, publishes or ends an attempt counts as a publication and rings the key's doorbell, so that a death
right after the commit is made up for as after a put.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.files import PreparedFile, SealedSegment, SegmentWriter, segment_path
from memstore.engine.format import PREPARED, SegmentRow
from memstore.engine.protocols.attempt_ends import (
    Member,
    drop_expired,
    end,
    ended,
    give_up,
    look,
    look_into,
    make_outcome,
    nanoseconds,
    now,
    retire_part,
    ring,
)
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.commit import Publication, commit
from memstore.engine.protocols.put import Draft, clean_up, close_published, write
from memstore.engine.root import SHARDED, Root, folder
from memstore.errors import PartialCommitError, ShardMismatchError, VersionConflictError

_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more than go come never
LOOK_EVERY = 1.0  # seconds, as a net under the doorbell


# --- prepare ----------------------------------------------------------------------------------------------------------


def prepare(root: Root, member: Member, draft: Draft, content: Callable[[], bytes], deadline: float) -> Outcome | None:
    """Puts one rank's part. Returns the attempt's outcome if it has one already, and then has put nothing.

    Args:
        draft: of the rank's own bytes; without a header, the rank holds none.
        content: what the part says of the value, asked for once the bytes are written.

    Raises:
        ShardMismatchError: other ranks say that the attempt has another number of ranks.
        StoreFullError, ResourceLimitError, StoreTimeoutError, NotAStoreError.
    """
    if SHARDED not in root.settings.features:
        root.mutex.run(functools.partial(_add_feature, root), deadline)
    writers: list[SegmentWriter] = []
    try:
        change = write(root, draft, writers, deadline)
        said = content()
        segment = change.segments[0] if change.segments else None
        outcome, bell = root.mutex.run(lambda: _prepare_locked(root, member, draft, segment, said), deadline)
        if outcome is not None:
            raise _OverAlready(outcome)
    except _OverAlready as over:
        clean_up(root, writers, over)
        return over.outcome
    except BaseException as error:
        clean_up(root, writers, error)
        raise
    close_published(root, writers)
    if bell is not None:
        root.doorbell.wake(bell)
    root.check_in_place()
    return None


def _add_feature(root: Root) -> None:
    root.check_in_place()
    root.settings = folder.add_feature(root.path, root.settings, SHARDED)


class _OverAlready(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _prepare_locked(
    root: Root, member: Member, draft: Draft, segment: SealedSegment | None, content: bytes
) -> tuple[Outcome | None, int | None]:
    """The outcome, if there is one; and the bell to wake, if the attempt is complete."""
    root.glance()
    moment = now()

    def apply(transaction: Transaction) -> tuple[Outcome | None, bool, Counters]:
        counters = transaction.counters()
        drop_expired(transaction, counters, moment, member)
        attempts.drop_outcomes(transaction, moment, _DROPPED)
        outcome = attempts.outcome_of(transaction, member.key, member.attempt)
        if outcome is not None and not outcome.is_over(moment):
            return outcome, False, counters
        there = {part.rank: part for part in attempts.parts_of(transaction, member.key, member.attempt)}
        for other in there.values():
            if other.world_size != member.world_size:
                raise _other_world(member, other)
        if member.rank in there:
            retire_part(transaction, counters, there[member.rank])
        if segment is None:
            counters.number += 1
        else:
            row = SegmentRow(member.key, segment.put_id, PREPARED, segment.size)
            transaction.put_segment(segment.segment, row)
            transaction.delete_number("filling", segment.segment)
        put_id = counters.number if segment is None else segment.put_id
        attempts.put_part(transaction, _part(member, draft, segment, put_id, moment), content)
        is_complete = len({*there, member.rank}) == member.world_size
        counters.publications += is_complete
        transaction.put_counters(counters)
        return None, is_complete, counters

    with root.guard:
        outcome, is_complete, counters = root.catalog.update(apply)
    if not is_complete:
        return outcome, None
    return outcome, ring(root, member.key, counters)


def _part(member: Member, draft: Draft, segment: SealedSegment | None, put_id: int, moment: Now) -> Part:
    lease = nanoseconds(member.lease)
    return Part(
        key=member.key,
        attempt=member.attempt,
        rank=member.rank,
        world_size=member.world_size,
        put_id=put_id,
        segment=segment.segment if segment else 0,
        size=segment.size if segment else 0,
        start=segment.start if segment else 0,
        expect=draft.expect,
        lease=lease,
        expires=moment.clock + lease,
        boot=moment.boot,
    )


def _other_world(member: Member, other: Part) -> ShardMismatchError:
    key = member.key.decode()
    return ShardMismatchError(
        f"{key!r}: attempt {member.attempt!r} has {other.world_size} ranks by rank {other.rank}, and "
        f"{member.world_size} by rank {member.rank}: name another attempt after a restart with other ranks",
        key=key,
    )


# --- publish ----------------------------------------------------------------------------------------------------------


Merge = Callable[[Sequence[Part], Sequence[bytes]], Content]
"""Makes one value of an attempt's parts, which are given by rank, and of what they say. Its ShardMismatchError or
PartialCommitError ends the attempt.
"""


def outcome_of(root: Root, member: Member, merge: Merge, waits_until: float, deadline: float) -> Outcome | None:
    """Waits until an attempt has an outcome, and publishes it if all parts are there. None if time is up before.

    Args:
        waits_until: for parts that are missing.
        deadline: of each wait for the mutex.
    """
    doorbell = root.doorbell
    bell = doorbell.bell(member.key)
    while True:
        seen = doorbell.load(bell)
        outcome, parts = look(root, member)
        if outcome is None and all(part.rank != member.rank for part in parts):
            gone = "its lease was over before all ranks had put their parts"
            outcome = make_outcome(member, parts, now(), failure=ended(member, parts, gone))
        if outcome is None and len(parts) == member.world_size:
            outcome = _publish(root, member, merge, deadline)
            if outcome is None:  # a part was replaced meanwhile
                continue
        left = waits_until - time.monotonic()
        if outcome is not None or left <= 0:
            return outcome
        doorbell.wait(bell, seen, min(LOOK_EVERY, left))


def _publish(root: Root, member: Member, merge: Merge, deadline: float) -> Outcome | None:
    """Publishes an attempt, and returns its outcome. None if its parts are no longer those that were seen."""
    outcome, parts, contents = look_into(root, member)
    if outcome is not None or len(parts) < member.world_size:
        return outcome
    try:
        content, expected = merge(parts, contents), _expected(member, parts)
        change = Change(member.key, content, expected, segments=tuple(_segments(root, parts)))
        publication = _Publication(member, parts)
        commit(root, [change], deadline, publication)
    except _PartsChanged:
        return None
    except _OverAlready as over:
        return over.outcome
    except (ShardMismatchError, PartialCommitError, VersionConflictError) as failure:
        return give_up(root, member, failure, deadline)
    return publication.outcome


class _PartsChanged(Exception):
    pass


class _Publication(Publication):
    """What the transaction of a publication does beside the commit's own work."""

    def __init__(self, member: Member, parts: Sequence[Part]) -> None:
        self._member, self._parts, self._moment = member, parts, now()
        self.outcome: Outcome | None = None

    def check(self, transaction: Transaction) -> None:
        key, attempt = self._member.key, self._member.attempt
        outcome = attempts.outcome_of(transaction, key, attempt)
        if outcome is not None and not outcome.is_over(self._moment):
            raise _OverAlready(outcome)
        there = attempts.parts_of(transaction, key, attempt)
        if [part.put_id for part in there] != [part.put_id for part in self._parts]:
            raise _PartsChanged

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        for part in self._parts:
            attempts.delete_part(transaction, part)
        self.outcome = make_outcome(self._member, self._parts, self._moment, version=version)
        attempts.put_outcome(transaction, self.outcome)
        first = min(part.put_id for part in self._parts)
        others: dict[str, list[Part]] = {}
        for part in attempts.parts_of(transaction, self._member.key):
            others.setdefault(part.attempt, []).append(part)
        for parts in others.values():
            if min(part.put_id for part in parts) < first:
                failure = ended(parts[0], parts, f"attempt {self._member.attempt!r}, begun later, was published first")
                end(transaction, counters, parts, failure, self._moment)


def _expected(member: Member, parts: Sequence[Part]) -> int | None:
    expected = {part.expect: part.rank for part in parts if part.expect is not None}
    if len(expected) > 1:
        key, said = member.key.decode(), ", ".join(f"rank {rank} {version}" for version, rank in expected.items())
        raise ShardMismatchError(f"{key!r}: the ranks expect different versions: {said}", key=key)
    return next(iter(expected), None)


def _segments(root: Root, parts: Sequence[Part]) -> list[SealedSegment]:
    return [
        SealedSegment(part.segment, part.put_id, part.size, part.start, part.size, PreparedFile(path, root.segments_fd))
        for part in parts
        if part.segment
        for path in [segment_path(root.segments, part.segment)]
    ]
