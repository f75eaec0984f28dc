"""The share of a rank in sharded puts of a store on several hosts, by the rules: rules/ranks.py."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from memstore import engine
from memstore.distributed import catalog, rules
from memstore.distributed.client.driving import Sender, drive
from memstore.distributed.rules import Client, Place, PutPart, Ranks, Steps, turn, waiting
from memstore.engine import LOOK_EVERY, AttemptOutcome, Merge, Participant, Root, SealedSegment, boot_clock
from memstore.errors import HomeUnavailableError, PartialCommitError, ShardMismatchError, StoreTimeoutError

Result = TypeVar("Result")

_LONGEST_NAME = 1 << 16  # characters, of an attempt
_LONGEST_LEASE = 1e9  # seconds
_LONGEST_LENT = 600.0  # seconds that no audit asks after a part whose owner hasn't answered
_MOST_UNANSWERED = 64
_TO_ANSWER = 0.25  # seconds for an owner to say, at the end of a wait, that there is nothing yet


class ShardedPuts:
    """The ranks of one process, at one root. Thread-safe."""

    def __init__(self, root: Root, links: Sender, client: Client) -> None:
        self._root, self._links = root, links
        self._client, self._ranks = client, Ranks(client)
        self._member = root.member_id()
        self._unanswered: OrderedDict[tuple[bytes, str, int], PutPart] = OrderedDict()

    def _drive(self, steps: Steps[Result], deadline: float, sealed: Sequence[SealedSegment] = ()) -> Result:
        return drive(steps, self._root, self._links, deadline, sealed=sealed)

    # --- a part is put ------------------------------------------------------------------------------------------------

    def prepare(
        self, member: Participant, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
    ) -> AttemptOutcome | Participant:
        """Does what `engine.Elsewhere` says."""
        if len(member.attempt) > _LONGEST_NAME:
            raise ValueError(f"attempt has {len(member.attempt):,} characters, and may have {_LONGEST_NAME:,}")
        part = self._part(member, expect)
        if segment is not None:
            place = Place(self._member, segment.put_id, segment.segment)
            part = msgspec.structs.replace(part, place=place, size=segment.size, start=segment.start)
        own = PutPart(part)
        left = min(max(deadline - time.monotonic(), 0.0), _LONGEST_LENT)
        steps = self._ranks.prepare(own, content, boot_clock() + int(left * 1e9))
        try:
            outcome = self._drive(steps, deadline, () if segment is None else (segment,))
        except StoreTimeoutError as error:  # its file may be lent: the next put must not take it for its own
            raise HomeUnavailableError(str(error), key=member.key.decode()) from error
        finally:
            if own.lane is not None:
                self._note_unanswered((member.key, member.attempt, member.rank), own)
        if outcome is not None:
            return catalog.outcome_row(outcome)
        assert own.owner is not None, "a part that was taken in has an owner"
        return member._replace(number=own.number, owner=own.owner)

    def _note_unanswered(self, name: tuple[bytes, str, int], own: PutPart) -> None:
        """Notes a part until it is given up. Those that nobody gives up leave their lanes to later calls."""
        before = self._unanswered.pop(name, None)
        self._unanswered[name] = own
        if before is None and len(self._unanswered) > _MOST_UNANSWERED:
            before = self._unanswered.popitem(last=False)[1]
        if before is not None and before.lane is not None:
            self._client.free_lane(before.lane)

    def _part(self, member: Participant, expect: int | None) -> rules.Part:
        return rules.Part(
            key=member.key,
            attempt=member.attempt,
            number=0,
            rank=member.rank,
            world_size=member.world_size,
            place=Place(self._member, 0),
            expect=expect,
            lease=int(min(max(member.lease, 0), _LONGEST_LEASE) * 1e9),
        )

    def _put_part(self, member: Participant) -> PutPart:
        """Makes what a process knows of its part. An attempt without an owner began before this host was served."""
        owner = member.owner or (self._member if member.number else None)
        return PutPart(self._part(member, None), owner, member.number)

    # --- what becomes of it -------------------------------------------------------------------------------------------

    def outcome_of(
        self, member: Participant, merge: Merge, waits_until: float, deadline: float
    ) -> AttemptOutcome | None:
        """Looks at the attempt until it has an outcome, or nobody waits any more: see `engine.Elsewhere`.

        Who finds all parts later than at its first look leaves them to who put the last.
        """
        own, body_of = self._put_part(member), self._body_of(member, merge)
        doorbell = self._root.doorbell
        bell = doorbell.bell(member.key)
        publish_at, milliseconds, was_complete = time.monotonic(), 0, False
        while True:
            seen = doorbell.load(bell)
            publishes = time.monotonic() >= min(publish_at, waits_until)
            steps = turn(own, body_of, milliseconds, was_complete=was_complete, publishes=publishes)
            found = self._drive(steps, max(waits_until + _TO_ANSWER, deadline))
            if isinstance(found, rules.Outcome):
                return catalog.outcome_row(found)
            left = waits_until - time.monotonic()
            if left <= 0:
                return None
            if not was_complete:
                publish_at = time.monotonic() + LOOK_EVERY
            was_complete = len(found.parts) == member.world_size
            if own.owner == self._member:
                doorbell.wait(bell, seen, min(LOOK_EVERY, left))
            else:
                milliseconds = max(int(min(LOOK_EVERY, left) * 1000), 1)

    def _body_of(self, member: Participant, merge: Merge) -> rules.Merge:
        def body_of(parts: Sequence[rules.Part], contents: Sequence[bytes]) -> bytes | rules.Failure:
            try:
                content = merge([catalog.part_row(part, self._member) for part in parts], contents)
            except (ShardMismatchError, PartialCommitError) as failure:
                return catalog.failure_of(failure)
            body = catalog.change_of(engine.Change(member.key, content), self._member).body
            assert body is not None, "a content has a body"
            return body

        return body_of

    # --- it is given up -----------------------------------------------------------------------------------------------

    def give_up(self, member: Participant, failure: engine.AttemptFailure, deadline: float) -> AttemptOutcome:
        """Does what `engine.Elsewhere` says."""
        own = self._unanswered.pop((member.key, member.attempt, member.rank), None)
        if own is None or member.number:
            own = self._put_part(member)
        steps = self._ranks.give_up(own, catalog.failure_of(failure))
        return catalog.outcome_row(self._drive(steps, deadline))

    def pending(self, key: bytes | None, deadline: float) -> list[tuple[engine.PendingPart, float]]:
        """Does what `engine.Elsewhere` says."""
        found = self._drive(waiting(self._client, key), deadline)
        return [
            (catalog.part_row(part, self._member), (part.expires - one.now) / 1e9)
            for one in found
            for part in one.parts
        ]
