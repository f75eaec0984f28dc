"""Groups: the directory, which says what member owns each, and a hand-over, by which a group goes to another one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from memstore.distributed.rules.history import hand_on, passing_over, with_replaced
from memstore.distributed.rules.messages import (
    BYTES_LIMIT,
    OUTCOMES_LIMIT,
    PORTION,
    ROWS_LIMIT,
    Answer,
    Ask,
    ClaimGroups,
    Done,
    Dropped,
    Failed,
    FindOwners,
    Finish,
    Give,
    HandOver,
    Inherit,
    Inherited,
    IsAt,
    IsRoster,
    Later,
    Mirror,
    Mirrored,
    NotOwner,
    Owners,
    RosterChange,
    Serve,
    Stale,
    WatchGroup,
)
from memstore.distributed.rules.nouns import (
    KEY_LIMIT,
    TERM_BITS,
    Entry,
    Grant,
    Member,
    Ownership,
    Roster,
    Standing,
    group_of,
)
from memstore.distributed.rules.owning import REMOVED, admit, group_page, record_grant
from memstore.distributed.rules.recovery import SOON, NotRecovered, forget_replica, is_outdated, is_pending
from memstore.distributed.rules.sharded import end_attempts_of, remember
from memstore.distributed.rules.steps import (
    KeptGroup,
    LeavingGroup,
    Lent,
    Steps,
    Tables,
    own_standing,
    pause,
    send,
    send_all,
    side_by_side,
    transact,
    view,
)

# --- The directory ---------------------------------------------------------------------------------------------------
# The directory: which member owns a group. The seed keeps it in its catalog, and deputies have a copy.
#
# **Grants.** A claim of groups that nobody owns writes rows, each with a number that never repeats within a term. What
# a row says is told only when all deputies have it. So whichever of them is the next seed knows all that was ever told.
#
# **Denials.** That nobody owns a group is told only when each deputy has said, after the question came, that it obeys
# this seed still. A new seed needs a deputy that doesn't: so none has granted the group meanwhile.
#
# **Mirrors.** Rows are ordered by the numbers of their grants. A deputy takes in whatever rows come, each if its number
# is larger than that of the row it has, and says up to which number it has all of them. So late and repeated messages
# do no harm. A row of an older term gives way to whatever this term's seed has: the old seed may have told one deputy
# alone.
#
# **Rows of members that were removed** count for nothing, wherever they are. Ids never come back.
#
# **Rows of a newcomer** (`roster.note_groups`) are written before it is a member, and count from its admission on: that
# one row, the roster, makes all of them its own. Until then whoever claims such a group gets it, and the newcomer
# begins anew. Their grants are of the epoch of the admission, which is AHEAD: so nobody drops them as those of a
# removed member.


log = logging.getLogger("memstore")

IDLE = 1_000_000_000  # nanoseconds after which a deputy is asked though there is nothing to tell
BETWEEN = 0.002  # seconds between two portions of a host's work, in which its puts come to the mutex
_TOGETHER = 32  # groups that are handed over side by side
_TOLD = 16  # rosters that a seed remembers, to say what is different
AHEAD = 64  # epochs that may pass until a newcomer is admitted: if there are more, it begins anew


def owner_row(tables: Tables, roster: Roster, group: bytes) -> Ownership | None:
    """Returns the row of a group, if its owner is a member. One that was removed may have an heir.

    A group whose owner was removed is its giver's again: that one may not have heard yet that it was handed over, and
    have all of its records, which its own processes read.
    """
    row = tables.ownership(group)
    if row is None or row.owner in roster.ids:
        return row
    if row.giver is None or row.giver not in roster.ids:
        heir = roster.departed_of(row.owner)
        if heir is None or not heir.is_ready:
            return None
        former = row.owner if roster.may_return(row.owner) else None
        number, first = row.grant.number, row.first
        return give(tables, roster, group, heir.heir, number, None, first, former, recovered=roster.epoch)
    return give(tables, roster, group, row.giver, row.grant.after)


class Newcomer(msgspec.Struct):
    """A root that has keys, and is to be admitted. It is known in memory only: after a kill it begins anew.

    Attributes:
        number: of its try. The grants of the rows that were written for it are above.
        epoch: of these grants, and of its admission.
        heard_at: when it was heard of last.
    """

    number: int
    epoch: int
    heard_at: int


class _Votes:
    """The members that have a roster: its deputies, and its voters.

    A question is answered for each of a thousand members, so they are counted as they are heard of.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster, self.position = roster, roster.position
        self._voters, self._deputies = frozenset(roster.voters), roster.deputies
        self._have: set[bytes] = set()
        self._have_votes: set[bytes] = set()

    def add(self, member: bytes) -> None:
        self._have.add(member)
        if member in self._voters:
            self._have_votes.add(member)

    @property
    def is_enough(self) -> bool:
        few = len(self._voters) <= 2
        return self._have.issuperset(self._deputies) and (few or 2 * len(self._have_votes) > len(self._voters))


class Directory:
    """A seed's memory of its term: what it has heard of the members, and how far its deputies are.

    Args:
        clock: nanoseconds of this host's clock since boot.

    Attributes:
        heard: of each member the position of the roster that it has.
        heard_at: when each member was last heard of.
        began: when this seed began its term, or was started again in it.
        looked_for: the member that was looked for last.
        answered: when each deputy last answered a mirror, or this seed began to ask it.
        candidate: a member that gets a copy, to be a deputy.
        rival: a later term that a member has promised to wait for, and since when that is known.
        is_over: another member is the seed, by what others said.
        new_holder: a member with `is_owner` False that has to own a group: the roster must say so before.
        away_since: when removed members that may come back were first seen to be away.
        draft: positions of the roster that counted, and of the one that is being written: several changes become one
            roster, in a transaction of `Index.ended_waits`; None: none is being written.
        newcomers: roots whose groups are noted, by id. Who is in it has each row that was written for it in that try.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self._forget(0)

    def _forget(self, term: int) -> None:
        self.term = term
        self.heard: dict[bytes, tuple[int, int]] = {}
        self.heard_at: dict[bytes, int] = {}
        self.began = self.clock()
        self.looked_for = b""
        self.answered: dict[bytes, int] = {}
        self.candidate: bytes | None = None
        self.rival = (0, 0)
        self.is_over = False
        self.new_holder: bytes | None = None
        self.draft: tuple[tuple[int, int], tuple[int, int]] | None = None
        self.newcomers: dict[bytes, Newcomer] = {}
        self.away_since: dict[bytes, int] = {}
        self._reached: dict[bytes, int] = {}  # the number up to which it has all rows
        self._confirmed: dict[bytes, int] = {}  # the last question before the mirror that it answered
        self._questions = 0
        self._votes: _Votes | None = None
        self._told: OrderedDict[tuple[int, int], Roster] = OrderedDict()
        self._changes: dict[tuple[int, int], tuple[Roster, IsRoster, RosterChange | None]] = {}  # by position before

    def begin(self, standing: Standing) -> None:
        """Forgets what was of another term."""
        if self.term != standing.roster.term:
            self._forget(standing.roster.term)

    def hear(self, member: bytes, position: tuple[int, int]) -> None:
        """Notes which roster a member has. What comes late says what it had."""
        self.heard[member] = max(position, self.heard.get(member, position))
        self.heard_at[member] = self.clock()
        votes = self._votes  # after the note: see `counts`
        if votes is not None and self.heard[member] == votes.position:
            votes.add(member)

    def forget_heard(self) -> None:
        """Forgets which rosters the members have: all are told anew."""
        self.heard.clear()
        self._votes = None

    def hear_of(self, term: int) -> None:
        """Notes that somebody is to be the seed of a term, or was to be."""
        if term > max(self.term, self.rival[0]):
            self.rival = (term, self.rival[1] or self.clock())

    def shortened(self, ask: Ask, answer: IsRoster) -> IsRoster | RosterChange:
        """Returns an answer to a question in fewer words: a list of all members is 71 kB for each of a thousand."""
        self._told[answer.roster.position] = answer.roster
        if len(self._told) > _TOLD:
            self._told.popitem(last=False)
            self._changes.clear()
        since = ask.term, ask.epoch
        old = self._told.get(since)
        if old is None or since == answer.roster.position:
            return answer
        base, known, change = self._changes.get(since, (None, None, None))
        if base is not old or known != answer:
            change = RosterChange.between(old, answer)
            self._changes[since] = old, answer, change
        return change or answer

    def counts(self, standing: Standing) -> bool:
        """Whether a majority of the roster before has the present one, and each deputy: then it counts for good.

        Of one or two members no majority is asked: it would have the seed in it, which has decided.
        """
        roster, votes = standing.roster, self._votes
        if votes is None or votes.roster is not roster:
            self._votes = votes = _Votes(roster)  # before the look at what was heard: a thread that hears more adds it
            votes.add(standing.member)
            for member, position in list(self.heard.items()):
                if position == roster.position:
                    votes.add(member)
        return votes.is_enough

    def is_settled(self, standing: Standing) -> bool:
        """Whether the roster counts, and this seed may make another one, and grant and deny."""
        return standing.is_seed and standing.promised <= standing.roster.term and self.counts(standing)

    def may_propose(self, standing: Standing) -> bool:
        """Whether this seed may write the next roster. One that nobody has seen yet may be changed further."""
        return self.is_settled(standing) or (self.draft is not None and self.draft[1] == standing.roster.position)

    def knows_present(self, position: tuple[int, int], roster: Roster) -> bool:
        """Whether who has the roster of that position knows the present one, or all of it that anybody knows."""
        is_before = self.draft is not None and self.draft == (position, roster.position)
        return is_before or position == roster.position

    def new_question(self) -> int:
        """Returns the number of a question. A mirror that is sent from now on is sent after it."""
        self._questions += 1
        return self._questions

    # --- what it answers ----------------------------------------------------------------------------------------------

    def answer(
        self,
        tables: Tables,
        standing: Standing,
        request: ClaimGroups | FindOwners | WatchGroup | HandOver | Dropped | Inherit,
        question: int | None,
    ) -> Answer:
        """Answers a request; `Later` if it can't be told yet.

        Args:
            question: its number, if it was kept.
        """
        self.begin(standing)
        if standing.unheard or not self.is_settled(standing):
            return Later()
        roster = standing.roster
        if isinstance(request, Inherit):
            return self._inherited(tables, standing, request)
        match request:
            case WatchGroup() | HandOver():
                groups: Sequence[bytes] = (request.group,)
            case Dropped():
                groups = [group for group, _ in request.rows]
            case _:
                groups = request.groups
        if is_pending(tables, roster, groups):
            return NotRecovered()
        match request:
            case ClaimGroups():
                rows = self._claim(tables, roster, request)
            case FindOwners() | Dropped():
                locate = self._locate if isinstance(request, FindOwners) else self._forget_giver
                rows = locate(tables, roster, request)  # pyright: ignore
                if (None in rows or not rows) and not self._is_confirmed(roster, question):
                    return Later()
            case WatchGroup():
                rows = [owner_row(tables, roster, request.group)]
                if None in rows:
                    return Later()
            case HandOver():
                rows = self._hand_over(tables, roster, request)
        return Later() if rows is None else self.tell(tables, standing, rows)

    def tell(self, tables: Tables, standing: Standing, rows: Sequence[Ownership | None]) -> Owners | Later:
        """Tells rows that all deputies have."""
        reached = min((self._reached.get(deputy, 0) for deputy in standing.roster.deputies), default=inf)
        is_known = all(row is None or row.grant.number <= reached for row in rows)
        return Owners(tuple(rows)) if is_known else Later()

    def give_new(
        self, tables: Tables, roster: Roster, groups: Sequence[bytes], member: bytes, epoch: int | None = None
    ) -> list[Ownership]:
        """Writes rows of groups that no member owns. A newcomer that they were noted for doesn't have them any more."""
        formers: dict[bytes, bytes] = {}
        for group in groups:
            row = tables.ownership(group)
            if row is not None and row.owner != member:
                self.lose(row)
            if row is not None and roster.may_return(row.owner):
                formers[group] = row.owner
        return _write(tables, roster, groups, member, Grant(0, epoch or roster.epoch, 0), formers=formers)

    def lose(self, row: Ownership) -> None:
        """Notes that a row goes. The newcomer that it was written for doesn't have all of its rows any more."""
        newcomer = self.newcomers.get(row.owner)
        if newcomer is not None and row.grant.number > newcomer.number:
            del self.newcomers[row.owner]

    def _claim(self, tables: Tables, roster: Roster, request: ClaimGroups) -> Sequence[Ownership | None] | None:
        rows = [owner_row(tables, roster, group) for group in request.groups]
        owners = {row.owner for row in rows if row is not None}
        member = request.member
        if member is None:
            member = owners.copy().pop() if len(owners) == 1 else _stays(roster)
        if member not in roster.ids:
            return None  # who claims for it will hear that it was removed
        if owners <= {member}:
            if None in rows and not _may_own(roster, member):
                self.new_holder = member
                return None
            new = [group for group, row in zip(request.groups, rows, strict=True) if row is None]
            given = iter(self.give_new(tables, roster, new, member))
            return [row or next(given) for row in rows]
        return rows

    def _locate(self, tables: Tables, roster: Roster, request: FindOwners) -> Sequence[Ownership | None]:
        rows: list[Ownership | None] = []
        for group, refused in zip(request.groups, request.refused, strict=True):
            row = owner_row(tables, roster, group)
            if row is not None and row.grant.number == refused:  # its owner has forgotten it, and still is the owner
                row = give(tables, roster, group, row.owner, row.grant.after, row.giver, row.first, row.former)
            rows.append(row)
        return rows

    def _is_confirmed(self, roster: Roster, question: int | None) -> bool:
        if question is None:
            return not roster.deputies
        return all(self._confirmed.get(deputy, -1) >= question for deputy in roster.deputies)

    def _hand_over(self, tables: Tables, roster: Roster, request: HandOver) -> Sequence[Ownership] | None:
        """A late duplicate names a grant from before the group was handed to its present owner."""
        if not {request.giver, request.taker} <= roster.ids:
            return None
        row = owner_row(tables, roster, request.group)
        if row is None:
            return None
        if row.owner == request.giver and request.of > row.grant.after:
            if request.taker != request.giver and _may_own(roster, request.taker):
                row = give(tables, roster, request.group, request.taker, request.of, request.giver)
            else:  # it stays, by a grant which tells a taker that what it keeps was never handed over to the end
                row = give(tables, roster, request.group, request.giver, request.of, None, row.first, row.former)
        return [row]

    def _forget_giver(self, tables: Tables, roster: Roster, request: Dropped) -> Sequence[Ownership | None]:
        """Writes rows without their giver, before the owner serves: after its death others have what was put there."""
        rows: list[Ownership | None] = []
        for group, of in request.rows:
            row = owner_row(tables, roster, group)
            if row is not None and row.giver == request.giver and row.grant.after == of:
                row = give(tables, roster, group, row.owner, of, None, row.first, row.former)
            rows.append(row)
        return rows

    def _inherited(self, tables: Tables, standing: Standing, request: Inherit) -> Answer:
        """Says which groups a removed member had that are its heir's. The heir is told what deputies have, too."""
        if standing.roster.departed_of(request.member) is None:
            return Stale(*standing.roster.position)
        page = tables.ownerships(request.after, ROWS_LIMIT)
        ids = standing.roster.ids
        told = self.tell(
            tables, standing, [row for row in page if row.owner == request.member and row.giver not in ids]
        )
        if isinstance(told, Later):
            return told
        rows = tuple(row for row in told.rows if row is not None)
        return Inherited(rows, page[-1].grant.number if len(page) == ROWS_LIMIT else 0)

    # --- mirrors ------------------------------------------------------------------------------------------------------

    def told(self, roster: Roster) -> list[bytes]:
        """Returns who is told of rows: the deputies, and the candidate."""
        return list(dict.fromkeys([*roster.deputies, *([self.candidate] if self.candidate else ())]))

    def mirror(self, slot: int) -> Steps[bool]:
        """Tells a deputy, or the candidate, what it doesn't have, and asks whether it obeys still.

        Returns whether it has taken in a portion, and there may be more.
        """
        question, began = self._questions, self.clock()
        found = yield from view(lambda tables: self._untold(tables, slot))
        if found is None:
            return False
        roster, member, after, upto, rows = found
        is_due = began - self.answered.get(member.id, 0) >= IDLE
        if after is not None and upto == after and self._confirmed.get(member.id) == question and not is_due:
            return False
        self.answered.setdefault(member.id, began)
        answer = yield from send(member, Mirror(roster.term, after or 0, upto or 0, rows))
        if isinstance(answer, Stale):
            self.hear_of(answer.term)
        if isinstance(answer, Mirrored) and self.term == roster.term:
            self._reached[member.id] = answer.upto
            self._confirmed[member.id] = max(question, self._confirmed.get(member.id, 0))
            self.answered[member.id] = self.clock()
            return len(rows) == ROWS_LIMIT
        return False

    def _untold(
        self, tables: Tables, slot: int
    ) -> tuple[Roster, Member, int | None, int | None, tuple[Ownership, ...]] | None:
        """Finds a member that is told of rows, up to which number it has them, and those beyond with their last number.

        One that hasn't been asked in this term says first how far it is.
        """
        standing = tables.standing()
        if standing is None or not standing.is_seed or standing.unheard or standing.is_removed:
            return None
        self.begin(standing)
        roster, told = standing.roster, self.told(standing.roster)
        member = roster.member(told[slot]) if slot < len(told) else None
        if member is None or member.id == standing.member:
            return None
        after = self._reached.get(member.id)
        if after is None:
            return roster, member, None, None, ()
        rows, upto = _rows_beyond(tables, roster, after)
        return roster, member, after, upto, rows

    def has_all(self, tables: Tables, member: bytes) -> bool:
        return self._reached.get(member, -1) >= max(tables.granted, self.term << TERM_BITS)


def give(
    tables: Tables,
    roster: Roster,
    group: bytes,
    member: bytes,
    after: int = 0,
    giver: bytes | None = None,
    since: int = 0,
    former: bytes | None = None,
    recovered: int = 0,
) -> Ownership:
    """Writes a row with a new grant. What was recovered before stays so."""
    before = tables.ownership(group)
    recovered = max(recovered, before.grant.recovered if before else 0)
    formers = {} if former is None else {group: former}
    grant = Grant(0, roster.epoch, after, recovered)
    return _write(tables, roster, [group], member, grant, giver, since, formers)[0]


def _write(
    tables: Tables,
    roster: Roster,
    groups: Sequence[bytes],
    member: bytes,
    like: Grant,
    giver: bytes | None = None,
    since: int = 0,
    formers: Mapping[bytes, bytes] | None = None,
) -> list[Ownership]:
    """Writes a row for each group. Their grants are like this one, but for its number."""
    last = max(tables.granted, roster.term << TERM_BITS)
    rows = [
        Ownership(
            group,
            member,
            Grant(number, like.epoch, like.after, like.recovered),
            giver,
            since,
            (formers or {}).get(group),
        )
        for number, group in enumerate(groups, last + 1)
    ]
    if rows:
        tables.put_ownerships(rows)
        tables.granted = last + len(rows)
    return rows


def take_mirror(tables: Tables, standing: Standing, request: Mirror) -> Answer:
    """Takes in rows as a deputy."""
    if request.term < max(standing.promised, standing.roster.term):
        return Stale(max(standing.promised, standing.roster.term))
    if request.term > standing.roster.term:
        return Later()
    known, newer = tables.ownerships_of([row.group for row in request.rows]), list[Ownership]()
    for row in request.rows:
        old = known.get(row.group)
        if old is None or old.grant.number < row.grant.number or old.grant.term < request.term:
            newer.append(row)
    if newer:
        tables.put_ownerships(newer)
    term, upto = tables.mirrored
    if term != request.term:
        upto = 0
    if request.after <= upto:
        upto = max(upto, request.upto)
    if tables.mirrored != (request.term, upto):
        tables.mirrored = (request.term, upto)
    return Mirrored(upto)


def _stays(roster: Roster) -> bytes:
    """Chooses who owns what a host puts that is never an owner."""
    takers = [member.id for member in roster.takers]
    return roster.seed if roster.seed in takers or not takers else takers[0]


def _may_own(roster: Roster, member: bytes) -> bool:
    return any(one.id == member for one in roster.owners)


def _rows_beyond(tables: Tables, roster: Roster, after: int) -> tuple[tuple[Ownership, ...], int]:
    rows = tuple(tables.ownerships(after, ROWS_LIMIT))  # a deputy's puts wait for some 3 ms while it takes them in
    if len(rows) == ROWS_LIMIT:
        return rows, rows[-1].grant.number
    return rows, max(after, tables.granted, roster.term << TERM_BITS)


# --- A hand-over -----------------------------------------------------------------------------------------------------
# A hand-over: a group of A becomes B's, with its records. Any of it may be cut off by a kill, and goes on after it.
#
# 1. *Mark* (`begin`): A notes whom the group goes to. From this transaction on no process of its host commits to it,
#    since each commit compares `membership`. Its sharded puts end. It is read here still.
# 2. *Give*: A sends the records, the outcomes of sharded puts, and at last its largest version. B keeps them beside its
#    own, unserved.
# 3. *Grant*: the seed writes a row for B, whose grant names A's. If B is removed, the group is A's again.
# 4. *Drop*: A forgets that it owns the group, and raises its floor to B's grant: no request with an older one is done
#       any more. Then it deletes the records, and lends their bytes to B. This must be of the term in which step 3 was
#    answered:
#    a later seed may have no directory, and hear from A alone what A still owns.
#    Then A tells the seed, which writes B's row anew, without A: if B is removed, the group is A's no more.
# 5. *Serve*: A tells B, which asks the directory and serves what it kept (`owning.admit`). Requests with B's grant may
#    come before that: they wait, because processes of A's host may read records there as long as it has them. If A was
#    removed, B need not be told.
# 6. *Finish*: the seed begins an epoch. Until A has heard of an epoch after the one in which B served the group, it
#    takes part in no listing: B may have been asked for its page before, and A after.


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
        end_attempts_of(tables, group)


def cancel(tables: Tables, group: bytes) -> None:
    """Keeps a group here that was to go to another member, if the directory doesn't have that one yet."""
    standing, leaving = tables.standing(), tables.leaving(group)
    if standing is not None and leaving is not None and leaving.grant is None:
        tables.put_leaving(group, msgspec.structs.replace(leaving, taker=standing.member))


# --- the old owner ----------------------------------------------------------------------------------------------------


def go_on(refused: dict[bytes, Failed] | None = None) -> Steps[bool]:
    """Goes on with each group that leaves this host, as far as it comes. Returns whether there is one.

    Args:
        refused: is given, by group, why its taker can't keep what it is given.
    """
    standing, all_leaving = yield from view(lambda tables: (tables.standing(), tables.all_leaving()))
    if standing is None or standing.is_removed:
        return False
    served, over = 0, list[bytes]()
    moves: list[tuple[bytes, Steps[Failed | LeavingGroup | None]]] = []
    for group, leaving in all_leaving:
        taker = standing.roster.member(leaving.taker)
        if leaving.grant is None:
            moves.append((group, _give(standing, group, leaving, taker)))
        elif not leaving.served:
            moves.append((group, _drop_rest(group, leaving)))
        elif standing.roster.epoch > leaving.served:
            over.append(group)
        else:
            served = max(served, leaving.served)
    for first in range(0, len(moves), _TOGETHER):
        some = moves[first : first + _TOGETHER]
        dropped = dict[bytes, LeavingGroup]()
        for (group, _), end in zip(some, (yield from side_by_side([steps for _, steps in some])), strict=True):
            if isinstance(end, LeavingGroup):
                dropped[group] = end
            elif end is not None and refused is not None:
                refused[group] = end
        yield from _hand(standing, dropped)
    if over:
        yield from transact(lambda tables: [tables.drop_leaving(group) for group in over])
    if served:  # one epoch for all of them
        yield from send(standing.seed, Finish(served))
    return bool(all_leaving)


def _give(
    standing: Standing, group: bytes, leaving: LeavingGroup, taker: Member | None
) -> Steps[Failed | LeavingGroup | None]:
    """Steps 2 to 4. Returns what is noted of a group that is dropped; or why the taker can't keep what it is given.

    None: it stays, or somebody gives no answer.
    """
    if taker is not None and taker.id == standing.member:  # it stays
        taker = None
    after: bytes | None = b"" if taker is not None else None
    while taker is not None and after is not None:
        portions, after = yield from view(
            lambda tables, start=after: _page(tables, standing.member, group, leaving, start)
        )
        for portion in portions:
            answer = yield from send(taker, portion)
            if not isinstance(answer, Done):
                return answer if isinstance(answer, Failed) else None
    to = standing.member if taker is None else taker.id
    answer = yield from send(standing.seed, HandOver(group, standing.member, leaving.of, to))
    row = answer.rows[0] if isinstance(answer, Owners) and answer.rows else None
    if row is not None:
        dropped = yield from transact(lambda tables: _drop(tables, standing.roster, leaving, row))
        if dropped is not None:
            return (yield from _drop_rest(group, dropped))
    return None


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
        entry = None if entry is None else with_replaced(tables, key, entry)
        size = KEY_LIMIT if entry is None else entry.nbytes
        if rows and (nbytes + size > BYTES_LIMIT or len(rows) == ROWS_LIMIT):
            found.append(_message(giver, group, leaving, rows, None))
            rows, nbytes = [], 0
        rows.append((key, entry))
        nbytes += size
    is_last = len(page) < ROWS_LIMIT
    if rows or is_last:
        found.append(_message(giver, group, leaving, rows, tables.version if is_last else None))
    return found, None if is_last else page[-1][0]


def _message(giver: bytes, group: bytes, leaving: LeavingGroup, rows: Rows, version: int | None) -> Give:
    whole = tuple((key, entry) for key, entry in rows if entry is not None)
    damaged = tuple(key for key, entry in rows if entry is None)
    return Give(group, giver, leaving.of, whole, (), damaged, version)


def _drop(tables: Tables, roster: Roster, leaving: LeavingGroup, row: Ownership) -> LeavingGroup | None:
    """Forgets that a group is owned here. Returns what is noted of it then; None: it stays, or all is as it was."""
    standing = tables.standing()
    if standing is None or standing.is_removed or standing.roster.term != roster.term:
        return None
    if tables.leaving(row.group) != leaving:
        return None
    if row.owner == standing.member:  # it stays
        record_grant(tables, row.group, row.grant)
        tables.drop_leaving(row.group)
        return None
    tables.drop_owned(row.group)
    dropped = msgspec.structs.replace(leaving, taker=row.owner, grant=row.grant)
    tables.put_leaving(row.group, dropped)
    if standing.floor < row.grant.number:
        tables.put_standing(msgspec.structs.replace(standing, floor=row.grant.number))
    return dropped


def _drop_rest(group: bytes, leaving: LeavingGroup) -> Steps[LeavingGroup]:
    """The rest of step 4, but for telling the seed."""
    after: bytes | None = b""
    given_up = 0
    while after is not None:
        count, after = yield from transact(lambda tables, start=after: _drop_page(tables, group, leaving, start))
        given_up += count
    if given_up:
        name = group.decode(errors="replace")
        log.warning("%d replaced versions of the group %r go: one message has no room for all of a key", given_up, name)
    return leaving


def _hand(standing: Standing, dropped: dict[bytes, LeavingGroup]) -> Steps[None]:
    """Tells the seed of groups that are dropped, and their takers: step 5."""
    gone = [group for group, leaving in dropped.items() if standing.roster.member(leaving.taker) is None]
    if gone:  # what they were handed is gone with them
        yield from transact(lambda tables: [tables.drop_leaving(group) for group in gone])
    left = [(group, leaving) for group, leaving in dropped.items() if group not in gone]
    if not left:
        return
    rows = tuple((group, leaving.of) for group, leaving in left)
    answer = yield from send(standing.seed, Dropped(standing.member, rows))
    if not isinstance(answer, Owners):
        return
    takers = [standing.roster.member(leaving.taker) for _, leaving in left]
    requests = [(taker, Serve(group, of)) for taker, (group, of) in zip(takers, rows, strict=True) if taker is not None]
    for (group, leaving), served in zip(left, (yield from send_all(requests)), strict=True):
        if isinstance(served, IsAt):
            over = msgspec.structs.replace(leaving, served=served.version)
            yield from transact(lambda tables, group=group, over=over: tables.put_leaving(group, over))


def _drop_page(tables: Tables, group: bytes, leaving: LeavingGroup, after: bytes) -> tuple[int, bytes | None]:
    """Deletes records. Bytes that lie here are lent to the new owner. What is damaged stays.

    Returns how many replaced versions were given up, and where the next page begins.
    """
    standing = tables.standing()
    if standing is None or tables.leaving(group) != leaving:  # it may be owned here once more
        return 0, None
    page, given_up = group_page(tables, group, after, ROWS_LIMIT), 0
    for key, entry in page:
        if entry is None:
            continue
        given_up += hand_on(tables, standing, key, entry, leaving.taker)
        tables.delete_record(key)
        tables.put_keepers(key, ())  # they count no more; if the group comes back, nobody has kept them up to date
        tables.put_unnoted(key, False)
        forget_replica(tables, key)
        for place in entry.places:
            if place.host == standing.member:
                with passing_over(tables, key):
                    tables.lend(place, Lent(key, leaving.taker))
    return given_up, page[-1][0] if len(page) >= ROWS_LIMIT else None


# --- the new owner ----------------------------------------------------------------------------------------------------


def take(tables: Tables, standing: Standing, request: Give) -> Answer:
    """Keeps what comes. A late duplicate changes nothing that counts: no grant names what it brings."""
    if not standing.may_change:
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
        rows = {key: entry for key, entry in request.rows if group_of(key) == request.group}
        damaged = dict.fromkeys((key for key in request.damaged if group_of(key) == request.group), None)
        tables.keep({**rows, **damaged})
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
    after: bytes | None = None
    has_kept = False
    while page := (yield from view(lambda tables, start=after: tables.all_kept(start, ROWS_LIMIT))):
        after, has_kept = page[-1][0], True
        if not (yield from _settle_page(standing, dict(page), refused)):
            break
    return has_kept


def _settle_page(standing: Standing, kept_of: Mapping[bytes, KeptGroup], refused: dict[bytes, int]) -> Steps[bool]:
    """Returns whether the directory has answered."""
    groups = tuple(kept_of)
    numbers = tuple(refused.get(group, 0) for group in groups)
    answer = yield from send(standing.seed, FindOwners(groups, numbers))
    if not isinstance(answer, Owners):
        return False
    mine: list[tuple[Ownership, KeptGroup]] = []
    for group, row in zip(groups, answer.rows, strict=True):
        kept = kept_of[group]
        if row is not None and row.owner == standing.member and row.grant.after == kept.of:
            mine.append((row, kept))
        elif is_outdated(row, kept.of):
            continue
        elif row is None or row.owner != kept.giver or kept.of <= row.grant.after:  # a late duplicate has brought it
            yield from transact(lambda tables, group=group, kept=kept: _forget(tables, group, kept))
    while mine:
        done = yield from transact(lambda tables, some=mine: _open_some(tables, some, refused))
        mine = mine[done:]
        yield from pause(SOON)
    return True


def _open_some(tables: Tables, rows: Sequence[tuple[Ownership, KeptGroup]], refused: dict[bytes, int]) -> int:
    """Opens a portion. Returns how many of these groups are open, or can't be opened yet."""
    done = 0
    for row, kept in rows[:PORTION]:
        before = tables.kept_page(row.group, 2)
        opened = _open(tables, row, kept)
        if isinstance(opened, NotOwner):
            refused[row.group] = row.grant.number
        if isinstance(opened, Later) and tables.kept_page(row.group, 2) != before:
            break  # there is more of it
        done += 1
        if len(before) > 1:
            break
    return done


def _open(tables: Tables, row: Ownership, kept: KeptGroup) -> Answer | None:
    if tables.owned(row.group) is not None:
        _forget(tables, row.group, kept)
        return None
    return admit(tables, own_standing(tables), [row.group], [row.grant], changes=False)


def _forget(tables: Tables, group: bytes, kept: KeptGroup) -> None:
    now = tables.kept(group)
    if now is not None and now.of == kept.of:
        tables.drop_kept(group)
