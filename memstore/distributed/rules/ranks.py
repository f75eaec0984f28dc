"""How a rank of a sharded put does its share, wherever the home of the key is.

1. `prepare`: its part is lent to the home, which takes it in. If the home is here, it is one transaction.
2. `turn`, again and again: a look what has become of the attempt; who finds it complete merges the parts and publishes.
3. `give_up`: if the rank fails, or its time is over.

Whoever drives these steps throws `DeadlinePassed` into them when the time of one is over. The waiting between two turns
is the driver's too: it has a clock, and on the home's host a doorbell.
"""

from __future__ import annotations

import msgspec

from memstore.distributed.rules.attempt_answers import give_up_here, prepare_here
from memstore.distributed.rules.attempt_messages import (
    Ended,
    Failure,
    GiveUp,
    Outcome,
    Part,
    Prepare,
    Prepared,
)
from memstore.distributed.rules.changing import Client
from memstore.distributed.rules.lending import give_back
from memstore.distributed.rules.looking import (
    AGAIN,
    DeadlinePassed,
    error_of,
    look_at,
    no_answer,
    removed,
    try_again,
    unavailable,
)
from memstore.distributed.rules.looking import Look as Seen
from memstore.distributed.rules.members import Member
from memstore.distributed.rules.messages import Answer, Done, Failed, Later, Never, NoSession, Request, Stale
from memstore.distributed.rules.seats import FORGOTTEN, Seat, asked, home_of, unknown
from memstore.distributed.rules.steps import NotSent, Steps, pause, sent, transact, view
from memstore.distributed.rules.tables import Lent, Tables
from memstore.errors import MemstoreError


class Ranks:
    """The ranks of one process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # --- a part is put ------------------------------------------------------------------------------------------------

    def prepare(self, seat: Seat, content: bytes, until: int) -> Steps[Outcome | None]:
        """Puts a part, whose segment lies on this host, filled. Returns the outcome that the attempt has already.

        After an error, or if there is an outcome, the segment is given back, at once or by an audit. Then the rank
        still has to give up, unless it knows that the others know.

        Args:
            until: when the call's time is over, on this host's clock since boot.
        """
        try:
            found = yield from self._prepare(seat, content, until)
        except DeadlinePassed as passed:
            error: MemstoreError = unavailable(seat.part.key, seat.waits_for, passed)
        except MemstoreError as failure:
            error = failure
        else:
            if found is not None:
                yield from give_back(seat.part.places)
            return found
        if seat.lane is None:
            yield from give_back(seat.part.places)
        raise error

    def _prepare(self, seat: Seat, content: bytes, until: int) -> Steps[Outcome | None]:
        part = seat.part
        while True:
            look = yield from view(lambda tables: look_at(tables, []))
            home = yield from home_of(look, part.key)
            if home is None:
                continue
            seat.home, is_here = home.id, look.standing is not None and home.id == look.standing.member
            seat.waits_for = None if is_here else home
            if is_here:
                answer: Answer | None = yield from transact(
                    lambda tables, now=look: prepare_here(tables, now.membership, part, content)
                )
            else:
                answer = yield from self._prepare_there(seat, look, home, content, until)
            match answer:
                case Prepared():
                    seat.number = answer.number
                    return None
                case Ended():
                    return answer.outcome
                case Failed():
                    raise error_of(answer, None if is_here else home)
                case _:
                    seat.home = None

    def _prepare_there(self, seat: Seat, look: Seen, home: Member, content: bytes, until: int) -> Steps[Answer | None]:
        """The definite answer of another host. None: it has not taken the part, and won't: look again."""
        assert look.standing is not None
        lane = yield from self._client.take_lane()
        try:
            call = yield from self._client.call(home, lane, look.standing.view.epoch)
            lent = Lent(seat.part.key, home.id, call.session, call.lane, call.number, until)
            answer = yield from transact(lambda tables: _lend(tables, look.membership, seat.part, lent))
            if not isinstance(answer, Done):
                return answer
            seat.lane = lane  # from here on, nobody knows whether it was made
            answer, is_first = yield from _repeated(home, Prepare(call, seat.part, content))
            if isinstance(answer, NoSession):
                self._client.forget(home, call)
                if is_first:
                    seat.lane = None
                    yield from pause(AGAIN)
                    return None
                raise unavailable(seat.part.key, home, DeadlinePassed("it has forgotten this process"))
            seat.lane = None
        finally:
            if seat.lane is None:
                self._client.free_lane(lane)
        match answer:
            case Prepared() | Ended() | Failed():
                return answer
            case Stale():
                yield from pause(AGAIN)  # until this host has heard of that epoch too
                return None
            case Never():
                return Failed("StoreTimeoutError", "its time was over before its home had heard of it", seat.part.key)
            case _:
                raise removed()

    # --- it is given up -----------------------------------------------------------------------------------------------

    def give_up(self, seat: Seat, failure: Failure) -> Steps[Outcome]:
        """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

        Raises:
            UnknownOutcomeError: it could not be ended, or nothing is known of it any more.
        """
        part = seat.part
        request = GiveUp(part.key, part.attempt, seat.number, failure, lease=part.lease)
        try:
            if seat.number:
                answer = yield from asked(seat, request, lambda tables: give_up_here(tables, request))
            else:
                answer = yield from self._give_up_by_name(seat, request)
        except DeadlinePassed as passed:
            why = f"{no_answer(seat.waits_for, passed)}, so it could not be given up, and others may still complete it"
            raise unknown(part, why) from None
        if isinstance(answer, Ended):
            return answer.outcome
        raise unknown(part, FORGOTTEN)

    def _give_up_by_name(self, seat: Seat, request: GiveUp) -> Steps[Answer]:
        """By the lane of the part that wasn't answered, if there is one, so that it can't be taken in any more."""
        lane = seat.lane if seat.lane is not None else (yield from self._client.take_lane())
        try:
            while True:
                look = yield from view(lambda tables: look_at(tables, []))
                home = yield from home_of(look, seat.part.key)
                if home is None or look.standing is None:
                    continue
                if seat.lane is not None and seat.home is not None:  # it alone knows what became of the part
                    home = look.standing.view.member(seat.home)
                    if home is None:
                        raise unknown(seat.part, "the host that was asked to keep its part was removed")
                seat.waits_for = None if home.id == look.standing.member else home
                if home.id == look.standing.member:
                    answer = yield from transact(lambda tables, now=look: _unless_moved(tables, now, request))
                else:
                    call = yield from self._client.call(home, lane, look.standing.view.epoch)
                    answer, _ = yield from _repeated(home, msgspec.structs.replace(request, call=call))
                    if isinstance(answer, NoSession):
                        self._client.forget(home, call)
                if isinstance(answer, Stale | Failed) and seat.lane is not None:
                    seat.lane = seat.home = None  # it has not taken in the part, and won't: the home of today is asked
                if answer is None or isinstance(answer, Stale | NoSession | Failed):
                    yield from pause(AGAIN)
                    continue
                return answer
        finally:
            seat.lane = None
            self._client.free_lane(lane)


def _repeated(home: Member, request: Request) -> Steps[tuple[Answer, bool]]:
    """Sends the same call until it is answered for good. Also whether it was sent once only: see `changing.py`."""
    is_first = True
    while True:
        answer = yield from sent(home, request)
        if isinstance(answer, NotSent):
            yield from pause(AGAIN)
            continue
        if answer is not None and not isinstance(answer, Later):
            return answer, is_first
        is_first = False
        yield from try_again(answer, b"")


def _lend(tables: Tables, membership: int, part: Part, lent: Lent) -> Done | Failed | None:
    """Notes whom the part is lent to. None: the home may be another one by now."""
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    for place in part.places:
        if not tables.is_there(place):
            return Failed("StoreTimeoutError", "its time was over, and its bytes have been given back", part.key)
        tables.lend(place, lent)
    return Done()


def _unless_moved(tables: Tables, look: Seen, request: GiveUp) -> Answer | None:
    return give_up_here(tables, request) if tables.membership() == look.membership else None
