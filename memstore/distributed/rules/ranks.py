"""How a rank of a sharded put does its share, wherever the key is owned.

1. `prepare`: its part is lent to the owner, which takes it in. If this host is the owner, it is one transaction.
2. `turn`, again and again: a look what has become of the attempt; who finds it complete merges the parts and publishes.
3. `give_up`: if the rank fails, or its time is over.

Whoever drives these steps throws `DeadlinePassed` into them when the time of one is over. The waiting between two turns
is the driver's too: it has a clock, and on the owner's host a doorbell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from memstore.distributed.rules import attempts
from memstore.distributed.rules.attempts import give_up_here, prepare_here
from memstore.distributed.rules.client import (
    AGAIN,
    CatalogView,
    Client,
    DeadlinePassed,
    Delivery,
    GroupOwner,
    error_of,
    look_at,
    no_answer,
    not_listed,
    repeated,
    unavailable,
)
from memstore.distributed.rules.lending import give_back
from memstore.distributed.rules.messages import (
    Answer,
    Done,
    Ended,
    Failed,
    Failure,
    GiveUp,
    Later,
    Look,
    Member,
    Never,
    NoSession,
    Outcome,
    Part,
    Pending,
    Prepare,
    Prepared,
    Publish,
    Renew,
    Request,
    Standing,
    group_of,
)
from memstore.distributed.rules.steps import Lent, Steps, Tables, pause, send, transact, view
from memstore.errors import MemstoreError, UnknownOutcomeError

FORGOTTEN = "nothing is known of it any more: this rank looked later than its lease, or the owner was repaired since"

Merge = Callable[[Sequence[Part], Sequence[bytes]], "bytes | Failure"]
"""Makes the body of a record of all parts, by rank, and of what they say; or says why they are no value."""


class PutPart:
    """A rank's part of an attempt, as its process knows it.

    Attributes:
        part: what the rank puts, or would have; without a number.
        owner: the member that has the part, or was asked to keep it; None: nobody was.
        waits_for: whom a message was sent to last, for errors; None: this host.
        number: of the attempt; 0: the rank doesn't know it.
        lane: of the call that asked for it, while nobody knows whether it was made.
    """

    def __init__(self, part: Part, owner: bytes | None = None, number: int = 0) -> None:
        self.part, self.owner, self.number = part, owner, number
        self.lane: int | None = None
        self.waits_for: Member | None = None


class Ranks:
    """The ranks of one process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # --- a part is put ------------------------------------------------------------------------------------------------

    def prepare(self, own: PutPart, content: bytes, until: int) -> Steps[Outcome | None]:
        """Puts a part, whose segment lies on this host, filled. Returns the outcome that the attempt has already.

        After an error, or if there is an outcome, the segment is given back, at once or by an audit. Then the rank
        still has to give up, unless it knows that the others know.

        Args:
            until: when the call's time is over, on this host's clock since boot.
        """
        try:
            found = yield from self._prepare(own, content, until)
        except DeadlinePassed as passed:
            error: MemstoreError = unavailable(own.part.key, own.waits_for, passed)
        except MemstoreError as failure:
            error = failure
        else:
            if found is not None:
                yield from give_back(own.part.places)
            return found
        if own.lane is None:
            yield from give_back(own.part.places)
        raise error

    def _prepare(self, own: PutPart, content: bytes, until: int) -> Steps[Outcome | None]:
        group = group_of(own.part.key)
        while True:
            seen, owner = yield from self._owner(own.part)
            if seen.standing is None or owner is None or owner.member is None:
                continue
            is_here = owner.member.id == seen.standing.member
            grant = owner.grants[group]
            own.owner, own.waits_for = owner.member.id, None if is_here else owner.member
            if is_here:
                answer: Answer | None = yield from transact(
                    lambda tables, now=seen, by=grant: prepare_here(tables, now.membership, own.part, content, by)
                )
            else:
                answer = yield from self._prepare_there(own, seen, owner, content, until)
            match (yield from self._client.heard(answer, owner)):
                case Prepared() as prepared:
                    own.number = prepared.number
                    return None
                case Ended() as ended:
                    return ended.outcome
                case Failed() as failed:
                    raise error_of(failed, None if is_here else owner.member)
                case _:
                    own.owner = None

    def _owner(self, part: Part) -> Steps[tuple[CatalogView, GroupOwner | None]]:
        """Finds or claims the owner. None, after a pause: not yet."""
        group = group_of(part.key)
        seen = yield from view(lambda tables: look_at(tables, [], [group]))
        if seen.standing is None:
            yield from pause(AGAIN)
            return seen, None
        return seen, (yield from self._client.owner_of(seen, [group], claims=True))

    def _prepare_there(
        self, own: PutPart, seen: CatalogView, owner: GroupOwner, content: bytes, until: int
    ) -> Steps[Answer | None]:
        """Returns the definite answer of another host. None: it has not taken the part, and won't: look again."""
        assert seen.standing is not None and owner.member is not None
        part, member = own.part, owner.member
        lane = yield from self._client.take_lane()
        try:
            call = yield from self._client.call(member, lane, seen.standing.roster.epoch)
            if call is None:
                return None
            lent = Lent(part.key, member.id, call.session, call.lane, call.number, until)
            answer = yield from transact(lambda tables: _lend(tables, seen.membership, part, lent))
            if not isinstance(answer, Done):
                return answer
            own.lane = lane  # from here on, nobody knows whether it was made
            request = Prepare(call, part, content, owner.grants[group_of(part.key)])
            delivery = Delivery()
            answer = yield from repeated(member, request, delivery)
            if answer is None or isinstance(answer, NoSession):
                self._client.forget(member, call)
                if not delivery.is_sent:
                    own.lane = None
                    return None
                why = "it was removed" if answer is None else "it has forgotten this process"
                raise unavailable(part.key, member, DeadlinePassed(why))
            own.lane = None
        finally:
            if own.lane is None:
                self._client.free_lane(lane)
        if isinstance(answer, Never):
            return Failed("StoreTimeoutError", "its time was over before its owner had heard of it", part.key)
        return answer

    # --- it is given up -----------------------------------------------------------------------------------------------

    def give_up(self, own: PutPart, failure: Failure) -> Steps[Outcome]:
        """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

        Raises:
            UnknownOutcomeError: it could not be ended, or nothing is known of it any more.
        """
        part = own.part
        request = GiveUp(part.key, part.attempt, own.number, failure, lease=part.lease)
        try:
            if own.number:
                answer = yield from _ask_owner(own, request, lambda tables: give_up_here(tables, request))
            else:
                answer = yield from self._give_up_by_name(own, request)
        except DeadlinePassed as passed:
            why = f"{no_answer(own.waits_for, passed)}, so it could not be given up, and others may still complete it"
            raise _unknown(part, why) from None
        if isinstance(answer, Ended):
            return answer.outcome
        raise _unknown(part, FORGOTTEN)

    def _give_up_by_name(self, own: PutPart, request: GiveUp) -> Steps[Answer]:
        """Gives up by the lane of the part that wasn't answered, if there is one: then it can't be taken in any more.

        If another member owns the group by now, its grant keeps that part away, and it has the attempt's outcome.
        """
        lane = own.lane if own.lane is not None else (yield from self._client.take_lane())
        try:
            while True:
                seen, owner = yield from self._owner(own.part)
                if seen.standing is None or owner is None or owner.member is None:
                    continue
                standing, member = seen.standing, owner.member
                if own.lane is not None and own.owner is not None and standing.roster.member(own.owner) is None:
                    raise _unknown(own.part, "the host that was asked to keep its part was removed")
                own.waits_for = None if member.id == standing.member else member
                request = msgspec.structs.replace(request, grant=owner.grants[group_of(own.part.key)])
                if member.id == standing.member:
                    answer: Answer | None = yield from transact(
                        lambda tables, now=seen, it=request: _unless_left(tables, now, it)
                    )
                else:
                    call = yield from self._client.call(member, lane, standing.roster.epoch)
                    if call is None:
                        continue
                    answer = yield from repeated(member, msgspec.structs.replace(request, call=call), Delivery())
                    if isinstance(answer, NoSession):
                        self._client.forget(member, call)
                answer = yield from self._client.heard(answer, owner)
                if answer is None or isinstance(answer, NoSession | Failed):
                    yield from pause(AGAIN)
                    continue
                return answer
        finally:
            own.lane = None
            self._client.free_lane(lane)


def _lend(tables: Tables, membership: int, part: Part, lent: Lent) -> Done | Failed | None:
    """Notes whom the part is lent to. None: the group may have left this host."""
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    for place in part.places:
        if not tables.is_there(place):
            return Failed("StoreTimeoutError", "its time was over, and its bytes have been given back", part.key)
        tables.lend(place, lent)
    return Done()


def _unless_left(tables: Tables, seen: CatalogView, request: GiveUp) -> Answer | None:
    return give_up_here(tables, request) if tables.membership() == seen.membership else None


def _ask_owner(
    own: PutPart, request: Request, here: Callable[[Tables], object], *, is_read: bool = False
) -> Steps[object]:
    """Returns the answer of the owner where the attempt began, which may be this host."""
    while True:
        standing = yield from view(lambda tables: tables.standing())
        owner = None if standing is None or own.owner is None else standing.roster.member(own.owner)
        if standing is None or owner is None:
            raise _unknown(own.part, "the host where it began was removed")
        own.waits_for = None if owner.id == standing.member else owner
        if owner.id == standing.member:
            return (yield from view(here)) if is_read else (yield from transact(here))
        answer = yield from send(owner, request)
        if answer is not None and not isinstance(answer, Later):
            return answer
        yield from pause(AGAIN)


def _unknown(part: Part, why: str) -> UnknownOutcomeError:
    key = part.key.decode()
    return UnknownOutcomeError(
        f"{key!r}: attempt {part.attempt!r}: {why}: the key says whether it was published", key=key
    )


# --- turns ------------------------------------------------------------------------------------------------------------


def turn(
    own: PutPart, merge: Merge, milliseconds: int, *, was_complete: bool, publishes: bool
) -> Steps[Outcome | Pending]:
    """One look at an attempt of which this process has a part.

    Args:
        milliseconds: that another host may wait for news.
        was_complete: the last look found all parts, and only the end is news.
        publishes: if all parts are there, merge them and publish.

    Raises:
        UnknownOutcomeError: nothing is known of it any more.
    """
    part = own.part
    look = Look(part.key, part.attempt, own.number, milliseconds, was_complete)
    try:
        while True:
            found = yield from _looked(own, look)
            if isinstance(found, Outcome) or not (publishes and attempts.is_complete(found.parts)):
                break
            outcome = yield from _publish(own, merge)
            if outcome is not None:
                return outcome
            look = msgspec.structs.replace(look, milliseconds=0)
    except DeadlinePassed as passed:
        raise unavailable(part.key, own.waits_for, passed) from None
    if isinstance(found, Pending):
        with contextlib.suppress(DeadlinePassed):  # the next turn renews it, or the rank gives up
            yield from _renew(own, found)
    return found


def waiting(client: Client, key: bytes | None) -> Steps[list[Pending]]:
    """Asks the owner of a key, or all owners, for attempts that wait for parts. One moment of each.

    Raises HomeUnavailableError, which names the member that gave no answer.
    """
    look, found = Look(key), list[Pending]()
    client.asked = None
    try:
        groups = [] if key is None else [group_of(key)]
        owner: GroupOwner | None = None
        while True:
            seen = yield from view(lambda tables: look_at(tables, [], groups))
            standing = seen.standing
            if standing is None:
                return found
            if key is None or (owner := (yield from client.owner_of(seen, groups))) is not None:
                break
        members = list(standing.roster.owners) if owner is None else [owner.member] if owner.member else []
        while members:
            client.asked = members[-1]
            if members[-1].id == standing.member:
                answer = yield from view(lambda tables: attempts.look(tables, look))
            else:
                answer = yield from send(members[-1], look)
            if isinstance(answer, Pending):
                found.append(answer)
                members.pop()
            else:
                yield from pause(AGAIN)
        return found
    except DeadlinePassed as passed:
        if key is None:
            raise not_listed(b"", client.asked, passed, "the sharded puts that wait for ranks") from None
        raise unavailable(key, client.asked, passed) from None


def _looked(own: PutPart, look: Look) -> Steps[Outcome | Pending]:
    answer = yield from _ask_owner(own, look, lambda tables: attempts.look(tables, look), is_read=True)
    if isinstance(answer, Ended):
        return answer.outcome
    if isinstance(answer, Pending):
        return answer
    raise _unknown(own.part, FORGOTTEN)


def _publish(own: PutPart, merge: Merge) -> Steps[Outcome | None]:
    """The outcome. None: the parts are others by now."""
    part = own.part
    found = yield from _contents(own)
    if isinstance(found, Outcome):
        return found
    parts, contents = found
    if not attempts.is_complete(parts):
        return None
    merged, places = merge(parts, contents), tuple(one.place for one in parts)
    if isinstance(merged, Failure):
        failed = GiveUp(part.key, part.attempt, own.number, merged, None, places, part.lease)
        answer = yield from _ask_owner(own, failed, lambda tables: give_up_here(tables, failed))
    else:
        request = Publish(part.key, part.attempt, own.number, places, merged)
        answer = yield from _ask_owner(
            own, request, lambda tables: attempts.publish(tables, _standing(tables), request)
        )
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer.outcome if isinstance(answer, Ended) else None


def _contents(own: PutPart) -> Steps[Outcome | tuple[list[Part], list[bytes]]]:
    """All parts with what they say; not all of them, if they change meanwhile."""
    part = own.part
    parts: list[Part] = []
    contents: list[bytes] = []
    while True:
        first = parts[-1].rank + 1 if parts else 0
        look = Look(part.key, part.attempt, own.number, contents=True, rank=first)
        found = yield from _looked(own, look)
        if isinstance(found, Outcome):
            return found
        parts += found.parts
        contents += found.contents
        if not found.parts or len(parts) >= parts[0].world_size:
            return parts, contents


def _renew(own: PutPart, found: Pending) -> Steps[None]:
    """Takes this rank's part on by a lease, when half of that is over."""
    mine = next((part for part in found.parts if part.rank == own.part.rank), None)
    if mine is not None and mine.expires - found.now < mine.lease // 2:
        request = Renew(mine.key, mine.attempt, mine.number, mine.rank)
        yield from _ask_owner(own, request, lambda tables: attempts.renew(tables, request))


def _standing(tables: Tables) -> Standing:
    standing = tables.standing()
    assert standing is not None, "a member stays one"
    return standing
