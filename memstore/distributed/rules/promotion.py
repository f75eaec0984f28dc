"""The seed: who has its directory, and how another member becomes the seed.

**Deputies** have all of the directory. The seed appoints them (`appoint`), and leaves out one that doesn't answer.

**A new seed** begins a term. `promote`, at a deputy, once a majority has answered that it is one (`_is_seed_already`):

1. It asks all members to obey no seed of an older term any more, and itself first. Each says which roster it has.
2. It goes on with a majority of the newest roster that it was told, if it is a deputy in that one: then it has all that
   the directory has ever said.
3. It writes the same members, under a new term, and tells them. This roster counts as any other does.

If the majority or the directory is lost, a person may force it. Then the members of the new term announce what they
own, and grants and denials wait until each has, or was removed. The old seed may live, and may have admitted hosts of
which the new one hasn't heard. A member that knows one obeys a roster only with it in it (`roster.adopt`), and the new
seed takes it in (`take_back`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import msgspec

from memstore.distributed.rules.directory import BETWEEN, Directory
from memstore.distributed.rules.messages import (
    PORTION,
    ROWS_LIMIT,
    Announce,
    Announced,
    Answer,
    Ask,
    IsRoster,
    Later,
    Meet,
    Met,
    Obey,
    Promise,
    Promised,
    Refused,
    Stale,
)
from memstore.distributed.rules.nouns import EPOCH_BITS, SEED_BITS, Member, Ownership, Roster, Standing
from memstore.distributed.rules.roster import adopt, in_rows, leave, left_out, propose
from memstore.distributed.rules.steps import Steps, Tables, pause, send, send_all, transact, view

MOST_DEPUTIES = 2
SILENT = 3_000_000_000  # nanoseconds without an answer after which a deputy is replaced
LOST_EPOCHS = 1024  # that a seed which is lost may have made, and nobody has heard of
_ROUNDS = 20  # of questions before a promotion gives up
_BETWEEN = 0.2  # seconds


# --- deputies ---------------------------------------------------------------------------------------------------------


def appoint(seed: Directory) -> Steps[None]:
    """Leaves out a deputy that doesn't answer, and makes one of a member that has all of the directory.

    Deputies are owners, and one that is none is left out as soon as there is another: it may go at any moment, with
    most of its kind, and what others put for the first time would wait for it. A seed that is the only owner has one.

    It follows another seed, if members know of one. It begins a term itself if a promotion was cut off: members that
    have promised obey no older one.
    """
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or standing.is_removed:
        return
    seed.begin(standing)
    roster, now = standing.roster, seed.clock()
    seed.hear_of(standing.promised)
    rival, since = seed.rival
    if rival and (yield from _follow(standing)):
        return
    if rival and now - since > SILENT and not seed.is_over:  # nothing came of it, and who has promised obeys nobody
        yield from transact(lambda tables: _hear_of(tables, rival))
        with contextlib.suppress(NotPromoted):
            yield from promote(seed, forced=bool(standing.unheard))
    if rival or standing.unheard:
        return
    silent = {one for one, answered in seed.answered.items() if now - answered > SILENT}
    if silent & set(roster.deputies):
        left = tuple(one for one in roster.deputies if one not in silent)
        yield from transact(lambda tables: _propose_deputies(tables, seed, standing, left))
        return
    steady = _steady(roster)
    firm = tuple(one for one in roster.deputies if one in steady)
    if firm and firm != roster.deputies:
        yield from transact(lambda tables: _propose_deputies(tables, seed, standing, firm))
        return
    if (roster.deputies and len(firm) >= min(MOST_DEPUTIES, len(steady))) or not seed.is_settled(standing):
        return
    candidate = seed.candidate
    is_able = candidate in (steady if roster.deputies else roster.ids) and candidate not in (*roster.deputies, *silent)
    if candidate is None or not is_able:
        present = [one for one, position in seed.heard.items() if position == roster.position and one in roster.ids]
        able = [one for one in sorted(present) if one not in (*roster.deputies, standing.member, candidate)]
        able = [one for one in able if one in steady] or ([] if roster.deputies else able)
        seed.candidate = able[0] if able else None
        if seed.candidate is not None:
            seed.answered.pop(seed.candidate, None)
    else:
        found = (*roster.deputies, candidate)
        yield from transact(lambda tables: _propose_deputies(tables, seed, standing, found, candidate))


def _steady(roster: Roster) -> frozenset[bytes]:
    """Returns the members that are to be deputies, before any other: all that own groups, or may, but the seed.

    One that leaves gives them away.
    """
    return frozenset(one.id for one in roster.owners if not roster.is_leaver(one.id)) - {roster.seed}


def _follow(standing: Standing) -> Steps[bool]:
    """Asks members whether another is the seed by now, and that one for its roster. Returns whether there is one.

    Who was removed, and was the seed before that, is told by nobody.
    """
    own, newest = standing.roster.member(standing.member), standing.roster
    if own is None:
        return False
    for member in standing.roster.members:
        if member != own:
            answer = yield from send(member, Meet(own, None))
            theirs = answer.roster if isinstance(answer, Met) else None
            if theirs is not None and theirs.cluster == newest.cluster:
                newest = max(newest, theirs, key=lambda roster: roster.position)
    seed = newest.member(newest.seed)
    if seed is None or newest.term == standing.roster.term:
        return False
    answer = yield from send(seed, Ask(own, newest.cluster, *standing.roster.position, promised=standing.promised))
    if isinstance(answer, Refused) and answer.is_removed:
        yield from transact(leave)
    elif isinstance(answer, IsRoster):
        yield from transact(lambda tables: adopt(tables, answer.roster))
    return True


def _propose_deputies(
    tables: Tables, seed: Directory, before: Standing, deputies: tuple[bytes, ...], new: bytes | None = None
) -> None:
    standing = tables.standing()
    if standing is None or standing.roster != before.roster or standing.promised > standing.roster.term:
        return
    if new is None or (seed.is_settled(standing) and seed.has_all(tables, new)):
        propose(tables, standing, seed.is_settled(standing), deputies=deputies)


# --- a new seed -------------------------------------------------------------------------------------------------------


def take_promise(tables: Tables, standing: Standing | None, request: Promise) -> Answer:
    if standing is None:
        return _promise_early(tables, request)
    if request.cluster != standing.roster.cluster or standing.is_removed:
        return Refused("this host is no member of that cluster", is_removed=standing.is_removed)
    if request.term < standing.promised or request.term <= standing.roster.term:
        return Stale(max(standing.promised, standing.roster.term))
    if request.term > standing.promised:
        tables.put_standing(msgspec.structs.replace(standing, promised=request.term))
    return Promised(standing.roster)


def _promise_early(tables: Tables, request: Promise) -> Answer:
    """Promises as a root that a roster names, and that hasn't been told so: it counts in that roster's majority.

    *Schedule (found):* of five hosts one is lost; another root is admitted, and a second host is lost before anybody
    has told it. Three of six are no majority.
    """
    cluster, term = tables.early_promise
    if term and cluster != request.cluster:
        return Refused("this root has made a promise to another cluster, which was to admit it")
    if request.term < term:
        return Stale(term)
    tables.early_promise = request.cluster, request.term
    return Promised(None)


def take_obey(tables: Tables, standing: Standing, request: Obey) -> Answer:
    if request.roster.cluster == standing.roster.cluster and standing.member in request.roster.ids:
        adopt(tables, request.roster)
    standing = tables.standing() or standing
    is_later = standing.promised > request.roster.term  # to one whose promotion was cut off, perhaps: it is told of it
    return Stale(standing.promised) if is_later else Promised(standing.roster)


class NotPromoted(Exception):
    """Says why this member can't be the seed."""


def promote(seed: Directory, *, forced: bool = False) -> Steps[None]:
    """Makes this member the seed.

    Args:
        seed: this member's.
        forced: without a majority, or without the directory: what an old seed has granted since may be granted twice.

    Raises:
        NotPromoted.
    """
    if not forced and (yield from _is_seed_already(seed)):
        return
    standing = yield from transact(_promise_oneself)
    if standing is None:
        raise NotPromoted(_NO_MEMBER)
    term, newest = standing.promised, standing.roster
    promised = {standing.member}
    for _ in range(_ROUNDS):
        asked = [member for member in newest.members if member.id not in promised]
        request = Promise(standing.roster.cluster, term)
        answers = yield from send_all([(member, request) for member in asked])
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Stale):
                yield from transact(lambda tables, term=answer.term: _hear_of(tables, term))
                raise NotPromoted(f"{member.label} obeys a later seed, or is to: promote it once more")
            if isinstance(answer, Promised):
                promised.add(member.id)
                newest = max(newest, answer.roster or newest, key=lambda roster: roster.position)
        if forced or _has_majority(newest, promised):
            break
        yield from pause(_BETWEEN)
    if standing.is_seed:  # else another promotion of this host, by a person, may have come to its end meanwhile
        seed.is_over = newest.seed != standing.member
    why_not = _why_not(standing, newest, promised)
    if why_not is not None and (not forced or standing.member not in newest.ids):
        raise NotPromoted(why_not)
    if not (yield from transact(lambda tables: _begin_term(tables, standing.member, newest, term, why_not is None))):
        raise NotPromoted("another host was promoted meanwhile")
    yield from tell_members(seed, [member for member in newest.members if member.id in promised])


_NO_MEMBER = "this host is no member of a cluster"


def _is_seed_already(seed: Directory) -> Steps[bool]:
    """Finds out whether this member may be the seed, before anybody promises anything.

    Whoever has promised obeys no older seed: so one that can't be the seed disturbs nobody, however often it is tried.

    Returns: whether it is the seed, and nothing is to be done.

    Raises:
        NotPromoted.
    """
    standing = yield from view(lambda tables: tables.standing())
    own = None if standing is None or standing.is_removed else standing.roster.member(standing.member)
    if standing is None or own is None:
        raise NotPromoted(_NO_MEMBER)
    newest, met = standing.roster, {own.id}
    for _ in range(_ROUNDS):
        asked = [member for member in newest.members if member.id not in met]
        answers = yield from send_all([(member, Meet(own, None)) for member in asked])
        for member, answer in zip(asked, answers, strict=True):
            theirs = answer.roster or newest if isinstance(answer, Met) else None  # or it hasn't been told of any
            if theirs is not None and theirs.cluster == newest.cluster:
                met.add(member.id)
                newest = max(newest, theirs, key=lambda roster: roster.position)
        if _has_majority(newest, met):
            break
        yield from pause(_BETWEEN)
    if standing.is_seed:
        seed.is_over = newest.seed != own.id
    why_not = _why_not(standing, newest, met)
    if why_not is not None:
        raise NotPromoted(why_not)
    is_seed = standing.is_seed and newest == standing.roster and standing.promised <= newest.term
    return is_seed and not (seed.term == newest.term and seed.rival[0])


def _has_majority(newest: Roster, having: Collection[bytes]) -> bool:
    return 2 * len(newest.ids.intersection(having)) > len(newest.members)


def _why_not(standing: Standing, newest: Roster, having: Collection[bytes]) -> str | None:
    """Returns why this member can't be the seed, unless it is forced; None: it can.

    Args:
        newest: the newest roster that it knows, or any that has answered.
        having: the members that have answered, and this one.
    """
    if standing.member not in newest.ids:
        return "this host was removed from the cluster"
    if not _has_majority(newest, having):
        answering = len(newest.ids.intersection(having))
        return f"{answering} of {len(newest.members)} hosts answer: more than half of them are needed"
    if standing.member in newest.deputies or (newest.seed == standing.member and not standing.unheard):
        return None
    able = [member.label for member in newest.members if member.id in (newest.seed, *newest.deputies)]
    return (
        f"this host has no copy of the directory: promote {' or '.join(able)}, which has one; if none of these comes "
        "back, force it: see docs/hosts.md"
    )


def _promise_oneself(tables: Tables) -> Standing | None:
    """Chooses a term: above all that this member has heard of, and of nobody else who is forced at the same time."""
    standing = tables.standing()
    if standing is None or standing.is_removed:
        return None
    own = sorted(standing.roster.ids | {standing.member}).index(standing.member) % (1 << SEED_BITS)
    is_own = standing.promised > standing.roster.term and standing.promised % (1 << SEED_BITS) == own
    if not is_own:  # else it has tried with that one before
        counter = (max(standing.promised, standing.roster.term) >> SEED_BITS) + 1
        standing = msgspec.structs.replace(standing, promised=counter << SEED_BITS | own)
        tables.put_standing(standing)
    return standing


def _hear_of(tables: Tables, term: int) -> None:
    standing = tables.standing()
    if standing is not None and standing.promised < term:
        tables.put_standing(msgspec.structs.replace(standing, promised=term))


def _begin_term(tables: Tables, member: bytes, newest: Roster, term: int, is_whole: bool) -> bool:
    standing = tables.standing()
    if standing is None or standing.promised != term or standing.roster.term >= term:
        return False
    deputies = tuple(one for one in newest.deputies if one != member) if is_whole else ()
    voters = tuple(one.id for one in newest.members) if is_whole else ()
    epoch = newest.epoch + (1 if is_whole else LOST_EPOCHS)
    base = (0, 0) if is_whole else newest.position if newest.base == (0, 0) else newest.base
    # Without the directory nobody knows who owns groups, until all have announced it.
    holders = newest.holders if is_whole else tuple(one.id for one in newest.members if not one.is_owner)
    leavers, known = newest.leavers, newest.members
    as_before = (newest.lease, newest.leased, newest.departed, newest.returns, newest.policies, newest.quotas)
    changed = (deputies, voters, holders, leavers, base, *as_before)
    adopt(tables, Roster(newest.cluster, term, epoch, known, member, *changed))
    standing = tables.standing()
    assert standing is not None
    if not is_whole:
        unheard = tuple(one.id for one in newest.members)
        tables.put_standing(msgspec.structs.replace(standing, unheard=unheard))
    return True


def tell_members(seed: Directory, members: Sequence[Member] | None = None) -> Steps[None]:
    """Tells members of a new seed, until each has heard of it; they may ask the old one still. None: all."""
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or standing.is_removed:
        return
    seed.begin(standing)
    members = [
        member
        for member in (standing.roster.members if members is None else members)
        if member.id != standing.member and seed.heard.get(member.id, (0, 0))[0] != seed.term
    ]
    answers = yield from send_all([(member, Obey(standing.roster)) for member in members])
    for member, answer in zip(members, answers, strict=True):
        theirs = answer.roster if isinstance(answer, Promised) else None
        if isinstance(answer, Stale):
            seed.hear_of(answer.term)
        elif theirs is not None and theirs.term == seed.term:
            seed.hear(member.id, theirs.position)
        elif theirs is not None:
            yield from transact(lambda tables, older=theirs: take_back(tables, older))


def take_back(tables: Tables, older: Roster) -> None:
    """Takes in whom an older seed had admitted when this one was forced, which hadn't heard of it."""
    standing = tables.standing()
    missed = [] if standing is None or not standing.unheard else left_out(older, standing.roster)
    if standing is None or not standing.is_seed or standing.is_removed or not missed:
        return
    unheard = (*standing.unheard, *(member.id for member in missed))
    members = (*standing.roster.members, *missed)
    propose(tables, standing, is_settled=True, members=members, base=older.position)
    standing = tables.standing() or standing
    tables.put_standing(msgspec.structs.replace(standing, unheard=unheard))


def rebuild(seed: Directory) -> Steps[None]:
    """Writes down what the members announce, while a seed has no directory."""
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or not standing.unheard:
        return
    asked: list[tuple[Member, Announce]] = []  # what comes next of each that has more to say
    for member in standing.roster.members:
        if member.id in standing.unheard:
            asked.append((member, Announce(standing.roster.term, standing.member, None)))
    while asked:
        others = [(member, request) for member, request in asked if member.id != standing.member]
        answers = list(zip(others, (yield from send_all(others)), strict=True))
        for member, request in asked:
            if member.id == standing.member:
                answer = yield from view(lambda tables, request=request: announce(tables, standing, request))
                answers.append(((member, request), answer))
        asked = []
        for (member, request), answer in answers:
            if not isinstance(answer, Announced):
                continue  # it is asked anew, from the beginning
            for first in range(0, len(answer.rows), PORTION):
                yield from transact(lambda tables, rows=answer.rows[first : first + PORTION]: _write_rows(tables, rows))
                yield from pause(BETWEEN)
            if answer.rows:
                asked.append((member, msgspec.structs.replace(request, after=answer.rows[-1].group)))
            else:
                id, versions = member.id, answer.versions
                yield from transact(lambda tables, id=id, versions=versions: _has_announced(tables, id, versions))


def announce(tables: Tables, standing: Standing, request: Announce) -> Answer:
    """Says what this member owns, and what it has handed over and nobody else may know of."""
    if standing.is_removed or request.term < standing.roster.term:
        return Stale(standing.roster.term)
    if (request.term, request.seed) != (standing.roster.term, standing.roster.seed):
        return Later()
    owned = [Ownership(group, standing.member, grant) for group, grant in tables.all_owned(request.after, ROWS_LIMIT)]
    last = owned[-1].group if len(owned) == ROWS_LIMIT else None
    for group, leaving in tables.all_leaving():
        is_next = request.after is None or group > request.after
        if leaving.grant is not None and is_next and (last is None or group <= last):
            owned.append(Ownership(group, leaving.taker, leaving.grant, standing.member))
    owned.sort(key=lambda row: row.group)
    return Announced(tuple(owned[:ROWS_LIMIT]), tables.version)


def _write_rows(tables: Tables, rows: Sequence[Ownership]) -> None:
    known = tables.ownerships_of([row.group for row in rows])
    newer: dict[bytes, Ownership] = {}
    for row in rows:
        old = newer.get(row.group) or known.get(row.group)
        if old is None or old.grant.number < row.grant.number:
            newer[row.group] = row
    tables.put_ownerships(list(newer.values()))


def _has_announced(tables: Tables, member: bytes, versions: int) -> None:
    standing = tables.standing()
    if standing is None or not standing.is_seed:
        return
    if versions >> EPOCH_BITS > standing.roster.epoch:
        propose(tables, standing, is_settled=True, epoch=versions >> EPOCH_BITS)
        standing = tables.standing() or standing
    unheard = tuple(one for one in standing.unheard if one != member)
    if not unheard and standing.roster.holders:
        named = in_rows(tables)
        holders = tuple(one for one in standing.roster.holders if one in named)
        if holders != standing.roster.holders:
            propose(tables, standing, is_settled=True, holders=holders)
            standing = tables.standing() or standing
    tables.put_standing(msgspec.structs.replace(standing, unheard=unheard))
