"""How a home gives what is at home elsewhere in a new epoch: see `moving.py`, steps 2 and 3."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.distributed.rules.members import Standing, View, takers_from
from memstore.distributed.rules.messages import (
    OUTCOMES_LIMIT,
    ROWS_LIMIT,
    Done,
    Entry,
    Give,
    Given,
    Outcome,
    Request,
)
from memstore.distributed.rules.partition import dispose, passing_over
from memstore.distributed.rules.steps import Steps, pause, send, transact, view
from memstore.distributed.rules.tables import Lent, Tables
from memstore.distributed.rules.terms import BYTES_LIMIT, KEY_LIMIT

AGAIN = 0.1  # seconds until something is tried again

Rows = list[tuple[bytes, Entry | None]]  # None: the record is damaged


def settle(standing: Standing) -> Steps[bool]:
    """Gives all that is at home elsewhere in this epoch. False: there is another epoch by now."""
    if standing.is_joining:  # what is here is not of the cluster yet
        return True
    view = standing.view
    after: bytes | None = b""
    while after is not None:
        page = yield from transact(lambda tables, start=after: _page_to_give(tables, view, start))
        if page is None:
            return False
        rows, after = page
        for home, given in _by_home(view, rows):
            for portion in _portions(given):
                if not (yield from _tell(standing, home, _give(standing, portion))):
                    return False
    for home, outcomes in (yield from transact(lambda tables: _outcomes_to_give(tables, view, standing.member))):
        if not (yield from _tell(standing, home, Give(view.epoch, standing.member, (), outcomes))):
            return False
    after = b""
    while after is not None:
        dropped = yield from transact(lambda tables, start=after: _drop_page(tables, view, start))
        if dropped is None:
            return False
        after = dropped[0]
    for taker in takers_from(view, standing.member):
        if not (yield from _tell(standing, taker, Given(view.epoch, standing.member))):
            return False
    return True


def _page_to_give(tables: Tables, view: View, after: bytes) -> tuple[Rows, bytes | None] | None:
    """The records of a page that go elsewhere, and where the next page begins. What lies on no member is dropped."""
    standing = _at(tables, view)
    if standing is None:
        return None
    page = tables.page(after, ROWS_LIMIT)
    rows: Rows = []
    for key, entry in page:
        if entry is not None and any(place.host not in view.ids for place in entry.places):
            tables.delete_record(key)
            for place in entry.places:
                with passing_over(tables, key):
                    dispose(tables, standing, (place,))
        elif not standing.is_home_of(key):
            rows.append((key, entry))
    return rows, page[-1][0] if page else None


def _outcomes_to_give(tables: Tables, view: View, member: bytes) -> list[tuple[bytes, tuple[Outcome, ...]]]:
    """What sharded puts have become: ranks that come late, or again, ask the new home."""
    homes: dict[bytes, list[Outcome]] = {}
    for outcome in tables.outcomes():
        homes.setdefault(view.home_of(outcome.key), []).append(outcome)
    return [
        (home, tuple(outcomes[first : first + OUTCOMES_LIMIT]))
        for home, outcomes in homes.items()
        for first in range(0, len(outcomes), OUTCOMES_LIMIT)
        if home != member
    ]


def _drop_page(tables: Tables, view: View, after: bytes) -> tuple[bytes | None] | None:
    """Deletes what was given. Bytes that lie here are lent to the new home. What is damaged stays."""
    standing = _at(tables, view)
    if standing is None:
        return None
    page = tables.page(after, ROWS_LIMIT)
    for key, entry in page:
        if entry is None or standing.is_home_of(key):
            continue
        tables.delete_record(key)
        for place in entry.places:
            if place.host == standing.member:
                with passing_over(tables, key):
                    tables.lend(place, Lent(key, view.home_of(key)))
    return (page[-1][0] if page else None,)


def _at(tables: Tables, view: View) -> Standing | None:
    standing = tables.standing()
    return standing if standing is not None and standing.view.epoch == view.epoch and not standing.is_removed else None


def _by_home(view: View, rows: Rows) -> Iterable[tuple[bytes, Rows]]:
    homes: dict[bytes, Rows] = {}
    for key, entry in rows:
        homes.setdefault(view.home_of(key), []).append((key, entry))
    return homes.items()


def _portions(rows: Rows) -> Iterable[Rows]:
    """As many of them as a message has room for: what a record says of a value may be megabytes."""
    portion: Rows = []
    nbytes = 0
    for key, entry in rows:
        size = KEY_LIMIT if entry is None else entry.nbytes
        if portion and nbytes + size > BYTES_LIMIT:
            yield portion
            portion, nbytes = [], 0
        portion.append((key, entry))
        nbytes += size
    if portion:
        yield portion


def _give(standing: Standing, portion: Rows) -> Give:
    whole = tuple((key, entry) for key, entry in portion if entry is not None)
    damaged = tuple(key for key, entry in portion if entry is None)
    return Give(standing.view.epoch, standing.member, whole, (), damaged)


def _tell(standing: Standing, home: bytes, request: Request) -> Steps[bool]:
    """Until it is acknowledged. False: there is another epoch by now."""
    member = standing.view.member(home)
    assert member is not None, "a home is a member"
    while True:
        answer = yield from send(member, request)
        if isinstance(answer, Done):
            return True
        if not (yield from view(lambda tables: _at(tables, standing.view) is not None)):
            return False
        yield from pause(AGAIN)
