"""Segments of this host that records of other owners name: how they are let go.

An owner that replaces a value owes its host a *release*, and tells it until it is acknowledged. What a client has lent
for a put and never heard of again, or whose owner is gone, is found by an *audit*: the call is resolved, so that it
can't be made any more, and the group's owner is asked whether it names the segment. If nobody owns the group, nothing
names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from memstore.distributed.rules.messages import (
    ROWS_LIMIT,
    Answer,
    Committed,
    Done,
    Ended,
    Failed,
    FindOwners,
    IsNamed,
    Named,
    Never,
    NoSession,
    NotOwner,
    Owners,
    Place,
    Prepared,
    Release,
    Resolve,
    Standing,
    group_of,
)
from memstore.distributed.rules.owning import are_named, is_here, is_named, passing_over, resolve
from memstore.distributed.rules.steps import Lent, Steps, Tables, own_standing, send, transact, view
from memstore.errors import MemstoreError

log = logging.getLogger("memstore")


def give_back(places: Sequence[Place]) -> Steps[None]:
    """Gives back what was filled, or lent, for a call that has failed. It raises nothing: the real error is the
    call's."""

    def retire(tables: Tables) -> None:
        standing = tables.standing()
        for place in places:
            if is_here(standing, place):
                tables.retire(place)

    try:
        yield from transact(retire)
    except (MemstoreError, OSError) as error:  # the store may be what failed
        log.warning("bytes of a call that failed are left to an audit, or a sweep: %s", str(error))


def release(tables: Tables, standing: Standing, request: Release) -> Answer:
    """Retires what is lent. What records of this host name by now is not: the release is an old one then."""
    for place in request.places:
        with passing_over(tables, b"segment %016x" % place.segment):
            if place.host == standing.member and tables.lent(place) is not None:
                tables.retire(place)
    return Done()


def pay(is_pinned: Callable[[Place], bool]) -> Steps[None]:
    """Tells other hosts what they are owed, once."""
    standing, owed = yield from view(lambda tables: (tables.standing(), tables.owed(ROWS_LIMIT)))
    if standing is None:
        return
    for host in sorted({place.host for place in owed}):
        places = tuple(place for place in owed if place.host == host and not is_pinned(place))
        member = standing.roster.member(host)
        answer = Done() if member is None else None
        if member is not None and places:
            answer = yield from send(member, Release(places))
        if isinstance(answer, Done):
            yield from transact(lambda tables, paid=places: [tables.settle(place) for place in paid])


class Audit:
    """Which lent segments are really named by records of other owners, since the index process was started.

    Args:
        clock: this host's clock since boot.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._members: frozenset[bytes] = frozenset()
        self._seen: set[Place] = set()
        self._refused: dict[bytes, int] = {}  # of groups, the number of the grant that their owner has refused

    def run(self) -> Steps[None]:
        """Looks at what is due, once; at all of it again when a member was removed."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.is_removed or standing.is_joining:
            return
        if not self._members <= standing.roster.ids:
            self._seen.clear()
        self._members = standing.roster.ids
        now, after = self._clock(), 0
        while rows := (yield from view(lambda tables, start=after: tables.all_lent(start, ROWS_LIMIT))):
            after = rows[-1][0].put_id
            for place, lent in rows:
                if place not in self._seen and lent.until <= now:
                    yield from self._look_at(standing, place, lent)

    def _look_at(self, standing: Standing, place: Place, lent: Lent) -> Steps[None]:
        if lent.session and not (yield from self._resolved(standing, lent)):
            return
        group = group_of(lent.key)
        answer = yield from send(standing.seed, FindOwners((group,), (self._refused.pop(group, 0),)))
        if not isinstance(answer, Owners) or not answer.rows:
            return
        row = answer.rows[0]
        if row is None:
            yield from transact(lambda tables: self._retire(tables, place, lent))
            return
        request = Named(lent.key, place, row.grant)
        owner = standing.roster.member(row.owner)
        if row.owner == standing.member:
            answer = yield from transact(lambda tables: are_named(tables, own_standing(tables), request))
        else:
            answer = None if owner is None else (yield from send(owner, request))
        if isinstance(answer, NotOwner):  # it was never recorded, and others since
            self._refused[group] = row.grant.number
        elif answer == IsNamed(named=False):
            yield from transact(lambda tables: self._retire(tables, place, lent))
        elif isinstance(answer, IsNamed):
            self._seen.add(place)

    def _resolved(self, standing: Standing, lent: Lent) -> Steps[bool]:
        """Returns whether it is known that the call isn't under way any more."""
        member = standing.roster.member(lent.owner)
        if member is None:
            return True
        if member.id == standing.member:
            request = Resolve(lent.session, lent.lane, lent.number)
            yield from transact(lambda tables: resolve(tables, request))
            return True
        answer = yield from send(member, Resolve(lent.session, lent.lane, lent.number))
        return isinstance(answer, Committed | Failed | Never | NoSession | Prepared | Ended)

    def _retire(self, tables: Tables, place: Place, lent: Lent) -> None:
        """Retires it, unless its client has lent it anew meanwhile, or a record here names it, or a part does."""
        with passing_over(tables, lent.key):
            if tables.lent(place) == lent and not is_named(tables, lent.key, place):
                tables.retire(place)
