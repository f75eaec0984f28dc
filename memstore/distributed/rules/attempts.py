"""Sharded puts at the home of their key: the rules of decision 012, with messages in place of holds.

Each function below is one transaction of the home. Ranks of its own host call them so; those of other hosts send a
message. A part that lies on another host is lent to the home, as what an ordinary put stores; whatever ends the part
owes it to its host.

**An attempt stays where it began.** It ends in the transaction in which its home hears that the key has another home,
or that a host which has one of its parts is no member any more. So no publication can be under way there afterwards,
and its ranks learn it where their parts were. Outcomes do move: a rank that comes late, or again, learns at the new
home that its attempt is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from memstore._wording import conflict
from memstore.distributed.rules.attempt_messages import (
    CONTENTS_LIMIT,
    Ended,
    Failure,
    Forgotten,
    GiveUp,
    Look,
    Outcome,
    Part,
    PartsChanged,
    Pending,
    Prepared,
    Publish,
    Renew,
)
from memstore.distributed.rules.members import Standing
from memstore.distributed.rules.messages import Change, Committed
from memstore.distributed.rules.partition import apply, dispose, is_here, passing_over
from memstore.distributed.rules.tables import Tables
from memstore.distributed.rules.terms import Place

SHORTEST_MEMORY = 60_000_000_000  # nanoseconds that an outcome is kept for ranks that ask late
_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come
_MOVED = "its key has its home on another host since: put it again, as another attempt"
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
    """Whether a rank that looks is to be told at once; else the home may keep its question for a while."""
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
    """Ends the attempts that can't be published here any more, since another view is written."""
    members = standing.view.ids
    for parts in _attempts(tables.parts()):
        if standing.is_removed or not standing.is_home_of(parts[0].key):
            _end(tables, standing, parts, _given_up(parts, _MOVED))
        elif any(part.place.host not in members for part in parts):
            _end(tables, standing, parts, _given_up(parts, _LOST))


def remember(tables: Tables, outcome: Outcome) -> None:
    """What the home before this one says of an attempt. Its clock was another."""
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
