"""How a process changes keys, wherever their homes are.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over. A change that may have been
made by then raises UnknownOutcomeError; all other errors say that nothing was changed, and won't be.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from memstore.distributed import partition
from memstore.distributed.looking import AGAIN, DeadlinePassed, Look, error_of, look_at, one_home, removed, unavailable
from memstore.distributed.members import Member, Standing
from memstore.distributed.messages import (
    LANES,
    Answer,
    Call,
    Change,
    Commit,
    Committed,
    Done,
    Failed,
    Later,
    Never,
    NoSession,
    Open,
    Opened,
    Request,
    Stale,
)
from memstore.distributed.steps import Steps, pause, send, transact
from memstore.distributed.tables import Lent, Tables
from memstore.errors import MemstoreError, UnknownOutcomeError


class Client:
    """One process of a host. It has sessions of its own: a forked child makes another Client."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, int] = {}
        self._numbers = itertools.count(1)
        self._free_lanes = list(range(LANES))

    def commit(self, changes: Sequence[Change], until: int) -> Steps[tuple[int, ...]]:
        """Makes changes of keys that have one home at one moment, or none of them. Returns the versions.

        Their segments lie on this host, filled. After an error they are given back, at once or by an audit.

        Args:
            until: when the call's time is over, on this host's clock since boot.

        Raises:
            UnknownOutcomeError: the changes may have been made, or will be.
            VersionConflictError, KeyNotFoundError, CrossHostError, HomeUnavailableError, StaleMembershipError.
        """
        attempt = _Attempt(changes, until)
        try:
            while True:
                look = yield from transact(lambda tables: look_at(tables, []))
                standing = look.standing
                if standing is not None and standing.is_joining:
                    yield from pause(AGAIN)
                    continue
                home = None if standing is None else one_home(standing, [change.key for change in changes])
                if standing is None or home is None or home.id == standing.member:
                    answer = yield from self._commit_here(look, attempt)
                else:
                    answer = yield from self._commit_there(look, standing, home, attempt)
                if isinstance(answer, Committed):
                    return answer.versions
                if isinstance(answer, Failed):
                    raise error_of(answer)
        except DeadlinePassed:
            if attempt.is_sent:
                text = f"{changes[0].key.decode()!r}: its home did not answer, so nobody knows whether it was changed"
                raise UnknownOutcomeError(text, key=changes[0].key.decode()) from None
            yield from _give_back(changes)
            raise unavailable(changes[0].key) from None
        except UnknownOutcomeError:
            raise
        except MemstoreError:
            yield from _give_back(changes)
            raise

    def _commit_here(self, look: Look, attempt: _Attempt) -> Steps[Answer | None]:
        standing = look.standing
        if standing is not None and not all(standing.is_ready_for(change.key) for change in attempt.changes):
            yield from pause(AGAIN)
            return None
        return (yield from transact(lambda tables: partition.commit_here(tables, look.membership, attempt.changes)))

    def _commit_there(self, look: Look, standing: Standing, home: Member, attempt: _Attempt) -> Steps[Answer | None]:
        """The definite answer of another host. None: it has not made the changes, and won't: look again."""
        session = yield from self._session(home)
        while not self._free_lanes:
            yield from pause(AGAIN)
        lane = self._free_lanes.pop()
        try:
            call = Call(session, lane, next(self._numbers), standing.view.epoch)
            answer = yield from transact(lambda tables: _lend(tables, look.membership, home.id, call, attempt))
            if not isinstance(answer, Done):
                return answer
            attempt.is_sent = True
            answer = yield from _repeated(home, Commit(call, tuple(attempt.changes)))
        finally:
            self._free_lanes.append(lane)
        match answer:
            case Committed() | Failed():
                attempt.is_sent = False
                return answer
            case Stale():
                attempt.is_sent = False
                yield from pause(AGAIN)  # until this host has heard of that epoch too
                return None
            case NoSession():
                del self._sessions[home.id]
                text = (
                    f"{attempt.changes[0].key.decode()!r}: its home has forgotten this process, and what it asked for"
                )
                raise UnknownOutcomeError(text, key=attempt.changes[0].key.decode())
            case Never():
                attempt.is_sent = False
                return Failed("StoreTimeoutError", "its time was over before its home had heard of it")
            case _:
                attempt.is_sent = False
                raise removed()

    def _session(self, home: Member) -> Steps[int]:
        while home.id not in self._sessions:
            answer = yield from send(home, Open())
            if isinstance(answer, Opened):
                self._sessions[home.id] = answer.session
            else:
                yield from pause(AGAIN)
        return self._sessions[home.id]


class _Attempt:
    """A commit under way. `is_sent`: nobody knows whether its last call was made."""

    def __init__(self, changes: Sequence[Change], until: int) -> None:
        self.changes, self.until = changes, until
        self.is_sent = False


def _repeated(home: Member, request: Request) -> Steps[Answer]:
    """Sends the same call until it is answered for good."""
    while True:
        answer = yield from send(home, request)
        if answer is not None and not isinstance(answer, Later):
            return answer
        yield from pause(AGAIN)


def _lend(tables: Tables, membership: int, home: bytes, call: Call, attempt: _Attempt) -> Done | Failed | None:
    """Notes whom the segments are lent to, and by which call. None: the home may be another one by now."""
    standing = tables.standing()
    if standing is None or tables.membership() != membership:
        return None
    failed = partition.bytes_gone(tables, standing, attempt.changes)
    if failed is not None:
        return failed
    for change in attempt.changes:
        for place in change.places:
            lent = Lent(change.key, home, call.session, call.lane, call.number, attempt.until)
            if partition.is_here(standing, place):
                tables.lend(place.put_id, lent)
    return Done()


def _give_back(changes: Sequence[Change]) -> Steps[None]:
    def retire(tables: Tables) -> None:
        standing = tables.standing()
        for place in itertools.chain.from_iterable(change.places for change in changes):
            if partition.is_here(standing, place):
                tables.retire(place.put_id)

    yield from transact(retire)
