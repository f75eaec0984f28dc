"""Sharded puts: several ranks put parts, which become one version at one moment, or never. Decision 012 has the rules.

1. *Prepare*: a rank fills a segment as in any put. Then, in one hold of the store's mutex, its row becomes *prepared*,
   and a row of `pending` keeps it from now on, so that the rank may exit. A kill before leaves what a put leaves; after
   it, a part that waits for the others until its lease is over.
2. *Publish*: who finds all parts there merges them outside of the mutex, and commits them by steps 4 and 5 of a put
   (`commit.py`), with its own transaction: the attempt must have no outcome, and its parts must be those that were
   merged; their rows go, and the version becomes the outcome. A kill before the commit leaves headers that say live:
   the mutex's next owner puts them back, since rows of `pending` still name the segments (`recovery.py`).
3. *Give up* (`attempt_ends.py`): a timeout, an error of a rank, or `abort` ends an attempt, unless it has an outcome:
   its segments are retired, and the error becomes its outcome. So what raised never publishes later.
4. *Expire*: what is over is ended in the same way, by whoever prepares or sweeps next. Who waits puts that off.

Whatever completes, publishes or ends an attempt counts as a publication and rings the key's doorbell, so that a death
right after the commit is made up for as after a put.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.files import ClaimedFile, PreparedFile, SealedSegment, SegmentWriter, segment_path
from memstore.engine.format import PREPARED, SegmentRow
from memstore.engine.protocols.attempt_ends import (
    Member,
    are_same,
    drop_expired,
    end,
    ended,
    find,
    give_up_if,
    look_into,
    make_outcome,
    nanoseconds,
    now,
    retire_part,
    ring,
    unknown,
)
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.commit import Publication, commit
from memstore.engine.protocols.put import Draft, clean_up, close_published, write
from memstore.engine.root import SHARDED, Root, folder
from memstore.engine.sync import Refusal
from memstore.errors import CorruptionError, PartialCommitError, ShardMismatchError, VersionConflictError

_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come
LOOK_EVERY = 1.0  # seconds after which a waiting rank looks under the mutex, and does what a dead one has left undone

# --- prepare ----------------------------------------------------------------------------------------------------------


def prepare(
    root: Root, member: Member, draft: Draft, content: Callable[[], bytes], deadline: float
) -> Outcome | Member:
    """Puts one rank's part. Returns the member with the attempt's number.

    If the attempt has an outcome already, it returns that instead, and has put nothing.

    Args:
        draft: of the rank's own bytes; without a header, the rank holds none.
        content: what the part says of the value, asked for once the bytes are written.

    Raises:
        ShardMismatchError: other ranks say that the attempt has another number of ranks.
        StoreFullError, ResourceLimitError, StoreTimeoutError, NotAStoreError.
    """
    need_boxes(root, deadline)
    writers: list[SegmentWriter] = []
    try:
        change = write(root, draft, writers, deadline)
        said = content()
        segment = change.segments[0] if change.segments else None
        found, bells = root.mutex.run(lambda: _prepare_locked(root, member, draft, segment, said), deadline)
        for bell in bells:
            root.doorbell.wake(bell)
        if isinstance(found, Outcome):
            raise _OverAlready(found)
    except BaseException as error:
        clean_up(root, writers, error)
        if isinstance(error, _OverAlready):
            return error.outcome
        raise
    close_published(root, writers)
    root.check_in_place()
    return member._replace(number=found)


def need_boxes(root: Root, deadline: float) -> None:
    """Lets the store have records with boxes: memstore before format 2 refuses it from then on."""
    if SHARDED not in root.settings.features:
        root.mutex.run(functools.partial(_add_feature, root), deadline)


def _add_feature(root: Root) -> None:
    root.check_in_place()
    root.settings = folder.add_feature(root.path, root.settings, SHARDED)


class _OverAlready(Refusal):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _prepare_locked(
    root: Root, member: Member, draft: Draft, segment: SealedSegment | None, content: bytes
) -> tuple[Outcome | int, list[int]]:
    """The attempt's number, or the outcome that it has already; and the bells to wake, of attempts that are complete
    or over.
    """
    root.glance()
    moment = now()

    def apply(transaction: Transaction) -> tuple[Outcome | int, list[bytes], Counters]:
        counters = transaction.counters()
        rung = drop_expired(transaction, counters, moment)
        attempts.drop_outcomes(transaction, moment, _DROPPED)
        outcome, there = find(transaction, member)
        number = 0
        if outcome is None:
            part = _part(member, draft, segment, counters, there, moment)
            _enter(transaction, counters, part, content, there)
            number = part.number
            if len({part.rank, *[other.rank for other in there]}) == part.world_size:
                rung.append(member.key)
        if outcome is None or rung:
            counters.publications += bool(rung)
            transaction.put_counters(counters)
        if outcome is None and segment is not None and isinstance(segment.file, ClaimedFile):
            segment.file.unlock()  # before the commit: who reads the segment, once it is live, must not find it locked
        return outcome or number, rung, counters

    with root.guard:
        found, rung, counters = root.catalog.update(apply)
    return found, [ring(root, key, counters) for key in rung]


def _enter(transaction: Transaction, counters: Counters, part: Part, content: bytes, there: Sequence[Part]) -> None:
    """Writes the rows of a part beside those of the others of its attempt; what the rank has put before is retired."""
    for other in there:
        if other.world_size != part.world_size:
            raise _other_world(part, other)
    for other in there:
        if other.rank == part.rank:
            retire_part(transaction, counters, other)
    if part.segment:
        transaction.put_segment(part.segment, SegmentRow(part.key, part.put_id, PREPARED, part.size))
        transaction.delete_number("filling", part.segment)
    attempts.put_part(transaction, part, content)


def _part(
    member: Member,
    draft: Draft,
    segment: SealedSegment | None,
    counters: Counters,
    there: Sequence[Part],
    moment: Now,
) -> Part:
    """The attempt's number is new with its first part. Its expiry is the latest that any of them asked for."""
    if segment is None:
        counters.number += 1
    put_id = counters.number if segment is None else segment.put_id
    if not there:
        counters.number += 1
    lease = nanoseconds(member.lease)
    return Part(
        key=member.key,
        attempt=member.attempt,
        number=there[0].number if there else counters.number,
        rank=member.rank,
        world_size=member.world_size,
        put_id=put_id,
        segment=segment.segment if segment else 0,
        size=segment.size if segment else 0,
        start=segment.start if segment else 0,
        expect=draft.expect,
        lease=lease,
        expires=max([moment.clock + lease, *[other.expires for other in there]]),
        boot=moment.boot,
    )


def _other_world(part: Part, other: Part) -> ShardMismatchError:
    key = part.key.decode()
    return ShardMismatchError(
        f"{key!r}: attempt {part.attempt!r} has {other.world_size} ranks by rank {other.rank}, and "
        f"{part.world_size} by rank {part.rank}: name another attempt after a restart with other ranks",
        key=key,
    )


# --- publish ----------------------------------------------------------------------------------------------------------

Merge = Callable[[Sequence[Part], Sequence[bytes]], Content]
"""Makes one value of an attempt's parts, which are given by rank, and of what they say. Its ShardMismatchError or
PartialCommitError ends the attempt.
"""


def outcome_of(root: Root, member: Member, merge: Merge, waits_until: float, deadline: float) -> Outcome | None:
    """Waits until an attempt has an outcome, and publishes it if all parts are there. None if time is up before.

    Who finds all parts at its first look publishes them: that is whoever has put the last one. Who finds them later
    leaves them to that one for a while, since all who wait would merge the same parts at once.

    Args:
        waits_until: for parts that are missing.
        deadline: of the mutex, to publish.

    Raises:
        UnknownOutcomeError: this was stopped for longer than outcomes are kept.
        StoreTimeoutError: the mutex was not to be had.
        NotAStoreError: the store was removed or moved.
    """
    doorbell = root.doorbell
    bell = doorbell.bell(member.key)
    look_at, publish_at = time.monotonic() + LOOK_EVERY, time.monotonic()
    seen = doorbell.load(bell)
    outcome, parts = root.catalog.view(find, member)
    while True:
        is_complete = len(parts) == member.world_size
        if outcome is None and is_complete and time.monotonic() >= min(publish_at, waits_until):
            outcome = _publish(root, member, merge, deadline)
        if outcome is None and not parts:
            raise unknown(member)
        left = waits_until - time.monotonic()
        if outcome is not None or left <= 0:
            return outcome
        doorbell.wait(bell, seen, min(LOOK_EVERY, left))
        seen = doorbell.load(bell)
        moment = time.monotonic()
        if look_at <= moment < waits_until:  # whoever should have rung may be dead: who takes the mutex makes up for it
            look_at = moment + LOOK_EVERY
            root.check_in_place()
            outcome, parts = root.mutex.run(functools.partial(_look_and_renew, root, member), waits_until)
        else:
            outcome, parts = root.catalog.view(find, member)
        if not is_complete:
            publish_at = moment + LOOK_EVERY


def _look_and_renew(root: Root, member: Member) -> tuple[Outcome | None, list[Part]]:
    """Takes this rank's part on by a lease, when half of that is over."""
    moment = now()
    with root.guard:
        outcome, parts = root.catalog.view(find, member)
        own = [part for part in parts if part.rank == member.rank]
        if own and own[0].expires - moment.clock < own[0].lease // 2:
            renewed = msgspec.structs.replace(own[0], expires=moment.clock + own[0].lease)
            root.catalog.update(lambda transaction: attempts.renew_part(transaction, renewed), is_delete=True)
    return outcome, parts


def _publish(root: Root, member: Member, merge: Merge, deadline: float) -> Outcome | None:
    """Publishes an attempt, and returns its outcome. None if its parts are incomplete by now."""
    while True:
        outcome, parts, contents = look_into(root, member)
        if outcome is not None or len(parts) < member.world_size:
            return outcome
        try:
            content, expected = merge(parts, contents), _expected(member, parts)
            change = Change(member.key, content, expected, segments=tuple(_segments(root, parts)))
            publication = _Publication(member, parts)
            commit(root, [change], deadline, publication)
        except _PartsChanged:
            continue
        except _OverAlready as over:
            return over.outcome
        except (ShardMismatchError, PartialCommitError, VersionConflictError) as failure:
            outcome = give_up_if(root, member, parts, failure, deadline)
            if outcome is not None:
                return outcome
        except CorruptionError:  # the file of a part is missing; or the whole store is
            root.check_in_place()
            raise
        else:
            return publication.outcome


class _PartsChanged(Refusal):
    pass


class _Publication(Publication):
    """What the transaction of a publication does beside the commit's own work."""

    def __init__(self, member: Member, parts: Sequence[Part]) -> None:
        self._member, self._parts, self._moment = member._replace(number=parts[0].number), parts, now()
        self.outcome: Outcome | None = None

    def check(self, transaction: Transaction) -> None:
        outcome, parts = find(transaction, self._member)
        if outcome is not None:
            raise _OverAlready(outcome)
        if not are_same(parts, self._parts):
            raise _PartsChanged

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        member = self._member
        for part in self._parts:
            attempts.delete_part(transaction, part)
        self.outcome = make_outcome(member, self._parts, self._moment, version=version)
        attempts.put_outcome(transaction, self.outcome)
        others: dict[str, list[Part]] = {}
        for part in attempts.parts_of(transaction, member.key):
            if part.number < member.number:
                others.setdefault(part.attempt, []).append(part)
        for parts in others.values():
            failure = ended(parts[0], parts, f"attempt {member.attempt!r}, begun later, was published first")
            end(transaction, counters, parts, failure, self._moment)


def _expected(member: Member, parts: Sequence[Part]) -> int | None:
    expected = {part.expect: part.rank for part in parts if part.expect is not None}
    if len(expected) > 1:
        key, said = member.key.decode(), ", ".join(f"rank {rank} {version}" for version, rank in expected.items())
        raise VersionConflictError(f"{key!r}: the ranks expect different versions: {said}", key=key)
    return next(iter(expected), None)


def _segments(root: Root, parts: Sequence[Part]) -> list[SealedSegment]:
    return [
        SealedSegment(part.segment, part.put_id, part.size, part.start, part.size, PreparedFile(path, root.segments_fd))
        for part in parts
        if part.segment
        for path in [segment_path(root.segments, part.segment)]
    ]
