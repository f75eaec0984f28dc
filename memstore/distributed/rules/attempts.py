"""Sharded puts at the owner of their key: the rules of decision 012, with messages in place of holds.

Each function of the first part is one transaction of the owner. Ranks of its own host call them so; those of other
hosts send a message. A part that lies on another host is lent to the owner, as what an ordinary put stores; whatever
ends the part owes it to its host.

**An attempt stays where it began.** It ends in the transaction in which its owner marks the group for a hand-over, or
hears that a host which has one of its parts is no member any more. So no publication can be under way there afterwards,
and its ranks learn it where their parts were. Outcomes do move: a rank that comes late, or again, learns at the new
owner that its attempt is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from memstore._wording import conflict
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
    is_here,
    keep_answer,
    passing_over,
)
from memstore.distributed.rules.steps import Tables

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


def look(tables: Tables, request: Look) -> Ended | Pending | Forgotten:
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
    """Answers a rank of another host."""
    match request:
        case Prepare():
            return _prepare(tables, standing, request)
        case Look():
            return look(tables, request)
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


def give_up_here(tables: Tables, request: GiveUp) -> Answer:
    """Gives up for a rank of this host."""
    standing = tables.standing()
    if standing is None:
        return Failed("StaleMembershipError", "nobody serves this store any more", request.key)
    return _give_up_admitted(tables, standing, request)


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
