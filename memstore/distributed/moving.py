"""How homes move: adopt, give, take. Any of it may be cut off by a kill, and repeated.

1. *Adopt*: a member writes the new view. From this transaction on no process of its host commits to a key that is at
   home elsewhere, since each commit compares `membership`.
2. *Give*: it sends the records of such keys to their new homes. Nobody can change them meanwhile: so who still finds
   one here finds the right one.
3. When all of them are acknowledged it deletes them here, and only then says *given*.
4. *Take*: until it has heard this of the old home of a group, the new one serves nothing of the group.

So no two hosts serve a key at one time, and a get that finds a record need not ask whether the home is still here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memstore.distributed.members import Standing, View, givers_to, takers_from
from memstore.distributed.messages import ROWS_LIMIT, Answer, Done, Entry, Give, Given, Later, Refused, Request, Stale
from memstore.distributed.partition import dispose, write
from memstore.distributed.steps import Steps, pause, send, transact
from memstore.distributed.tables import Lent, Tables

AGAIN = 0.1  # seconds until something is tried again

Rows = list[tuple[bytes, Entry]]


def adopt(tables: Tables, member: bytes, view: View) -> bool:
    """Writes the view, if it is newer than what this member has."""
    standing = tables.standing()
    if standing is not None and standing.view.epoch >= view.epoch:
        return False
    # Versions go on above those of any home before, also of one that could not be asked.
    tables.version = max(tables.version, view.version_floor)
    is_joining = has_keys_of_its_own(tables) if member not in view.before else False
    tables.put_standing(Standing(member, view, givers_to(view, member), is_joining))
    return True


def has_keys_of_its_own(tables: Tables) -> bool:
    """Whether this root had keys when it was first served, and they aren't all at their homes yet."""
    standing = tables.standing()
    return bool(tables.page(b"", 1)) if standing is None else standing.is_joining


def leave(tables: Tables) -> None:
    """This root was removed from the cluster."""
    standing = tables.standing()
    if standing is not None and not standing.is_removed:
        tables.put_standing(msgspec.structs.replace(standing, is_removed=True))


# --- the new home -----------------------------------------------------------------------------------------------------


def take(tables: Tables, standing: Standing, request: Give) -> Answer:
    refused = _other_epoch(standing, request.epoch)
    if refused is not None:
        return refused
    if request.giver in standing.missing:  # else it is a late duplicate: what is here may be newer
        for key, entry in request.rows:
            if standing.is_home_of(key) and standing.view.home_before(key) == request.giver:
                write(tables, standing, key, entry)
    return Done()


def has_given(tables: Tables, standing: Standing, request: Given) -> Answer:
    refused = _other_epoch(standing, request.epoch)
    if refused is None and request.giver in standing.missing:
        missing = tuple(giver for giver in standing.missing if giver != request.giver)
        tables.put_standing(msgspec.structs.replace(standing, missing=missing))
    return refused or Done()


def _other_epoch(standing: Standing, epoch: int) -> Answer | None:
    if standing.is_removed:
        return Refused("this host was removed from the cluster", is_removed=True)
    if epoch == standing.view.epoch:
        return None
    return Stale(standing.view.epoch) if epoch < standing.view.epoch else Later()


# --- the old home -----------------------------------------------------------------------------------------------------


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
            if not (yield from _tell(standing, home, Give(view.epoch, standing.member, tuple(given)))):
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
        if any(place.host not in view.ids for place in entry.places):
            tables.delete_record(key)
            dispose(tables, standing, entry)
        elif not standing.is_home_of(key):
            rows.append((key, entry))
    return rows, page[-1][0] if page else None


def _drop_page(tables: Tables, view: View, after: bytes) -> tuple[bytes | None] | None:
    """Deletes what was given. Bytes that lie here are lent to the new home."""
    standing = _at(tables, view)
    if standing is None:
        return None
    page = tables.page(after, ROWS_LIMIT)
    for key, entry in page:
        if standing.is_home_of(key):
            continue
        tables.delete_record(key)
        for place in entry.places:
            if place.host == standing.member:
                tables.lend(place.put_id, Lent(key, view.home_of(key)))
    return (page[-1][0] if page else None,)


def _at(tables: Tables, view: View) -> Standing | None:
    standing = tables.standing()
    return standing if standing is not None and standing.view.epoch == view.epoch and not standing.is_removed else None


def _by_home(view: View, rows: Rows) -> Iterable[tuple[bytes, Rows]]:
    homes: dict[bytes, Rows] = {}
    for key, entry in rows:
        homes.setdefault(view.home_of(key), []).append((key, entry))
    return homes.items()


def _tell(standing: Standing, home: bytes, request: Request) -> Steps[bool]:
    """Until it is acknowledged. False: there is another epoch by now."""
    member = standing.view.member(home)
    assert member is not None, "a home is a member"
    while True:
        answer = yield from send(member, request)
        if isinstance(answer, Done):
            return True
        if not (yield from transact(lambda tables: _at(tables, standing.view) is not None)):
            return False
        yield from pause(AGAIN)
