"""How a process reads keys, wherever their homes are.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.distributed import partition
from memstore.distributed.looking import AGAIN, DeadlinePassed, look_at, one_home, try_again, unavailable
from memstore.distributed.members import Standing
from memstore.distributed.messages import LONGEST_WAIT, ROWS_LIMIT, Entry, Found, IsAt, List, Listed, Lookup, Wait
from memstore.distributed.steps import Steps, pause, send, transact
from memstore.distributed.tables import Tables
from memstore.errors import StoreTimeoutError

_TRIES_WITHOUT_PIN = 2

Value = TypeVar("Value")


def look_up(keys: Sequence[bytes], *, pin: bool = False) -> Steps[tuple[Entry | None, ...]]:
    """The entries of keys that have one home, at one moment.

    Raises:
        CrossHostError: they have several homes.
        HomeUnavailableError, StaleMembershipError.
    """
    try:
        while True:
            look = yield from transact(lambda tables: look_at(tables, keys))
            standing = look.standing
            if standing is None or len(keys) == 1 and look.entries[0] is not None:
                return look.entries
            if standing.is_joining:
                yield from pause(AGAIN)
                continue
            home = one_home(standing, keys)
            if home.id == standing.member:
                if all(map(standing.is_ready_for, keys)):
                    return look.entries
                yield from pause(AGAIN)
                continue
            answer = yield from send(home, Lookup(standing.view.epoch, tuple(keys), pin))
            if isinstance(answer, Found):
                return answer.entries
            yield from try_again(answer, keys[0])
    except DeadlinePassed:
        raise unavailable(keys[0]) from None


def read(key: bytes, fetch: Callable[[Entry], Steps[Value | None]]) -> Steps[tuple[int, Value] | None]:
    """A version of a key, with what `fetch` makes of its bytes; None if there is no such key.

    Args:
        fetch: None as its result: those bytes are there no more, the version was replaced.
    """
    tries = 0
    try:
        while True:
            (entry,) = yield from look_up([key], pin=tries >= _TRIES_WITHOUT_PIN)
            if entry is None:
                return None
            value = yield from fetch(entry)
            if value is not None:
                return entry.version, value
            tries += 1
            yield from pause(AGAIN)
    except DeadlinePassed:
        raise unavailable(key) from None


def wait(key: bytes, newer_than: int) -> Steps[int]:
    """Raises StoreTimeoutError, and what `look_up` raises."""
    try:
        while True:
            look = yield from transact(lambda tables: look_at(tables, [key]))
            standing, entry = look.standing, look.entries[0]
            if entry is not None and entry.version > newer_than:
                return entry.version
            home = None if standing is None else one_home(standing, [key])
            if standing is None or home is None or home.id == standing.member:
                yield from pause(AGAIN)  # a process sleeps on the key's doorbell
                continue
            answer = yield from send(home, Wait(standing.view.epoch, key, newer_than, LONGEST_WAIT))
            if isinstance(answer, IsAt):
                if answer.version:
                    return answer.version
            else:
                yield from try_again(answer, key)
    except DeadlinePassed:
        name = key.decode()
        raise StoreTimeoutError(f"{name!r}: no version newer than {newer_than}", key=name) from None


def page(prefix: bytes, after: bytes, limit: int = ROWS_LIMIT) -> Steps[list[tuple[bytes, int]]]:
    """The next keys in order, with their versions, of all homes in one epoch. Empty: there are no more."""
    try:
        while True:
            look = yield from transact(lambda tables: look_at(tables, []))
            standing = look.standing
            if standing is None:
                rows = yield from transact(lambda tables: tables.page(after, limit, prefix))
                return [(key, entry.version) for key, entry in rows]
            pages = yield from _round(standing, List(standing.view.epoch, prefix, after, limit))
            if pages is not None:
                return _merge(pages, limit)
            yield from pause(AGAIN)
    except DeadlinePassed:
        raise unavailable(after or prefix) from None


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
