"""Sharded puts: a rank puts its part, and who finds the parts of all ranks publishes them as one version.

`attempts.py` has the rules. Here is how a rank takes them: `prepare` is step 1, `outcome_of` is step 2, `give_up` is
step 3, wherever the owner of the key is: on this host alone, or in a cluster, whose ranks take the same rules by
messages. A store that nobody serves pays a look at its counters. If it comes to be served meanwhile, the transaction
that would have changed something raises MembershipChanged, and the owner is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from memstore.engine.catalog.tables import AttemptOutcome, Counters, Failure, PendingPart, Transaction
from memstore.engine.files.segments import PreparedFile, SealedSegment, SegmentWriter, segment_path
from memstore.engine.protocols.attempts import (
    AttemptFailure,
    Merge,
    NothingKnown,
    OtherParts,
    OverAlready,
    Participant,
    TransactionRows,
    change_attempts,
    error_of,
    expected_version,
    find_attempt,
    give_up_here,
    look_into_attempt,
    needs_renewal,
    new_part,
    no_version_yet,
    parts_here,
    parts_to_publish,
    places_of,
    renew,
    settle,
    take_in,
    unknown_outcome,
)
from memstore.engine.protocols.change import Change, MembershipChanged, need_boxes
from memstore.engine.protocols.elsewhere import elsewhere_of, is_served
from memstore.engine.protocols.put import Draft, ExtraRows, close_published, commit, fill_segment
from memstore.engine.protocols.sweep import clean_up
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import boot_clock, deadline_after
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


def outcome_of(
    root: Root, member: Participant, merge: Merge, waits_until: float, deadline: float
) -> AttemptOutcome | None:
    """Returns the outcome of an attempt, wherever the key's owner is: see `outcome_here`.

    Raises HomeUnavailableError, StaleMembershipError and UnknownOutcomeError too.
    """
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return outcome_here(root, member, merge, waits_until, deadline)
    outcome = elsewhere_of(root).outcome_of(member, merge, waits_until, deadline)
    if outcome is not None and root.host_lease[0]:
        root.confirm_lease(member.key)
    return outcome


def give_up(root: Root, member: Participant, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
    """Ends an attempt with an error, wherever the key's owner is, unless it has an outcome.

    Args:
        member: without a number, the rank has put nothing yet: the attempt may have begun all the same, or never will.

    Returns:
        The outcome that the attempt has then.

    Raises UnknownOutcomeError: there is neither an outcome of this attempt nor a part, so its outcome was dropped.
    """
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            try:
                return give_up_here(root, member, failure, deadline)
            except NothingKnown:
                raise unknown_outcome(member) from None
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


def prepare(
    root: Root, member: Participant, draft: Draft, content: Callable[[], bytes], deadline: float
) -> AttemptOutcome | Participant:
    """Puts one rank's part, wherever the key's owner is. Returns the member with the attempt's number.

    If the attempt has an outcome already, it returns that instead, and has put nothing.

    Args:
        draft: of the rank's own bytes; without a header, the rank holds none.
        content: what the part says of the value, asked for once the bytes are written.

    Raises:
        ShardMismatchError: other ranks say that the attempt has another number of ranks.
        StoreFullError, ResourceLimitError, StoreTimeoutError, NotAStoreError.
        HomeUnavailableError, StaleMembershipError.
    """
    need_boxes(root, deadline)
    writers: list[SegmentWriter] = []
    try:
        change = fill_segment(root, draft, writers, deadline)
        said = content()
        segment = change.segments[0] if change.segments else None
        found = _enter(root, member, draft.expect, segment, said, deadline)
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


def _enter(
    root: Root, member: Participant, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
) -> AttemptOutcome | Participant:
    """Has a part taken in whose segment, if it has one, is filled."""
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return enter_here(root, member, expect, segment, content, deadline)
    return elsewhere_of(root).prepare(member, expect, segment, content, deadline)


def enter_here(
    root: Root, member: Participant, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
) -> AttemptOutcome | Participant:
    """Enters a part in this host's catalog. Raises MembershipChanged if the store is served to others."""
    part = new_part(member, expect, segment)
    found = change_attempts(root, partial(take_in, part=part, content=content), deadline, sealed=segment)
    if isinstance(found, Failure):
        raise error_of(found, member.key)
    return found if isinstance(found, AttemptOutcome) else member._replace(number=found)


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
    """Renews this rank's part, when half of its time is over."""

    def take_on(transaction: Transaction) -> None:
        renew(TransactionRows(transaction), member.key, member.attempt, member.number, member.rank)

    now = boot_clock()
    with root.guard:
        outcome, parts = root.catalog.view(find_attempt, member)
        if any(needs_renewal(part, now) for part in parts if part.rank == member.rank):
            root.catalog.update(take_on, is_delete=True)
    return outcome, parts


def _publish_parts(root: Root, member: Participant, merge: Merge, deadline: float) -> AttemptOutcome | None:
    """Publishes an attempt, and returns its outcome. None if its parts are incomplete by now."""
    while True:
        outcome, parts, contents = look_into_attempt(root, member)
        if outcome is not None or len(parts) < member.world_size:
            return outcome
        try:
            try:
                content, expected = merge(parts, contents), expected_version(parts)
                change = Change(member.key, content, expected, segments=tuple(_segments_of_parts(root, parts)))
                extra = _OutcomeRows(parts)
                commit(root, [change], deadline, extra)
            except (ShardMismatchError, PartialCommitError, VersionConflictError, MutableEntryError) as failure:
                return give_up_here(root, member, failure, deadline, only=places_of(parts))
            return extra.outcome
        except (OtherParts, NothingKnown):
            continue
        except OverAlready as over:
            return over.outcome
        except CorruptionError:  # the file of a part is missing; or the whole store is
            root.check_in_place()
            raise


class _OutcomeRows(ExtraRows):
    """Rows of an attempt's end, in the transaction that publishes its value."""

    def __init__(self, parts: Sequence[PendingPart]) -> None:
        self._parts = parts
        self.outcome: AttemptOutcome | None = None

    def check(self, transaction: Transaction) -> None:
        first = self._parts[0]
        merged = places_of(self._parts)
        parts_to_publish(TransactionRows(transaction), first.key, first.attempt, first.number, merged)

    def settle(self, transaction: Transaction, counters: Counters, version: int) -> None:
        self.outcome = settle(TransactionRows(transaction, counters), self._parts, version)


def _segments_of_parts(root: Root, parts: Sequence[PendingPart]) -> list[SealedSegment]:
    return [
        SealedSegment(part.segment, part.put_id, part.size, part.start, part.size, PreparedFile(path, root.segments_fd))
        for part in parts
        if part.segment
        for path in [segment_path(root.segments, part.segment)]
    ]
