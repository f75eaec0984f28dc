"""Sharded puts: a rank puts its part, and who finds the parts of all ranks publishes them as one version.

`attempts.py` has the rules, and how attempts end that are not published. `prepare` is step 1, `outcome_of` is step 2,
`give_up` is step 3, wherever the owner of the key is: on this host alone, else by the rules of a cluster. A store that
nobody serves pays a look at its counters. If it comes to be served meanwhile, the transaction that would have changed
something raises MembershipChanged, and the owner is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import AttemptOutcome, Counters, Now, PendingPart, Transaction
from memstore.engine.files.segments import ClaimedFile, PreparedFile, SealedSegment, SegmentWriter, segment_path
from memstore.engine.format.records import PREPARED, SegmentRow
from memstore.engine.protocols.attempts import (
    AttemptFailure,
    Merge,
    OverAlready,
    Participant,
    are_same,
    drop_expired,
    end_attempt,
    ended,
    find_attempt,
    give_up_here,
    give_up_if,
    look_into_attempt,
    make_outcome,
    nanoseconds,
    no_version_yet,
    now,
    parts_here,
    retire_part,
    ring_for_attempt,
    unknown_outcome,
)
from memstore.engine.protocols.change import Change, MembershipChanged, need_boxes
from memstore.engine.protocols.elsewhere import elsewhere_of, is_served
from memstore.engine.protocols.put import Draft, Publication, clean_up, close_published, commit, fill_segment
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import Refusal, deadline_after
from memstore.errors import (
    CorruptionError,
    HomeUnavailableError,
    KeyNotFoundError,
    MutableEntryError,
    PartialCommitError,
    ShardMismatchError,
    VersionConflictError,
)

_TO_EXPLAIN = 0.25  # seconds for other hosts to say what an error tells: the time of its call may be over


def prepare(
    root: Root, member: Participant, draft: Draft, content: Callable[[], bytes], deadline: float
) -> AttemptOutcome | Participant:
    """Prepares a part, wherever the key's owner is: see `prepare_part`.

    Raises HomeUnavailableError and StaleMembershipError too.
    """
    return prepare_part(root, member, draft, content, _enter_anywhere, deadline)


def _enter_anywhere(
    root: Root, member: Participant, draft: Draft, segment: SealedSegment | None, content: bytes, deadline: float
) -> AttemptOutcome | Participant:
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return enter_here(root, member, draft, segment, content, deadline)
    return elsewhere_of(root).prepare(member, draft.expect, segment, content, deadline)


def outcome_of(
    root: Root, member: Participant, merge: Merge, waits_until: float, deadline: float
) -> AttemptOutcome | None:
    """Returns the outcome of an attempt, wherever the key's owner is: see `outcome_here`.

    Raises HomeUnavailableError and StaleMembershipError too.
    """
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return outcome_here(root, member, merge, waits_until, deadline)
    return elsewhere_of(root).outcome_of(member, merge, waits_until, deadline)


def give_up(root: Root, member: Participant, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
    """Ends an attempt, wherever the key's owner is: see `give_up_here`."""
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return give_up_here(root, member, failure, deadline)
    return elsewhere_of(root).give_up(member, failure, deadline)


def pending_parts(root: Root, key: bytes | None, deadline: float) -> list[tuple[PendingPart, float]]:
    """The parts of the attempts of a key, or of all on all hosts, each with the seconds until it is over.

    Args:
        deadline: for other hosts.

    Raises HomeUnavailableError, which names the host.
    """
    if is_served(root):
        return elsewhere_of(root).pending(key, deadline)
    return parts_here(root, key)


def no_version(root: Root, key: bytes, deadline: float | None = None) -> KeyNotFoundError | PartialCommitError:
    """The error for a key that doesn't exist. If it has parts that wait for others, that is another one.

    Args:
        deadline: for the key's owner; None: a moment.
    """
    parts: list[tuple[PendingPart, float]] = []
    with contextlib.suppress(HomeUnavailableError):  # it has just said that there is no version
        parts = pending_parts(root, key, to_explain() if deadline is None else deadline)
    return no_version_yet(key, [part for part, _ in parts])


def to_explain() -> float:
    """The deadline of what is asked for an error's text alone."""
    return deadline_after(_TO_EXPLAIN)


# --- step 1: prepare -------------------------------------------------------------------------------------------------


_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come


Enter = Callable[[Root, Participant, Draft, SealedSegment | None, bytes, float], AttemptOutcome | Participant]
"""Takes in a part whose segment, if it has one, is filled: `enter_here`, or another owner does."""


def prepare_part(
    root: Root, member: Participant, draft: Draft, content: Callable[[], bytes], enter: Enter, deadline: float
) -> AttemptOutcome | Participant:
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
        change = fill_segment(root, draft, writers, deadline)
        said = content()
        segment = change.segments[0] if change.segments else None
        found = enter(root, member, draft, segment, said, deadline)
        if isinstance(found, AttemptOutcome):
            raise OverAlready(found)
    except BaseException as error:
        clean_up(root, writers, error)
        if isinstance(error, OverAlready):
            return error.outcome
        raise
    close_published(root, writers)
    root.check_in_place()
    return found


def enter_here(
    root: Root, member: Participant, draft: Draft, segment: SealedSegment | None, content: bytes, deadline: float
) -> AttemptOutcome | Participant:
    """Enters a part in this host's catalog. Raises MembershipChanged if the store is served to others."""
    found, bells = root.mutex.run(_prepare_locked, deadline, root, member, draft, segment, content)
    for bell in bells:
        root.doorbell.wake(bell)
    return found if isinstance(found, AttemptOutcome) else member._replace(number=found)


def _prepare_locked(
    root: Root, member: Participant, draft: Draft, segment: SealedSegment | None, content: bytes
) -> tuple[AttemptOutcome | int, list[int]]:
    """The attempt's number, or the outcome that it has already; and the bells to wake, of attempts that are complete
    or over.
    """
    root.glance()
    moment = now()

    def apply(transaction: Transaction) -> tuple[AttemptOutcome | int, list[bytes], Counters]:
        counters = transaction.counters()
        if counters.membership:
            raise MembershipChanged
        rung = drop_expired(transaction, counters, moment)
        tables.drop_outcomes(transaction, moment, _DROPPED)
        outcome, there = find_attempt(transaction, member)
        number = 0
        if outcome is None:
            part = _part(member, draft, segment, counters, there, moment)
            _write_part(transaction, counters, part, content, there)
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
    return found, [ring_for_attempt(root, key, counters) for key in rung]


def _write_part(
    transaction: Transaction, counters: Counters, part: PendingPart, content: bytes, there: Sequence[PendingPart]
) -> None:
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
    tables.put_part(transaction, part, content)


def _part(
    member: Participant,
    draft: Draft,
    segment: SealedSegment | None,
    counters: Counters,
    there: Sequence[PendingPart],
    moment: Now,
) -> PendingPart:
    """The attempt's number is new with its first part. Its expiry is the latest that any of them asked for."""
    if segment is None:
        counters.number += 1
    put_id = counters.number if segment is None else segment.put_id
    if not there:
        counters.number += 1
    lease = nanoseconds(member.lease)
    return PendingPart(
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


def _other_world(part: PendingPart, other: PendingPart) -> ShardMismatchError:
    key = part.key.decode()
    return ShardMismatchError(
        f"{key!r}: attempt {part.attempt!r} has {other.world_size} ranks by rank {other.rank}, and "
        f"{part.world_size} by rank {part.rank}: name another attempt after a restart with other ranks",
        key=key,
    )


# --- step 2: publish -------------------------------------------------------------------------------------------------


LOOK_EVERY = 1.0  # seconds after which a waiting rank looks under the mutex, and does what a dead one has left undone


def outcome_here(
    root: Root, member: Participant, merge: Merge, waits_until: float, deadline: float
) -> AttemptOutcome | None:
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
        MembershipChanged: it is served to other hosts by now.
    """
    doorbell = root.doorbell
    bell = doorbell.bell(member.key)
    look_at, publish_at = time.monotonic() + LOOK_EVERY, time.monotonic()
    seen = doorbell.load(bell)
    outcome, parts = root.catalog.view(find_attempt, member)
    while True:
        is_complete = len(parts) == member.world_size
        if outcome is None and is_complete and time.monotonic() >= min(publish_at, waits_until):
            outcome = _publish_parts(root, member, merge, deadline)
        if outcome is None and not parts:
            raise unknown_outcome(member)
        left = waits_until - time.monotonic()
        if outcome is not None or left <= 0:
            return outcome
        doorbell.wait(bell, seen, min(LOOK_EVERY, left))
        seen = doorbell.load(bell)
        moment = time.monotonic()
        if look_at <= moment < waits_until:  # whoever should have rung may be dead: who takes the mutex makes up for it
            look_at = moment + LOOK_EVERY
            root.check_in_place()
            outcome, parts = root.mutex.run(_look_and_renew, waits_until, root, member)
        else:
            outcome, parts = root.catalog.view(find_attempt, member)
        if not is_complete:
            publish_at = moment + LOOK_EVERY


def _look_and_renew(root: Root, member: Participant) -> tuple[AttemptOutcome | None, list[PendingPart]]:
    """Takes this rank's part on by a lease, when half of that is over."""
    moment = now()
    with root.guard:
        outcome, parts = root.catalog.view(find_attempt, member)
        own = [part for part in parts if part.rank == member.rank]
        if own and own[0].expires - moment.clock < own[0].lease // 2:
            renewed = msgspec.structs.replace(own[0], expires=moment.clock + own[0].lease)
            root.catalog.update(lambda transaction: tables.renew_part(transaction, renewed), is_delete=True)
    return outcome, parts


def _publish_parts(root: Root, member: Participant, merge: Merge, deadline: float) -> AttemptOutcome | None:
    """Publishes an attempt, and returns its outcome. None if its parts are incomplete by now."""
    while True:
        outcome, parts, contents = look_into_attempt(root, member)
        if outcome is not None or len(parts) < member.world_size:
            return outcome
        try:
            content, expected = merge(parts, contents), _expected(member, parts)
            change = Change(member.key, content, expected, segments=tuple(_segments_of_parts(root, parts)))
            publication = _PartsPublication(member, parts)
            commit(root, [change], deadline, publication)
        except _PartsChanged:
            continue
        except OverAlready as over:
            return over.outcome
        except (ShardMismatchError, PartialCommitError, VersionConflictError, MutableEntryError) as failure:
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


class _PartsPublication(Publication):
    """Rows of an attempt's end, in the transaction that publishes its value."""

    def __init__(self, member: Participant, parts: Sequence[PendingPart]) -> None:
        self._member, self._parts, self._moment = member._replace(number=parts[0].number), parts, now()
        self.outcome: AttemptOutcome | None = None

    def check(self, transaction: Transaction) -> None:
        outcome, parts = find_attempt(transaction, self._member)
        if outcome is not None:
            raise OverAlready(outcome)
        if not are_same(parts, self._parts):
            raise _PartsChanged

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        member = self._member
        for part in self._parts:
            tables.delete_part(transaction, part)
        self.outcome = make_outcome(member, self._parts, self._moment, version=version)
        tables.put_outcome(transaction, self.outcome)
        others: dict[str, list[PendingPart]] = {}
        for part in tables.parts_of(transaction, member.key):
            if part.number < member.number:
                others.setdefault(part.attempt, []).append(part)
        for parts in others.values():
            failure = ended(parts[0], parts, f"attempt {member.attempt!r}, begun later, was published first")
            end_attempt(transaction, counters, parts, failure, self._moment)


def _expected(member: Participant, parts: Sequence[PendingPart]) -> int | None:
    expected = {part.expect: part.rank for part in parts if part.expect is not None}
    if len(expected) > 1:
        key, said = member.key.decode(), ", ".join(f"rank {rank} {version}" for version, rank in expected.items())
        raise VersionConflictError(f"{key!r}: the ranks expect different versions: {said}", key=key)
    return next(iter(expected), None)


def _segments_of_parts(root: Root, parts: Sequence[PendingPart]) -> list[SealedSegment]:
    return [
        SealedSegment(part.segment, part.put_id, part.size, part.start, part.size, PreparedFile(path, root.segments_fd))
        for part in parts
        if part.segment
        for path in [segment_path(root.segments, part.segment)]
    ]
