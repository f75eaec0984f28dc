"""How a process changes keys, wherever their homes are.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over: in place of a message, which
isn't sent then, or of a pause. A change that may have been made by then raises UnknownOutcomeError; all other errors
say that nothing was changed, and won't be.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from memstore.distributed.rules import partition
from memstore.distributed.rules.lending import give_back
from memstore.distributed.rules.looking import (
    AGAIN,
    DeadlinePassed,
    Look,
    error_of,
    look_at,
    one_home,
    removed,
    try_again,
    unavailable,
    unknown,
)
from memstore.distributed.rules.members import Member, Standing
from memstore.distributed.rules.messages import (
    LANES,
    Answer,
    Call,
    Change,
    Close,
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
from memstore.distributed.rules.steps import NotSent, Steps, pause, send, sent, transact, view
from memstore.distributed.rules.tables import Lent, Tables
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
            return (yield from self._commit(attempt))
        except DeadlinePassed as passed:
            why: Exception = passed
            error: MemstoreError = unavailable(changes[0].key, attempt.home, passed)
        except MemstoreError as failure:
            why = error = failure
        if attempt.is_sent and attempt.home is not None and not isinstance(error, UnknownOutcomeError):
            error = unknown(changes[0].key, attempt.home, why)
        if not isinstance(error, UnknownOutcomeError):
            yield from give_back([place for change in changes for place in change.places])
        raise error

    def end(self, members: Callable[[bytes], Member | None]) -> Steps[None]:
        """Tells the homes that nothing more will come. One that doesn't hear it finds out in an hour."""
        sessions, self._sessions = self._sessions, {}
        with contextlib.suppress(DeadlinePassed):
            for home, session in sessions.items():
                member = members(home)
                if member is not None:
                    yield from send(member, Close(session))

    def _commit(self, attempt: _Attempt) -> Steps[tuple[int, ...]]:
        keys = [change.key for change in attempt.changes]
        while True:
            look = yield from view(lambda tables: look_at(tables, []))
            standing = look.standing
            if standing is not None and standing.is_joining:
                yield from pause(AGAIN)
                continue
            home = None if standing is None else one_home(standing, keys)
            if standing is None or home is None or home.id == standing.member:
                attempt.home = None
                answer = yield from self._commit_here(look, attempt)
            else:
                attempt.home = home
                answer = yield from self._commit_there(look, standing, home, attempt)
            if isinstance(answer, Committed):
                return answer.versions
            if isinstance(answer, Failed):
                raise error_of(answer, attempt.home)

    def _commit_here(self, look: Look, attempt: _Attempt) -> Steps[Answer | None]:
        standing = look.standing
        if standing is not None and not all(standing.is_ready_for(change.key) for change in attempt.changes):
            yield from pause(AGAIN)
            return None
        return (yield from transact(lambda tables: partition.commit_here(tables, look.membership, attempt.changes)))

    def _commit_there(self, look: Look, standing: Standing, home: Member, attempt: _Attempt) -> Steps[Answer | None]:
        """The definite answer of another host. None: it has not made the changes, and won't: look again."""
        lane = yield from self.take_lane()
        try:
            call = yield from self.call(home, lane, standing.view.epoch)
            if any(partition.is_here(standing, place) for change in attempt.changes for place in change.places):
                answer = yield from transact(lambda tables: _lend(tables, look.membership, home.id, call, attempt))
                if not isinstance(answer, Done):
                    return answer
            answer = yield from _repeated(home, Commit(call, tuple(attempt.changes)), attempt)
        finally:
            # Also if nobody knows what became of the call: the lane's next one has a larger number, and once the home
            # has heard that, this one is refused.
            self.free_lane(lane)
        if isinstance(answer, NoSession):
            self.forget(home, call)
            if attempt.is_sent:  # before that, too: it may have been made then, and forgotten with its session
                raise unknown(attempt.changes[0].key, home)
            yield from pause(AGAIN)
            return None
        attempt.is_sent = False
        match answer:
            case Committed() | Failed():
                return answer
            case Stale():
                yield from pause(AGAIN)  # until this host has heard of that epoch too
                return None
            case Never():
                return Failed("StoreTimeoutError", "its time was over before its home had heard of it")
            case _:
                raise removed()

    # --- calls --------------------------------------------------------------------------------------------------------

    def take_lane(self) -> Steps[int]:
        while True:
            try:
                return self._free_lanes.pop()
            except IndexError:  # other threads have them all
                yield from pause(AGAIN)

    def free_lane(self, lane: int) -> None:
        self._free_lanes.append(lane)

    def call(self, home: Member, lane: int, epoch: int) -> Steps[Call]:
        """A new call of this process at a home, in a lane that it has taken."""
        session = yield from self._session(home)
        return Call(session, lane, next(self._numbers), epoch)

    def forget(self, home: Member, call: Call) -> None:
        """The home doesn't know the session of this call any more."""
        if self._sessions.get(home.id) == call.session:
            del self._sessions[home.id]

    def _session(self, home: Member) -> Steps[int]:
        while (session := self._sessions.get(home.id)) is None:  # another thread may forget it at any time
            answer = yield from send(home, Open())
            if isinstance(answer, Opened):
                self._sessions[home.id] = answer.session
            else:
                yield from try_again(answer, b"")
        return session


class _Attempt:
    """A commit under way.

    Attributes:
        home: that was asked last; None: this host.
        is_sent: nobody knows whether its last call was made.
    """

    def __init__(self, changes: Sequence[Change], until: int) -> None:
        self.changes, self.until = changes, until
        self.home: Member | None = None
        self.is_sent = False


def _repeated(home: Member, request: Request, attempt: _Attempt) -> Steps[Answer]:
    """Sends the same call until it is answered for good.

    If the first answer is that there is no such session, the call was not made, and never will be: the session had
    ended before, since this process had no connection for an hour. `attempt.is_sent` is as it was then.
    """
    while True:
        answer = yield from sent(home, request)
        if not isinstance(answer, NotSent | NoSession):
            attempt.is_sent = True
        if not (answer is None or isinstance(answer, NotSent | Later)):
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
                tables.lend(place, lent)
    return Done()
