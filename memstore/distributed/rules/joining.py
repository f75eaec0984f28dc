"""A root that had keys when it was first served: each is registered at its home, by a commit that expects no such key.

The member is no home meanwhile, and its processes wait with what they would change. A batch of records moves from
`entries` to `joining`, gets a call, and is committed. The call stands beside the records: after a kill, the home says
what became of it. A key that somebody else has put by now is theirs, and was put after ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from memstore.distributed.rules.members import Member, Standing
from memstore.distributed.rules.messages import (
    Answer,
    Call,
    Change,
    Close,
    Commit,
    Committed,
    Entry,
    Failed,
    Later,
    Open,
    Opened,
    Place,
    Request,
    Resolve,
)
from memstore.distributed.rules.partition import is_here, passing_over
from memstore.distributed.rules.steps import Steps, send, transact, view
from memstore.distributed.rules.tables import Joining, Lent, Tables
from memstore.distributed.rules.terms import BYTES_LIMIT

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
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or not standing.is_joining or standing.is_removed:
            yield from self._close(standing)
            return
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
            request = Commit(call, tuple(_put_of(key, one.entry) for key, one in rows))
        if not rows:
            return
        answer: Answer | None = Failed("HomeUnavailableError", "its home was removed")
        if home is not None:
            answer = yield from send(home, request)
        if answer is not None and not isinstance(answer, Later):
            if home is not None and not isinstance(answer, Committed | Failed):
                self._sessions.pop(home.id, None)
            yield from transact(lambda tables: _end(tables, answer, rows))
            if home is not None and first.session not in (0, self._sessions.get(home.id)):
                yield from send(home, Close(first.session))  # of an index process that was killed

    def _session(self, home: Member) -> Steps[int | None]:
        """One that lasts: if it ended while this host is away, a key that has been registered, and deleted since, would
        be registered once more."""
        if home.id not in self._sessions:
            answer = yield from send(home, Open(lasts=True))
            if isinstance(answer, Opened):
                self._sessions[home.id] = answer.session
        return self._sessions.get(home.id)

    def _close(self, standing: Standing | None) -> Steps[None]:
        for id, session in list(self._sessions.items()):
            home = None if standing is None else standing.view.member(id)
            if home is None or (yield from send(home, Close(session))) is not None:
                del self._sessions[id]


def _next_batch(tables: Tables) -> tuple[Standing | None, Rows]:
    """What was begun and is not ended, all of one call; or the next records; or none, and the root has joined."""
    standing = tables.standing()
    if standing is None or not standing.is_joining or standing.is_removed:
        return standing, ()
    rows = tables.joining(_BATCH)
    if not rows:
        for key, entry in _whole_records(tables):
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
    return standing, _portion([row for row in rows if not row[1].session and standing.view.home_of(row[0]) == home])


def _whole_records(tables: Tables) -> list[tuple[bytes, Entry]]:
    """The next ones. What is damaged can't be registered, and stays where it is."""
    after: bytes = b""
    while page := tables.page(after, _BATCH):
        whole = [(key, entry) for key, entry in page if entry is not None]
        if whole:
            return whole
        after = page[-1][0]
    return []


def _portion(rows: Rows) -> Rows:
    """As many of them, from the first on, as a message has room for."""
    sizes = itertools.accumulate(one.entry.nbytes for _, one in rows)
    count = sum(1 for size in sizes if size <= BYTES_LIMIT)
    return rows[: max(count, 1)]


def _assign(tables: Tables, standing: Standing, home: Member, call: Call, rows: Rows) -> Rows:
    """Notes the call beside each record. None of them if there is another epoch by now."""
    now = tables.standing()
    if now is None or now.view.epoch != standing.view.epoch:
        return ()
    assigned: list[tuple[bytes, Joining]] = []
    for key, one in rows:
        if not all(_is_there(tables, key, place) for place in one.entry.places if is_here(standing, place)):
            tables.delete_joining(key)  # an earlier call was made after all, and its value has been replaced since
            continue
        one = Joining(one.entry, home.id, call.session, call.lane, call.number)
        assigned.append((key, one))
        tables.put_joining(key, one)
        for place in one.entry.places:
            if is_here(standing, place):
                lent = Lent(key, home.id, call.session, call.lane, call.number, _NEVER_MIND)
                with passing_over(tables, key):
                    tables.lend(place, lent)
    return assigned


def _is_there(tables: Tables, key: bytes, place: Place) -> bool:
    """Also if the row is damaged that says so: the file may be whole."""
    with passing_over(tables, key):
        return tables.is_there(place)
    return True


def _put_of(key: bytes, entry: Entry) -> Change:
    return Change(key, entry.body, entry.places, expect=0, is_mutable=entry.is_mutable)


def _end(tables: Tables, answer: Answer, rows: Rows) -> None:
    """What the call has become. Unless it was made, the records that are left get another."""
    for key, one in rows:
        conflicts = isinstance(answer, Failed) and answer.error == "VersionConflictError" and answer.key == key
        if isinstance(answer, Committed) or conflicts:
            # It conflicts with what somebody else has put; or with itself, put by a call that was forgotten with its
            # session. An audit finds out whether its bytes are named.
            tables.delete_joining(key)
            for place in one.entry.places:
                if tables.lent(place) is not None:  # else it was replaced, and released, before this answer came
                    tables.lend(place, Lent(key, one.home))
        else:
            tables.put_joining(key, Joining(one.entry))
