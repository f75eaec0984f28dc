"""The index process as a state machine: what it answers, and what it does by itself.

All that must outlive it stands in the tables. What it has in memory may be lost at any moment: waits, whose clients ask
again; pins; what the seed has heard; whether this member has settled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeGuard

import msgspec

from memstore.distributed.rules import attempt_answers, attempts, calls, giving, lending, moving, partition
from memstore.distributed.rules.joining import Registrar
from memstore.distributed.rules.looking import failed_of
from memstore.distributed.rules.members import Member
from memstore.distributed.rules.messages import (
    Answer,
    Ask,
    Close,
    Commit,
    Done,
    Give,
    Given,
    GiveUp,
    IsAt,
    IsView,
    Later,
    List,
    Look,
    Lookup,
    Named,
    Open,
    Opened,
    Place,
    Prepare,
    Publish,
    Refused,
    Release,
    Remove,
    Renew,
    Request,
    Resolve,
    Wait,
)
from memstore.distributed.rules.seed import Seed
from memstore.distributed.rules.sessions import Sessions
from memstore.distributed.rules.steps import Steps, send, transact, view
from memstore.distributed.rules.tables import Tables
from memstore.errors import CorruptionError

PIN = 10_000_000_000  # nanoseconds that the bytes of a version are kept for a get that was unlucky


class Index:
    """What one index process answers and does.

    Args:
        member: this host.
        seed: the seed's address.
        clock: nanoseconds of this host's clock since boot.

    Attributes:
        refusal: the seed's last answer, if it was one: this root can't be a member.
        settled: the epoch in which this member has given all.
        heard: the last epoch that the seed has told; 0: none.
    """

    def __init__(self, member: Member, seed: str, clock: Callable[[], int]) -> None:
        self.member, self._clock = member, clock
        self._seed_address = seed
        self._seed = Seed() if seed == member.address else None
        self._audit = lending.Audit(clock)
        self._registrar = Registrar()
        self._sessions = Sessions(clock)
        self.refusal: Refused | None = None
        self.heard = 0
        self.settled = 0
        self._pins: dict[Place, int] = {}
        self._waits: dict[int, tuple[Wait | Look, int]] = {}

    # --- what it answers ----------------------------------------------------------------------------------------------

    def answer(self, tables: Tables, request: Request) -> Answer:
        """The answer, in the transaction that makes the change. `may_keep` says whether there is time for it."""
        standing = tables.standing()
        if standing is None:
            return Later()
        match request:
            case Lookup():
                if request.pin:
                    self._pin(tables, request)
                return partition.look_up(tables, standing, request)
            case Wait():
                return partition.version_of(tables, standing, request)
            case List():
                return partition.list_page(tables, standing, request)
            case Commit():
                return partition.commit(tables, standing, request)
            case Named():
                return partition.are_named(tables, standing, request)
            case Resolve():
                return calls.resolve(tables, request)
            case Open():
                return Opened(tables.new_session(lasts=request.lasts))
            case Close():
                tables.end_session(request.session)
                return Done()
            case Release():
                return lending.release(tables, standing, request)
            case Give():
                return moving.take(tables, standing, request)
            case Given():
                return moving.has_given(tables, standing, request)
            case Ask():
                return self._seed.answer(tables, standing, request) if self._seed else self._not_the_seed()
            case Remove():
                return self._seed.remove(tables, standing, request) if self._seed else self._not_the_seed()
            case Prepare() | Look() | Renew() | Publish() | GiveUp():
                return attempt_answers.answer(tables, standing, request)

    def _not_the_seed(self) -> Refused:
        return Refused(f"this is not the seed: join {self._seed_address}, which alone adds and removes hosts")

    def _pin(self, tables: Tables, request: Lookup) -> None:
        now = self._clock()
        for place in [place for place, until in list(self._pins.items()) if until <= now]:
            self._pins.pop(place, None)  # most are of bytes that were never replaced
        until = now + PIN
        for key in request.keys:
            entry = tables.record(key)
            self._pins.update((place, until) for place in (entry.places if entry else ()))

    def is_pinned(self, place: Place) -> bool:
        until = self._pins.get(place)
        if until is not None and until <= self._clock():
            self._pins.pop(place, None)
        return place in self._pins

    # --- waits --------------------------------------------------------------------------------------------------------

    def may_keep(self, request: Request, answer: Answer) -> TypeGuard[Wait | Look]:
        """Whether the request is for news, and this is none."""
        if isinstance(request, Wait):
            return answer == IsAt(0) and request.milliseconds > 0
        return isinstance(request, Look) and request.milliseconds > 0 and not attempts.is_news(request, answer)

    def keep(self, ticket: int, wait: Wait | Look) -> None:
        """A request for news that aren't there yet. `ticket` says whom to answer."""
        self._waits[ticket] = (wait, self._clock() + wait.milliseconds * 1_000_000)

    def forget(self, ticket: int) -> None:
        """Its connection has closed."""
        self._waits.pop(ticket, None)

    def ended_waits(self, tables: Tables, tickets: Collection[int] | None = None) -> list[tuple[int, Answer]]:
        """Look after each change of the tables, and now and then.

        Args:
            tickets: whose waits are looked at: those that the change may have ended, and those whose time is over.
                None: all.
        """
        ended: list[tuple[int, Answer]] = []
        for ticket in self._waits if tickets is None else tickets:
            wait, until = self._waits[ticket]
            answer = self._answer_again(tables, wait)
            if until <= self._clock() or not self.may_keep(wait, answer):
                ended.append((ticket, answer))
        for ticket, _ in ended:
            del self._waits[ticket]
        return ended

    def _answer_again(self, tables: Tables, wait: Wait | Look) -> Answer:
        try:
            return self.answer(tables, wait)
        except CorruptionError as error:  # of this key: the others wait for theirs
            return failed_of(error)

    # --- what it does by itself, again and again ----------------------------------------------------------------------

    def ask_the_seed(self) -> Steps[None]:
        ask = yield from transact(self._ask)
        if self._seed is not None:
            answer = yield from transact(lambda tables: self.answer(tables, ask))
        else:
            answer = yield from send(self._seed_address, ask)
        if answer is not None:
            self.refusal = answer if isinstance(answer, Refused) else None
        if isinstance(answer, IsView):
            view = answer.view
            self.heard = view.epoch
            if self.member.id in view.ids:
                yield from transact(lambda tables: moving.adopt(tables, self.member.id, view))
        elif self.refusal is not None and self.refusal.is_removed:
            yield from transact(moving.leave)

    def _ask(self, tables: Tables) -> Ask:
        standing, member = tables.standing(), self.member
        if moving.has_keys_of_its_own(tables):
            member = msgspec.structs.replace(member, is_home=False)
        if standing is None:
            return Ask(member, None, self.heard, False, tables.version)
        view = standing.view
        is_settled = self.settled == view.epoch and not standing.missing
        return Ask(member, view.cluster, view.epoch, is_settled, tables.version)

    def settle(self) -> Steps[None]:
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.is_removed or standing.view.epoch == self.settled:
            return
        if (yield from giving.settle(standing)):
            self.settled = standing.view.epoch

    def register(self) -> Steps[None]:
        return (yield from self._registrar.run())

    def pay(self) -> Steps[None]:
        """Ends the sharded puts whose time is over, and tells other hosts what they are owed."""
        if (yield from view(attempts.has_expired)):
            yield from transact(_expire)
        yield from lending.pay(self.is_pinned)

    def audit(self) -> Steps[None]:
        return (yield from self._audit.run())

    def end_sessions(self, connected: Callable[[], Collection[int]]) -> Steps[None]:
        """Of clients that have had no connection for an hour.

        Args:
            connected: sessions that have a connection, or had one since this was last called.
        """
        return (yield from self._sessions.run(connected))


def _expire(tables: Tables) -> None:
    standing = tables.standing()
    if standing is not None:
        attempts.expire(tables, standing)
