"""How a process reads keys, wherever their homes are.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.distributed.rules import partition
from memstore.distributed.rules.looking import (
    AGAIN,
    DeadlinePassed,
    look_at,
    not_listed,
    one_home,
    removed,
    try_again,
    unavailable,
)
from memstore.distributed.rules.lookups import look_up_at
from memstore.distributed.rules.members import Member, Standing
from memstore.distributed.rules.messages import LONGEST_WAIT, ROWS_LIMIT, Entry, Found, IsAt, List, Listed, Wait
from memstore.distributed.rules.steps import Steps, pause, send, view
from memstore.distributed.rules.tables import Tables
from memstore.errors import StoreTimeoutError

_TRIES_WITHOUT_PIN = 2

Value = TypeVar("Value")


def look_up(keys: Sequence[bytes], *, pin: bool = False) -> Steps[tuple[Entry | None, ...]]:
    """The entries of keys that have one home, at one moment.

    Raises:
        CrossHostError: they have several homes.
        HomeUnavailableError, StaleMembershipError.
        CorruptionError: a record is damaged.
    """
    home: Member | None = None
    try:
        while True:
            look = yield from view(lambda tables: look_at(tables, keys))
            standing = look.standing
            if standing is None:
                return look.entries
            if all(entry is not None for entry in look.entries):
                entries = (yield from _pinned(standing, keys)) if pin else look.entries
                if None not in entries:
                    return entries
                continue  # they were given to another home meanwhile
            if standing.is_joining:
                yield from pause(AGAIN)
                continue
            home = one_home(standing, keys)
            if home.id == standing.member:
                if all(map(standing.is_ready_for, keys)):
                    return look.entries
                home = None
                yield from pause(AGAIN)
                continue
            answer = yield from look_up_at(home, standing.view.epoch, keys, pin=pin)
            if isinstance(answer, Found):
                return answer.entries
            yield from try_again(answer, keys[0])
    except DeadlinePassed as why:
        raise unavailable(keys[0], home, why) from None


def _pinned(standing: Standing, keys: Sequence[bytes]) -> Steps[tuple[Entry | None, ...]]:
    """Entries whose home is here. What is pinned this host's index process knows: without it, nothing is."""
    own = standing.view.member(standing.member)
    answer = None if own is None else (yield from look_up_at(own, standing.view.epoch, keys, pin=True))
    if isinstance(answer, Found):
        return answer.entries
    look = yield from view(lambda tables: look_at(tables, keys))
    return look.entries


def read(key: bytes, fetch: Callable[[Entry], Steps[Value | None]]) -> Steps[tuple[int, Value] | None]:
    """A version of a key, with what `fetch` makes of its bytes; None if there is no such key.

    Args:
        fetch: None as its result: those bytes are there no more, the version was replaced.
    """
    (found,) = yield from read_all([key], lambda _, entry: fetch(entry))
    return found


def read_all(
    keys: Sequence[bytes], fetch: Callable[[bytes, Entry], Steps[Value | None]]
) -> Steps[tuple[tuple[int, Value] | None, ...]]:
    """As `read`, of keys that have one home, at one moment. If one of them was replaced, all are looked up again."""
    tries = 0
    try:
        while True:
            entries = yield from look_up(keys, pin=tries >= _TRIES_WITHOUT_PIN)
            found: list[tuple[int, Value] | None] = []
            for key, entry in zip(keys, entries, strict=True):
                value = None if entry is None else (yield from fetch(key, entry))
                if entry is not None and value is None:
                    break
                found.append(None if entry is None or value is None else (entry.version, value))
            else:
                return tuple(found)
            tries += 1
            yield from pause(AGAIN)
    except DeadlinePassed as why:
        raise unavailable(keys[0], None, why) from None


def wait(key: bytes, newer_than: int) -> Steps[int]:
    """The first version that is newer. Raises StoreTimeoutError, and what `look_up` raises."""
    try:
        while True:
            version = yield from wait_there(key, newer_than)
            if version is not None:
                return version
            yield from pause(AGAIN)  # a process of the store sleeps on the key's doorbell instead
    except DeadlinePassed:
        name = key.decode()
        raise StoreTimeoutError(f"{name!r}: no version newer than {newer_than}", key=name) from None


def wait_there(key: bytes, newer_than: int) -> Steps[int | None]:
    """As `wait`, as long as the home is elsewhere; None: it is here. It lets DeadlinePassed through."""
    while True:
        look = yield from view(lambda tables: look_at(tables, [key]))
        standing, entry = look.standing, look.entries[0]
        if entry is not None and entry.version > newer_than:
            return entry.version
        home = None if standing is None else one_home(standing, [key])
        if standing is None or home is None or home.id == standing.member:
            return None
        answer = yield from send(home, Wait(standing.view.epoch, key, newer_than, LONGEST_WAIT))
        if isinstance(answer, IsAt):
            if answer.version:
                return answer.version
        else:
            yield from try_again(answer, key)


def page(prefix: bytes, after: bytes, limit: int = ROWS_LIMIT) -> Steps[list[tuple[bytes, int]]]:
    """The next keys in order, with their versions, of all homes in one epoch. Empty: there are no more.

    Keys whose records are damaged are among them, as they are among those of one host, with version 0.
    """
    silent: Member | None = None
    try:
        while True:
            look = yield from view(lambda tables: look_at(tables, []))
            standing = look.standing
            if standing is None:
                rows = yield from view(lambda tables: tables.page(after, limit, prefix))
                return [(key, entry.version if entry else 0) for key, entry in rows]
            if standing.is_removed:
                raise removed()
            if standing.is_joining:  # nobody has all of this host's own keys yet
                yield from pause(AGAIN)
                continue
            pages = yield from _round(standing, List(standing.view.epoch, prefix, after, limit))
            if not isinstance(pages, Member):
                return _merge(pages, limit)
            silent = pages
            yield from pause(AGAIN)
    except DeadlinePassed as why:
        raise not_listed(prefix, silent, why) from None


def _round(standing: Standing, request: List) -> Steps[list[Listed] | Member]:
    """A page of each home, all of one epoch. Or the home that has none: it is of another epoch, or can't be reached."""
    homes = standing.view.homes if b"/" not in request.prefix else (standing.view.home_of(request.prefix),)
    pages: list[Listed] = []
    for home in homes:
        member = standing.view.member(home)
        assert member is not None, "a home is a member"
        if home == standing.member:
            answer = yield from view(lambda tables: partition.list_page(tables, _standing(tables), request))
        else:
            answer = yield from send(member, request)
        if not isinstance(answer, Listed):
            return member
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
