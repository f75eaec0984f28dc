"""The index process as a state machine: what it answers, and what it does by itself.

All that must outlive it stands in the tables. What it has in memory may be lost at any moment: waits, whose clients ask
again; pins; what the seed has heard; whether this member has settled.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memstore.distributed import calls, lending, moving, partition
from memstore.distributed.joining import Registrar
from memstore.distributed.members import Member
from memstore.distributed.messages import (
    Answer,
    Ask,
    Close,
    Commit,
    Done,
    Give,
    Given,
    IsAt,
    IsView,
    Later,
    List,
    Lookup,
    Named,
    Open,
    Opened,
    Place,
    Refused,
    Release,
    Remove,
    Request,
    Resolve,
    Wait,
)
from memstore.distributed.seed import Seed
from memstore.distributed.steps import Steps, send, transact
from memstore.distributed.tables import Tables

PIN = 10_000_000_000  # nanoseconds that the bytes of a version are kept for a get that was unlucky
_NOT_THE_SEED = Refused("this is not the seed")


class Index:
    """What one index process answers and does.

    Args:
        member: this host.
        seed: the seed's address.
        clock: nanoseconds of this host's clock since boot.
    """

    def __init__(self, member: Member, seed: str, clock: Callable[[], int]) -> None:
        self.member, self._clock = member, clock
        self._seed_address = seed
        self._seed = Seed() if seed == member.address else None
        self._audit = lending.Audit(clock)
        self._registrar = Registrar()
        self._heard = 0  # the last epoch that the seed has told
        self._settled = 0  # the epoch in which this member has given all
        self._pins: dict[Place, int] = {}
        self._waits: dict[int, tuple[Wait, int]] = {}

    # --- what it answers ----------------------------------------------------------------------------------------------

    def answer(self, tables: Tables, request: Request) -> Answer:
        """The answer, in the transaction that makes the change. `IsAt(0)` to a wait: it may be kept."""
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
                return Opened(tables.new_session())
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
                return self._seed.answer(tables, standing, request) if self._seed else _NOT_THE_SEED
            case Remove():
                return self._seed.remove(tables, standing, request) if self._seed else _NOT_THE_SEED

    def _pin(self, tables: Tables, request: Lookup) -> None:
        until = self._clock() + PIN
        for key in request.keys:
            entry = tables.record(key)
            self._pins.update((place, until) for place in (entry.places if entry else ()))

    def is_pinned(self, place: Place) -> bool:
        until = self._pins.get(place)
        if until is not None and until <= self._clock():
            del self._pins[place]
        return place in self._pins

    # --- waits --------------------------------------------------------------------------------------------------------

    def keep(self, ticket: int, wait: Wait) -> None:
        """A wait whose version isn't there yet. `ticket` says whom to answer."""
        self._waits[ticket] = (wait, self._clock() + wait.milliseconds * 1_000_000)

    def forget(self, ticket: int) -> None:
        """Its connection has closed."""
        self._waits.pop(ticket, None)

    def ended_waits(self, tables: Tables) -> list[tuple[int, Answer]]:
        """Look after each change of the tables, and now and then."""
        ended: list[tuple[int, Answer]] = []
        for ticket, (wait, until) in list(self._waits.items()):
            answer = self.answer(tables, wait)
            if answer != IsAt(0) or until <= self._clock():
                del self._waits[ticket]
                ended.append((ticket, answer))
        return ended

    # --- what it does by itself, again and again ----------------------------------------------------------------------

    def ask_the_seed(self) -> Steps[None]:
        ask = yield from transact(self._ask)
        if self._seed is not None:
            answer = yield from transact(lambda tables: self.answer(tables, ask))
        else:
            answer = yield from send(self._seed_address, ask)
        if isinstance(answer, IsView):
            view = answer.view
            self._heard = view.epoch
            if self.member.id in view.ids:
                yield from transact(lambda tables: moving.adopt(tables, self.member.id, view))
        elif isinstance(answer, Refused) and answer.is_removed:
            yield from transact(moving.leave)

    def _ask(self, tables: Tables) -> Ask:
        standing, member = tables.standing(), self.member
        if moving.has_keys_of_its_own(tables):
            member = msgspec.structs.replace(member, is_home=False)
        if standing is None:
            return Ask(member, None, self._heard, False, tables.version)
        view = standing.view
        is_settled = self._settled == view.epoch and not standing.missing
        return Ask(member, view.cluster, view.epoch, is_settled, tables.version)

    def settle(self) -> Steps[None]:
        standing = yield from transact(lambda tables: tables.standing())
        if standing is None or standing.is_removed or standing.view.epoch == self._settled:
            return
        if (yield from moving.settle(standing)):
            self._settled = standing.view.epoch

    def register(self) -> Steps[None]:
        return (yield from self._registrar.run())

    def pay(self) -> Steps[None]:
        return (yield from lending.pay(self.is_pinned))

    def audit(self) -> Steps[None]:
        return (yield from self._audit.run())
