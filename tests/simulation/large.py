"""A world of thousands of hosts: the rules as they are, and for each host one processor and one network interface.

The world of tests/distributed/rules runs the rules' steps. Here a host does one thing at a time: what comes meanwhile
waits. What it takes is what the rules take on this machine, in CPU seconds, while they run here, and in addition what
`costs` says of links and transactions. To read a thread's clock takes longer than most rules, so of each kind of work
one in 16 is measured, and the others take the mean; a look at all that a seed keeps is measured each time. Nothing is
lost and nothing comes late: bad luck is that other world's.

Duties that have nothing to do are looked at seldom, as a thousand hosts are looked at in one thread. What a duty is
woken for in an index process (a question to the seed, another roster) wakes it here, too.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memstore.distributed.rules import NOT_SENT, Answer, Index, Send, Standing
from memstore.distributed.rules.directory import give
from memstore.distributed.rules.messages import (
    Ask,
    Done,
    Heartbeat,
    IsRoster,
    Lookup,
    Meet,
    RosterChange,
)
from memstore.distributed.rules.nouns import (
    TERM_BITS,
    Roster,
)
from memstore.distributed.rules.owning import record_grant
from tests.distributed.rules.scenes import CALM
from tests.distributed.rules.world import SECOND, Host, World
from tests.simulation.costs import Costs, address_of, roster_of

_PERIODS = {  # seconds: of duties that look whether there is anything to do
    "ask": 0.01,
    "found": 1.0,
    "settle": 1.0,
    "mirror 0": 0.05,
    "mirror 1": 0.05,
    "mirror 2": 0.05,
    "appoint": 0.25,
    "look_for": 1.0,
    "pay": 5.0,
}
_SEEDS = ("mirror", "appoint", "look_for", "remove_silent", "found")
_LONGEST = 12.0  # seconds that an answer may take
_NO_ANSWER = 1.0  # seconds until a host that is gone is given up
_READS = (Lookup, Meet, Heartbeat)
_LOOK_EVERY = 1.0  # seconds
_FIRST, _ONE_IN = 20, 16  # of a kind of work that are measured
_LOOK = "look"
_MANY = 500  # hosts, beyond which they settle less often, so that all of them do in the same time here

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Network:
    """What isn't measured here.

    Attributes:
        latency: seconds from one host to another.
        bandwidth: bytes a second that a host sends.
    """

    latency: float = 50e-6
    bandwidth: float = 50e9


@dataclass
class Meter:
    """What a host has sent, and how long its processor was busy."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class _Machine:
    """A host's processor and network interface."""

    meter: Meter = field(default_factory=Meter)
    waiting: collections.deque[tuple[Callable[[], None], float, str]] = field(
        default_factory=collections.deque[tuple[Callable[[], None], float, str]]
    )
    is_busy: bool = False
    is_sent: int = 0  # until when its network is busy


@dataclass
class _Kind:
    """Work of a kind: how often it was done, and measured, and what that took together."""

    done: int = 0
    measured: int = 0
    seconds: float = 0.0

    @property
    def is_due(self) -> bool:
        return self.measured < _FIRST or self.done % _ONE_IN == 0


@dataclass
class _Kept:
    """What a seed keeps: see `SeedWaits`."""

    has_news: bool
    until: int


class LargeWorld(World):
    """A cluster of hosts that know the roster already.

    Attributes:
        kinds: how many messages of each kind were sent.
        rosters: the epochs of those that somebody was told.
    """

    def __init__(self, hosts: int, costs: Costs, network: Network, *, remove_after: float = 0) -> None:
        super().__init__(0, CALM, remove_after=remove_after)
        leases = {name: period for name, period in self.periods.items() if name in ("beat", "remove_silent")}
        self.periods = {**_PERIODS, **leases, "settle": max(_PERIODS["settle"], hosts / _MANY)}
        self.costs, self.network = costs, network
        self.kinds: collections.Counter[str] = collections.Counter()
        self.rosters: set[int] = set()
        self._machines: dict[str, _Machine] = {}
        self._books: dict[Index, dict[int, _Kept]] = {}
        self._positions: dict[Index, tuple[int, int]] = {}
        self._looks: set[Index] = set()
        self._timed: set[Index] = set()
        self._times: dict[tuple[str, bool], _Kind] = {}  # by kind, and whether it is the seed's
        self._extra = 0.0  # of what is being done
        self._outbox: list[tuple[Host, str, str, int, Callable[[], None]]] | None = None
        roster = roster_of(hosts)
        self.seed = roster.members[0].address
        self.is_founded = True
        for member in roster.members:
            host = self.add_host(member.address)
            host.tables.own_standing = Standing(member.id, roster, 1 << TERM_BITS, 1)
        for host in self.hosts.values():
            self.serve(host, self.seed, names=[self.seed])

    def join(self, count: int) -> list[Host]:
        """Serves so many more hosts, which ask the seed to admit them."""
        first = len(self.hosts)
        new = [self.add_host(address_of(number)) for number in range(first, first + count)]
        for host in new:
            self.serve(host, self.seed, names=[self.seed])
        return new

    def give_groups(self) -> None:
        """Has each host own a group, as if it had put there."""
        seed = self.hosts[self.seed].tables
        for number, host in enumerate(list(self.hosts.values())):
            group = b"of-%d" % number
            record_grant(host.tables, group, give(seed, self.seed_roster(), group, host.id).grant)

    def kill(self, hosts: Collection[Host]) -> None:
        """Ends hosts. Their connections close, so nobody keeps their questions."""
        for host in hosts:
            self.gone.add(host.id)
            self._end(host)
        dead = {host.address for host in hosts}
        for ticket in [ticket for ticket, (asker, _) in self._kept.items() if asker in dead]:
            self._kept.pop(ticket)[1].forget(ticket)

    def meters(self) -> dict[str, Meter]:
        return {address: machine.meter for address, machine in self._machines.items()}

    def forget_meters(self) -> None:
        for machine in self._machines.values():
            machine.meter = Meter()
        self.kinds.clear()
        self.rosters.clear()

    def seed_roster(self) -> Roster:
        standing = self.hosts[self.seed].tables.standing()
        assert standing is not None, "a seed is a member"
        return standing.roster

    def has_settled(self) -> bool:
        """Returns whether all that are there know one roster, which names them alone."""
        roster = self.seed_roster()
        there = [host for host in self.hosts.values() if host.index is not None]
        if {host.id for host in there} != roster.ids or roster.departed:
            return False
        return all(
            (it := host.tables.standing()) is not None and it.roster.position == roster.position for host in there
        )

    def seconds_until_settled(self, limit: float, step: float = 0.02) -> float:
        began = self.now
        while not self.has_settled():
            if self.now - began > limit * SECOND:
                raise TimeoutError(f"nothing settles in {limit:g} s: {self.seed_roster().position}")
            self.run(step)
        return (self.now - began) / SECOND

    # --- hosts --------------------------------------------------------------------------------------------------------

    def add_host(self, address: str) -> Host:
        self._machines[address] = _Machine()
        return super().add_host(address)

    def _new_id(self, address: str, root: int) -> bytes:
        return b"%016d" % (len(self.hosts) if root == 1 else 10**9 * root + len(self.hosts))

    def _set_up(self, host: Host) -> None:
        host.tables.clock = lambda: self.now + host.clock_offset
        host.tables.changed = lambda before, after: self._note_roster()

    def _note_roster(self) -> None:
        self._extra += self.costs.write

    def _repeat(self, host: Host, index: Index, task: str, period: float) -> None:
        if host.address == self.seed or not task.startswith(_SEEDS):
            super()._repeat(host, index, task, period)

    # --- what takes time ----------------------------------------------------------------------------------------------

    def work(self, host: Host, action: Callable[[], None], seconds: float, kind: str) -> None:
        """Has a host do something, once it has done what came before. It takes so long in addition to itself."""
        machine = self._machines[host.address]
        machine.waiting.append((action, seconds, kind))
        if not machine.is_busy:
            self._go_on(host, machine)

    def _go_on(self, host: Host, machine: _Machine) -> None:
        machine.is_busy = bool(machine.waiting)
        if not machine.is_busy:
            return
        action, seconds, name = machine.waiting.popleft()
        kind = self._times.setdefault((name, host.address == self.seed), _Kind())
        self._outbox = outbox = []
        if name == _LOOK or kind.is_due:
            began = time.thread_time()
            action()
            taken = time.thread_time() - began
            kind.measured += 1
            kind.seconds += taken
        else:
            action()
            taken = kind.seconds / kind.measured
        kind.done += 1
        seconds += taken + self._extra
        self._outbox, self._extra = None, 0.0
        machine.meter.seconds += seconds

        def end() -> None:
            for sender, receiver, kind, size, arrive in outbox:
                self._transmit(sender, receiver, kind, size, arrive)
            self._go_on(host, machine)

        self.at(seconds, end)

    def transact(self, host: Host, action: Callable[[], None]) -> None:
        self.work(host, action, self.costs.look, "transact")

    def _post(self, sender: Host, receiver: str, message: Any, arrive: Callable[[], None]) -> None:
        size, kind = len(_encode(message)), type(message).__name__
        if self._outbox is None:
            self._transmit(sender, receiver, kind, size, arrive)
        else:
            self._outbox.append((sender, receiver, kind, size, arrive))

    def _transmit(self, sender: Host, receiver: str, kind: str, size: int, arrive: Callable[[], None]) -> None:
        machine = self._machines[sender.address]
        machine.meter.messages += 1
        machine.meter.nbytes += size
        self.kinds[kind] += 1
        machine.is_sent = max(machine.is_sent, self.now) + int(size / self.network.bandwidth * SECOND)
        takes = size * self.costs.decode
        host = self.hosts[receiver]
        after = (machine.is_sent - self.now) / SECOND + self.network.latency
        self.at(after, lambda: self.work(host, arrive, takes + self.costs.read / 2, kind))

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, host: Host, send: Send, is_alive: Callable[[], bool], reply: Callable[[Any], None]) -> None:
        ticket = next(self._tickets)
        self._replies[ticket] = reply
        receiver = self.hosts.get(send.address)
        if receiver is None or receiver.index is None:
            self.at(_NO_ANSWER, lambda: self._reply(ticket, NOT_SENT))
            return
        self._post(
            host, send.address, send.request, lambda: self._arrive(host.address, send, ticket, self.now, is_alive)
        )
        self._give_up(ticket, _LONGEST)

    def _arrive(self, sender: str, send: Send, ticket: int, sent: int, is_alive: Callable[[], bool]) -> None:
        host, request = self.hosts[send.address], send.request
        index = host.index
        if index is None or (send.member is not None and send.member != host.id):
            return
        costs = self.costs
        self._extra += costs.look + (0.0 if isinstance(request, _READS) else max(0.0, costs.change - costs.read))
        before = host.tables.own_standing
        answer = index.answer(host.tables, request)
        if index.may_keep(request, answer):
            index.keep(ticket, request)
            self._kept[ticket] = sender, index
            has_news = isinstance(request, Ask) and isinstance(answer, Done)
            lasts = int(getattr(request, "milliseconds", 10_000)) * 1_000_000
            self._books.setdefault(index, {})[ticket] = _Kept(has_news, self.now + lasts)
        else:
            self._answer(host, sender, ticket, answer)
        if isinstance(request, Ask) or host.tables.own_standing is not before:
            self._look_soon(host, index)

    def _answer(self, host: Host, sender: str, ticket: int, answer: Answer) -> None:
        asker = self.hosts[sender]
        if isinstance(answer, IsRoster | RosterChange):
            self.rosters.add((answer.roster if isinstance(answer, IsRoster) else answer.rest).epoch)
        self._post(host, sender, answer, lambda: self._reply(ticket, answer) if asker.index else None)

    def _look_at_waits(self, host: Host, index: Index, *, also_asks: bool = False) -> None:
        """Looks as the index process does: all of a burst of messages are looked after at once."""
        if self._books.get(index):
            self._look_soon(host, index)

    def _look_soon(self, host: Host, index: Index) -> None:
        if index not in self._looks and host.index is index:
            self._looks.add(index)
            self.at(0, lambda: self.work(host, lambda: self._look(host, index), self.costs.look, _LOOK))

    def _look(self, host: Host, index: Index) -> None:
        """Does what `SeedWaits` does: who has the roster waits for another one, and is looked at when there is one."""
        self._looks.discard(index)
        book = self._books.get(index, {})
        for ticket in [ticket for ticket in book if ticket not in self._kept]:
            del book[ticket]
        standing = host.tables.standing()
        if host.index is not index or not book or standing is None:
            return
        position = standing.roster.position
        others = [ticket for ticket, kept in book.items() if not kept.has_news or kept.until <= self.now]
        is_other = self._positions.get(index) != position
        self._positions[index] = position
        ended = index.ended_waits(host.tables, list(book) if is_other else others)
        for ticket, answer in ended:
            index.forget(ticket)
            del book[ticket]
            asker, _ = self._kept.pop(ticket)
            self._answer(host, asker, ticket, answer)
        after = host.tables.standing()
        if after is not None and after.roster.position != position:
            self._look_soon(host, index)
        elif book and index not in self._timed:
            self._timed.add(index)
            self.at(_LOOK_EVERY, lambda: self._look_again(host, index))

    def _look_again(self, host: Host, index: Index) -> None:
        self._timed.discard(index)
        self._look_soon(host, index)
