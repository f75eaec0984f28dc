"""What a process of a host does to read and change keys, wherever their homes are.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over. A change that may have been
made by then raises UnknownOutcomeError; all other errors say that nothing was changed, and won't be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from memstore.distributed import partition
from memstore.distributed.members import Member, Standing
from memstore.distributed.messages import (
    LANES,
    LONGEST_WAIT,
    ROWS_LIMIT,
    Answer,
    Call,
    Change,
    Commit,
    Committed,
    Done,
    Entry,
    Failed,
    Found,
    IsAt,
    Later,
    List,
    Listed,
    Lookup,
    Never,
    NoSession,
    Open,
    Opened,
    Refused,
    Request,
    Stale,
    Wait,
)
from memstore.distributed.steps import Steps, pause, send, transact
from memstore.distributed.tables import Lent, Tables
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    KeyNotFoundError,
    MemstoreError,
    StaleMembershipError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)

AGAIN = 0.01  # seconds
_TRIES_WITHOUT_PIN = 2

Value = TypeVar("Value")


class DeadlinePassed(Exception):
    """Thrown into the steps of a call whose time is over."""


class Look(NamedTuple):
    """One moment of this host's catalog."""

    entries: tuple[Entry | None, ...]
    standing: Standing | None
    membership: int


class Client:
    """One process of a host. It has sessions of its own: a forked child makes another Client."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, int] = {}
        self._numbers = itertools.count(1)
        self._free_lanes = list(range(LANES))

    # --- reading ------------------------------------------------------------------------------------------------------

    def look_up(self, keys: Sequence[bytes], *, pin: bool = False) -> Steps[tuple[Entry | None, ...]]:
        """The entries of keys that have one home, at one moment.

        Raises:
            CrossHostError: they have several homes.
            HomeUnavailableError, StaleMembershipError.
        """
        try:
            while True:
                look = yield from transact(lambda tables: _look(tables, keys))
                standing = look.standing
                if standing is None or len(keys) == 1 and look.entries[0] is not None:
                    return look.entries
                if standing.is_joining:
                    yield from pause(AGAIN)
                    continue
                home = _one_home(standing, keys)
                if home.id == standing.member:
                    if all(map(standing.is_ready_for, keys)):
                        return look.entries
                    yield from pause(AGAIN)
                    continue
                answer = yield from send(home, Lookup(standing.view.epoch, tuple(keys), pin))
                if isinstance(answer, Found):
                    return answer.entries
                yield from _try_again(answer, keys[0])
        except DeadlinePassed:
            raise _unavailable(keys[0]) from None

    def read(self, key: bytes, fetch: Callable[[Entry], Steps[Value | None]]) -> Steps[tuple[int, Value] | None]:
        """A version of a key, with what `fetch` makes of its bytes; None if there is no such key.

        Args:
            fetch: None as its result: those bytes are there no more, the version was replaced.
        """
        tries = 0
        try:
            while True:
                (entry,) = yield from self.look_up([key], pin=tries >= _TRIES_WITHOUT_PIN)
                if entry is None:
                    return None
                value = yield from fetch(entry)
                if value is not None:
                    return entry.version, value
                tries += 1
                yield from pause(AGAIN)
        except DeadlinePassed:
            raise _unavailable(key) from None

    def wait(self, key: bytes, newer_than: int) -> Steps[int]:
        """Raises StoreTimeoutError, and what `look_up` raises."""
        try:
            while True:
                look = yield from transact(lambda tables: _look(tables, [key]))
                standing, entry = look.standing, look.entries[0]
                if entry is not None and entry.version > newer_than:
                    return entry.version
                if standing is None or standing.is_home_of(key):
                    yield from pause(AGAIN)  # a process sleeps on the key's doorbell
                    continue
                home = _one_home(standing, [key])
                answer = yield from send(home, Wait(standing.view.epoch, key, newer_than, LONGEST_WAIT))
                if isinstance(answer, IsAt):
                    if answer.version:
                        return answer.version
                else:
                    yield from _try_again(answer, key)
        except DeadlinePassed:
            name = key.decode()
            raise StoreTimeoutError(f"{name!r}: no version newer than {newer_than}", key=name) from None

    def page(self, prefix: bytes, after: bytes, limit: int = ROWS_LIMIT) -> Steps[list[tuple[bytes, int]]]:
        """The next keys in order, with their versions, of all homes in one epoch. Empty: there are no more."""
        try:
            while True:
                look = yield from transact(lambda tables: _look(tables, []))
                standing = look.standing
                if standing is None:
                    rows = yield from transact(lambda tables: tables.page(after, limit, prefix))
                    return [(key, entry.version) for key, entry in rows]
                pages = yield from _round(standing, List(standing.view.epoch, prefix, after, limit))
                if pages is not None:
                    return _merge(pages, limit)
                yield from pause(AGAIN)
        except DeadlinePassed:
            raise _unavailable(after or prefix) from None

    # --- changing -----------------------------------------------------------------------------------------------------

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
                look = yield from transact(lambda tables: _look(tables, []))
                standing = look.standing
                if standing is not None and standing.is_joining:
                    yield from pause(AGAIN)
                    continue
                home = None if standing is None else _one_home(standing, [change.key for change in changes])
                if standing is None or home is None or home.id == standing.member:
                    answer = yield from self._commit_here(look, attempt)
                else:
                    answer = yield from self._commit_there(look, standing, home, attempt)
                if isinstance(answer, Committed):
                    return answer.versions
                if isinstance(answer, Failed):
                    raise _error(answer)
        except DeadlinePassed:
            if attempt.is_sent:
                text = f"{changes[0].key.decode()!r}: its home did not answer, so nobody knows whether it was changed"
                raise UnknownOutcomeError(text, key=changes[0].key.decode()) from None
            yield from _give_back(changes)
            raise _unavailable(changes[0].key) from None
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
                raise _removed()

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


def _look(tables: Tables, keys: Sequence[bytes]) -> Look:
    return Look(tuple(tables.record(key) for key in keys), tables.standing(), tables.membership())


def _one_home(standing: Standing, keys: Sequence[bytes]) -> Member:
    """Raises CrossHostError, StaleMembershipError."""
    if standing.is_removed:
        raise _removed()
    homes = {standing.view.home_of(key) for key in keys}
    if len(homes) > 1:
        names = ", ".join(repr(key.decode()) for key in keys[:3])
        raise CrossHostError(
            f"{names} have their homes on {len(homes)} hosts: keys with one text before the first '/' have one"
        )
    home = standing.view.member(homes.pop())
    assert home is not None, "a home is a member"
    return home


def _try_again(answer: Answer | None, key: bytes) -> Steps[None]:
    if isinstance(answer, Refused):
        raise _removed()
    if isinstance(answer, Failed):
        raise _error(answer)
    yield from pause(AGAIN)


def _round(standing: Standing, request: List) -> Steps[list[Listed] | None]:
    """A page of each home, all of one epoch; None: there is another one by now, or one can't be reached."""
    homes = standing.view.homes if b"/" not in request.prefix else (standing.view.home_of(request.prefix),)
    pages: list[Listed] = []
    for home in homes:
        if home == standing.member:
            answer = yield from transact(lambda tables: partition.list_page(tables, _standing(tables), request))
        else:
            member = standing.view.member(home)
            assert member is not None, "a home is a member"
            answer = yield from send(member, request)
        if not isinstance(answer, Listed):
            return None
        pages.append(answer)
    return pages


def _standing(tables: Tables) -> Standing:
    standing = tables.standing()
    assert standing is not None, "a member stays one"
    return standing


def _merge(pages: list[Listed], limit: int) -> list[tuple[bytes, int]]:
    """In order, up to where every page goes: beyond the last key of a full one there may be more."""
    ends = [page.rows[-1][0] for page in pages if len(page.rows) == limit]
    rows = sorted(row for page in pages for row in page.rows)
    return [row for row in rows if not ends or row[0] <= min(ends)]


# --- errors -----------------------------------------------------------------------------------------------------------


def _unavailable(key: bytes) -> HomeUnavailableError:
    name = key.decode(errors="replace")
    return HomeUnavailableError(f"{name!r}: its home did not answer within the timeout", key=name)


def _removed() -> StaleMembershipError:
    return StaleMembershipError("this host was removed from the cluster: serve an empty root")


def _error(failed: Failed) -> MemstoreError:
    key = None if failed.key is None else failed.key.decode()
    text = failed.text if key is None else f"{key!r}: {failed.text}"
    if failed.error == "VersionConflictError":
        return VersionConflictError(text, key=key, expected=failed.expected, found=failed.found)
    kinds: dict[str, type[MemstoreError]] = {
        kind.__name__: kind for kind in (KeyNotFoundError, CrossHostError, StoreTimeoutError)
    }
    return kinds.get(failed.error, MemstoreError)(text, key=key)
