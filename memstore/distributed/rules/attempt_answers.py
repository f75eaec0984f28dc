"""What a home answers the ranks of sharded puts that are on other hosts."""

from __future__ import annotations

from memstore.distributed.rules import attempts
from memstore.distributed.rules.attempt_messages import (
    Ended,
    Failure,
    GiveUp,
    Look,
    Part,
    Prepare,
    Prepared,
    Publish,
    Renew,
)
from memstore.distributed.rules.calls import answer_again, keep_answer
from memstore.distributed.rules.members import Standing
from memstore.distributed.rules.messages import Answer, Done, Failed
from memstore.distributed.rules.partition import lies_here, refusal
from memstore.distributed.rules.tables import Tables

_LONGEST_TEXT = 4096  # characters, of what an answer may say


def answer(tables: Tables, standing: Standing, request: Prepare | Look | Renew | Publish | GiveUp) -> Answer:
    match request:
        case Prepare():
            return _prepare(tables, standing, request)
        case Look():
            return attempts.look(tables, request)
        case Renew():
            attempts.renew(tables, request)
            return Done()
        case Publish():
            return attempts.publish(tables, standing, request)
        case GiveUp():
            return _give_up(tables, standing, request)


def prepare_here(tables: Tables, membership: int, part: Part, content: bytes) -> Prepared | Ended | Failed | None:
    """A part of a rank of this host. None: the home may be elsewhere by now, look again.

    Args:
        membership: under which the rank's process found that the home is here, and ready.
    """
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    return _told(part, attempts.prepare(tables, standing, part, content))


def give_up_here(tables: Tables, request: GiveUp) -> Answer:
    """As a rank of this host gives up."""
    standing = tables.standing()
    if standing is None:
        return Failed("StaleMembershipError", "nobody serves this store any more", request.key)
    return attempts.give_up(tables, standing, request)


def _prepare(tables: Tables, standing: Standing, request: Prepare) -> Answer:
    answered = answer_again(tables, request.call)
    if answered is not None:
        return answered
    refused = refusal(standing, request.call.epoch, [request.part.key])
    if refused is not None:
        return refused
    if request.part.place.host == standing.member:
        return keep_answer(tables, request.call, lies_here(request.part.key))
    found = attempts.prepare(tables, standing, request.part, request.content)
    return keep_answer(tables, request.call, _told(request.part, found))


def _told(part: Part, found: Prepared | Ended | Failure) -> Prepared | Ended | Failed:
    return Failed(found.error, found.text[:_LONGEST_TEXT], part.key) if isinstance(found, Failure) else found


def _give_up(tables: Tables, standing: Standing, request: GiveUp) -> Answer:
    call = request.call
    if request.number:
        return attempts.give_up(tables, standing, request)
    if call is None:
        return Failed("MemstoreError", "who gives up without a number names a call", request.key)
    answered = answer_again(tables, call)
    if answered is not None:
        return answered
    outcome, _ = attempts.find(tables, request.key, request.attempt, 0)
    if outcome is None:  # what has one has it for good, whoever the home is
        refused = refusal(standing, call.epoch, [request.key])
        if refused is not None:
            return refused
    return keep_answer(tables, call, attempts.give_up(tables, standing, request))
