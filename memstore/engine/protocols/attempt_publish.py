"""Step 2 of `attempts.py`: who finds the parts of all ranks there publishes them as one version; the others wait."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from memstore.engine.catalog import Counters, Outcome, Part, Transaction, attempts
from memstore.engine.files import PreparedFile, SealedSegment, segment_path
from memstore.engine.protocols.attempt_ends import end, give_up_if
from memstore.engine.protocols.attempt_outcomes import OverAlready, ended, make_outcome, unknown
from memstore.engine.protocols.attempts import Member, are_same, find, look_into, now
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.commit import Publication, commit
from memstore.engine.root import Root
from memstore.engine.sync import Refusal
from memstore.errors import (
    CorruptionError,
    MutableEntryError,
    PartialCommitError,
    ShardMismatchError,
    VersionConflictError,
)

LOOK_EVERY = 1.0  # seconds after which a waiting rank looks under the mutex, and does what a dead one has left undone

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
        MembershipChanged: it is served to other hosts by now.
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


class _Publication(Publication):
    """What the transaction of a publication does beside the commit's own work."""

    def __init__(self, member: Member, parts: Sequence[Part]) -> None:
        self._member, self._parts, self._moment = member._replace(number=parts[0].number), parts, now()
        self.outcome: Outcome | None = None

    def check(self, transaction: Transaction) -> None:
        outcome, parts = find(transaction, self._member)
        if outcome is not None:
            raise OverAlready(outcome)
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
