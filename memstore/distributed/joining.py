"""A root that had keys when it was first served: each is registered at its home, by a commit that expects no such key.

The member is no home meanwhile, and its processes wait with what they would change. A batch of records moves from
`entries` to `joining`, gets a call, and is committed. The call stands beside the records: after a kill, the home says
what became of it. A key that somebody else has put by now is theirs, and was put after ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from memstore.distributed.members import Member, Standing
from memstore.distributed.messages import (
    Answer,
    Call,
    Change,
    Commit,
    Committed,
    Failed,
    Later,
    Open,
    Opened,
    Request,
    Resolve,
)
from memstore.distributed.partition import dispose, is_here
from memstore.distributed.steps import Steps, send, transact
from memstore.distributed.tables import Joining, Lent, Tables

_BATCH = 256  # records
_NEVER_MIND = (1 << 63) - 1  # no audit asks after what is joining

Rows = Sequence[tuple[bytes, Joining]]


class Registrar:
    """What an index process has begun for its root."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, int] = {}
        self._numbers = itertools.count(1)

    def run(self) -> Steps[None]:
        """Goes on with one batch. What it can't end now, it tries again when it is called again."""
        standing, rows = yield from transact(_next_batch)
        if standing is None or not rows:
            return
        first = rows[0][1]
        if first.session:
            home = standing.view.member(first.home)
            request: Request = Resolve(first.session, first.lane, first.number)
        else:
            home = standing.view.member(standing.view.home_of(rows[0][0]))
            assert home is not None, "a home is a member"
            session = yield from self._session(home)
            if session is None:
                return
            call = Call(session, 0, next(self._numbers), standing.view.epoch)
            rows = yield from transact(lambda tables: _assign(tables, standing, home, call, rows))
            request = Commit(call, tuple(Change(key, one.entry.body, one.entry.places, 0) for key, one in rows))
        if not rows:
            return
        answer: Answer | None = Failed("HomeUnavailableError", "its home was removed")
        if home is not None:
            answer = yield from send(home, request)
        if answer is not None and not isinstance(answer, Later):
            if not isinstance(answer, Committed | Failed):
                self._sessions.pop(first.home, None)
            yield from transact(lambda tables: _end(tables, answer, rows))

    def _session(self, home: Member) -> Steps[int | None]:
        if home.id not in self._sessions:
            answer = yield from send(home, Open())
            if isinstance(answer, Opened):
                self._sessions[home.id] = answer.session
        return self._sessions.get(home.id)


def _next_batch(tables: Tables) -> tuple[Standing | None, Rows]:
    """What was begun and is not ended, all of one call; or the next records; or none, and the root has joined."""
    standing = tables.standing()
    if standing is None or not standing.is_joining or standing.is_removed:
        return standing, ()
    rows = tables.joining(_BATCH)
    if not rows:
        for key, entry in tables.page(b"", _BATCH):
            tables.delete_record(key)
            tables.put_joining(key, Joining(entry))
        rows = tables.joining(_BATCH)
    if not rows:
        tables.put_standing(msgspec.structs.replace(standing, is_joining=False))
        return standing, ()
    key, first = rows[0]
    if first.session:
        return standing, [row for row in rows if row[1].call == first.call]
    home = standing.view.home_of(key)
    return standing, [row for row in rows if not row[1].session and standing.view.home_of(row[0]) == home]


def _assign(tables: Tables, standing: Standing, home: Member, call: Call, rows: Rows) -> Rows:
    """Notes the call beside each record. None of them if there is another epoch by now."""
    now = tables.standing()
    if now is None or now.view.epoch != standing.view.epoch:
        return ()
    assigned: list[tuple[bytes, Joining]] = []
    for key, one in rows:
        if not all(tables.is_there(place.put_id) for place in one.entry.places if is_here(standing, place)):
            tables.delete_joining(key)  # an earlier call was made after all, and its value has been replaced since
            continue
        one = Joining(one.entry, home.id, call.session, call.lane, call.number)
        assigned.append((key, one))
        tables.put_joining(key, one)
        for place in one.entry.places:
            if is_here(standing, place):
                lent = Lent(key, home.id, call.session, call.lane, call.number, _NEVER_MIND)
                tables.lend(place.put_id, lent)
    return assigned


def _end(tables: Tables, answer: Answer, rows: Rows) -> None:
    """What the call has become. Unless it was made, the records that are left get another."""
    standing = tables.standing()
    for key, one in rows:
        if isinstance(answer, Committed):
            tables.delete_joining(key)
            for place in one.entry.places:
                if tables.lent(place.put_id) is not None:  # else it was replaced, and released, before this answer came
                    tables.lend(place.put_id, Lent(key, one.home))
        elif isinstance(answer, Failed) and answer.error == "VersionConflictError" and answer.key == key:
            tables.delete_joining(key)
            dispose(tables, standing, one.entry)
        else:
            tables.put_joining(key, Joining(one.entry))
