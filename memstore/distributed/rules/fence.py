"""Leases of hosts, and what a host does by itself when another one is silent: decision 031.

**A deputy takes over** (`stand_in`), where a person or a launcher has allowed it (`promote_after`). Each member notes
when it last heard its seed, by `Heartbeat` and by the questions that it has open there. A deputy that hasn't heard it
for so long asks all members, and goes on if a majority of the roster says the same. Then it does what a person would
have it do: an unforced promotion, which needs a majority's promises. So a deputy whose way to the seed alone is cut
changes nothing, and of two hosts, none of which is a majority, neither ever takes over by itself.

The second deputy waits half as long again: it is there if the first one is lost, too.

**The seed removes a silent member** (`remove_silent`), where it was served with `remove_after`. Such a member may be
alive, and cut off or stopped. So it holds a *lease*: a time on its own clock, beyond which its processes neither change
nor read anything, until it hears again. It is the fence between it and the next owner of its groups.

1. The roster says how long leases last, of three members or more. A member that sees it writes a lease that begins now
   where all processes of its host read it (`HostLease.follow`). **Then** it says in its heartbeats that it obeys, and
   the seed writes it into the roster's list `leased`. Only members of that list are ever removed by the clock.
2. The seed answers a heartbeat with the *age* of its own right: how long ago a majority obeyed it for sure. It knows
   that from stamps of its clock, which members bring back with their next heartbeat, unless they have promised to obey
   another seed. The member's lease begins so long before it *sent* the heartbeat (`HostLease.renew`).
3. So no lease lasts longer than `lease` beyond the moment at which a majority last obeyed the seed that gave it, nor
   beyond the last answer. A seed waits for a tenth more than that, since its last answer, and since its term began.

Time in which the seed itself hears no majority, or was stopped, counts as nobody's silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from memstore.distributed.rules.directory import Directory
from memstore.distributed.rules.messages import Alive, Answer, AskSilence, Heartbeat, Silence, Stale
from memstore.distributed.rules.nouns import Roster, Standing
from memstore.distributed.rules.promotion import NotPromoted, promote
from memstore.distributed.rules.roster import FEWEST_LEASED, propose
from memstore.distributed.rules.steps import Steps, Tables, send, send_all, transact, view

NEVER = 1 << 62  # nanoseconds
BEATS = 6  # heartbeats in the time of a lease, of which two may be lost
_MARGIN = 10  # a part of so many of a lease, by which clocks of two hosts may differ in it
_EVERYBODY = 3  # a part of so many of a lease, in which all members that are there say that they obey


def is_majority(count: int, roster: Roster) -> bool:
    return 2 * count > len(roster.members)


# --- every member -----------------------------------------------------------------------------------------------------


class SeedWatch:
    """When this member last heard its seed, since its index process was started. Thread-safe: a note is one object.

    Args:
        clock: nanoseconds of this host's clock since boot.
        limit: nanoseconds of silence after which this host takes over, as a deputy; 0: never.
    """

    def __init__(self, clock: Callable[[], int], limit: int = 0) -> None:
        self.clock, self.limit = clock, limit
        self._heard: tuple[bytes, int, int] = (b"", 0, 0)  # the seed, its term, and when it was heard last
        self._stamp: tuple[bytes, int, int, int] = (b"", 0, 0, 0)  # the seed, its term, and what it has sent last

    def hear(self, standing: Standing) -> None:
        """Notes that the seed has answered."""
        self._heard = (standing.roster.seed, standing.roster.term, self.clock())

    def silent_for(self, standing: Standing) -> int:
        """Returns for how many nanoseconds the seed hasn't been heard. A new one begins at none."""
        if standing.is_seed:
            return 0
        if self._heard[:2] != (standing.roster.seed, standing.roster.term):
            self.hear(standing)
        return self.clock() - self._heard[2]

    def note_stamp(self, standing: Standing, answer: Alive | None) -> None:
        """Notes what is to be brought back. None: the last heartbeat had no answer, and the seed may have rebooted."""
        began, stamp = (0, 0) if answer is None else (answer.began, answer.stamp)
        self._stamp = (standing.roster.seed, standing.roster.term, began, stamp)

    def stamp(self, standing: Standing) -> tuple[int, int]:
        """Returns what the seed is to be brought back: when it began, and its stamp; zeros: nothing."""
        seed, term, began, stamp = self._stamp
        return (began, stamp) if (seed, term) == (standing.roster.seed, standing.roster.term) else (0, 0)

    def answer(self, standing: Standing, request: AskSilence) -> Answer:
        """Says for how long the seed of that term hasn't been heard. Of a later one than it knows it never heard.

        *Schedule (found):* a seed is promoted that one of four members can't hear, and is lost. The two that have heard
        of it are no majority, and the third one waits for the seed before.
        """
        roster = standing.roster
        if request.cluster != roster.cluster or standing.is_removed or request.term < roster.term:
            return Silence(0)
        return Silence(self.silent_for(standing) if request.term == roster.term else NEVER)


class Word(Protocol):
    """A number that all processes of this host read, and that outlives the index process."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, until: int, /) -> None: ...


class HostLease:
    """Until when this host's processes may use the store, as its word says: on its clock since boot; 0: for ever.

    Args:
        word: what all processes of this host read at each call.
        is_exempt: no clock ever removes this host: what it has outlives its death.
    """

    def __init__(self, clock: Callable[[], int], word: Word, *, is_exempt: bool = False) -> None:
        self._clock, self._word, self._is_exempt = clock, word, is_exempt
        self._lasts = 0  # what the word was written for

    @property
    def is_over(self) -> bool:
        until = self._word[0]
        return 0 < until < self._clock()

    def follow(self, standing: Standing) -> int:
        """Begins a lease, or ends it, as the roster says. Returns how long it lasts: this host obeys it; 0: none."""
        roster = standing.roster
        is_held = len(roster.members) >= FEWEST_LEASED and not self._is_exempt and not standing.is_removed
        lasts = roster.lease if is_held else 0
        if lasts and lasts != self._lasts:  # a shorter one counts from now on
            until = self._clock() + lasts
            self._word[0] = min(until, self._word[0] or until)
        elif not lasts and self._word[0]:
            self._word[0] = 0
        self._lasts = lasts
        return lasts

    def renew(self, began: int) -> None:
        """Notes that a majority obeyed the seed at that time of this host's clock, or later."""
        self._word[0] = max(self._word[0], began + self._lasts)


def beat(watch: SeedWatch, lease: HostLease, leases: HostLeases, seed: Directory) -> Steps[None]:
    """Asks the seed whether it is there, and renews this host's lease. The seed renews its own."""
    began = watch.clock()  # before all that follows: a lease counts from here
    standing = yield from view(lambda tables: tables.standing())
    if standing is None:
        return
    obeys = lease.follow(standing)
    if standing.is_removed:
        return
    roster = standing.roster
    if standing.is_seed:
        since = leases.hear_oneself(standing, seed, began, obeys)
        if obeys and since is not None:
            lease.renew(since)
        return
    heartbeat = Heartbeat(standing.member, roster.term, roster.epoch, standing.promised, obeys, *watch.stamp(standing))
    answer = yield from send(standing.seed, heartbeat)
    watch.note_stamp(standing, answer if isinstance(answer, Alive) else None)
    if isinstance(answer, Alive):
        watch.hear(standing)
        if obeys and answer.age is not None:
            lease.renew(began - answer.age)


def stand_in(seed: Directory, watch: SeedWatch) -> Steps[bool]:
    """Makes this deputy the seed, if a majority of the roster hasn't heard the present one for as long as it may.

    What fails is tried again: another deputy may have begun the same, or the majority is gone by now. Returns whether
    this host is the seed by that.
    """
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or standing.is_removed or standing.is_seed or not watch.limit:
        return False
    roster, own = standing.roster, standing.member
    if own not in roster.deputies or roster.is_leaver(own):
        return False
    if watch.silent_for(standing) < watch.limit + roster.deputies.index(own) * watch.limit // 2:
        return False
    request = AskSilence(roster.cluster, roster.term)
    answers = yield from send_all([(member, request) for member in roster.members if member.id != own])
    agree = [answer for answer in answers if isinstance(answer, Silence) and answer.nanoseconds >= watch.limit]
    if not is_majority(1 + len(agree), roster):
        return False
    try:
        yield from promote(seed)
    except NotPromoted:
        return False
    return True


# --- the seed ---------------------------------------------------------------------------------------------------------


class HostLeases:
    """A seed's memory of its term: whom it has heard, and since when a majority obeys it. Thread-safe.

    Args:
        clock: nanoseconds of this host's clock since boot.
        lasts: nanoseconds of a lease, of a roster that this seed makes; 0: there are none.
    """

    def __init__(self, clock: Callable[[], int], lasts: int = 0) -> None:
        self._clock, self.lasts = clock, lasts
        self._forget((0, 0))

    def _forget(self, of: tuple[int, int]) -> None:
        self._heard: dict[bytes, int] = {}  # by member, the last stamp that it has brought back
        self._answered: dict[bytes, int] = {}  # when it was answered last
        self._obeys: dict[bytes, tuple[int, int]] = {}  # its epoch, and the lease that it says it obeys
        self._closing: set[bytes] = set()  # members that are being removed: they get no lease any more
        self._looked = self._counts_from = self._noted = self._clock()
        self._of = of  # the term, and when this process began it

    def begin(self, standing: Standing, seed: Directory) -> None:
        """Forgets what was of another term."""
        seed.begin(standing)
        if self._of != (seed.term, seed.began):
            self._forget((seed.term, seed.began))

    def answer(self, standing: Standing, seed: Directory, request: Heartbeat) -> Answer:
        roster, member = standing.roster, request.member
        if not standing.is_seed or standing.is_removed or roster.term != request.term:
            return Stale(*roster.position)
        self.begin(standing, seed)
        now = self._clock()
        self._answered[member] = now  # then looks: `silent` marks, and then looks here. One of them sees the other
        if member in self._closing or member not in roster.ids:
            return Stale(*roster.position)
        if request.promised <= roster.term and request.began == seed.began:
            self._heard[member] = max(self._heard.get(member, 0), min(request.stamp, now))
        self._obeys[member] = (request.epoch, request.obeys)
        since = self._since(standing, seed)
        return Alive(seed.began, now, None if since is None else max(now - since, 0))

    def hear_oneself(self, standing: Standing, seed: Directory, began: int, obeys: int) -> int | None:
        """Notes that the seed obeyed itself at a time. Returns since when a majority has, for sure; None: it doesn't.

        Args:
            began: before its standing was read.
        """
        self.begin(standing, seed)
        if standing.promised <= standing.roster.term:
            self._heard[standing.member] = began
        self._obeys[standing.member] = (standing.roster.epoch, obeys)
        return self._since(standing, seed)

    def _since(self, standing: Standing, seed: Directory) -> int | None:
        """Returns a time after which no other seed can have been promoted, by a majority's promises."""
        roster = standing.roster
        since = _majority_since(roster.ids, self._heard)
        if since is not None and roster.voters and not seed.counts(standing):  # who promotes may know the one before
            before = _majority_since(roster.voters, self._heard)
            since = None if before is None else min(since, before)
        return since

    def silent(self, standing: Standing, seed: Directory) -> list[bytes]:
        """Returns members whose leases are over, as they have had no answer for so long. They get none from now on."""
        self.begin(standing, seed)
        roster, now, since = standing.roster, self._clock(), self._since(standing, seed)
        was_stopped = now - self._looked > roster.lease // BEATS
        if was_stopped or since is None or now - since > roster.lease // 2:
            self._counts_from = now
        self._looked = now
        limit = roster.lease + roster.lease // _MARGIN
        from_when = max(seed.began, self._counts_from)
        found: list[bytes] = []
        for member in roster.leased:
            if member == standing.member or now - max(from_when, self._answered.get(member, 0)) <= limit:
                continue
            self._closing.add(member)
            if now - self._answered.get(member, 0) <= limit:  # it was answered just now
                self._closing.discard(member)
            else:
                found.append(member)
        return found

    def reopen(self, member: bytes) -> None:
        """Notes that a member was not removed."""
        self._closing.discard(member)

    def obeying(self, standing: Standing) -> tuple[bytes, ...]:
        """Returns members that obey the roster's lease for sure, and of which it doesn't say so yet.

        They come together, if they can: each change is an epoch.
        """
        roster = standing.roster
        wanted = (roster.epoch, roster.lease)
        unsure = [member.id for member in roster.members if member.id not in roster.leased]
        found = tuple(one for one in unsure if self._obeys.get(one) == wanted)
        if not found or (len(found) < len(unsure) and self._clock() - self._noted < roster.lease // _EVERYBODY):
            return ()
        return found

    def note_change(self) -> None:
        """Notes that the roster's leases have changed."""
        self._noted = self._clock()


def _majority_since(members: Collection[bytes], heard: dict[bytes, int]) -> int | None:
    times = sorted((heard[member] for member in members if member in heard), reverse=True)
    half = len(members) // 2
    return times[half] if len(times) > half else None


def remove_silent(seed: Directory, leases: HostLeases) -> Steps[list[bytes]]:
    """Removes members whose leases are over. Writes how long leases last, and who obeys, before.

    Returns the members that were removed.
    """
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.is_seed or standing.is_removed or standing.unheard:
        return []
    if not (leases.lasts or standing.roster.lease):
        return []
    yield from transact(lambda tables: _write_leases(tables, seed, leases))
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or not standing.roster.lease:
        return []
    silent = leases.silent(standing, seed)
    removed = (yield from transact(lambda tables: _remove(tables, seed, silent))) if silent else []
    for member in silent:
        if member not in removed:
            leases.reopen(member)
    return removed


def _may_change(standing: Standing | None, seed: Directory) -> bool:
    return standing is not None and not standing.is_removed and not standing.unheard and seed.is_settled(standing)


def _write_leases(tables: Tables, seed: Directory, leases: HostLeases) -> None:
    standing = tables.standing()
    if standing is None or not _may_change(standing, seed):
        return
    leases.begin(standing, seed)
    if standing.roster.lease != leases.lasts:
        propose(tables, standing, is_settled=True, lease=leases.lasts)
        leases.note_change()
    elif len(standing.roster.members) >= FEWEST_LEASED and (more := leases.obeying(standing)):
        propose(tables, standing, is_settled=True, leased=(*standing.roster.leased, *more))
        leases.note_change()


def _remove(tables: Tables, seed: Directory, silent: Sequence[bytes]) -> list[bytes]:
    """Removes all at once: each roster costs a message to every member. Returns who was removed."""
    standing = tables.standing()
    if standing is None or not _may_change(standing, seed):
        return []
    gone = [member for member in silent if member in standing.roster.leased]
    if gone:
        members = tuple(one for one in standing.roster.members if one.id not in gone)
        propose(tables, standing, is_settled=True, members=members)
    return gone
