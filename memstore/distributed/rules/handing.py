"""A hand-over: a group of A becomes B's, with its records. Any of it may be cut off by a kill, and goes on after it.

1. *Mark* (`begin`): A notes whom the group goes to. From this transaction on no process of its host commits to it,
   since each commit compares `membership`. Its sharded puts end. It is read here still.
2. *Give*: A sends the records, the outcomes of sharded puts, and at last its largest version. B keeps them beside its
   own, unserved.
3. *Grant*: the seed writes a row for B, whose grant names A's. If B is removed, the group is A's again.
4. *Drop*: A forgets that it owns the group, and raises its floor to B's grant: no request with an older one is done any
   more. Then it deletes the records, and lends their bytes to B. This must be of the term in which step 3 was answered:
   a later seed may have no directory, and hear from A alone what A still owns.
5. *Serve*: A tells B, which asks the directory and serves what it kept (`owning.admit`). Requests with B's grant may
   come before that: they wait, because processes of A's host may read records there as long as it has them. If A was
   removed, B need not be told.
6. *Finish*: the seed begins an epoch. Until A has heard of an epoch after the one in which B served the group, it takes
   part in no listing: B may have been asked for its page before, and A after.
"""

from __future__ import annotations

import msgspec

from memstore.distributed.rules.messages import (
    BYTES_LIMIT,
    KEY_LIMIT,
    OUTCOMES_LIMIT,
    ROWS_LIMIT,
    Answer,
    Done,
    Entry,
    FindOwners,
    Finish,
    Give,
    HandOver,
    IsAt,
    Later,
    Member,
    NotOwner,
    Owners,
    Ownership,
    Roster,
    Serve,
    Stale,
    Standing,
    group_of,
)
from memstore.distributed.rules.owning import REMOVED, admit, group_page, passing_over, record_grant
from memstore.distributed.rules.sharded import end_attempts_of, remember
from memstore.distributed.rules.steps import (
    KeptGroup,
    LeavingGroup,
    Lent,
    Steps,
    Tables,
    own_standing,
    send,
    transact,
    view,
)

Rows = list[tuple[bytes, Entry | None]]  # None: the record is damaged


def begin(tables: Tables, group: bytes, taker: bytes) -> None:
    """Marks a group: it goes to another member. Nothing happens if it isn't owned here, or goes already.

    A root that joins hands over nothing: it takes records of groups that it doesn't own for such as it must claim.
    """
    standing, own = tables.standing(), tables.owned(group)
    if standing is None or own is None or tables.leaving(group) is not None:
        return
    if standing.is_removed or standing.is_joining:
        return
    if taker in standing.roster.ids and taker != standing.member:
        tables.put_leaving(group, LeavingGroup(taker, own.number))
        end_attempts_of(tables, standing, group)


def cancel(tables: Tables, group: bytes) -> None:
    """Keeps a group here that was to go to another member, if the directory doesn't have that one yet."""
    standing, leaving = tables.standing(), tables.leaving(group)
    if standing is not None and leaving is not None and leaving.grant is None:
        tables.put_leaving(group, msgspec.structs.replace(leaving, taker=standing.member))


# --- the old owner ----------------------------------------------------------------------------------------------------


def go_on() -> Steps[bool]:
    """Goes on with each group that leaves this host, as far as it comes. Returns whether there is one."""
    standing, all_leaving = yield from view(lambda tables: (tables.standing(), tables.all_leaving()))
    if standing is None or standing.is_removed:
        return False
    served = 0
    for group, leaving in all_leaving:
        taker = standing.roster.member(leaving.taker)
        if leaving.grant is None:
            stays = taker is None or taker.id == standing.member
            yield from _give(standing, group, leaving, None if stays else taker)
        elif not leaving.served:
            yield from _hand(standing, group, leaving, taker)
        elif standing.roster.epoch > leaving.served:
            yield from transact(lambda tables, group=group: tables.drop_leaving(group))
        else:
            served = max(served, leaving.served)
    if served:  # one epoch for all of them
        yield from send(standing.seed, Finish(served))
    return bool(all_leaving)


def _give(standing: Standing, group: bytes, leaving: LeavingGroup, taker: Member | None) -> Steps[None]:
    """Steps 2 to 4."""
    after: bytes | None = b"" if taker is not None else None
    while taker is not None and after is not None:
        portions, after = yield from view(
            lambda tables, start=after: _page(tables, standing.member, group, leaving, start)
        )
        for portion in portions:
            if not isinstance((yield from send(taker, portion)), Done):
                return
    to = standing.member if taker is None else taker.id
    answer = yield from send(standing.seed, HandOver(group, standing.member, leaving.of, to))
    if isinstance(answer, Owners) and answer.rows and (row := answer.rows[0]) is not None:
        yield from transact(lambda tables: _drop(tables, standing.roster, leaving, row))


def _page(
    tables: Tables, giver: bytes, group: bytes, leaving: LeavingGroup, after: bytes
) -> tuple[list[Give], bytes | None]:
    """Makes messages of the next records, as many as they need: what a record says of a value may be megabytes.

    Returns also where the next page begins.
    """
    found: list[Give] = []
    if not after:
        outcomes = [outcome for outcome in tables.outcomes() if group_of(outcome.key) == group]
        for first in range(0, len(outcomes), OUTCOMES_LIMIT):
            found.append(Give(group, giver, leaving.of, (), tuple(outcomes[first : first + OUTCOMES_LIMIT])))
    page = group_page(tables, group, after, ROWS_LIMIT)
    rows: Rows = []
    nbytes = 0
    for key, entry in page:
        size = KEY_LIMIT if entry is None else entry.nbytes
        if rows and (nbytes + size > BYTES_LIMIT or len(rows) == ROWS_LIMIT):
            found.append(_message(giver, group, leaving, rows, None))
            rows, nbytes = [], 0
        rows.append((key, entry))
        nbytes += size
    if rows or not page:
        found.append(_message(giver, group, leaving, rows, None if page else tables.version))
    return found, page[-1][0] if page else None


def _message(giver: bytes, group: bytes, leaving: LeavingGroup, rows: Rows, version: int | None) -> Give:
    whole = tuple((key, entry) for key, entry in rows if entry is not None)
    damaged = tuple(key for key, entry in rows if entry is None)
    return Give(group, giver, leaving.of, whole, (), damaged, version)


def _drop(tables: Tables, roster: Roster, leaving: LeavingGroup, row: Ownership) -> None:
    standing = tables.standing()
    if standing is None or standing.is_removed or standing.roster.term != roster.term:
        return
    if tables.leaving(row.group) != leaving:
        return
    if row.owner == standing.member:  # it stays
        record_grant(tables, row.group, row.grant)
        tables.drop_leaving(row.group)
        return
    tables.drop_owned(row.group)
    tables.put_leaving(row.group, msgspec.structs.replace(leaving, taker=row.owner, grant=row.grant))
    if standing.floor < row.grant.number:
        tables.put_standing(msgspec.structs.replace(standing, floor=row.grant.number))


def _hand(standing: Standing, group: bytes, leaving: LeavingGroup, taker: Member | None) -> Steps[None]:
    """The rest of step 4, and step 5."""
    after: bytes | None = b""
    while after is not None:
        after = yield from transact(lambda tables, start=after: _drop_page(tables, group, leaving, start))
    if taker is None:  # what it was handed is gone with it
        yield from transact(lambda tables: tables.drop_leaving(group))
        return
    answer = yield from send(taker, Serve(group, leaving.of))
    if isinstance(answer, IsAt):
        served = msgspec.structs.replace(leaving, served=answer.version)
        yield from transact(lambda tables: tables.put_leaving(group, served))


def _drop_page(tables: Tables, group: bytes, leaving: LeavingGroup, after: bytes) -> bytes | None:
    """Deletes records. Bytes that lie here are lent to the new owner. What is damaged stays."""
    standing = tables.standing()
    if standing is None or tables.leaving(group) != leaving:  # it may be owned here once more
        return None
    page = group_page(tables, group, after, ROWS_LIMIT)
    for key, entry in page:
        if entry is None:
            continue
        tables.delete_record(key)
        for place in entry.places:
            if place.host == standing.member:
                with passing_over(tables, key):
                    tables.lend(place, Lent(key, leaving.taker))
    return page[-1][0] if page else None


# --- the new owner ----------------------------------------------------------------------------------------------------


def take(tables: Tables, standing: Standing, request: Give) -> Answer:
    """Keeps what comes. A late duplicate changes nothing that counts: no grant names what it brings."""
    if standing.is_removed:
        return REMOVED
    own, kept = tables.owned(request.group), tables.kept(request.group)
    if own is not None:
        return Done()
    if kept is not None and kept.of > request.of:
        return Stale(standing.roster.term)
    if kept is not None and kept.of < request.of:
        tables.drop_kept(request.group)
        kept = None
    kept = kept or KeptGroup(request.giver, request.of)
    if kept.version is None:
        for key, entry in request.rows:
            if group_of(key) == request.group:
                tables.keep(key, entry)
        for key in request.damaged:
            if group_of(key) == request.group:
                tables.keep(key, None)
        for outcome in request.outcomes:
            remember(tables, outcome)
        kept = msgspec.structs.replace(kept, version=request.version)
    tables.put_kept(request.group, kept)
    return Done()


def serve(tables: Tables, standing: Standing, request: Serve) -> Answer:
    """Hears that the giver has none of the records any more. Answers once they are served here."""
    if standing.is_removed:
        return REMOVED
    kept = tables.kept(request.group)
    if kept is None or kept.of != request.of:
        return IsAt(standing.roster.epoch)
    if not kept.is_free:
        tables.put_kept(request.group, msgspec.structs.replace(kept, is_free=True))
    return Later()


def settle_kept(standing: Standing, refused: dict[bytes, int]) -> Steps[bool]:
    """Asks the directory what was kept here is of. Serves it, or drops it. Returns whether anything was kept.

    Args:
        refused: of each group the number of a grant that was dead here.
    """
    kept_of = dict((yield from view(lambda tables: tables.all_kept())))
    groups = tuple(kept_of)
    if not groups:
        return False
    numbers = tuple(refused.get(group, 0) for group in groups)
    answer = yield from send(standing.seed, FindOwners(groups, numbers))
    if not isinstance(answer, Owners):
        return True
    for group, row in zip(groups, answer.rows, strict=True):
        kept = kept_of[group]
        if row is not None and row.owner == standing.member and row.grant.after == kept.of:
            opened = yield from transact(lambda tables, row=row, kept=kept: _open(tables, row, kept))
            if isinstance(opened, NotOwner):
                refused[group] = row.grant.number
        elif row is None or row.owner != kept.giver or kept.of <= row.grant.after:  # a late duplicate has brought it
            yield from transact(lambda tables, group=group, kept=kept: _forget(tables, group, kept))
    return True


def _open(tables: Tables, row: Ownership, kept: KeptGroup) -> Answer | None:
    if tables.owned(row.group) is not None:
        _forget(tables, row.group, kept)
        return None
    return admit(tables, own_standing(tables), [row.group], [row.grant], changes=False)


def _forget(tables: Tables, group: bytes, kept: KeptGroup) -> None:
    now = tables.kept(group)
    if now is not None and now.of == kept.of:
        tables.drop_kept(group)
