"""Sharded puts: the owner of a key, which takes in parts and publishes them, and ranks, which bring and merge them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memstore._wording import conflict
from memstore.distributed.rules.client import (
    AGAIN,
    CatalogView,
    Client,
    DeadlinePassed,
    Delivery,
    GroupOwner,
    error_of,
    lend,
    look_at,
    no_answer,
    not_listed,
    repeated,
    unavailable,
)
from memstore.distributed.rules.messages import (
    CONTENTS_LIMIT,
    LARGEST_DETAILS,
    LONGEST_TEXT,
    Answer,
    Committed,
    Done,
    Ended,
    Failed,
    Forgotten,
    GiveUp,
    Later,
    Look,
    Never,
    NoSession,
    NotOwner,
    PartsChanged,
    Pending,
    Prepare,
    Prepared,
    Publish,
    Renew,
)
from memstore.distributed.rules.nouns import Change, Grant, Member, Standing, group_of
from memstore.distributed.rules.owning import admit, answer_again, apply, are_strange, give_back, keep_answer
from memstore.distributed.rules.recovery import ToKeep, keep, tell_keepers
from memstore.distributed.rules.steps import Lent, Steps, Tables, own_standing, pause, send, transact, view
from memstore.engine import AttemptOutcome, Failure, FailureDetails, PendingPart, attempts
from memstore.errors import MemstoreError, VersionConflictError

# --- The owner -------------------------------------------------------------------------------------------------------
# Sharded puts at the owner of their key: the rules of the engine's attempts, with messages in place of holds.
#
# Each function of the first part is in one transaction of the owner. Ranks of its own host call them so; those of other
# hosts send a message. A part that lies on another host is lent to the owner, as what an ordinary put stores; whatever
# ends the part owes it to its host.
#
# **An attempt stays where it began.** It ends in the transaction in which its owner marks the group for a hand-over, or
# hears that a host which has one of its parts is no member any more. So no publication can be under way there
# afterwards, and its ranks learn it where their parts were. Outcomes do move: a rank that comes late, or again, learns
# at the new owner that its attempt is over.

_LONGEST_CLASS = 64  # characters, of an error's class
_LONGEST_ANSWER = 4096  # characters, of what an answer may say
_MOVED = "its key is handed over to another host: put it again, as another attempt"
_REMOVED = "its host was removed from the cluster"
_LOST = "a host that has a part of it was removed from the cluster"

_encode = msgspec.msgpack.Encoder().encode


def prepare(tables: Tables, standing: Standing, part: PendingPart, content: bytes) -> Prepared | Ended | Failed:
    """Takes in a rank's part. A part without bytes is the owner's, so that it stays if its host is removed."""
    if not part.segment:
        part = msgspec.structs.replace(part, host=standing.member)
    found = attempts.take_in(tables, part, content)
    if isinstance(found, AttemptOutcome):
        return Ended(found)
    if isinstance(found, Failure):
        return Failed(found.error, found.text[:_LONGEST_ANSWER], part.key)
    return Prepared(found)


def look_at_attempts(tables: Tables, request: Look) -> Ended | Pending | Forgotten:
    """It changes nothing."""
    if request.key is None or request.attempt is None:
        parts = tables.parts(request.key)
        return Pending(tuple(parts), now=tables.now())
    outcome, parts = attempts.find(tables, request.key, request.attempt, request.number)
    if outcome is not None:
        return Ended(outcome)
    if not parts and request.number:
        return Forgotten()
    if not request.contents:
        return Pending(tuple(parts), now=tables.now())
    parts = [part for part in parts if part.rank >= request.rank]
    contents = [tables.content(part) for part in parts[:1]]
    for part in parts[1:]:
        contents.append(tables.content(part))
        if sum(map(len, contents)) > CONTENTS_LIMIT:
            contents.pop()
            break
    return Pending(tuple(parts[: len(contents)]), tuple(contents), tables.now())


def is_news(request: Look, answer: Any) -> bool:
    """Whether a rank that looks is to be told at once; else the owner may keep its question for a while."""
    if not isinstance(answer, Pending):
        return True
    return not request.was_complete and attempts.is_complete(answer.parts)


def end_by(tables: Tables, standing: Standing, request: Publish | GiveUp) -> Ended | PartsChanged | Forgotten:
    """Ends an attempt: by a version of its parts, or an error. If it is over already, by that it stays."""
    try:
        if isinstance(request, Publish):
            return Ended(publish(tables, standing, request))
        key, attempt, said = request.key, request.attempt, fitting(request.failure)
        only, waits = request.parts, request.waits
        return Ended(attempts.give_up(tables, key, attempt, request.number, said, only=only, waits=waits))
    except attempts.OverAlready as over:
        return Ended(over.outcome)
    except attempts.OtherParts:
        return PartsChanged()
    except attempts.NothingKnown:
        return Forgotten()


def publish(tables: Tables, standing: Standing, request: Publish) -> AttemptOutcome:
    """Makes a version of the parts that were merged; or ends the attempt, if it can't become one."""
    key = request.key
    parts = attempts.parts_to_publish(tables, key, request.attempt, request.number, request.parts)
    try:
        expect = attempts.expected_version(parts)
    except VersionConflictError as error:
        return attempts.end(tables, parts, attempts.failure_of(error))
    places = tuple(itertools.chain.from_iterable(part.places for part in parts))
    keepers = sorted({place.host for place in places} - {standing.member})
    answer = apply(tables, standing, [Change(key, request.body, places, expect)], keepers, is_alone=False)
    if isinstance(answer, Committed):
        return attempts.settle(tables, parts, answer.versions[0])
    name, details = key.decode(errors="replace"), FailureDetails(expected=answer.expected, found=answer.found)
    text = f"{name!r}: {answer.text}"
    if answer.error == "VersionConflictError":
        text = conflict(name, answer.expected, answer.found)
    return attempts.end(tables, parts, Failure(answer.error, text, details))


def end_strays(tables: Tables, standing: Standing) -> None:
    """Ends the attempts that can't be published here any more, since another roster is written."""
    members = standing.roster.ids
    for parts in attempts.by_attempt(tables.parts()):
        if standing.is_removed:
            attempts.end(tables, parts, attempts.given_up(parts, _REMOVED))
        elif any(part.host not in members for part in parts):
            attempts.end(tables, parts, attempts.given_up(parts, _LOST))


def end_attempts_of(tables: Tables, group: bytes) -> None:
    """Ends the attempts of a group that leaves this host."""
    for parts in attempts.by_attempt(tables.parts()):
        if group_of(parts[0].key) == group:
            attempts.end(tables, parts, attempts.given_up(parts, _MOVED))


def remember(tables: Tables, outcome: AttemptOutcome) -> None:
    """Takes in what the owner before this one says of an attempt. Its clock was another."""
    tables.put_outcome(msgspec.structs.replace(outcome, expires=tables.now() + attempts.SHORTEST_MEMORY))


def fitting(failure: Failure) -> Failure:
    """Returns an error as it goes into a message, and an owner keeps it: what it lists may be too long."""
    details = failure.details
    if len(_encode(details)) > LARGEST_DETAILS:
        details = msgspec.structs.replace(details, missing_boxes=())
    if len(_encode(details)) > LARGEST_DETAILS:
        details = FailureDetails()
    return Failure(failure.error[:_LONGEST_CLASS], failure.text[:LONGEST_TEXT], details)


# --- what ranks are answered ------------------------------------------------------------------------------------------


def answer(tables: Tables, standing: Standing, request: Prepare | Look | Renew | Publish | GiveUp) -> Answer:
    """Answers a rank: of another host, or of this one, which names the number of an attempt that it knows."""
    match request:
        case Prepare():
            return _prepare(tables, standing, request)
        case Look():
            return look_at_attempts(tables, request)
        case Renew():
            attempts.renew(tables, request.key, request.attempt, request.number, request.rank)
            return Done()
        case Publish():
            return end_by(tables, standing, request)
        case GiveUp():
            return _give_up(tables, standing, request)


def prepare_here(
    tables: Tables, membership: int, part: PendingPart, content: bytes, grant: Grant
) -> Prepared | Ended | Failed | NotOwner | Later | None:
    """Takes in a part of a rank of this host. None: the group may have left it, look again.

    Args:
        membership: under which the rank's process found who owns the group.
    """
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    refused: Any = admit(tables, standing, [group_of(part.key)], [grant], changes=True)
    return refused or prepare(tables, standing, part, content)


def give_up_here(tables: Tables, membership: int, request: GiveUp) -> Answer | None:
    """Gives up by name for a rank of this host; arguments, and None, as of `prepare_here`."""
    if tables.membership() != membership:
        return None
    return _give_up_admitted(tables, own_standing(tables), request)


def _prepare(tables: Tables, standing: Standing, request: Prepare) -> Answer:
    answered = answer_again(tables, request.call)
    if answered is not None:
        return answered
    part = request.part
    strange = are_strange(standing, request.call, [part.place], part.key)
    if isinstance(strange, Later):
        return strange
    refused = admit(tables, standing, [group_of(part.key)], [request.grant], changes=strange is None)
    if refused is not None:
        return refused
    return keep_answer(tables, request.call, strange or prepare(tables, standing, part, request.content))


def _give_up(tables: Tables, standing: Standing, request: GiveUp) -> Answer:
    call = request.call
    if request.number:
        return end_by(tables, standing, request)
    if call is None or request.grant is None:
        return Failed("MemstoreError", "who gives up without a number names a call and a grant", request.key)
    answered = answer_again(tables, call)
    if answered is not None:
        return answered
    found = _give_up_admitted(tables, standing, request)
    return found if isinstance(found, Later | NotOwner) else keep_answer(tables, call, found)


def _give_up_admitted(tables: Tables, standing: Standing, request: GiveUp) -> Answer:
    """Gives up by name only what may begin here, and has no outcome: what has one has it for good."""
    if request.grant is not None and attempts.find(tables, request.key, request.attempt, 0)[0] is None:
        refused = admit(tables, standing, [group_of(request.key)], [request.grant], changes=True)
        if refused is not None:
            return refused
    return end_by(tables, standing, request)


# --- The ranks -------------------------------------------------------------------------------------------------------
# How a rank of a sharded put does its share, wherever the key is owned.
#
# 1. `put_part`: its part is lent to the owner, which takes it in. If this host is the owner, it is one transaction.
# 2. `turn`, again and again: a look what has become of the attempt; who finds it complete merges the parts and
#    publishes.
# 3. `give_up_part`: if the rank fails, or its time is over.
#
# Whoever drives these steps throws `DeadlinePassed` into them when the time of one is over. The waiting between two
# turns is the driver's too: it has a clock, and on the owner's host a doorbell.

Merge = Callable[[Sequence[PendingPart], Sequence[bytes]], "bytes | Failure"]
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

    def __init__(self, part: PendingPart, owner: bytes | None = None, number: int = 0) -> None:
        self.part, self.owner, self.number = part, owner, number
        self.lane: int | None = None
        self.waits_for: Member | None = None


# --- a part is put ----------------------------------------------------------------------------------------------------


def put_part(client: Client, own: PutPart, content: bytes, until: int) -> Steps[AttemptOutcome | None]:
    """Puts a part, whose segment lies on this host, filled. Returns the outcome that the attempt has already.

    After an error, or if there is an outcome, the segment is given back, at once or by an audit. Then the rank
    still has to give up, unless it knows that the others know.

    Args:
        until: when the call's time is over, on this host's clock since boot.
    """
    try:
        found = yield from _put_part(client, own, content, until)
    except DeadlinePassed as passed:
        error: MemstoreError = unavailable(own.part.key, own.waits_for, passed)
    except MemstoreError as failure:
        error = failure
    else:
        if found is not None:
            yield from give_back(own.part.places)
            yield from keep_published(client, own, found)
        return found
    if own.lane is None:
        yield from give_back(own.part.places)
    raise error


def _put_part(client: Client, own: PutPart, content: bytes, until: int) -> Steps[AttemptOutcome | None]:
    group = group_of(own.part.key)
    while True:
        seen, owner = yield from _owner(client, own.part)
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
            answer = yield from _put_part_there(client, own, seen, owner, content, until)
        match (yield from client.heard(answer, owner)):
            case Prepared() as prepared:
                own.number = prepared.number
                return None
            case Ended() as ended:
                return ended.outcome
            case Failed() as failed:
                raise error_of(failed, None if is_here else owner.member)
            case _:
                own.owner = None


def _owner(client: Client, part: PendingPart) -> Steps[tuple[CatalogView, GroupOwner | None]]:
    """Finds or claims the owner. None, after a pause: not yet."""
    group = group_of(part.key)
    seen = yield from view(lambda tables: look_at(tables, [], [group]))
    if seen.standing is None:
        yield from pause(AGAIN)
        return seen, None
    return seen, (yield from client.owner_of(seen, [group], claims=True))


def _put_part_there(
    client: Client, own: PutPart, seen: CatalogView, owner: GroupOwner, content: bytes, until: int
) -> Steps[Answer | None]:
    """Returns the definite answer of another host. None: it has not taken the part, and won't: look again."""
    assert seen.standing is not None and owner.member is not None
    part, member = own.part, owner.member
    lane = yield from client.take_lane()
    try:
        call = yield from client.call(member, lane, seen.standing.roster.epoch)
        if call is None:
            return None
        lent = Lent(part.key, member.id, call.session, call.lane, call.number, until)
        places = [(place, lent) for place in part.places]
        answer = yield from transact(lambda tables: lend(tables, seen.membership, places))
        if not isinstance(answer, Done):
            return answer
        own.lane = lane  # from here on, nobody knows whether it was made
        request = Prepare(call, part, content, owner.grants[group_of(part.key)])
        delivery = Delivery()
        answer = yield from repeated(member, request, delivery)
        if answer is None or isinstance(answer, NoSession):
            client.forget(member, call)
            if not delivery.is_sent:
                own.lane = None
                return None
            why = "it was removed" if answer is None else "it has forgotten this process"
            raise unavailable(part.key, member, DeadlinePassed(why))
        own.lane = None
    finally:
        if own.lane is None:
            client.free_lane(lane)
    if isinstance(answer, Never):
        return Failed("StoreTimeoutError", "its time was over before its owner had heard of it", part.key)
    return answer


# --- it is given up ---------------------------------------------------------------------------------------------------


def give_up_part(client: Client, own: PutPart, failure: Failure) -> Steps[AttemptOutcome]:
    """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

    Raises:
        UnknownOutcomeError: it could not be ended, or nothing is known of it any more.
    """
    part = own.part
    request = GiveUp(part.key, part.attempt, own.number, failure, waits=part.waits_ns)
    try:
        if own.number:
            answer = yield from _ask_owner(own, request)
        else:
            answer = yield from _give_up_by_name(client, own, request)
    except DeadlinePassed as passed:
        why = f"{no_answer(own.waits_for, passed)}, so it could not be given up, and others may still complete it"
        raise attempts.unknown_outcome(part, why) from None
    if isinstance(answer, Ended):
        yield from keep_published(client, own, answer.outcome)
        return answer.outcome
    raise attempts.unknown_outcome(part)


def _give_up_by_name(client: Client, own: PutPart, request: GiveUp) -> Steps[Answer]:
    """Gives up by the lane of the part that wasn't answered, if there is one: then it can't be taken in any more.

    If another member owns the group by now, its grant keeps that part away, and it has the attempt's outcome.
    """
    lane = own.lane if own.lane is not None else (yield from client.take_lane())
    try:
        while True:
            seen, owner = yield from _owner(client, own.part)
            if seen.standing is None or owner is None or owner.member is None:
                continue
            standing, member = seen.standing, owner.member
            if own.lane is not None and own.owner is not None and standing.roster.member(own.owner) is None:
                raise attempts.unknown_outcome(own.part, "the host that was asked to keep its part was removed")
            own.waits_for = None if member.id == standing.member else member
            request = msgspec.structs.replace(request, grant=owner.grants[group_of(own.part.key)])
            if member.id == standing.member:
                answer: Answer | None = yield from transact(
                    lambda tables, now=seen, it=request: give_up_here(tables, now.membership, it)
                )
            else:
                call = yield from client.call(member, lane, standing.roster.epoch)
                if call is None:
                    continue
                answer = yield from repeated(member, msgspec.structs.replace(request, call=call), Delivery())
                if isinstance(answer, NoSession):
                    client.forget(member, call)
            answer = yield from client.heard(answer, owner)
            if answer is None or isinstance(answer, NoSession | Failed):
                yield from pause(AGAIN)
                continue
            return answer
    finally:
        own.lane = None
        client.free_lane(lane)


def _ask_owner(own: PutPart, request: Look | Renew | Publish | GiveUp) -> Steps[Answer]:
    """Returns the answer of the owner where the attempt began, which may be this host. `request` names its number."""

    def here(tables: Tables) -> Answer:
        return answer(tables, own_standing(tables), request)

    while True:
        standing = yield from view(lambda tables: tables.standing())
        owner = None if standing is None or own.owner is None else standing.roster.member(own.owner)
        if standing is None or owner is None:
            raise attempts.unknown_outcome(own.part, "the host where it began was removed")
        own.waits_for = None if owner.id == standing.member else owner
        if owner.id == standing.member:
            return (yield from view(here)) if isinstance(request, Look) else (yield from transact(here))
        found = yield from send(owner, request)
        if found is not None and not isinstance(found, Later):
            return found
        yield from pause(AGAIN)


# --- turns ------------------------------------------------------------------------------------------------------------


def turn(
    client: Client, own: PutPart, merge: Merge, milliseconds: int, *, was_complete: bool, publishes: bool
) -> Steps[AttemptOutcome | Pending]:
    """One look at an attempt of which this process has a part. What it has become this host keeps.

    Args:
        milliseconds: that another host may wait for news.
        was_complete: the last look found all parts, and only the end is news.
        publishes: if all parts are there, merge them and publish.

    Raises:
        UnknownOutcomeError: nothing is known of it any more.
    """
    found = yield from _turn(own, merge, milliseconds, was_complete=was_complete, publishes=publishes)
    if isinstance(found, AttemptOutcome):
        yield from keep_published(client, own, found)
    return found


def _turn(
    own: PutPart, merge: Merge, milliseconds: int, *, was_complete: bool, publishes: bool
) -> Steps[AttemptOutcome | Pending]:
    part = own.part
    look = Look(part.key, part.attempt, own.number, milliseconds, was_complete)
    try:
        while True:
            found = yield from _looked(own, look)
            if isinstance(found, AttemptOutcome) or not (publishes and attempts.is_complete(found.parts)):
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


def keep_published(client: Client, own: PutPart, outcome: AttemptOutcome) -> Steps[None]:
    """Keeps what an attempt has become before a rank returns: see `recovery.py`.

    So if one rank has returned, there is a record of the version on its host. If this host is the owner, it tells who
    keeps what is replaced instead.

    Raises UnknownOutcomeError: the owner was removed, or doesn't answer.
    """
    part, group = own.part, group_of(own.part.key)
    if not outcome.version:
        return
    try:
        while True:
            seen = yield from view(lambda tables: look_at(tables, [], [group]))
            if seen.standing is None:
                return
            if seen.standing.is_sealed:  # drained meanwhile: it keeps nothing any more
                return
            if group in seen.owned:
                yield from tell_keepers([part.key], client.silent)
                return
            if own.owner not in seen.standing.roster.ids:
                raise attempts.unknown_outcome(part, "the host where it began was removed")
            backup = yield from view(lambda tables: tables.backup(part.key))
            if backup is not None and backup.version >= outcome.version:
                return
            owner = yield from client.owner_of(seen, [group])
            if owner is None or owner.member is None or owner.member.id == seen.standing.member:
                yield from pause(AGAIN)
                continue
            own.waits_for = owner.member
            row = ToKeep(part.key, outcome.version, owner.grants[group])
            if not (yield from keep(owner.member, [row], seen.now)):
                raise attempts.unknown_outcome(part, "the host where it began was removed")
            return
    except DeadlinePassed as passed:
        why = f"{no_answer(own.waits_for, passed)} when this host was to keep the version"
        raise attempts.unknown_outcome(part, why) from None


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
                answer = yield from view(lambda tables: look_at_attempts(tables, look))
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


def _looked(own: PutPart, look: Look) -> Steps[AttemptOutcome | Pending]:
    answer = yield from _ask_owner(own, look)
    if isinstance(answer, Ended):
        return answer.outcome
    if isinstance(answer, Pending):
        return answer
    raise attempts.unknown_outcome(own.part)


def _publish(own: PutPart, merge: Merge) -> Steps[AttemptOutcome | None]:
    """The outcome. None: the parts are others by now."""
    part = own.part
    found = yield from _contents(own)
    if isinstance(found, AttemptOutcome):
        return found
    parts, contents = found
    if not attempts.is_complete(parts):
        return None
    merged, places = merge(parts, contents), tuple(one.place for one in parts)
    if isinstance(merged, Failure):
        request = GiveUp(part.key, part.attempt, own.number, merged, None, places, part.waits_ns)
    else:
        request = Publish(part.key, part.attempt, own.number, places, merged)
    answer = yield from _ask_owner(own, request)
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer.outcome if isinstance(answer, Ended) else None


def _contents(own: PutPart) -> Steps[AttemptOutcome | tuple[list[PendingPart], list[bytes]]]:
    """All parts with what they say; not all of them, if they change meanwhile."""
    part = own.part
    parts: list[PendingPart] = []
    contents: list[bytes] = []
    while True:
        first = parts[-1].rank + 1 if parts else 0
        look = Look(part.key, part.attempt, own.number, contents=True, rank=first)
        found = yield from _looked(own, look)
        if isinstance(found, AttemptOutcome):
            return found
        parts += found.parts
        contents += found.contents
        if not found.parts or len(parts) >= parts[0].world_size:
            return parts, contents


def _renew(own: PutPart, found: Pending) -> Steps[None]:
    """Renews this rank's part, when half of its time is over."""
    mine = next((part for part in found.parts if part.rank == own.part.rank), None)
    if mine is not None and attempts.needs_renewal(mine, found.now):
        yield from _ask_owner(own, Renew(mine.key, mine.attempt, mine.number, mine.rank))
