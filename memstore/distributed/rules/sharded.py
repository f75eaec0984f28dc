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
    Answer,
    Change,
    Committed,
    Done,
    Ended,
    Failed,
    Failure,
    Forgotten,
    GiveUp,
    Grant,
    Later,
    Look,
    Member,
    Never,
    NoSession,
    NotOwner,
    Outcome,
    Part,
    PartsChanged,
    Pending,
    Place,
    Prepare,
    Prepared,
    Publish,
    Renew,
    Standing,
    group_of,
)
from memstore.distributed.rules.owning import (
    admit,
    answer_again,
    apply,
    are_strange,
    dispose,
    give_back,
    is_here,
    keep_answer,
    passing_over,
)
from memstore.distributed.rules.steps import Lent, Steps, Tables, own_standing, pause, send, transact, view
from memstore.errors import MemstoreError, UnknownOutcomeError

# --- The owner -------------------------------------------------------------------------------------------------------
# Sharded puts at the owner of their key: the rules of decision 012, with messages in place of holds.
#
# Each function of the first part is one transaction of the owner. Ranks of its own host call them so; those of other
# hosts send a message. A part that lies on another host is lent to the owner, as what an ordinary put stores; whatever
# ends the part owes it to its host.
#
# **An attempt stays where it began.** It ends in the transaction in which its owner marks the group for a hand-over, or
# hears that a host which has one of its parts is no member any more. So no publication can be under way there
# afterwards, and its ranks learn it where their parts were. Outcomes do move: a rank that comes late, or again, learns
# at the new owner that its attempt is over.

SHORTEST_MEMORY = 60_000_000_000  # nanoseconds that an outcome is kept for ranks that ask late
_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come
_LONGEST_TEXT = 4096  # characters, of what an answer may say
_MOVED = "its key is handed over to another host: put it again, as another attempt"
_REMOVED = "its host was removed from the cluster"
_LOST = "a host that has a part of it was removed from the cluster"
_LATE = "its lease was over before all ranks had put their parts"

_encode = msgspec.msgpack.Encoder().encode


def find(tables: Tables, key: bytes, attempt: str, number: int) -> tuple[Outcome | None, list[Part]]:
    """The outcome of an attempt, if it has one, or its parts by rank. `number` 0: whichever has this name."""
    outcome = tables.outcome(key, attempt)
    if outcome is not None and number in (0, outcome.number):
        return outcome, []
    return None, [part for part in tables.parts(key, attempt) if number in (0, part.number)]


# --- a part comes -----------------------------------------------------------------------------------------------------


def prepare(tables: Tables, standing: Standing, part: Part, content: bytes) -> Prepared | Ended | Failure:
    """Takes in a rank's part. A `Failure` has changed nothing, and the attempt goes on."""
    expire(tables, standing)
    tables.drop_outcomes(_DROPPED)
    outcome, there = find(tables, part.key, part.attempt, 0)
    if outcome is not None:
        return Ended(outcome)
    for other in there:
        if other.world_size != part.world_size:
            return _other_world(part, other)
    if is_here(standing, part.place) and part.places and not tables.is_there(part.place):
        return Failure("StoreTimeoutError", f"{_name(part)}: its time was over, and its bytes have been given back")
    for other in there:
        if other.rank == part.rank:
            _drop(tables, standing, other)
    part = msgspec.structs.replace(
        part,
        number=there[0].number if there else tables.new_number(),
        place=part.place if part.places else Place(standing.member, tables.new_number()),
        expires=max([tables.now() + part.lease, *[other.expires for other in there]]),
    )
    tables.put_part(part, content)
    return Prepared(part.number)


def renew(tables: Tables, request: Renew) -> None:
    for part in tables.parts(request.key, request.attempt):
        if part.rank == request.rank and part.number == request.number:
            expires = max(part.expires, tables.now() + part.lease)
            tables.put_part(msgspec.structs.replace(part, expires=expires), None)


# --- ranks look -------------------------------------------------------------------------------------------------------


def look_at_attempts(tables: Tables, request: Look) -> Ended | Pending | Forgotten:
    """It changes nothing."""
    if request.key is None or request.attempt is None:
        parts = tables.parts(request.key)
        return Pending(tuple(parts), now=tables.now())
    outcome, parts = find(tables, request.key, request.attempt, request.number)
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
    return not request.was_complete and is_complete(answer.parts)


def is_complete(parts: Sequence[Part]) -> bool:
    return bool(parts) and len(parts) == parts[0].world_size


# --- it is published --------------------------------------------------------------------------------------------------


def publish(tables: Tables, standing: Standing, request: Publish) -> Ended | PartsChanged | Forgotten:
    """Makes a version of the parts that were merged, if they still are the attempt's parts, and all of them."""
    outcome, parts = find(tables, request.key, request.attempt, request.number)
    if outcome is not None:
        return Ended(outcome)
    if not parts:
        return Forgotten()
    if not is_complete(parts) or tuple(part.place for part in parts) != request.parts:
        return PartsChanged()
    found = _commit(tables, standing, parts, request.body)
    if isinstance(found, Failure):
        return Ended(_end(tables, standing, parts, found))
    for part in parts:
        tables.delete_part(part)
    outcome = _outcome(tables, parts, version=found)
    tables.put_outcome(outcome)
    _end_older(tables, standing, parts[0])
    return Ended(outcome)


def _commit(tables: Tables, standing: Standing, parts: Sequence[Part], body: bytes) -> int | Failure:
    """The version, or why the parts can't become one, whatever comes later."""
    key = parts[0].key
    expected = {part.expect: part.rank for part in parts if part.expect is not None}
    if len(expected) > 1:
        said = ", ".join(f"rank {rank} {version}" for version, rank in expected.items())
        return Failure("VersionConflictError", f"{_text(key)}: the ranks expect different versions: {said}")
    places = tuple(itertools.chain.from_iterable(part.places for part in parts))
    answer = apply(tables, standing, [Change(key, body, places, next(iter(expected), None))])
    if isinstance(answer, Committed):
        return answer.versions[0]
    if answer.error == "VersionConflictError":
        text = conflict(key.decode(errors="replace"), answer.expected, answer.found)
        return Failure(answer.error, text, _encode({"expected": answer.expected, "found": answer.found}))
    return Failure(answer.error, f"{_text(key)}: {answer.text}")


def _end_older(tables: Tables, standing: Standing, published: Part) -> None:
    others: dict[str, list[Part]] = {}
    for part in tables.parts(published.key):
        if part.number < published.number:
            others.setdefault(part.attempt, []).append(part)
    for parts in others.values():
        why = f"attempt {published.attempt!r}, begun later, was published first"
        _end(tables, standing, parts, _given_up(parts, why))


# --- it is given up ---------------------------------------------------------------------------------------------------


def give_up(tables: Tables, standing: Standing, request: GiveUp) -> Ended | PartsChanged | Forgotten:
    """Ends an attempt with an error, unless it is over."""
    outcome, parts = find(tables, request.key, request.attempt, request.number)
    if outcome is not None:
        return Ended(outcome)
    if request.parts is not None and tuple(part.place for part in parts) != request.parts:
        return PartsChanged()
    if not parts and request.number:
        return Forgotten()
    if parts:
        return Ended(_end(tables, standing, parts, request.failure, request.lease))
    expires = tables.now() + max(SHORTEST_MEMORY, request.lease)
    outcome = Outcome(request.key, request.attempt, 0, 0, request.failure, expires)
    tables.put_outcome(outcome)
    return Ended(outcome)


def expire(tables: Tables, standing: Standing) -> None:
    """Ends the attempts whose parts are all over."""
    now = tables.now()
    for parts in _attempts(tables.parts()):
        if all(part.expires <= now for part in parts):
            _end(tables, standing, parts, _given_up(parts, _LATE))


def has_expired(tables: Tables) -> bool:
    now = tables.now()
    return any(all(part.expires <= now for part in parts) for parts in _attempts(tables.parts()))


def end_strays(tables: Tables, standing: Standing) -> None:
    """Ends the attempts that can't be published here any more, since another roster is written."""
    members = standing.roster.ids
    for parts in _attempts(tables.parts()):
        if standing.is_removed:
            _end(tables, standing, parts, _given_up(parts, _REMOVED))
        elif any(part.place.host not in members for part in parts):
            _end(tables, standing, parts, _given_up(parts, _LOST))


def end_attempts_of(tables: Tables, standing: Standing, group: bytes) -> None:
    """Ends the attempts of a group that leaves this host."""
    for parts in _attempts(tables.parts()):
        if group_of(parts[0].key) == group:
            _end(tables, standing, parts, _given_up(parts, _MOVED))


def remember(tables: Tables, outcome: Outcome) -> None:
    """Takes in what the owner before this one says of an attempt. Its clock was another."""
    tables.put_outcome(msgspec.structs.replace(outcome, expires=tables.now() + SHORTEST_MEMORY))


def _attempts(parts: Sequence[Part]) -> list[list[Part]]:
    found: dict[tuple[bytes, str], list[Part]] = {}
    for part in parts:
        found.setdefault((part.key, part.attempt), []).append(part)
    return list(found.values())


def _end(tables: Tables, standing: Standing, parts: Sequence[Part], failure: Failure, lease: int = 0) -> Outcome:
    for part in parts:
        _drop(tables, standing, part)
    outcome = _outcome(tables, parts, failure=failure, lease=lease)
    tables.put_outcome(outcome)
    return outcome


def _drop(tables: Tables, standing: Standing, part: Part) -> None:
    tables.delete_part(part)
    with passing_over(tables, part.key):
        dispose(tables, standing, part.places)


def _outcome(
    tables: Tables, parts: Sequence[Part], *, version: int = 0, failure: Failure | None = None, lease: int = 0
) -> Outcome:
    """It is kept for a lease, and as long as the parts were to be."""
    first = parts[0]
    longest = max(SHORTEST_MEMORY, lease, *[part.lease for part in parts])
    expires = max(tables.now() + longest, *[part.expires for part in parts])
    return Outcome(first.key, first.attempt, first.number, version, failure, expires)


# --- what is said -----------------------------------------------------------------------------------------------------


def _given_up(parts: Sequence[Part], why: str) -> Failure:
    there = {part.rank for part in parts}
    missing = [rank for rank in range(parts[0].world_size) if rank not in there]
    text = f"{_name(parts[0])} was given up: {why}"
    return Failure("PartialCommitError", text, _encode({"missing_ranks": missing, "missing_boxes": []}))


def _other_world(part: Part, other: Part) -> Failure:
    return Failure(
        "ShardMismatchError",
        f"{_name(part)} has {other.world_size} ranks by rank {other.rank}, and {part.world_size} by rank {part.rank}: "
        "name another attempt after a restart with other ranks",
    )


def _name(part: Part) -> str:
    return f"{_text(part.key)}: attempt {part.attempt!r}"


def _text(key: bytes) -> str:
    return repr(key.decode(errors="replace"))


# --- what ranks are answered ------------------------------------------------------------------------------------------


def answer(tables: Tables, standing: Standing, request: Prepare | Look | Renew | Publish | GiveUp) -> Answer:
    """Answers a rank: of another host, or of this one, which names the number of an attempt that it knows."""
    match request:
        case Prepare():
            return _prepare(tables, standing, request)
        case Look():
            return look_at_attempts(tables, request)
        case Renew():
            renew(tables, request)
            return Done()
        case Publish():
            return publish(tables, standing, request)
        case GiveUp():
            return _give_up(tables, standing, request)


def prepare_here(
    tables: Tables, membership: int, part: Part, content: bytes, grant: Grant
) -> Prepared | Ended | Failed | NotOwner | Later | None:
    """Takes in a part of a rank of this host. None: the group may have left it, look again.

    Args:
        membership: under which the rank's process found who owns the group.
    """
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    refused: Any = admit(tables, standing, [group_of(part.key)], [grant], changes=True)
    return refused or _told(part, prepare(tables, standing, part, content))


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
    return keep_answer(tables, request.call, strange or _told(part, prepare(tables, standing, part, request.content)))


def _told(part: Part, found: Prepared | Ended | Failure) -> Prepared | Ended | Failed:
    return Failed(found.error, found.text[:_LONGEST_TEXT], part.key) if isinstance(found, Failure) else found


def _give_up(tables: Tables, standing: Standing, request: GiveUp) -> Answer:
    call = request.call
    if request.number:
        return give_up(tables, standing, request)
    if call is None or request.grant is None:
        return Failed("MemstoreError", "who gives up without a number names a call and a grant", request.key)
    answered = answer_again(tables, call)
    if answered is not None:
        return answered
    found = _give_up_admitted(tables, standing, request)
    return found if isinstance(found, Later | NotOwner) else keep_answer(tables, call, found)


def _give_up_admitted(tables: Tables, standing: Standing, request: GiveUp) -> Answer:
    """Gives up by name only what may begin here, and has no outcome: what has one has it for good."""
    if request.grant is not None and find(tables, request.key, request.attempt, 0)[0] is None:
        refused = admit(tables, standing, [group_of(request.key)], [request.grant], changes=True)
        if refused is not None:
            return refused
    return give_up(tables, standing, request)


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


# --- a part is put ----------------------------------------------------------------------------------------------------


def put_part(client: Client, own: PutPart, content: bytes, until: int) -> Steps[Outcome | None]:
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
        return found
    if own.lane is None:
        yield from give_back(own.part.places)
    raise error


def _put_part(client: Client, own: PutPart, content: bytes, until: int) -> Steps[Outcome | None]:
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


def _owner(client: Client, part: Part) -> Steps[tuple[CatalogView, GroupOwner | None]]:
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


def give_up_part(client: Client, own: PutPart, failure: Failure) -> Steps[Outcome]:
    """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

    Raises:
        UnknownOutcomeError: it could not be ended, or nothing is known of it any more.
    """
    part = own.part
    request = GiveUp(part.key, part.attempt, own.number, failure, lease=part.lease)
    try:
        if own.number:
            answer = yield from _ask_owner(own, request)
        else:
            answer = yield from _give_up_by_name(client, own, request)
    except DeadlinePassed as passed:
        why = f"{no_answer(own.waits_for, passed)}, so it could not be given up, and others may still complete it"
        raise _unknown(part, why) from None
    if isinstance(answer, Ended):
        return answer.outcome
    raise _unknown(part, FORGOTTEN)


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
                raise _unknown(own.part, "the host that was asked to keep its part was removed")
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
            raise _unknown(own.part, "the host where it began was removed")
        own.waits_for = None if owner.id == standing.member else owner
        if owner.id == standing.member:
            return (yield from view(here)) if isinstance(request, Look) else (yield from transact(here))
        found = yield from send(owner, request)
        if found is not None and not isinstance(found, Later):
            return found
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
            if isinstance(found, Outcome) or not (publishes and is_complete(found.parts)):
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


def _looked(own: PutPart, look: Look) -> Steps[Outcome | Pending]:
    answer = yield from _ask_owner(own, look)
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
    if not is_complete(parts):
        return None
    merged, places = merge(parts, contents), tuple(one.place for one in parts)
    if isinstance(merged, Failure):
        request = GiveUp(part.key, part.attempt, own.number, merged, None, places, part.lease)
    else:
        request = Publish(part.key, part.attempt, own.number, places, merged)
    answer = yield from _ask_owner(own, request)
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
        yield from _ask_owner(own, Renew(mine.key, mine.attempt, mine.number, mine.rank))
