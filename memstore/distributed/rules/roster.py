"""The roster: who is a member. The seed alone changes it, one change after the other.

**A change counts** once a majority of the roster before has it, and each deputy (`Directory.counts`). Until then
the seed tells nobody that he is admitted or removed, and grants nothing. So of any majority of a roster somebody knows
the next one, and nobody can be the seed by an old one.

**Another seed** may take over: `promotion.py`.

**A root that has keys** is admitted with all of its groups, or refused if another member owns one (`bring_groups`,
`note_groups`). Before that its records get versions of the epoch in which it will be admitted, so that none of a key
goes down or comes twice. All of it is done in portions, and no put waits for more than one of them.

**Founding** stands in `Index.found`. A root without a cluster that was told of no other host waits three seconds, and
then makes one. Members of another cluster that find it at the address of their seed tell it, and it joins them; so does
their seed, which looks for members that are silent. Of hosts that were told of each other, and know of no cluster, the
one with the lowest id makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from memstore.distributed.rules import remembering
from memstore.distributed.rules.directory import AHEAD, BETWEEN, Directory, Newcomer, give, owner_row
from memstore.distributed.rules.history import dispose, give_up, let_lost_go, passing_over
from memstore.distributed.rules.messages import (
    PORTION,
    ROWS_LIMIT,
    Answer,
    Ask,
    BringGroups,
    Brought,
    ClaimGroups,
    Done,
    Drain,
    FindOwners,
    Finish,
    IsRoster,
    Later,
    Meet,
    Owners,
    Recovered,
    Refused,
    Remove,
    SetPolicy,
    SetQuota,
    Stale,
)
from memstore.distributed.rules.nouns import (
    EPOCH_BITS,
    MOST_EPOCHS,
    POLICIES_LIMIT,
    QUOTAS_LIMIT,
    TERM_BITS,
    Change,
    Departed,
    Grant,
    Member,
    Ownership,
    Policy,
    Quota,
    Returns,
    Roster,
    Standing,
)
from memstore.distributed.rules.owning import group_heads, record_grant
from memstore.distributed.rules.recovery import LOST_LIMIT, are_there, heirs, is_pending, note_change, tell_lost
from memstore.distributed.rules.sharded import end_strays
from memstore.distributed.rules.steps import Steps, Tables, own_standing, pause, send, transact, view

LOOKED_FOR = 1_000_000_000  # nanoseconds after which a member that isn't heard of is looked for: less than ALONE
FEWEST_LEASED = 3  # members: of two, no majority is left that could remove the other one
_NEWCOMER_SILENT = 10_000_000_000  # nanoseconds after which another root gets a group that was noted for one
_ROUNDS = 20  # of questions before a root begins anew to join
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
    if not roster.voters and left_out(standing.roster, roster):
        return False
    floor = standing.floor
    if roster.term > standing.roster.term:
        floor = max(floor, roster.term << TERM_BITS)
    unheard = tuple(one for one in standing.unheard if one in roster.ids and roster.seed == standing.member)
    losses = standing.losses + (not standing.roster.ids <= roster.ids)
    standing = msgspec.structs.replace(standing, roster=roster, floor=floor, unheard=unheard, losses=losses)
    tables.put_standing(standing)
    remembering.follow(tables, roster)
    end_strays(tables, standing)
    return True


def left_out(older: Roster, forced: Roster) -> list[Member]:
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

    One of an older term than it has promised may say that it is admitted, and not ask for its vote.

    Args:
        owns: the seed says that the groups are this root's for which it has grants. Else it must have none.
    """
    promised = early_term(tables, roster.cluster)
    if roster.term < promised and member in roster.voters:
        return
    if tables.standing() is None and (owns or not tables.all_owned(None, 1)):
        is_joining = bool(tables.groups(b"", 1)[0])
        tables.put_standing(Standing(member, roster, 0, max(promised, roster.term), is_joining=is_joining))
        remembering.follow(tables, roster)


def early_term(tables: Tables, cluster: bytes) -> int:
    """Returns the term that this root has promised before it was told that it is a member; 0: it has promised none."""
    promised_to, term = tables.early_promise
    return term if promised_to == cluster else 0


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
        give_up(tables, standing, key)
        tables.delete_record(key)
        with passing_over(tables, key):
            dispose(tables, standing, entry.places if entry else ())
    return bool(page)


def _has_joined(tables: Tables) -> None:
    standing = tables.standing()
    assert standing is not None
    tables.put_standing(msgspec.structs.replace(standing, is_joining=False))


def drop_lost(seed: Directory) -> Steps[None]:
    """Drops records whose bytes lay on hosts that are no members any more, and rows of the directory that name them.

    Replaced versions go where some of their bytes are gone, or the present version.
    """
    after: bytes | None = b""
    names: list[bytes] = []
    while after is not None:
        lost, after = yield from view(lambda tables, start=after: _lost_page(tables, start))
        yield from _in_portions(_drop_records, lost)
        names += lost[: LOST_LIMIT - len(names)]
    # After these: a present version that is gone may have been replaced meanwhile, and be kept.
    yield from let_lost_go()
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
    lost = [key for key, entry in page if entry and not are_there(tables, standing, entry.places)]
    return lost, page[-1][0] if page else None


def _drop_records(tables: Tables, keys: Sequence[bytes]) -> None:
    standing = tables.standing()
    assert standing is not None
    for key in keys:
        with passing_over(tables, key):
            entry = tables.head(key)
            if entry is None or are_there(tables, standing, entry.places):  # it was put anew
                continue
            give_up(tables, standing, key)
            tables.delete_record(key)
            remembering.note_loss(tables, standing, key, entry)
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
    if standing.roster.departed_of(row.owner) is not None or standing.roster.may_return(row.owner):
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
    returns: Returns | None = None,
    policies: tuple[Policy, ...] | None = None,
    quotas: tuple[Quota, ...] | None = None,
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
    back = remembering.returns_of(roster, ids, roster.returns if returns is None else returns)
    copies = roster.policies if policies is None else policies
    limits = roster.quotas if quotas is None else quotas
    changed = (kept, voters, hold, leave, base, lasts, obey, gone, back, copies, limits)
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
    seed.hear_of(ask.promised if ask.cluster in (None, roster.cluster) else 0)
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
        why = "the root was removed from this cluster: serve it again, as a new host"
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
        if not seed.knows_present(position, roster):  # what once was, or the asker hasn't heard of it: it asks again
            return IsRoster(roster)
        # A member that is served as another one may change while a seed waits for what it owns: it waits for the seed.
        is_settled = seed.is_settled(standing)
        if (standing.unheard and known is None) or not seed.may_propose(standing):
            return Later()
        if not is_settled and len(roster.members) >= 2 * len(roster.voters) - 1:
            return Later()  # if all that come by one roster die, the others must be a majority of it
        newcomer = _newcomer(seed, roster, asker.id, ask.brings)
        if ask.brings and newcomer is None:
            return Stale(*roster.position)
        members = (*(one for one in roster.members if one.id != asker.id), asker)
        has_groups = newcomer is not None or (known is not None and bool(standing.unheard))  # rows don't say so yet
        holders = _holders_with(tables, roster, asker, has_groups=has_groups)
        epoch = ask.versions >> EPOCH_BITS if newcomer is None else newcomer.epoch - 1
        propose(tables, standing, is_settled, members=members, holders=holders, epoch=epoch)
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
        seed.forget_heard()  # they may ask at the old address


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
        has_groups = member.id in in_rows(tables)
    return (*roster.holders, member.id) if has_groups and member.id not in roster.holders else roster.holders


def in_rows(tables: Tables) -> set[bytes]:
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
    if seed.may_propose(standing) or standing.unheard:
        members = tuple(member for member in roster.members if member.id != request.member)
        propose(tables, standing, seed.is_settled(standing), members=members)
    return Later()


def drain(tables: Tables, standing: Standing, seed: Directory, request: Drain) -> Answer:
    """Notes that a member leaves, or that it stays: `draining.py` has what follows."""
    seed.begin(standing)
    roster, taker = standing.roster, request.to or b""
    others = tuple(one for one in roster.leavers if one[0] != request.member)
    if request.cancels:
        if len(others) == len(roster.leavers):
            return IsRoster(roster) if seed.is_settled(standing) else Later()
        if seed.may_propose(standing) and not standing.unheard:
            propose(tables, standing, seed.is_settled(standing), leavers=others)
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
    if seed.may_propose(standing) and not standing.unheard:
        propose(tables, standing, seed.is_settled(standing), leavers=(*others, (request.member, taker)))
    return Later()


def set_policy(tables: Tables, standing: Standing, seed: Directory, request: SetPolicy) -> Answer:
    """Notes how many hosts are to have the values of a group: `replicas.py` has what follows."""
    seed.begin(standing)
    roster, policy = standing.roster, request.policy
    others = tuple(one for one in roster.policies if one.group != policy.group)
    wanted = others if request.drops else (*others, policy)
    if len(wanted) > POLICIES_LIMIT:
        return Refused(f"{POLICIES_LIMIT} groups have policies, which is the limit: state one for the whole store")
    return _agree_on(tables, standing, seed, policies=wanted)


def set_quota(tables: Tables, standing: Standing, seed: Directory, request: SetQuota) -> Answer:
    """Notes how many bytes the keys with a prefix may take. Who owns their group counts from when it has heard so."""
    seed.begin(standing)
    roster, prefix = standing.roster, request.prefix
    others = tuple(one for one in roster.quotas if one.prefix != prefix)
    wanted = others if request.limit is None else (*others, Quota(prefix, request.limit))
    if len(wanted) > QUOTAS_LIMIT:
        return Refused(f"{QUOTAS_LIMIT} prefixes have quotas, which is the limit: end some")
    return _agree_on(tables, standing, seed, quotas=wanted)


def _agree_on(
    tables: Tables,
    standing: Standing,
    seed: Directory,
    *,
    policies: tuple[Policy, ...] | None = None,
    quotas: tuple[Quota, ...] | None = None,
) -> Answer:
    """Has the roster say this, in whatever order. Who asks gets it once that is settled, and asks again until then."""
    roster = standing.roster
    is_so = policies is None or set(policies) == set(roster.policies)
    if is_so and (quotas is None or set(quotas) == set(roster.quotas)):
        return IsRoster(roster) if seed.is_settled(standing) else Later()
    if standing.is_seed and seed.may_propose(standing) and not standing.unheard:
        propose(tables, standing, seed.is_settled(standing), policies=policies, quotas=quotas)
    return Later()


def finish(tables: Tables, standing: Standing, seed: Directory, request: Finish) -> Answer:
    """Makes an epoch in which what a hand-over has moved is at one place for all who list keys."""
    seed.begin(standing)
    if standing.roster.epoch > request.epoch:
        return IsRoster(standing.roster)
    if standing.is_seed and seed.may_propose(standing) and not standing.unheard:
        propose(tables, standing, seed.is_settled(standing))
    return Later()


def recovered(tables: Tables, standing: Standing, seed: Directory, request: Recovered) -> Answer:
    """Notes how far the heir of a removed member is: see `recovery.py`."""
    seed.begin(standing)
    one = standing.roster.departed_of(request.member)
    if one is None or one.heir != request.heir or (one.is_ready and not request.is_over):
        return IsRoster(standing.roster)
    if standing.is_seed and seed.may_propose(standing) and not standing.unheard:
        others = tuple(other for other in standing.roster.departed if other != one)
        ready = () if request.is_over else (msgspec.structs.replace(one, is_ready=True),)
        propose(tables, standing, seed.is_settled(standing), departed=(*others, *ready))
    return Later()


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
