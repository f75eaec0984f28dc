"""A host that is drained: its groups go to other owners, then its bytes; then it leaves. Decision 029 has the reasons.

1. *Begin* (`roster.drain`, at the seed): the roster says that the member leaves. It gets no new groups from then on.
2. *Groups* (`Leaver._give_groups`): it hands them over, a portion at a time: see `directory.py`.
3. *Bytes* (`Leaver._are_taken`, `Takeovers`): each member looks through its records, and copies what they name there.
4. *Seal* (`_seal`): the leaver owns nothing, and nothing is on its way: from here on its processes change nothing.
5. *Leave* (`Leaver._leave`): each member has looked once more, nothing is lent: it asks the seed to remove it.

A kill anywhere leaves what the tables say: the roster has the leaver, the standing the seal. Rounds begin anew.

**Cancelled** (`stay`, `Leaver._stay`): the leaver notes that it stays, and isn't sealed from then on; then the seed
notes it. What has moved stays moved. Once it is sealed, it can't stay: a question to be removed may be on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

import msgspec

from memstore.distributed.rules import directory, history
from memstore.distributed.rules.history import dispose, is_here
from memstore.distributed.rules.messages import (
    PORTION,
    ROWS_LIMIT,
    Answer,
    Done,
    Drain,
    Failed,
    IsRoster,
    Later,
    Meet,
    Met,
    Refused,
    Remove,
    Stay,
    TakeOver,
)
from memstore.distributed.rules.nouns import Entry, Member, Roster, Standing, group_of
from memstore.distributed.rules.owning import group_heads
from memstore.distributed.rules.recovery import forget_keepers, noted
from memstore.distributed.rules.roster import adopt, leave
from memstore.distributed.rules.steps import (
    LeavingGroup,
    Steps,
    Tables,
    own_standing,
    pause,
    send,
    send_all,
    transact,
    view,
)
from memstore.errors import CorruptionError

AT_ONCE = 128  # groups: until all are served elsewhere, nobody writes them, and this host takes part in no listing
AGAIN = 1_000_000_000  # nanoseconds between two rounds, where a pass has left something
UNTAKEN = 5_000_000_000  # nanoseconds after which a group that nobody takes can be written here again
DECLINED = 5_000_000_000  # nanoseconds for which a host that has taken nothing is given nothing
FOR_ATTEMPTS = 30_000_000_000  # nanoseconds that sharded puts of a group have to end before it is handed over
_MUTABLE = "it is a dataset or a replay buffer, whose rows are written in place on the host that is drained"
_ATTACHED = "it is attached, and lies in files of others on the host that is drained"
_WAY_OUT = {
    "MutableEntryError": f"{_MUTABLE}: seal or delete it",
    "CrossHostError": f"{_ATTACHED}: delete it, or put it with attach(copy=True)",
}

Take = Callable[[bytes, Entry, bytes], Steps[bool | Failed]]
"""Copies the bytes of an entry that lie on a member to this host, and calls `replace_places`: whether it has."""


class Trouble(msgspec.Struct, frozen=True):
    """Why a drain doesn't go on. `at`: the member where it can't; None: this host."""

    failed: Failed
    at: Member | None = None


# --- the host that leaves ---------------------------------------------------------------------------------------------


class Leaver:
    """This host, as one that leaves, since its index process was started.

    Args:
        clock: nanoseconds of this host's clock since boot.

    Attributes:
        trouble: of the last pass; None: it goes on.
        has_marked: the last pass has begun hand-overs.
        brings_back: this host has not brought back yet all that a removed one had: see `returning.py`.
        refused: by group, why its taker can't keep what it is given: see `directory.go_on`.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.trouble: Trouble | None = None
        self.has_marked = self.brings_back = False
        self.refused: dict[bytes, Failed] = {}
        self._round = 0
        self._since: dict[bytes, int] = {}  # when a group was marked, or its attempts were found
        self._declined: dict[bytes, tuple[int, Trouble]] = {}  # by member, until when, and why

    def run(self) -> Steps[bool]:
        """Goes on as far as it comes. Returns whether this host leaves, or is to hear that it stays."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.is_removed:
            return False
        if standing.stays:
            yield from self._stay(standing)
            return True
        if not standing.roster.is_leaver(standing.member):
            if standing.is_sealed:  # a word from before that it stays came late
                yield from send(standing.seed, Drain(standing.member))
            return standing.is_sealed
        found: list[Trouble] = []
        self.has_marked = False
        if standing.is_sealed or not (yield from self._give_groups(standing, found)):
            yield from self._give_bytes(standing, found)
        else:
            found += self._refusals(standing)
        self.trouble = found[0] if found else None
        return True

    def _give_bytes(self, standing: Standing, found: list[Trouble]) -> Steps[None]:
        if self.brings_back:
            found.append(Trouble(Failed("NotServedError", "it still brings back what a removed host had")))
            return
        self._round = self._round or self._clock()
        if not (yield from self._are_taken(standing, found)):
            return
        if not standing.is_sealed:
            if (yield from transact(_seal)):
                self._round = self._clock()
        elif not (yield from view(lambda tables: tables.all_lent(0, 1))):
            yield from _leave(standing, found)
        elif self._clock() - self._round > AGAIN:
            self._round = self._clock()

    def _stay(self, standing: Standing) -> Steps[None]:
        """Takes back what is on its way, if it isn't another's yet, and has the seed note that this host stays."""
        self.trouble = None
        for group, one in (yield from view(lambda tables: tables.all_leaving())):
            if one.grant is None and one.taker != standing.member:
                yield from transact(lambda tables, group=group: directory.cancel(tables, group))
        answer = yield from send(standing.seed, Drain(standing.member, cancels=True))
        if isinstance(answer, IsRoster) and not answer.roster.is_leaver(standing.member):
            yield from transact(lambda tables: _stays(tables, answer.roster))

    # --- groups -------------------------------------------------------------------------------------------------------

    def _give_groups(self, standing: Standing, found: list[Trouble]) -> Steps[bool]:
        """Hands over the next groups. Returns whether some are here, or on their way."""
        leaving, busy, has_kept = yield from view(
            lambda tables: (
                dict(tables.all_leaving()),
                {group_of(part.key) for part in tables.parts()},
                bool(tables.all_kept()),
            )
        )
        if leaving:
            yield from self._take_back(standing, leaving)
            return True
        self._since = {group: since for group, since in self._since.items() if group in busy}
        after: bytes | None = None
        chosen: list[bytes] = []
        while len(chosen) < AT_ONCE:
            rows = yield from view(lambda tables, start=after: tables.all_owned(start, PORTION))
            if not rows:
                break
            for group, _ in rows[: AT_ONCE - len(chosen)]:
                after = group
                stuck = yield from _stuck(standing.member, group)
                if stuck is not None:
                    found.append(Trouble(stuck))
                elif group not in busy or self._clock() - self._since.setdefault(group, self._clock()) > FOR_ATTEMPTS:
                    chosen.append(group)
        if chosen:
            takers = yield from self._takers(standing, found)
            if takers:
                given = {group: takers[crc32(group) % len(takers)].id for group in chosen}
                self._since = {**self._since, **dict.fromkeys(given, self._clock())}
                yield from transact(lambda tables: _mark(tables, given))
                self.has_marked = True
        return after is not None or has_kept

    def _takers(self, standing: Standing, found: list[Trouble]) -> Steps[Sequence[Member]]:
        """Returns the members that take groups, of those that answer: the one that was named, or any that stays."""
        own = standing.roster.member(standing.member)
        asked = [member for member in _able(standing) if not self._declines(member)]
        if own is None or not asked:
            return []
        answers = yield from send_all([(member, Meet(own, None)) for member in asked])
        takers = [member for member, answer in zip(asked, answers, strict=True) if isinstance(answer, Met)]
        if not takers:
            found.extend(_silent(member) for member in asked)
        return takers

    def _take_back(self, standing: Standing, leaving: Mapping[bytes, LeavingGroup]) -> Steps[None]:
        """Cancels what nobody takes: a marked group can be written by nobody."""
        now = self._clock()
        for group, one in leaving.items():
            refused, taker = self.refused.pop(group, None), standing.roster.member(one.taker)
            if one.grant is not None or taker is None or taker.id == standing.member:
                continue
            if refused is not None or now - self._since.setdefault(group, now) >= UNTAKEN:
                why = _silent(taker) if refused is None else Trouble(refused, taker)
                self._declined[taker.id] = now + DECLINED, why
                yield from transact(lambda tables, group=group: directory.cancel(tables, group))

    def _declines(self, member: Member) -> bool:
        return self._declined.get(member.id, (0, None))[0] > self._clock()

    def _refusals(self, standing: Standing) -> list[Trouble]:
        """Returns why no host takes groups; empty: one may."""
        able = _able(standing)
        if not able:
            return [Trouble(Failed("NotServedError", "no other host may own its groups"))]
        return [self._declined[member.id][1] for member in able] if all(map(self._declines, able)) else []

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _are_taken(self, standing: Standing, found: list[Trouble]) -> Steps[bool]:
        """Asks all others whether they have taken over, in this round, what their records name here."""
        others = [member for member in standing.roster.members if member.id != standing.member]
        answers = yield from send_all([(member, TakeOver(standing.member, self._round)) for member in others])
        for member, answer in zip(others, answers, strict=True):
            if isinstance(answer, Failed):
                found.append(Trouble(answer, member))
            elif answer is None:
                found.append(_silent(member))
        return all(isinstance(answer, Done) for answer in answers)


def _able(standing: Standing) -> list[Member]:
    """Returns the members that may take groups: the one that was named, if it stays, or all that do."""
    takers = standing.roster.takers
    named = dict(standing.roster.leavers)[standing.member]
    return [member for member in takers if member.id == named] or list(takers)


def _mark(tables: Tables, given: Mapping[bytes, bytes]) -> None:
    for group, taker in given.items():
        directory.begin(tables, group, taker)


def _stuck(member: bytes, group: bytes) -> Steps[Failed | None]:
    """Returns why a group can't be handed over: bytes of it can't leave this host."""
    after = b""
    while True:
        page = yield from view(lambda tables, start=after: group_heads(tables, group, start, ROWS_LIMIT))
        for key, entry in page:
            stuck = None if entry is None else stays(key, entry, member)
            if stuck is not None:
                return stuck
        if not page:
            return None
        after = page[-1][0]


def stays(key: bytes, entry: Entry, member: bytes) -> Failed | None:
    """Returns why bytes of an entry can't leave a member; None: they can, or there are none."""
    places = [place for place in entry.places if place.host == member]
    if places and entry.is_mutable:
        return Failed("MutableEntryError", _WAY_OUT["MutableEntryError"], key)
    if any(not place.segment for place in places):
        return Failed("CrossHostError", _WAY_OUT["CrossHostError"], key)
    return None


def _silent(member: Member) -> Trouble:
    return Trouble(Failed("HomeUnavailableError", f"{member.label} does not answer"), member)


def _seal(tables: Tables) -> bool:
    """Ends what this host and its processes may change, unless it owns something, or something is on its way."""
    standing = own_standing(tables)
    if standing.stays or tables.all_owned(None, 1) or tables.all_leaving() or tables.all_kept():
        return False
    tables.put_standing(msgspec.structs.replace(standing, is_sealed=True))
    return True


def stay(tables: Tables, standing: Standing, request: Stay) -> Answer:
    """Notes that this host stays, which is to leave. The answer is `Done` once the seed has noted it, too."""
    if not standing.may_change:
        return Refused("it has given away all that it had, and leaves: serve an empty folder there")
    if standing.stays or standing.roster.position < (request.term, request.epoch):
        return Later()
    if not standing.roster.is_leaver(standing.member):
        return Done()
    tables.put_standing(msgspec.structs.replace(standing, stays=True))
    return Later()


def _stays(tables: Tables, roster: Roster) -> None:
    adopt(tables, roster)
    standing = own_standing(tables)
    if not standing.roster.is_leaver(standing.member):
        tables.put_standing(msgspec.structs.replace(standing, stays=False))


def _leave(standing: Standing, found: list[Trouble]) -> Steps[None]:
    answer = yield from send(standing.seed, Remove(standing.member))
    if isinstance(answer, IsRoster) and answer.roster.member(standing.member) is None:
        yield from transact(leave)
    elif isinstance(answer, Refused):
        found.append(Trouble(Failed("NotServedError", answer.why), standing.seed))
    elif answer is None:
        found.append(_silent(standing.seed))


# --- what is left -----------------------------------------------------------------------------------------------------


def forget_gone() -> Steps[None]:
    """Forgets which members that are gone keep versions of this host's keys: nobody asks them any more."""
    after: bytes = b""
    while page := (yield from view(lambda tables, start=after: tables.all_keepers(start, ROWS_LIMIT))):
        after = page[-1][0]
        ids = (yield from view(own_standing)).roster.ids
        stale = [key for key, rows in page if not ids.issuperset(host for host, _ in rows)]
        for first in range(0, len(stale), PORTION):
            yield from transact(lambda tables, some=stale[first : first + PORTION]: _forget_keepers(tables, some))
            yield from pause(directory.BETWEEN)


def _forget_keepers(tables: Tables, keys: Sequence[bytes]) -> None:
    for key in keys:
        noted(tables, b"", [(key, 0)])


# --- the others -------------------------------------------------------------------------------------------------------


class _Round(msgspec.Struct):
    """A look through all records. `answer`: of the last pass; None: there was none yet."""

    number: int
    answer: Done | Failed | None = None


class Takeovers:
    """What this host has taken over of members that leave, since its index process was started.

    On storage that hosts share, of such, too, that were removed: their files are there until nothing names them.
    """

    def __init__(self) -> None:
        self._rounds: dict[bytes, _Round] = {}
        self._asked: dict[bytes, tuple[tuple[int, int], int]] = {}  # by removed member: the roster, and the round

    def answer(self, standing: Standing, request: TakeOver) -> Answer:
        if not _may_go(standing.roster, request.member):
            return Later()
        found = self._rounds.get(request.member)
        if found is None or found.number != request.round:
            found = self._rounds[request.member] = _Round(request.round)
        return found.answer or Later()

    def run(self, take: Take) -> Steps[bool]:
        """Looks through all records for each leaver that has asked. Returns whether a pass is to be made again soon."""
        standing = yield from view(lambda tables: tables.standing())
        for leaver, now in list(self._rounds.items()):
            if standing is None or not _may_go(standing.roster, leaver):
                del self._rounds[leaver]
            elif not isinstance(now.answer, Done):
                now.answer = yield from _take_all(leaver, take)
        return any(one.answer is None for one in self._rounds.values())

    def clear(self, former: bytes, now: int) -> Steps[bool]:
        """Asks all, and this host, whether they have taken over what a removed member has left. Then it can go.

        A drain may carry a record from who hasn't looked yet to who has: all look anew under another roster.
        """
        standing = yield from view(own_standing)
        position = standing.roster.position
        if self._asked.get(former, (None, 0))[0] != position:
            self._asked[former] = position, now
        request = TakeOver(former, self._asked[former][1])
        others = [member for member in standing.roster.members if member.id != standing.member]
        answers = yield from send_all([(member, request) for member in others])
        after = yield from view(own_standing)
        has_moved = bool(standing.roster.leavers) or after.roster.position != position
        is_done = all(isinstance(answer, Done) for answer in (*answers, self.answer(standing, request)))
        return is_done and not has_moved


def _may_go(roster: Roster, member: bytes) -> bool:
    """Returns whether a member leaves; or was removed, and what it owned has owners."""
    return roster.is_leaver(member) or (member not in roster.ids and roster.departed_of(member) is None)


def _take_all(leaver: bytes, take: Take) -> Steps[Done | Failed | None]:
    """Takes over what records name there. Returns what a pass has met: None, if it is to be made again."""
    after, first, is_whole = b"", None, not (yield from view(lambda tables: _are_to_come(tables, leaver)))
    while True:
        found, last = yield from view(lambda tables, start=after: _page(tables, leaver, start))
        for key in found:
            met = yield from _take(leaver, key, take)
            if isinstance(met, Failed):
                first = first or met
                if met.error == "StoreFullError":
                    return met
            is_whole = is_whole and met is True
        if last is None:  # what was replaced meanwhile isn't seen before, and may be kept
            is_whole = (yield from history.take_over(leaver, take)) and is_whole
            return first or (Done() if is_whole else None)
        after = last
        yield from pause(directory.BETWEEN)


def _are_to_come(tables: Tables, leaver: bytes) -> bool:
    """Returns whether records may still come that name a removed member: of hand-overs. (A leaver asks twice.)"""
    roster = own_standing(tables).roster
    return leaver not in roster.ids and bool(roster.leavers or tables.all_kept(None, 1) or tables.all_leaving())


def _page(tables: Tables, leaver: bytes, after: bytes) -> tuple[list[bytes], bytes | None]:
    page = tables.heads(after, ROWS_LIMIT)
    named = [key for key, entry in page if entry and any(place.host == leaver for place in entry.places)]
    return named, page[-1][0] if page else None


def _take(leaver: bytes, key: bytes, take: Take) -> Steps[bool | Failed]:
    """Returns whether the key's record names nothing there any more."""
    try:
        entry = yield from view(lambda tables: tables.record(key))
    except CorruptionError:
        return True  # nobody can read it, wherever its bytes are
    if entry is None or all(place.host != leaver for place in entry.places):
        return True
    return stays(key, entry, leaver) or (yield from take(key, entry, leaver))


def replace_places(tables: Tables, key: bytes, before: Entry, after: Entry) -> bool:
    """Names copies in a record, in place of bytes that lie on a member that leaves. The version stays.

    It may be the present version, or one that was replaced and is kept. Nothing happens, and False is returned, if the
    record is another one, or its group leaves: the next owner may have got it as it was.
    """
    standing, group, now = own_standing(tables), group_of(key), history.find(tables, key, before.version)
    if not standing.may_change or tables.owned(group) is None or tables.leaving(group) is not None:
        return False
    if now is None or now.places != before.places:
        return False
    present = tables.head(key)
    if present is None or present.version != before.version:
        tables.drop_replaced(key, before.version)
        tables.put_replaced(key, after)
    else:
        tables.put_record(key, after)
        for place in after.places:
            if is_here(standing, place) and place not in before.places:
                tables.own(place, key)
        forget_keepers(tables, key)
    dispose(tables, standing, [place for place in before.places if place not in after.places])
    return True
