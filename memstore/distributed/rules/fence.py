"""What hosts do by themselves when another one is silent: decision 031.

**A deputy takes over** (`stand_in`), where a person or a launcher has allowed it (`promote_after`). Each member notes
when it last heard its seed, by `Heartbeat` and by the questions that it has open there. A deputy that hasn't heard it
for so long asks all members, and goes on if a majority of the roster says the same. Then it does what a person would
have it do: an unforced promotion, which needs a majority's promises. So a deputy whose way to the seed alone is cut
changes nothing, and of two hosts, none of which is a majority, neither ever takes over by itself.

The second deputy waits half as long again: it is there if the first one is lost, too.
"""

from __future__ import annotations

from collections.abc import Callable

from memstore.distributed.rules.directory import Directory
from memstore.distributed.rules.messages import Alive, Answer, AskSilence, Heartbeat, Roster, Silence, Stale, Standing
from memstore.distributed.rules.roster import NotPromoted, promote
from memstore.distributed.rules.steps import Steps, send, send_all, view

NEVER = 1 << 62  # nanoseconds


def is_majority(count: int, roster: Roster) -> bool:
    return 2 * count > len(roster.members)


class SeedWatch:
    """When this member last heard its seed, since its index process was started. Thread-safe: a note is one object.

    Args:
        clock: nanoseconds of this host's clock since boot.
        limit: nanoseconds of silence after which this host takes over, as a deputy; 0: never.
    """

    def __init__(self, clock: Callable[[], int], limit: int = 0) -> None:
        self._clock, self.limit = clock, limit
        self._heard: tuple[bytes, int, int] = (b"", 0, 0)  # the seed, its term, and when it was heard last

    def hear(self, standing: Standing) -> None:
        """Notes that the seed has answered."""
        self._heard = (standing.roster.seed, standing.roster.term, self._clock())

    def silent_for(self, standing: Standing) -> int:
        """Returns for how many nanoseconds the seed hasn't been heard. A new one begins at none."""
        if standing.is_seed:
            return 0
        if self._heard[:2] != (standing.roster.seed, standing.roster.term):
            self.hear(standing)
        return self._clock() - self._heard[2]

    def answer(self, standing: Standing, request: AskSilence) -> Answer:
        """Says for how long the seed of that term hasn't been heard. Of a later one than it knows it never heard.

        *Schedule (found):* a seed is promoted that one of four members can't hear, and is lost. The two that have heard
        of it are no majority, and the third one waits for the seed before.
        """
        roster = standing.roster
        if request.cluster != roster.cluster or standing.is_removed or request.term < roster.term:
            return Silence(0)
        return Silence(self.silent_for(standing) if request.term == roster.term else NEVER)


def answer_heartbeat(standing: Standing, request: Heartbeat) -> Answer:
    roster = standing.roster
    is_seed = standing.is_seed and not standing.is_removed and roster.term == request.term
    return Alive() if is_seed and request.member in roster.ids else Stale(*roster.position)


def beat(watch: SeedWatch) -> Steps[None]:
    """Asks the seed whether it is there."""
    standing = yield from view(lambda tables: tables.standing())
    if standing is None or standing.is_removed or standing.is_seed:
        return
    answer = yield from send(standing.seed, Heartbeat(standing.member, standing.roster.term))
    if isinstance(answer, Alive):
        watch.hear(standing)


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
