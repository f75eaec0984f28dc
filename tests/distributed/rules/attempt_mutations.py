"""Rules of sharded puts, left out on purpose: as `mutations.py`, which has the others."""

from __future__ import annotations

from typing import Any

import msgspec

from memstore.distributed.rules import attempt_answers, attempts, index, moving, partition, ranks, turns
from memstore.distributed.rules.messages import AreNamed
from tests.distributed.rules.mutations import Patch, mutation
from tests.distributed.rules.tables import SimTables


@mutation("a part is taken in though its attempt is over", "shards of stopped ranks")
def _(patch: Patch) -> None:
    prepare = attempts.prepare

    def forgets(tables: Any, standing: Any, part: Any, content: Any) -> Any:
        with Patch.context() as inner:
            inner.setattr(SimTables, "outcome", lambda tables, key, attempt: None)  # pyright: ignore
            return prepare(tables, standing, part, content)

    patch.setattr(attempts, "prepare", forgets)


@mutation("a publication doesn't look whether the parts are those that were merged", "shards put again")
def _(patch: Patch) -> None:
    publish = attempts.publish

    def blindly(tables: Any, standing: Any, request: Any) -> Any:
        _, parts = attempts.find(tables, request.key, request.attempt, request.number)
        request = msgspec.structs.replace(request, parts=tuple(part.place for part in parts))
        return publish(tables, standing, request)

    patch.setattr(attempts, "publish", blindly)


@mutation("the bytes of parts that are given up are nobody's", "shards")
def _(patch: Patch) -> None:
    patch.setattr(attempts, "_drop", lambda tables, standing, part: tables.delete_part(part))  # pyright: ignore


@mutation("an attempt goes on when its home moves", "shards while homes move")
def _(patch: Patch) -> None:
    patch.setattr(moving, "end_strays", lambda tables, standing: None)  # pyright: ignore


@mutation("outcomes stay where the home was", "shards while homes move")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "outcomes", lambda tables: [])  # pyright: ignore


@mutation("an audit knows records only", "shards of stopped ranks")
def _(patch: Patch) -> None:
    def are_named(tables: Any, standing: Any, request: Any) -> Any:
        refused = partition.refusal(standing, request.epoch, [key for key, _ in request.rows])
        found = ((tables.record(key), place) for key, place in request.rows)
        return refused or AreNamed(tuple(entry is not None and place in entry.places for entry, place in found))

    patch.setattr(partition, "are_named", are_named)


@mutation("an attempt whose time is over stays", "shards in a storm")
def _(patch: Patch) -> None:
    patch.setattr(attempts, "expire", lambda tables, standing: None)  # pyright: ignore
    patch.setattr(index.attempts, "has_expired", lambda tables: False)  # pyright: ignore


@mutation("older attempts go on after a publication", "shards of stopped ranks")
def _(patch: Patch) -> None:
    patch.setattr(attempts, "_end_older", lambda tables, standing, published: None)  # pyright: ignore


@mutation("a part is taken in again whenever it comes", "shards twice")
def _(patch: Patch) -> None:
    patch.setattr(attempt_answers, "answer_again", lambda tables, call: None)  # pyright: ignore


@mutation("a part is taken in whoever the home is", "shards while homes move")
def _(patch: Patch) -> None:
    patch.setattr(attempt_answers, "refusal", lambda standing, epoch, keys: None)  # pyright: ignore


@mutation("a part is not lent before the home hears of it", "shards")
def _(patch: Patch) -> None:
    lend = ranks._lend  # pyright: ignore[reportPrivateUsage]

    def forget(tables: Any, membership: int, part: Any, lent: Any) -> Any:
        answer = lend(tables, membership, part, lent)
        for place in part.places:
            if tables.lent(place) is not None:
                tables.lendings.pop(place)
        return answer

    patch.setattr(ranks, "_lend", forget)


@mutation("who gives up without a part leaves no outcome", "shards twice")
def _(patch: Patch) -> None:
    put_outcome = SimTables.put_outcome
    patch.setattr(
        SimTables,
        "put_outcome",
        lambda tables, outcome: put_outcome(tables, outcome) if outcome.number else None,  # pyright: ignore
    )


@mutation("who gives up asks the home of today", "shards of homes that fall silent")
def _(patch: Patch) -> None:
    by_name = ranks.Ranks._give_up_by_name  # pyright: ignore[reportPrivateUsage]

    def of_today(self: Any, seat: Any, request: Any) -> Any:
        seat.home = None
        return (yield from by_name(self, seat, request))

    patch.setattr(ranks.Ranks, "_give_up_by_name", of_today)


@mutation("a part's lease isn't renewed while its rank waits", "shards of stragglers")
def _(patch: Patch) -> None:
    def nothing(seat: Any, found: Any) -> Any:
        return
        yield

    patch.setattr(turns, "_renew", nothing)
