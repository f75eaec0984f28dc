"""How ranks of a sharded put learn what it has become; who finds it complete publishes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from memstore.distributed.rules import attempts
from memstore.distributed.rules.attempt_answers import give_up_here
from memstore.distributed.rules.attempt_messages import (
    Ended,
    Failure,
    GiveUp,
    Look,
    Outcome,
    Part,
    Pending,
    Publish,
    Renew,
)
from memstore.distributed.rules.looking import AGAIN, DeadlinePassed, error_of, not_listed, unavailable
from memstore.distributed.rules.members import Member, Standing
from memstore.distributed.rules.messages import Failed
from memstore.distributed.rules.seats import FORGOTTEN, Seat, asked, unknown
from memstore.distributed.rules.steps import Steps, pause, send, view
from memstore.distributed.rules.tables import Tables

Merge = Callable[[Sequence[Part], Sequence[bytes]], "bytes | Failure"]
"""Makes the body of a record of all parts, by rank, and of what they say; or says why they are no value."""


def turn(
    seat: Seat, merge: Merge, milliseconds: int, *, was_complete: bool, publishes: bool
) -> Steps[Outcome | Pending]:
    """One look at an attempt of which this process has a part.

    Args:
        milliseconds: that another host may wait for news.
        was_complete: the last look found all parts, and only the end is news.
        publishes: if all parts are there, merge them and publish.

    Raises:
        UnknownOutcomeError: nothing is known of it any more.
    """
    part = seat.part
    look = Look(part.key, part.attempt, seat.number, milliseconds, was_complete)
    try:
        while True:
            found = yield from _looked(seat, look)
            if isinstance(found, Outcome) or not (publishes and attempts.is_complete(found.parts)):
                break
            outcome = yield from _publish(seat, merge)
            if outcome is not None:
                return outcome
            look = msgspec.structs.replace(look, milliseconds=0)
    except DeadlinePassed as passed:
        raise unavailable(part.key, seat.waits_for, passed) from None
    if isinstance(found, Pending):
        with contextlib.suppress(DeadlinePassed):  # the next turn renews it, or the rank gives up
            yield from _renew(seat, found)
    return found


def waiting(key: bytes | None) -> Steps[list[Pending]]:
    """Asks each home for its attempts of a key, or of all, that wait for parts. One moment of each home.

    Raises HomeUnavailableError, which names the home that gave no answer.
    """
    look, found = Look(key), list[Pending]()
    member: Member | None = None
    try:
        standing = yield from view(lambda tables: tables.standing())
        if standing is None:
            return found
        homes = list(standing.view.homes if key is None else (standing.view.home_of(key),))
        while homes:
            member = standing.view.member(homes[-1])
            assert member is not None, "a home is a member"
            if member.id == standing.member:
                answer = yield from view(lambda tables: attempts.look(tables, look))
            else:
                answer = yield from send(member, look)
            if isinstance(answer, Pending):
                found.append(answer)
                homes.pop()
            else:
                yield from pause(AGAIN)
        return found
    except DeadlinePassed as passed:
        if key is None:
            raise not_listed(b"", member, passed, "the sharded puts that wait for ranks") from None
        raise unavailable(key, member, passed) from None


def _looked(seat: Seat, look: Look) -> Steps[Outcome | Pending]:
    answer = yield from asked(seat, look, lambda tables: attempts.look(tables, look), is_read=True)
    if isinstance(answer, Ended):
        return answer.outcome
    if isinstance(answer, Pending):
        return answer
    raise unknown(seat.part, FORGOTTEN)


def _publish(seat: Seat, merge: Merge) -> Steps[Outcome | None]:
    """The outcome. None: the parts are others by now."""
    part = seat.part
    found = yield from _contents(seat)
    if isinstance(found, Outcome):
        return found
    parts, contents = found
    if not attempts.is_complete(parts):
        return None
    merged, places = merge(parts, contents), tuple(one.place for one in parts)
    if isinstance(merged, Failure):
        failed = GiveUp(part.key, part.attempt, seat.number, merged, None, places, part.lease)
        answer = yield from asked(seat, failed, lambda tables: give_up_here(tables, failed))
    else:
        request = Publish(part.key, part.attempt, seat.number, places, merged)
        answer = yield from asked(seat, request, lambda tables: attempts.publish(tables, _standing(tables), request))
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer.outcome if isinstance(answer, Ended) else None


def _contents(seat: Seat) -> Steps[Outcome | tuple[list[Part], list[bytes]]]:
    """All parts with what they say; not all of them, if they change meanwhile."""
    part = seat.part
    parts: list[Part] = []
    contents: list[bytes] = []
    while True:
        first = parts[-1].rank + 1 if parts else 0
        look = Look(part.key, part.attempt, seat.number, contents=True, rank=first)
        found = yield from _looked(seat, look)
        if isinstance(found, Outcome):
            return found
        parts += found.parts
        contents += found.contents
        if not found.parts or len(parts) >= parts[0].world_size:
            return parts, contents


def _renew(seat: Seat, found: Pending) -> Steps[None]:
    """Takes this rank's part on by a lease, when half of that is over."""
    own = next((part for part in found.parts if part.rank == seat.part.rank), None)
    if own is not None and own.expires - found.now < own.lease // 2:
        request = Renew(own.key, own.attempt, own.number, own.rank)
        yield from asked(seat, request, lambda tables: attempts.renew(tables, request))


def _standing(tables: Tables) -> Standing:
    standing = tables.standing()
    assert standing is not None, "a member stays one"
    return standing
