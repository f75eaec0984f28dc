"""Hosts, processes and a network under one scheduler: what happens next is drawn from a seed, and time is a number.

Messages take their time, are lost, come twice, or overtake each other; links are cut, both ways or one. An index
process that is killed comes back with nothing in memory. A host that is lost comes back with an empty root. Clocks of
hosts differ by years.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from memstore.distributed import (
    Answer,
    Client,
    DeadlinePassed,
    Index,
    Member,
    Pause,
    Place,
    Request,
    Send,
    Transact,
    found,
)
from memstore.distributed.messages import IsAt, Wait
from tests.distributed.tables import SimTables

SECOND = 1_000_000_000
CLUSTER = b"C" * 16
PERIODS = {"ask_the_seed": 0.25, "settle": 0.25, "pay": 0.5, "register": 0.1}  # seconds

AnySteps = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Fetch:
    """Bytes of this place. In the store these are streams, beside the messages of the rules."""

    place: Place


@dataclass
class Weather:
    """How bad the network and the machines are, as probabilities, and seconds."""

    loss: float = 0.02
    twice: float = 0.02
    late: float = 0.05  # of messages that take seconds
    stalls: float = 0.005  # of steps before which a process is stopped for up to 20 s
    delay: float = 0.002


@dataclass
class Host:
    address: str
    clock_offset: int
    tables: SimTables
    index: Index | None = None
    roots: int = 1
    clients: list[Process] = field(default_factory=list["Process"])

    @property
    def id(self) -> bytes:
        return self.tables.member


@dataclass
class Process:
    """A client process. When it is killed, what it has begun goes no further."""

    host: Host
    client: Client
    is_alive: bool = True


class World:
    """Runs steps for hosts and processes. `trace` says what happened, and `seed` makes it happen again."""

    def __init__(self, seed: int, weather: Weather, *, audit_every: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.periods = {**PERIODS, "audit": audit_every}
        self.now = 0
        self.trace: list[str] = []
        self.hosts: dict[str, Host] = {}
        self.answers: set[type[Any]] = set()  # the kinds that were given
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tickets = itertools.count(1)
        self._replies: dict[int, Callable[[Answer | int | None], None]] = {}
        self._cut: set[tuple[str, str]] = set()

    # --- time ---------------------------------------------------------------------------------------------------------

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something that many seconds from now."""
        heapq.heappush(self._events, (self.now + int(seconds * SECOND), next(self._order), action))

    def run(self, seconds: float) -> None:
        until = self.now + int(seconds * SECOND)
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now / SECOND:9.4f} {text}")

    # --- hosts --------------------------------------------------------------------------------------------------------

    def add_host(self, address: str) -> Host:
        offset = self.random.randrange(365 * 24 * 3600) * SECOND
        host = self.hosts[address] = Host(address, offset, SimTables(self._new_id(address, 1)))
        return host

    def _new_id(self, address: str, root: int) -> bytes:
        return f"{address}/{root}".encode().ljust(16, b"\0")

    def serve(self, host: Host, seed: str, *, is_home: bool = True) -> None:
        """Starts the index process, as an agent does."""
        if host.index is not None:
            return
        member = Member(host.id, host.address, host.address, is_home)
        index = host.index = Index(member, seed, lambda: self.now + host.clock_offset)
        if seed == host.address and host.tables.standing() is None:
            found(host.tables, member, CLUSTER)
        for task, period in self.periods.items():
            self._repeat(host, index, task, period)
        self._look_at_waits(host, index)

    def _repeat(self, host: Host, index: Index, task: str, period: float) -> None:
        def again(_: object = None) -> None:
            self.at(period * self.random.uniform(0.5, 1.5), start)

        def start() -> None:
            if host.index is index:
                Task(self, host, getattr(index, task)(), lambda: host.index is index, again).start()

        self.at(self.random.uniform(0, period), start)

    def kill_index(self, host: Host) -> None:
        self.note(f"the index process of {host.address} is killed")
        host.index = None

    def lose(self, host: Host) -> None:
        """All processes of the host, and its memory. It comes back with another root."""
        self.note(f"{host.address} is lost")
        host.index = None
        for process in host.clients:
            process.is_alive = False
        host.clients.clear()
        host.roots += 1
        host.tables = SimTables(self._new_id(host.address, host.roots))

    def start_process(self, host: Host) -> Process:
        process = Process(host, Client())
        host.clients.append(process)
        return process

    def call(
        self, process: Process, steps: AnySteps, seconds: float, ended: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Runs a call of a process, with a deadline. `ended` gets its result or its error."""
        task = Task(self, process.host, steps, lambda: process.is_alive, lambda result: ended(result, None))
        task.failed = lambda error: ended(None, error)
        task.start()
        self.at(seconds, task.pass_deadline)

    # --- the network --------------------------------------------------------------------------------------------------

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        self.note(f"cut {a} -> {b}" + ("" if one_way else " and back"))
        self._cut.add((a, b))
        if not one_way:
            self._cut.add((b, a))

    def heal(self) -> None:
        self.note("healed")
        self._cut.clear()

    def send(self, host: Host, send: Send, reply: Callable[[Any], None]) -> None:
        """A request from this host. `reply` is called once: with the answer, or None when the link is given up."""
        ticket = next(self._tickets)
        self._replies[ticket] = reply
        request: Any = send.request
        self._carry(host.address, send.address, lambda: self._arrive(host.address, send, ticket))
        patience = 12 if isinstance(request, Wait) else self.random.uniform(0.3, 2)
        self.at(patience, lambda: self._reply(ticket, None))

    def _arrive(self, sender: str, send: Send, ticket: int) -> None:
        host = self.hosts[send.address]
        index = host.index
        if index is None or (send.member is not None and send.member != host.id):
            return
        request: Any = send.request
        if isinstance(request, Fetch):
            segment = host.tables.segments.get(request.place.put_id)
            answer: Any = None if segment is None else segment.value
            if answer is None:
                answer = 0
        else:
            answer = self.answer(host, index, request)
        if isinstance(request, Wait) and answer == IsAt(0):
            index.keep(ticket, request)
            return
        self._carry(host.address, sender, lambda: self._reply(ticket, answer))

    def answer(self, host: Host, index: Index, request: Request) -> Answer:
        answer = index.answer(host.tables, request)
        self.answers.add(type(answer))
        self._look_at_waits(host, index)
        return answer

    def _look_at_waits(self, host: Host, index: Index) -> None:
        for ticket, answer in index.ended_waits(host.tables):
            self._carry(host.address, "", lambda ticket=ticket, answer=answer: self._reply(ticket, answer))

    def _reply(self, ticket: int, answer: Any) -> None:
        reply = self._replies.pop(ticket, None)
        if reply is not None:
            reply(answer)

    def _carry(self, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        weather, chance = self.weather, self.random
        copies = 1 if chance.random() > weather.twice else 2
        for _ in range(copies):
            if chance.random() < weather.loss:
                continue
            delay = chance.expovariate(1 / weather.delay)
            if chance.random() < weather.late:
                delay += chance.uniform(0, 20)
            self.at(delay, lambda: None if (sender, receiver) in self._cut else arrive())


class Task:
    """Steps that are under way."""

    def __init__(
        self,
        world: World,
        host: Host,
        steps: AnySteps,
        is_alive: Callable[[], bool],
        ended: Callable[[Any], None],
    ) -> None:
        self._world, self._host, self._tables = world, host, host.tables
        self._steps, self._is_alive, self._ended = steps, is_alive, ended
        self.failed: Callable[[BaseException], None] | None = None
        self._turn = 0
        self._is_over = self._is_late = self._is_told = False
        self._may_be_told = True

    def start(self) -> None:
        self._go(lambda: next(self._steps))

    def pass_deadline(self) -> None:
        """Its time is over. A transaction that is under way ends first."""
        self._is_late = True
        if self._may_be_told:
            self._tell()

    def _tell(self) -> None:
        if not self._is_told and not self._is_over:
            self._is_told = True
            self._go(lambda: self._steps.throw(DeadlinePassed()))

    def _resume(self, turn: int, value: Any) -> None:
        if turn == self._turn and not self._is_over:
            self._go(lambda: self._steps.send(value))

    def _go(self, step: Callable[[], Any]) -> None:
        if not self._is_alive() or self._is_over or self._host.tables is not self._tables:
            self._is_over = True
            return
        self._turn += 1
        try:
            action = step()
        except StopIteration as end:
            self._is_over = True
            self._ended(end.value)
            return
        except Exception as error:
            self._is_over = True
            if self.failed is None or isinstance(error, AssertionError):
                raise
            self.failed(error)
            return
        self._begin(action, self._turn)

    def _begin(self, action: Any, turn: int) -> None:
        world = self._world
        self._may_be_told = not isinstance(action, Transact)
        if self._is_late and not self._is_told and self._may_be_told:
            world.at(0, self._tell)
            return
        if isinstance(action, Pause):
            world.at(action.seconds, lambda: self._resume(turn, None))
        elif isinstance(action, Send):
            world.send(self._host, action, lambda answer: self._resume(turn, answer))
        else:
            stall = world.random.random() < world.weather.stalls
            delay = world.random.uniform(0, 20) if stall else world.random.uniform(0, 0.001)
            world.at(delay, lambda: self._transact(action, turn))

    def _transact(self, action: Transact, turn: int) -> None:
        if not self._is_alive() or self._host.tables is not self._tables:
            return
        result = action.action(self._tables)
        if self._host.index is not None:
            self._world._look_at_waits(self._host, self._host.index)  # pyright: ignore[reportPrivateUsage]
        self._resume(turn, result)
