"""The roster: who is a member. The seed alone changes it, one change after the other.

**A change counts** once a majority of the roster before has it, and each deputy (`Directory.counts`). Until then
the seed tells nobody that he is admitted or removed, and grants nothing. So of any majority of a roster somebody knows
the next one, and nobody can be the seed by an old one.

**A new seed** begins a term. `promote`, at a deputy, once a majority has answered that it is one (`_is_seed_already`):

1. It asks all members to obey no seed of an older term any more, and itself first. Each says which roster it has.
2. It goes on with a majority of the newest roster that it was told, if it is a deputy in that one: then it has all that
   the directory has ever said.
3. It writes the same members, under a new term, and tells them. This roster counts as any other does.

If the majority or the directory is lost, a person may force it. Then the members of the new term announce what they
own, and grants and denials wait until each has, or was removed. The old seed may live, and may have admitted hosts of
which the new one hasn't heard. A member that knows one obeys a roster only with it in it (`adopt`), and the new seed
takes it in (`take_back`).

**A root that has keys** is admitted with all of its groups, or refused if another member owns one (`bring_groups`,
`note_groups`). Before that its records get versions of the epoch in which it will be admitted, so that none of a key
goes down or comes twice. All of it is done in portions, and no put waits for more than one of them.

**Founding** stands in `Index.found`. A root without a cluster that was told of no other host waits three seconds, and
then makes one. Members of another cluster that find it at the address of their seed tell it, and it joins them; so does
their seed, which looks for members that are silent. Of hosts that were told of each other, and know of no cluster, the
one with the lowest id makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

import msgspec

from memstore.distributed.rules.directory import AHEAD, BETWEEN, Directory, Newcomer, give, owner_row
from memstore.distributed.rules.messages import (
    EPOCH_BITS,
    MOST_EPOCHS,
    POLICIES_LIMIT,
    PORTION,
    ROWS_LIMIT,
    SEED_BITS,
    TERM_BITS,
    Announce,
    Announced,
    Answer,
    Ask,
    BringGroups,
    Brought,
    Change,
    ClaimGroups,
    Departed,
    Done,
    Drain,
    Entry,
    FindOwners,
    Finish,
    Grant,
    IsRoster,
    Later,
    Meet,
    Member,
    Met,
    Obey,
    Owners,
    Ownership,
    Policy,
    Promise,
    Promised,
    Recovered,
    Refused,
    Remove,
    Roster,
    SetPolicy,
    Stale,
    Standing,
)
from memstore.distributed.rules.owning import dispose, group_heads, passing_over, record_grant
from memstore.distributed.rules.recovery import LOST_LIMIT, heirs, is_pending, note_change, tell_lost
from memstore.distributed.rules.sharded import end_strays
from memstore.distributed.rules.steps import Steps, Tables, own_standing, pause, send, send_all, transact, view

MOST_DEPUTIES = 2
SILENT = 3_000_000_000  # nanoseconds without an answer after which a deputy is replaced
LOOKED_FOR = 1_000_000_000  # nanoseconds after which a member that isn't heard of is looked for: less than ALONE
FEWEST_LEASED = 3  # members: of two, no majority is left that could remove the other one
LOST_EPOCHS = 1024  # that a seed which is lost may have made, and nobody has heard of
_NEWCOMER_SILENT = 10_000_000_000  # nanoseconds after which another root gets a group that was noted for one
_ROUNDS = 20  # of questions before a promotion gives up, or a root begins anew to join
_BETWEEN = 0.2  # seconds


# --- every member -----------------------------------------------------------------------------------------------------


def adopt(tables: Tables, roster: Roster) -> bool:
    """Writes a roster, if it is newer than what this member has and of a seed that it obeys.

    A term ends all grants of older ones that aren't recorded as owned. A term that was forced leaves out nobody whom an
    older seed has admitted.
    """
    standing = tables.standing()
    if standing is None or roster.position <= standing.roster.position or roster.term < standing.promised:
        return False
    if not roster.voters and _left_out(standing.roster, roster):
        return False
    floor = standing.floor
    if roster.term > standing.roster.term:
        floor = max(floor, roster.term << TERM_BITS)
    unheard = tuple(one for one in standing.unheard if one in roster.ids and roster.seed == standing.member)
    losses = standing.losses + (not standing.roster.ids <= roster.ids)
    standing = msgspec.structs.replace(standing, roster=roster, floor=floor, unheard=unheard, losses=losses)
    tables.put_standing(standing)
    end_strays(tables, standing)
    return True


def _left_out(older: Roster, forced: Roster) -> list[Member]:
    """Returns the members of an older term that a forced one hasn't, as its seed had not heard of them."""
    if older.term >= forced.term or older.position <= forced.base:
        return []
    return [member for member in older.members if member.id not in forced.ids]


def leave(tables: Tables) -> None:
    """Writes that this root was removed from the cluster."""
    standing = tables.standing()
    if standing is not None and not standing.is_removed:
        standing = msgspec.structs.replace(standing, is_removed=True)
        tables.put_standing(standing)
        end_strays(tables, standing)


def make_cluster(member: Member, cluster: bytes) -> Steps[None]:
    """Makes a cluster of one member, which owns all of its groups. New versions go on above those of its records.

    What is written before the last step means nothing without it.
    """
    yield from forget_grants()
    epoch = (yield from view(lambda tables: tables.version >> EPOCH_BITS)) + 1
    roster = Roster(cluster, 1, epoch, (member,), member.id)
    start: bytes | None = b""
    while start is not None:
        groups, start = yield from view(lambda tables, start=start: tables.groups(start, PORTION))
        yield from transact(lambda tables, groups=groups: _own(tables, roster, groups))
        yield from pause(BETWEEN)
    yield from transact(lambda tables: found(tables, member, cluster, epoch))


def _own(tables: Tables, roster: Roster, groups: Sequence[bytes]) -> None:
    if tables.standing() is None:  # else another one has admitted it meanwhile
        for group in groups:
            record_grant(tables, group, give(tables, roster, group, roster.seed).grant)


def found(tables: Tables, member: Member, cluster: bytes, epoch: int = 1) -> None:
    """Writes the first roster. Groups that the root has and doesn't own are claimed then, as by one that joins."""
    if tables.standing() is None:
        has_keys = bool(tables.groups(b"", 1)[0])
        holders = (member.id,) if has_keys and not member.is_owner else ()
        roster = Roster(cluster, 1, epoch, (member,), member.id, holders=holders)
        tables.put_standing(Standing(member.id, roster, 1 << TERM_BITS, 1, is_joining=has_keys))


def begin(tables: Tables, member: bytes, roster: Roster, *, owns: bool) -> None:
    """Writes the roster that has admitted this root.

    Args:
        owns: the seed says that the groups are this root's for which it has grants. Else it must have none.
    """
    if tables.standing() is None and (owns or not tables.all_owned(None, 1)):
        is_joining = bool(tables.groups(b"", 1)[0])
        tables.put_standing(Standing(member, roster, 0, roster.term, is_joining=is_joining))


# --- a root that has keys ---------------------------------------------------------------------------------------------


def bring_groups(member: Member, seed: Member) -> Steps[Answer | None]:
    """Has the seed note the groups of a root that is to be admitted. Returns `Brought`, or why not.

    1. *Begin*: the seed gives this try a number. What an earlier try has written here goes.
    2. *Name* all groups, a portion a message. If another member owns one, all ends here, and nothing has changed.
    3. *Take in*: name them once more, since more may have been put, and of each portion write the grants here. Before,
       the records of a group get versions of the grant's epoch. So what is owned is ready to be served.

    The root is a store by itself all the while, and its processes put and get. After the admission, which counts if
    nobody has claimed one of the groups by then, they go on: what is owned stays.
    """
    versions = yield from view(lambda tables: tables.version)
    begun = yield from send(seed, BringGroups(member.id, versions=versions))
    if not isinstance(begun, Brought):
        return begun
    yield from forget_grants()
    for takes_in in (False, True):
        start: bytes | None = b""
        while start is not None:
            groups, start = yield from view(lambda tables, start=start: tables.groups(start, PORTION))
            answer = yield from _bring(seed, BringGroups(member.id, begun.number, tuple(groups)))
            if not isinstance(answer, Brought) or len(answer.grants) != len(groups):
                return answer
            if takes_in:
                yield from take_in(list(zip(groups, answer.grants, strict=True)))
    return begun


def _bring(seed: Member, request: BringGroups) -> Steps[Answer | None]:
    answer: Answer | None = None
    for _ in range(_ROUNDS):
        answer = yield from send(seed, request)
        if answer is not None and not isinstance(answer, Later):
            break
        yield from pause(_BETWEEN)
    return answer


def forget_grants() -> Steps[None]:
    """Drops what a root without a cluster has written when it tried to join one, or to make one."""
    while (yield from view(lambda tables: bool(tables.all_owned(None, 1) or tables.ownerships(0, 1)))):
        yield from transact(_forget_grants)
        yield from pause(BETWEEN)


def _forget_grants(tables: Tables) -> None:
    if tables.standing() is None:
        for group, _ in tables.all_owned(None, PORTION):
            tables.drop_owned(group)
        for row in tables.ownerships(0, PORTION):
            tables.drop_ownership(row.group)


def take_in(grants: Sequence[tuple[bytes, Grant]]) -> Steps[bool]:
    """Records grants, once the records of these groups have versions under them: above those of any owner before.

    Returns False if one is dead: a new term has begun.
    """
    at: tuple[int, bytes] | None = (0, b"")
    while at is not None and at[0] < len(grants):
        at = yield from transact(lambda tables, at=at: _take_in(tables, grants, *at))
        yield from pause(BETWEEN)
    return at is not None


def _take_in(
    tables: Tables, grants: Sequence[tuple[bytes, Grant]], number: int, after: bytes
) -> tuple[int, bytes] | None:
    """Takes in a portion. Returns where the next one begins, as the number of a group, and a key; None: one is dead."""
    standing = tables.standing()
    left = PORTION
    while number < len(grants) and left > 0:
        group, grant = grants[number]
        if standing is not None and (grant.term != standing.roster.term or grant.number <= standing.floor):
            return None
        floor = grant.epoch << EPOCH_BITS
        if tables.version < floor:  # what is put from now on is above; each record keeps its place below
            tables.version = floor + tables.version % (1 << EPOCH_BITS)
        page = group_heads(tables, group, after, left)
        for key, entry in page:
            if entry is not None and entry.version < floor:  # what is damaged stays as it is
                version = floor + entry.version % (1 << EPOCH_BITS)
                tables.version = max(tables.version, version)
                tables.raise_version(key, version)
        left -= 1 + len(page)
        if page:
            after = page[-1][0]
        else:
            record_grant(tables, group, grant)
            number, after = number + 1, b""
    return number, after


def finish_joining(standing: Standing) -> Steps[None]:
    """Claims groups that a root has put, and that it doesn't own: after it had named all, and before it was admitted.

    If another member owns one that was put later, this root's own records of it go.
    """
    seed = standing.roster.member(standing.roster.seed)
    assert seed is not None, "the seed is a member"
    start: bytes | None = b""
    while start is not None:
        unclaimed, following = yield from view(lambda tables, start=start: _unclaimed(tables, start))
        if not unclaimed:
            start = following
        elif not (yield from _claim(seed, standing.member, unclaimed)):
            return  # it is begun again
    yield from transact(_has_joined)


def _unclaimed(tables: Tables, start: bytes) -> tuple[list[bytes], bytes | None]:
    groups, following = tables.groups(start, ROWS_LIMIT)
    unclaimed = [group for group in dict.fromkeys(groups) if tables.owned(group) is None]
    return unclaimed[:PORTION], following


def _claim(seed: Member, member: bytes, groups: Sequence[bytes]) -> Steps[bool]:
    """Claims groups at once; if others own some of them, each by itself. Returns whether all are settled."""
    for some in (tuple(groups), *((group,) for group in groups)):
        answer = yield from send(seed, ClaimGroups(some, member))
        if not isinstance(answer, Owners):
            return False
        rows = [row for row in answer.rows if row is not None]
        own = [row for row in rows if row.owner == member]
        if not (yield from take_in([(row.group, row.grant) for row in own])):
            yield from send(seed, FindOwners(tuple(row.group for row in own), tuple(row.grant.number for row in own)))
            return False
        for row in rows:
            while row.owner != member and (yield from transact(lambda tables, row=row: _drop_group(tables, row.group))):
                yield from pause(BETWEEN)
        if len(some) == len(groups) == len(rows):
            break
    return True


def _drop_group(tables: Tables, group: bytes) -> bool:
    """Drops a portion of the records of a group that another member owns. Returns whether there may be more."""
    standing = tables.standing()
    assert standing is not None, "a member stays one"
    page = group_heads(tables, group, b"", PORTION)
    for key, entry in page:
        tables.delete_record(key)
        with passing_over(tables, key):
            dispose(tables, standing, entry.places if entry else ())
    return bool(page)


def _has_joined(tables: Tables) -> None:
    standing = tables.standing()
    assert standing is not None
    tables.put_standing(msgspec.structs.replace(standing, is_joining=False))


def drop_lost(seed: Directory) -> Steps[None]:
    """Drops records whose bytes lay on hosts that are no members any more, and rows of the directory that name them."""
    after: bytes | None = b""
    names: list[bytes] = []
    while after is not None:
        lost, after = yield from view(lambda tables, start=after: _lost_page(tables, start))
        yield from _in_portions(_drop_records, lost)
        names += lost[: LOST_LIMIT - len(names)]
    if names:
        standing = yield from view(own_standing)
        gone = [one.member.label for one in standing.roster.departed]
        yield from tell_lost(" or ".join(gone) or "a host", names)
    number: int | None = 0
    while number is not None:
        groups, number = yield from view(lambda tables, start=number: _lost_rows(tables, start))
        yield from _in_portions(lambda tables, some: _drop_rows(tables, seed, some), groups)


def _in_portions(drop: Callable[[Tables, Sequence[bytes]], None], found: Sequence[bytes]) -> Steps[None]:
    for first in range(0, len(found), PORTION):
        yield from transact(lambda tables, first=first: drop(tables, found[first : first + PORTION]))
        yield from pause(BETWEEN)


def _lost_page(tables: Tables, after: bytes) -> tuple[list[bytes], bytes | None]:
    standing = tables.standing()
    assert standing is not None
    page = tables.heads(after, ROWS_LIMIT)
    return [key for key, entry in page if _is_lost(standing, entry)], page[-1][0] if page else None


def _is_lost(standing: Standing, entry: Entry | None) -> bool:
    there = standing.roster.ids | {standing.member}  # its own removal may not count yet
    return entry is not None and any(place.host not in there for place in entry.places)


def _drop_records(tables: Tables, keys: Sequence[bytes]) -> None:
    standing = tables.standing()
    assert standing is not None
    for key in keys:
        with passing_over(tables, key):
            entry = tables.head(key)
            if entry is None or not _is_lost(standing, entry):  # it was put anew
                continue
            tables.delete_record(key)
            note_change(tables, standing, Change(key, None), 0)
            for place in entry.places:
                with passing_over(tables, key):
                    dispose(tables, standing, (place,))


def _lost_rows(tables: Tables, after: int) -> tuple[list[bytes], int | None]:
    standing = tables.standing()
    assert standing is not None
    rows = tables.ownerships(after, ROWS_LIMIT)
    return [row.group for row in rows if _counts_for_nothing(standing, row)], rows[-1].grant.number if rows else None


def _counts_for_nothing(standing: Standing, row: Ownership) -> bool:
    if standing.roster.departed_of(row.owner) is not None:
        return False
    is_known = row.grant.epoch <= standing.roster.epoch  # else its owner may be a member that is new, or to be one
    return is_known and not {row.owner, row.giver} & standing.roster.ids


def _drop_rows(tables: Tables, seed: Directory, groups: Sequence[bytes]) -> None:
    standing = tables.standing()
    assert standing is not None
    for group in groups:
        row = tables.ownership(group)
        if row is not None and _counts_for_nothing(standing, row):
            seed.lose(row)
            tables.drop_ownership(group)


# --- the seed ---------------------------------------------------------------------------------------------------------


def propose(
    tables: Tables,
    standing: Standing,
    is_settled: bool,
    *,
    members: tuple[Member, ...] | None = None,
    deputies: tuple[bytes, ...] | None = None,
    holders: tuple[bytes, ...] | None = None,
    leavers: tuple[tuple[bytes, bytes], ...] | None = None,
    epoch: int = 0,
    base: tuple[int, int] = (0, 0),
    lease: int | None = None,
    leased: tuple[bytes, ...] | None = None,
    departed: tuple[Departed, ...] | None = None,
    policies: tuple[Policy, ...] | None = None,
) -> Roster:
    """Writes the next roster. It counts when it has settled; only deputies may be left out before the last one has.

    Args:
        epoch: it is to be later than that.
        base: of a term that was forced, if its seed has heard of a later position than before.
        lease: another one, which nobody obeys yet.
    """
    roster = standing.roster
    members = roster.members if members is None else members
    ids = {member.id for member in members}
    kept = tuple(one for one in (roster.deputies if deputies is None else deputies) if one in ids)
    voters = tuple(member.id for member in roster.members) if is_settled else roster.voters
    if standing.unheard:  # a majority is lost, and a person has forced it
        voters, base = (), max(base, roster.base)
    epoch = max(roster.epoch, epoch) + 1
    visitors = {member.id for member in members if not member.is_owner}
    hold = tuple(one for one in (roster.holders if holders is None else holders) if one in visitors)
    leave = tuple(one for one in (roster.leavers if leavers is None else leavers) if one[0] in ids)
    gone = heirs(roster, members, roster.departed if departed is None else departed)
    hold = (*hold, *(one.heir for one in gone if one.heir in visitors and one.heir not in hold))
    lasts = roster.lease if lease is None else lease
    is_obeyed = lasts == roster.lease and len(members) >= FEWEST_LEASED  # of fewer, members may hold none by now
    obey = tuple(one for one in (roster.leased if leased is None else leased) if one in ids and is_obeyed)
    copies = roster.policies if policies is None else policies
    changed = (kept, voters, hold, leave, base, lasts, obey, gone, copies)
    roster = Roster(roster.cluster, roster.term, epoch, members, roster.seed, *changed)
    adopt(tables, roster)
    return roster


def answer_ask(tables: Tables, standing: Standing, seed: Directory, ask: Ask) -> Answer:
    """Answers who asks which roster there is. `Done` says that he has it."""
    roster, asker = standing.roster, ask.member
    known, position = roster.member(asker.id), (ask.term, ask.epoch)
    if not standing.is_seed:
        return IsRoster(roster) if roster.position > position else Later()
    seed.begin(standing)
    seed.hear_of(ask.promised if ask.cluster == roster.cluster else 0)
    if ask.cluster is not None and ask.cluster != roster.cluster:
        return Refused("the root belongs to another cluster")
    if ask.cluster is not None and position > roster.position:
        return Later()  # of another seed, of which this one has not heard yet
    if known is None and ask.cluster is not None and standing.unheard:
        return Later()  # it may be one of an older term: members will say so
    if known is None and ask.cluster is not None:
        if asker.id in roster.voters:  # it has a vote, and may be needed: the others may be lost
            seed.hear(asker.id, position)
            if position < roster.position and not seed.counts(standing):
                return IsRoster(roster)
        why = "the root was removed from this cluster: serve an empty one"
        return Refused(why, is_removed=True) if seed.counts(standing) else Later()
    if known is not None and known.address != asker.address and not ask.moved:
        return Refused(
            f"a host at {known.address} has this root: serve it there, remove that host, or say that it has moved"
        )
    if ask.versions >> EPOCH_BITS >= MOST_EPOCHS:
        return Refused(_too_large(ask.versions))
    if known is not None and ask.cluster is not None:
        seed.hear(asker.id, position)
    if known != asker:
        if position != roster.position:  # it says what once was, or the asker hasn't heard of this epoch: it asks again
            return IsRoster(roster)
        # A member that is served as another one may change while a seed waits for what it owns: it waits for the seed.
        if (standing.unheard and known is None) or not seed.is_settled(standing):
            return Later()
        newcomer = _newcomer(seed, roster, asker.id, ask.brings)
        if ask.brings and newcomer is None:
            return Stale(*roster.position)
        members = (*(one for one in roster.members if one.id != asker.id), asker)
        has_groups = newcomer is not None or (known is not None and bool(standing.unheard))  # rows don't say so yet
        holders = _holders_with(tables, roster, asker, has_groups=has_groups)
        epoch = ask.versions >> EPOCH_BITS if newcomer is None else newcomer.epoch - 1
        propose(tables, standing, is_settled=True, members=members, holders=holders, epoch=epoch)
        return Later()
    if ask.cluster is not None:
        return Done() if position == roster.position else IsRoster(roster)
    # It is in the roster before, too, which counts: else it could not help this one to count.
    newcomer = seed.newcomers.get(asker.id)
    brought = 0 if newcomer is None else newcomer.number
    is_told = seed.counts(standing) or asker.id in roster.voters
    return IsRoster(roster, admits=True, brought=brought) if is_told else Later()


def note_groups(tables: Tables, standing: Standing, seed: Directory, request: BringGroups) -> Answer:
    """Writes rows for groups of a root that is to be admitted, if no member owns one. They count from then on.

    Of two roots that come with one group at the same time, the one that began first gets it, unless it is silent: the
    other one waits, and is refused then. So neither waits for one that waits for it.
    """
    roster, member = standing.roster, request.member
    if not standing.is_seed or roster.member(member) is not None:
        return IsRoster(roster)
    seed.begin(standing)
    if standing.unheard or not seed.is_settled(standing):
        return Later()
    if not request.number:
        seen = request.versions >> EPOCH_BITS
        if seen >= MOST_EPOCHS:
            return Refused(_too_large(request.versions))
        tables.granted = max(tables.granted, roster.term << TERM_BITS) + 1
        seed.newcomers[member] = Newcomer(tables.granted, max(roster.epoch, seen) + AHEAD, seed.clock())
        return Brought(tables.granted)
    newcomer = _newcomer(seed, roster, member, request.number)
    if newcomer is None:
        return Stale(*roster.position)
    newcomer.heard_at = seed.clock()
    if is_pending(tables, roster, request.groups):
        return Later()
    owned = [row for group in request.groups if (row := owner_row(tables, roster, group)) is not None]
    if owned:
        del seed.newcomers[member]
        return Refused(_owned_elsewhere(roster, owned))
    rows = [tables.ownership(group) for group in request.groups]
    if any(_is_of_earlier(seed, newcomer, row) for row in rows):
        return Later()
    new = [
        group
        for group, row in zip(request.groups, rows, strict=True)
        if row is None or row.owner != member or row.grant.number <= newcomer.number
    ]
    seed.give_new(tables, roster, new, member, newcomer.epoch)
    rows = [tables.ownership(group) for group in request.groups]
    told = seed.tell(tables, standing, rows)
    return (
        told
        if isinstance(told, Later)
        else Brought(newcomer.number, tuple(row.grant for row in rows if row is not None))
    )


def _newcomer(seed: Directory, roster: Roster, member: bytes, number: int) -> Newcomer | None:
    """Returns what is known of a root whose groups were noted under a number, if that try is still good."""
    newcomer = seed.newcomers.get(member)
    return newcomer if newcomer is not None and newcomer.number == number and roster.epoch < newcomer.epoch else None


def _is_of_earlier(seed: Directory, newcomer: Newcomer, row: Ownership | None) -> bool:
    """Returns whether a row is noted for a root that began before this one, and isn't silent."""
    rival = None if row is None else seed.newcomers.get(row.owner)
    if row is None or rival is None or not rival.number < row.grant.number:
        return False
    return rival.number < newcomer.number and seed.clock() - rival.heard_at < _NEWCOMER_SILENT


def change_oneself(tables: Tables, seed: Directory, member: Member, *, moved: bool) -> None:
    """Writes what the seed itself is served as now, as `answer_ask` does for others."""
    standing = tables.standing()
    known = None if standing is None else standing.roster.member(member.id)
    if standing is None or known is None or known == member or not seed.is_settled(standing):
        return
    if moved or known.address == member.address:
        members = (*(one for one in standing.roster.members if one != known), member)
        holders = _holders_with(tables, standing.roster, member)
        propose(tables, standing, is_settled=True, members=members, holders=holders)
        seed.heard.clear()  # so all are told: they may ask at the old address


def let_own(tables: Tables, seed: Directory) -> bool:
    """Writes that a member may own groups, for which the directory waits before it grants them. False: it doesn't."""
    standing = tables.standing()
    holder, seed.new_holder = seed.new_holder, None
    if standing is None or holder is None:
        return False
    propose(tables, standing, is_settled=True, holders=(*standing.roster.holders, holder))
    return True


def _holders_with(tables: Tables, roster: Roster, member: Member, *, has_groups: bool = False) -> tuple[bytes, ...]:
    """Returns the holders of the next roster, in which a member is new, or another than before."""
    known = roster.member(member.id)
    if not member.is_owner and not has_groups and known is not None and known.is_owner:
        has_groups = member.id in _in_rows(tables)
    return (*roster.holders, member.id) if has_groups and member.id not in roster.holders else roster.holders


def _in_rows(tables: Tables) -> set[bytes]:
    """Returns the members that rows of the directory name: owners, and givers, whose group it may be again."""
    found: set[bytes] = set()
    after = 0
    while rows := tables.ownerships(after, ROWS_LIMIT):
        after = rows[-1].grant.number
        found.update(row.owner for row in rows)
        found.update(row.giver for row in rows if row.giver is not None)
    return found


def _too_large(version: int) -> str:
    return f"its root has a version {version}, and none can be that large: serve an empty one"


def _owned_elsewhere(roster: Roster, rows: Sequence[Ownership]) -> str:
    def name(row: Ownership) -> str:
        owner = roster.member(row.owner)
        return f"{row.group.decode(errors='replace')!r} ({owner.name or owner.address if owner else 'nobody'})"

    names = ", ".join(map(name, rows[:3])) + (", ..." if len(rows) > 3 else "")
    return f"other hosts own what the root has put under {names}: delete or rename it here, or serve an empty root"


def remove(tables: Tables, standing: Standing, seed: Directory, request: Remove) -> Answer:
    if request.member == standing.member:
        return Refused("the seed can't be removed: promote another host first")
    seed.begin(standing)
    roster = standing.roster
    if roster.member(request.member) is None:
        return IsRoster(roster) if seed.is_settled(standing) else Later()
    if seed.is_settled(standing) or standing.unheard:
        members = tuple(member for member in roster.members if member.id != request.member)
        propose(tables, standing, is_settled=True, members=members)
    return Later()


def drain(tables: Tables, standing: Standing, seed: Directory, request: Drain) -> Answer:
    """Notes that a member leaves, or that it stays: `draining.py` has what follows."""
    seed.begin(standing)
    roster, taker = standing.roster, request.to or b""
    others = tuple(one for one in roster.leavers if one[0] != request.member)
    if request.cancels:
        if len(others) == len(roster.leavers):
            return IsRoster(roster) if seed.is_settled(standing) else Later()
        if seed.is_settled(standing) and not standing.unheard:
            propose(tables, standing, is_settled=True, leavers=others)
        return Later()
    if request.member == standing.member:
        return Refused("the seed can't leave: promote another host first")
    if roster.member(request.member) is None or (request.member, taker) in roster.leavers:
        return IsRoster(roster) if seed.is_settled(standing) else Later()
    stay = [member.id for member in roster.takers if member.id != request.member]
    if not stay:
        return Refused("it is the last host that may own groups: serve another one first")
    if taker and taker not in stay:
        return Refused("the host that is to take its groups leaves, too, or may own none")
    if seed.is_settled(standing) and not standing.unheard:
        propose(tables, standing, is_settled=True, leavers=(*others, (request.member, taker)))
    return Later()


def set_policy(tables: Tables, standing: Standing, seed: Directory, request: SetPolicy) -> Answer:
    """Notes how many hosts are to have the values of a group: `replicas.py` has what follows."""
    seed.begin(standing)
    roster, policy = standing.roster, request.policy
    others = tuple(one for one in roster.policies if one.group != policy.group)
    wanted = others if request.drops else (*others, policy)
    if len(wanted) > POLICIES_LIMIT:
        return Refused(f"{POLICIES_LIMIT} groups have policies, which is the limit: state one for the whole store")
    if set(wanted) == set(roster.policies):
        return IsRoster(roster) if seed.is_settled(standing) else Later()
    if standing.is_seed and seed.is_settled(standing) and not standing.unheard:
        propose(tables, standing, is_settled=True, policies=wanted)
    return Later()


def finish(tables: Tables, standing: Standing, seed: Directory, request: Finish) -> Answer:
    """Makes an epoch in which what a hand-over has moved is at one place for all who list keys."""
    seed.begin(standing)
    if standing.roster.epoch > request.epoch:
        return IsRoster(standing.roster)
    if standing.is_seed and seed.is_settled(standing) and not standing.unheard:
        propose(tables, standing, is_settled=True)
    return Later()


def recovered(tables: Tables, standing: Standing, seed: Directory, request: Recovered) -> Answer:
    """Notes how far the heir of a removed member is: see `recovery.py`."""
    seed.begin(standing)
    one = standing.roster.departed_of(request.member)
    if one is None or one.heir != request.heir or (one.is_ready and not request.is_over):
        return IsRoster(standing.roster)
    if standing.is_seed and seed.is_settled(standing) and not standing.unheard:
        others = tuple(other for other in standing.roster.departed if other != one)
        ready = () if request.is_over else (msgspec.structs.replace(one, is_ready=True),)
        propose(tables, standing, is_settled=True, departed=(*others, *ready))
    return Later()


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


def look_for(seed: Directory, asking: Collection[bytes]) -> Steps[None]:
    """Looks for a member that is silent, at its address. The next call looks for the next one.

    Its host may have come back with an empty root that was told of nobody. That root is told where it belongs, before
    it makes a cluster of its own.

    Args:
        asking: members that have a question open here.
    """
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or standing.is_removed:
        return
    seed.begin(standing)
    since = seed.clock() - LOOKED_FOR
    present = {one for one, heard in seed.heard_at.items() if heard > since} | {standing.member, *asking}
    members = sorted(standing.roster.members, key=lambda one: one.id)
    taken = {one.address for one in members if one.id in present}  # another root is a member there by now
    silent = [one for one in members if one.id not in present and one.address not in taken]
    own = standing.roster.member(standing.member)
    if own is None or not silent or seed.began > since:
        return
    member = next((one for one in silent if one.id > seed.looked_for), silent[0])
    seed.looked_for = member.id
    yield from send(member.address, Meet(own, standing.roster))


def _propose_deputies(
    tables: Tables, seed: Directory, before: Standing, deputies: tuple[bytes, ...], new: bytes | None = None
) -> None:
    standing = tables.standing()
    if standing is None or standing.roster != before.roster or standing.promised > standing.roster.term:
        return
    if new is None or (seed.is_settled(standing) and seed.has_all(tables, new)):
        propose(tables, standing, seed.is_settled(standing), deputies=deputies)


# --- a new seed -------------------------------------------------------------------------------------------------------


def take_promise(tables: Tables, standing: Standing, request: Promise) -> Answer:
    if request.cluster != standing.roster.cluster or standing.is_removed:
        return Refused("this host is no member of that cluster", is_removed=standing.is_removed)
    if request.term < standing.promised or request.term <= standing.roster.term:
        return Stale(max(standing.promised, standing.roster.term))
    if request.term > standing.promised:
        tables.put_standing(msgspec.structs.replace(standing, promised=request.term))
    return Promised(standing.roster)


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
                newest = max(newest, answer.roster, key=lambda roster: roster.position)
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
            theirs = answer.roster if isinstance(answer, Met) else None
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
    as_before = (newest.lease, newest.leased, newest.departed, newest.policies)
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
        if isinstance(answer, Promised) and answer.roster.term == seed.term:
            seed.hear(member.id, answer.roster.position)
        elif isinstance(answer, Stale):
            seed.hear_of(answer.term)
        elif isinstance(answer, Promised):
            yield from transact(lambda tables, older=answer.roster: take_back(tables, older))


def take_back(tables: Tables, older: Roster) -> None:
    """Takes in whom an older seed had admitted when this one was forced, which hadn't heard of it."""
    standing = tables.standing()
    missed = [] if standing is None or not standing.unheard else _left_out(older, standing.roster)
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
    for row in rows:
        old = tables.ownership(row.group)
        if old is None or old.grant.number < row.grant.number:
            tables.put_ownership(row)


def _has_announced(tables: Tables, member: bytes, versions: int) -> None:
    standing = tables.standing()
    if standing is None or not standing.is_seed:
        return
    if versions >> EPOCH_BITS > standing.roster.epoch:
        propose(tables, standing, is_settled=True, epoch=versions >> EPOCH_BITS)
        standing = tables.standing() or standing
    unheard = tuple(one for one in standing.unheard if one != member)
    if not unheard and standing.roster.holders:
        named = _in_rows(tables)
        holders = tuple(one for one in standing.roster.holders if one in named)
        if holders != standing.roster.holders:
            propose(tables, standing, is_settled=True, holders=holders)
            standing = tables.standing() or standing
    tables.put_standing(msgspec.structs.replace(standing, unheard=unheard))
