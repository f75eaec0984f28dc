"""A removed host comes back: as a new member, which puts anew what was lost, and nobody has put or deleted since.

The removed root never is a member again: rows that name it count for nothing, wherever they are. It is set aside, and
the host serves a new root, with another id. That joins as any other, and brings back what the old one has
(`Returns`):

1. *Ask the seed* (`answer_return`). The roster's `returns` says who may come back, and which member brings it. So of
   two copies of a folder one comes back, and each once.
2. *Ask the directory* who owns the groups by now. What the removed member owned and nobody has claimed since is
   claimed.
3. *Offer* keys, with their versions, to the owners, which say what may come back: see `remembering.py`.
4. *Put* those, by an ordinary commit, under the condition that they still may (`Change.returns`). They get new
   versions: above all that readers have seen of their keys. All of one owner, of a portion, come back at one moment.
5. *Tell* all members which names are lost no more, and which stay lost; then the seed, that it is over.

Two kinds of versions come back. Those of groups that the removed member owned, if the directory says that no third
one has owned the group since (`Ownership.former`), and this owner doesn't remember a deletion. And those that it had
put into groups of others, if the owner remembers that it has dropped just this version, since its bytes were gone.

What names bytes of other members, too, doesn't come back, nor rows that are written in place. A kill leaves what has
come back, which is no longer in the old root then, and the rest there: it begins anew with that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from memstore.distributed.rules import remembering
from memstore.distributed.rules.directory import Directory
from memstore.distributed.rules.messages import (
    IS_PUT_SINCE,
    IS_THERE,
    MAY_RETURN,
    PORTION,
    ROWS_LIMIT,
    STAYS_AWAY,
    Answer,
    CameBack,
    ClaimGroups,
    FindOwners,
    IsRoster,
    Later,
    Lost,
    NotOwner,
    Offer,
    Offered,
    Owners,
    Refused,
    Return,
)
from memstore.distributed.rules.nouns import Grant, Ownership, Returning, Standing, group_of, groups_of
from memstore.distributed.rules.owning import admit
from memstore.distributed.rules.recovery import LOST_LIMIT, note_lost
from memstore.distributed.rules.roster import propose
from memstore.distributed.rules.steps import Steps, Tables, own_standing, pause, send, send_all, transact, view

AT_ONCE = 256 << 20  # bytes that come back at one moment, or one value
AWAY = 86_400_000_000_000  # nanoseconds for which a removed member may come back
_BETWEEN = 0.002  # seconds between two portions, in which puts come to the mutex
_SHOWN = 20  # names in a line of the log

# --- the seed ---------------------------------------------------------------------------------------------------------


def answer_return(tables: Tables, standing: Standing, seed: Directory, request: Return) -> Answer:
    """Notes who brings back what a removed member had; or that it is over. One member at a time, and once."""
    seed.begin(standing)
    roster = standing.roster
    if not standing.is_seed or standing.unheard or not seed.is_settled(standing):
        return Later()
    by = dict(roster.returns).get(request.former)
    if by is None:
        why = "it has come back before, was drained, or many hosts were removed since"
        return IsRoster(roster) if request.is_over else Refused(why)
    if request.by not in roster.ids:
        return Later()
    if by == request.by and not request.is_over:
        return IsRoster(roster)
    if by != request.by and by in roster.ids:
        return Refused("another host brings it back: was the folder copied?")
    others = tuple(one for one in roster.returns if one[0] != request.former)
    back = others if request.is_over else ((request.former, request.by), *others)
    propose(tables, standing, is_settled=True, returns=back)
    return Later()


def give_up(seed: Directory) -> Steps[None]:
    """Waits no longer for removed members that don't come back: owners remember deletions for them all the while.

    The time counts in memory: a seed that is started again begins anew.
    """
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or standing.is_removed or standing.unheard:
        return
    now, roster = seed.clock(), standing.roster
    away = [former for former, by in roster.returns if by not in roster.ids]
    seed.away_since = {former: seed.away_since.get(former, now) for former in away}
    over = {former for former, since in seed.away_since.items() if now - since > AWAY}
    if over:
        yield from transact(lambda tables: _give_up(tables, seed, over))


def _give_up(tables: Tables, seed: Directory, over: Collection[bytes]) -> None:
    standing = own_standing(tables)
    if seed.is_settled(standing):
        back = tuple(one for one in standing.roster.returns if one[0] not in over)
        propose(tables, standing, is_settled=True, returns=back)


# --- the host that comes back -----------------------------------------------------------------------------------------


class FormerEntry(msgspec.Struct, frozen=True):
    """A version that the removed root has.

    Attributes:
        is_own: it owned the key's group; else another host did, and it had put the version there.
        is_whole: all of its bytes are here, and it may be put anew.
        nbytes: that it takes.
    """

    key: bytes
    version: int
    is_own: bool
    is_whole: bool
    nbytes: int = 0


class FormerRoot(Protocol):
    """A removed root that was set aside.

    Attributes:
        member: its id.
        who: that member, for people, as others name it.
    """

    member: bytes
    who: str

    def page(self, after: bytes, limit: int) -> Sequence[FormerEntry]: ...  # the next keys beyond that one, in order
    def groups(self) -> Sequence[bytes]: ...  # that it owned, or the first ones, of LOST_LIMIT
    def drop(self, keys: Collection[bytes]) -> None: ...  # they have come back


Take = Callable[[FormerRoot, Sequence[tuple[FormerEntry, Returning]]], Steps[bool]]
"""Puts versions anew, at one moment. False: it is to be tried again, perhaps without one that is damaged."""


class Returns:
    """What this host brings back, since its index process was started.

    Attributes:
        count: of keys that have come back.
        left: keys that stay away: they are lost.
        replaced: keys that were put anew since, so what this host had of them stays away.
        is_over: there is nothing more to do.
    """

    def __init__(self, root: FormerRoot, take: Take) -> None:
        self._root, self._take = root, take
        self.count, self.left, self.replaced = 0, dict[bytes, None](), dict[bytes, None]()
        self.is_over = False
        self._why, self._is_told = "", False
        self._back: list[bytes] = []
        self._refused: dict[bytes, int] = {}  # of groups, the number of the grant that their owner has refused

    def run(self) -> Steps[bool]:
        """Goes on as far as it comes. Returns whether it is over."""
        standing = yield from view(lambda tables: tables.standing())
        if self.is_over or standing is None or not standing.may_change or standing.is_joining:
            return self.is_over
        former, member = self._root.member, standing.member
        if self._is_told:  # until the seed has noted it: owners remember deletions for this host
            yield from send(standing.seed, Return(former, member, is_over=True))
            self.is_over = (former, member) not in standing.roster.returns
            return self.is_over
        answer = yield from send(standing.seed, Return(former, member))
        if isinstance(answer, Refused):
            yield from self._end(standing, f"{answer.why}: nothing comes back")
            return False
        if (former, member) not in standing.roster.returns:
            return False  # it asks again when it has heard of the roster that says so
        is_whole, after = True, b""
        while page := self._root.page(after, ROWS_LIMIT):
            after = page[-1].key
            entries = [one for one in page if one.key not in self.left and one.key not in self.replaced]
            is_whole = (yield from self._bring(standing, entries)) and is_whole
            yield from pause(_BETWEEN)
        if not is_whole:
            return False
        yield from self._end(standing, "they were deleted since, or can't be put anew")
        return False

    def _end(self, standing: Standing, why: str) -> Steps[None]:
        """Tells all what has come back, and what stays lost."""
        after = b""
        while page := self._root.page(after, ROWS_LIMIT):
            after = page[-1].key
            self.left |= dict.fromkeys(one.key for one in page if one.key not in self.replaced)
        who, left = self._root.who, list(self.left)
        back, groups = tuple(self._back[:ROWS_LIMIT]), tuple(self._root.groups())[:ROWS_LIMIT]
        lost = tuple(left[:LOST_LIMIT])
        self._why = why
        yield from transact(lambda tables: _note(tables, who, back, groups, lost))
        for request in (CameBack("", back), CameBack(who, groups), Lost(who, lost)):
            others = [member for member in standing.roster.members if member.id != standing.member]
            yield from send_all([(member, request) for member in others] if request.names else [])
        self._is_told = True

    def said(self) -> str:
        """Returns what has come back, for people."""
        why = self._why
        left = f"; {len(self.left):,} stay lost{f' ({why})' if why else ''}: {_shown(self.left)}" if self.left else ""
        new = f"; {len(self.replaced):,} have been put anew: {_shown(self.replaced)}" if self.replaced else ""
        return f"{self.count:,} keys are there again{left}{new}"

    def _bring(self, standing: Standing, entries: Sequence[FormerEntry]) -> Steps[bool]:
        """Brings back what may come back of a page. Returns whether nothing of it is left to be tried again."""
        rows = yield from self._locate(standing, entries)
        if rows is None:
            return False
        by_owner: dict[bytes, list[tuple[FormerEntry, Returning]]] = {}
        for one in entries:
            row = rows.get(group_of(one.key))
            if row is None:
                self.left[one.key] = None
                continue
            under = row.grant.number if one.is_own and row.former == self._root.member else 0
            returning = Returning(self._root.member, standing.member, one.version, under)
            by_owner.setdefault(row.owner, []).append((one, returning))
        is_done = True
        for owner, offered in by_owner.items():
            grants = tuple(rows[group].grant for group in groups_of(one.key for one, _ in offered))
            is_done = (yield from self._bring_to(standing, owner, offered, grants)) and is_done
        return is_done

    def _locate(self, standing: Standing, entries: Sequence[FormerEntry]) -> Steps[dict[bytes, Ownership] | None]:
        """Finds who owns groups by now. Those of the removed member that nobody owns are claimed. None: not yet."""
        rows: dict[bytes, Ownership] = {}
        groups = groups_of(one.key for one in entries)
        own = {group_of(one.key) for one in entries if one.is_own and one.is_whole}
        for first in range(0, len(groups), PORTION):
            some = groups[first : first + PORTION]
            refused = tuple(self._refused.pop(group, 0) for group in some)
            answer = yield from send(standing.seed, FindOwners(some, refused))
            if not isinstance(answer, Owners):
                return None
            found = {row.group: row for row in answer.rows if row is not None}
            nobody = tuple(group for group in some if group not in found and group in own)
            if nobody:
                is_owner = standing.roster.member(standing.member) in standing.roster.takers
                claimed = yield from send(standing.seed, ClaimGroups(nobody, standing.member if is_owner else None))
                if not isinstance(claimed, Owners):
                    return None
                found |= {row.group: row for row in claimed.rows if row is not None}
            rows |= found
        return rows

    def _bring_to(
        self,
        standing: Standing,
        owner: bytes,
        offered: Sequence[tuple[FormerEntry, Returning]],
        grants: tuple[Grant, ...],
    ) -> Steps[bool]:
        offer = Offer(tuple(one.key for one, _ in offered), grants, tuple(row for _, row in offered))
        member = standing.roster.member(owner)
        if owner == standing.member:
            answer: Answer | None = yield from transact(
                lambda tables: answer_offer(tables, own_standing(tables), offer)
            )
        elif member is None:
            return False
        else:
            answer = yield from send(member, offer)
        if isinstance(answer, NotOwner):  # it was never recorded, and others since
            groups = groups_of(offer.keys)
            self._refused |= {group: grant.number for group, grant in zip(groups, grants, strict=True)}
        if not isinstance(answer, Offered) or len(answer.fates) != len(offered):
            return False
        keys: tuple[list[bytes], ...] = ([], [], [], [])
        for (one, _), fate in zip(offered, answer.fates, strict=True):
            keys[STAYS_AWAY if fate == MAY_RETURN and not one.is_whole else fate].append(one.key)
        self._root.drop(keys[IS_THERE])
        self.replaced |= dict.fromkeys(keys[IS_PUT_SINCE])
        self.left |= dict.fromkeys(keys[STAYS_AWAY])
        back = set(keys[MAY_RETURN])
        some = [pair for pair in offered if pair[0].key in back]
        for portion in _portions(some):
            if not (yield from self._take(self._root, portion)):
                return False
            back = [one.key for one, _ in portion]
            self.count += len(back)
            self._back += back[: ROWS_LIMIT - len(self._back)]
            self._root.drop(back)
        return True


def _portions(some: Sequence[tuple[FormerEntry, Returning]]) -> list[list[tuple[FormerEntry, Returning]]]:
    """Splits what may come back, so that not too much of it takes room twice for a while."""
    found: list[list[tuple[FormerEntry, Returning]]] = []
    nbytes = AT_ONCE
    for one in some:
        if nbytes >= AT_ONCE:
            found.append([])
            nbytes = 0
        found[-1].append(one)
        nbytes += one[0].nbytes
    return found


def _shown(names: Collection[bytes]) -> str:
    shown = ", ".join(repr(name.decode(errors="replace")) for name in list(names)[:_SHOWN])
    return shown + (", ..." if len(names) > _SHOWN else "")


def answer_offer(tables: Tables, standing: Standing, offer: Offer) -> Answer:
    """Says what may come back, as the owner of the groups."""
    refused = admit(tables, standing, groups_of(offer.keys), offer.grants, changes=True)
    return refused or remembering.answer_offer(tables, standing, offer)


def take_word(tables: Tables, request: CameBack) -> None:
    for name in request.names:
        tables.drop_lost(name, request.who)


def _note(tables: Tables, who: str, back: Sequence[bytes], groups: Sequence[bytes], lost: Sequence[bytes]) -> None:
    take_word(tables, CameBack("", tuple(back)))
    take_word(tables, CameBack(who, tuple(groups)))
    note_lost(tables, who, lost)
