"""Hosts, processes and a network under one scheduler: what happens next is drawn from a seed, and time is a number.

Messages take their time, are lost, come twice, or overtake each other; links are cut, both ways or one. An index
process that is killed comes back with nothing in memory. A host that is lost comes back with an empty root. Clocks of
hosts differ by years.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from memstore.distributed.rules import (
    NOT_SENT,
    Answer,
    Change,
    Client,
    DeadlinePassed,
    Entry,
    Gather,
    Index,
    Look,
    Member,
    NotPromoted,
    Pause,
    Place,
    Race,
    Remove,
    Request,
    Send,
    Steps,
    Transact,
    failed_of,
    reading,
    session_of,
)
from memstore.distributed.rules.draining import replace_places
from memstore.distributed.rules.fence import BEATS, HostLease
from memstore.distributed.rules.messages import (
    Ask,
    BringGroups,
    ClaimGroups,
    Commit,
    Done,
    Drain,
    FindOwners,
    IsRoster,
    Refused,
    Replicate,
    Stay,
    Wait,
    WaitAny,
    WatchGroup,
)
from memstore.distributed.rules.nouns import Returning, Roster, Standing
from memstore.distributed.rules.owning import Sessions
from memstore.distributed.rules.returning import FormerEntry
from memstore.distributed.rules.steps import Tables, send, transact
from memstore.errors import (
    CorruptionError,
    FencedError,
    HomeUnavailableError,
    MemstoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from tests.distributed.rules.tables import MERGED, Segment, SimTables, body_of, merged_of
from tests.support.explore import Fault

SECOND = 1_000_000_000
HOUR = 3600.0  # seconds
CLUSTER = b"C" * 16
PERIODS = {  # seconds
    "ask": 0.05,
    "found": 0.1,
    "settle": 0.25,
    "hand_over": 0.1,
    "note": 0.1,
    "mirror 0": 0.1,
    "mirror 1": 0.1,
    "mirror 2": 0.1,
    "appoint": 0.25,
    "look_for": 0.7,
    "pay": 0.5,
    "drain": 0.2,
    "take_over": 0.2,
    "fill_up": 0.3,
}

AnySteps = Generator[Any, Any, Any]


def _always(tables: SimTables, standing: Standing | None) -> bool:
    return True


def _of_seed(tables: SimTables, standing: Standing | None) -> bool:
    return standing is not None and standing.is_seed


def _of_others(tables: SimTables, standing: Standing | None) -> bool:
    return standing is None or not standing.is_seed


def _drains(tables: SimTables, standing: Standing | None) -> bool:
    if standing is None:
        return False
    return standing.roster.is_leaver(standing.member) or standing.stays or standing.is_sealed


_WORK: dict[str, Callable[[SimTables, Standing | None], bool]] = {  # whether a duty would do anything: most seldom do
    **dict.fromkeys(("mirror", "appoint", "look_for", "remove_silent"), _of_seed),
    **dict.fromkeys(("ask", "stand_in"), _of_others),
    "found": lambda tables, standing: standing is None,
    "hand_over": lambda tables, standing: bool(tables.leaving_groups),
    "note": lambda tables, standing: bool(tables.unnoted),
    "fill_up": lambda tables, standing: standing is not None and bool(standing.roster.policies or tables.lacks),
    "drain": _drains,
    "take_over": lambda tables, standing: standing is not None and bool(standing.roster.leavers or tables.is_shared),
    "pay": lambda tables, standing: bool(tables.debts or tables.pending or tables.voids),
}


class FencedOutError(FencedError, HomeUnavailableError, StoreTimeoutError):
    """Of a process whose host's lease is over. Whoever expects that nobody answers expects this."""


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
    word: list[int] = field(default_factory=lambda: [0])  # until when its processes may use the store
    roots: int = 1
    formers: list[FormerTables] = field(default_factory=list["FormerTables"])  # removed roots that it brings back
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

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        audit_every: float = 2.0,
        sessions_last: float = HOUR,
        promote_after: float = 0,
        remove_after: float = 0,
        is_shared: bool = False,
    ) -> None:
        self.is_shared = is_shared
        self.stopped: set[tuple[str, str]] = set()  # duties that hosts don't do, by their addresses
        self.graves: dict[bytes, tuple[str, SimTables]] = {}  # the files of hosts that are lost, on shared storage
        self.random = random.Random(seed)
        self.weather = weather
        self.periods = {**PERIODS, "audit": audit_every}
        if sessions_last < HOUR:
            self.periods["end_sessions"] = sessions_last / 8
        if remove_after:
            self.periods |= {"beat": remove_after / BEATS, "remove_silent": remove_after / 16}
        if promote_after:
            self.periods |= {"beat": promote_after / 5, "stand_in": promote_after / 10}
        self.promote_after, self.remove_after = int(promote_after * SECOND), int(remove_after * SECOND)
        self.sessions_last = int(sessions_last * SECOND)
        self.now = 0
        self.trace: list[str] = []
        self.hosts: dict[str, Host] = {}
        self.is_founded = False
        self.answers: set[type[Any]] = set()  # the kinds that were given
        self.stepped: Callable[[Host, str], None] = lambda host, step: None  # told before and after each step of a host
        self.taken: Callable[[int, bytes], None] = lambda value, host: None  # told of a value's copy on another host
        self.left_out: Callable[[Host], None] = lambda host: None  # told when the clock removes a host
        self.left: Callable[[Host], None] = lambda host: None  # told when a host was drained
        self.came_back: Callable[[Host, bytes], None] = lambda host, former: None  # told when one comes back
        self.comes_back = False  # a host that hears that it was removed
        self.begun_return: Callable[[Host, bytes, int], int] = lambda host, key, value: (
            value
        )  # which value that is then
        self.ended_return: Callable[[bytes, int, int | None], None] = lambda key, value, version: None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tickets = itertools.count(1)
        self._replies: dict[int, Callable[[Answer | int | None], None]] = {}
        self._kept: dict[int, tuple[str, Index]] = {}  # who asked, and who keeps it
        self._cut: set[tuple[str, str]] = set()
        self._seen: set[tuple[int, int]] = set()  # positions of rosters
        self.gone: set[bytes] = set()  # roots that are lost, or to be removed
        self.handed: dict[bytes, float] = {}  # groups that were handed over, and until when: what others kept is void
        self._clients: dict[tuple[bytes, int], tuple[str, Callable[[], bool]]] = {}  # by member and session

    # --- time ---------------------------------------------------------------------------------------------------------

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something that many seconds from now."""
        heapq.heappush(self._events, (self.now + int(seconds * SECOND), next(self._order), action))

    def run(self, seconds: float) -> None:
        until, events, pop = self.now + int(seconds * SECOND), self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, action = pop(events)
            action()
        self.now = until

    def transact(self, host: Host, action: Callable[[], None]) -> None:
        """Has a process of a host transact, soon."""
        stall = self.random.random() < self.weather.stalls
        self.at(self.random.uniform(0, 20) if stall else self.random.uniform(0, 0.001), action)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now / SECOND:9.4f} {text}")

    # --- hosts --------------------------------------------------------------------------------------------------------

    def add_host(self, address: str) -> Host:
        offset = self.random.randrange(365 * 24 * 3600) * SECOND
        host = self.hosts[address] = Host(address, offset, SimTables(self._new_id(address, 1), self.is_shared))
        self._set_up(host)
        return host

    def _set_up(self, host: Host) -> None:
        tables = host.tables
        tables.clock = lambda: self.now + host.clock_offset
        tables.owns = lambda group: self._check_owners(host, tables, group)
        tables.changed = self._look_at_removals
        tables.hands = self._note_hand_over

    def _check_owners(self, host: Host, tables: SimTables, group: bytes) -> None:
        """No two members own a group at one time."""
        if tables.member in self.gone or tables.standing() is None:
            return
        for other in self.hosts.values():
            is_member = other.id not in self.gone and other.tables.standing() is not None
            if other is not host and group in other.tables.own_groups and is_member:
                raise Fault(f"{group!r} is owned by {host.address} and {other.address}", tuple(self.trace))

    def _look_at_removals(self, before: Roster, after: Roster) -> None:
        """Notes members that a seed leaves out by itself: of a roster that never counts one may be left out again."""
        if self.remove_after and before.term == after.term and after.position not in self._seen:
            self._seen.add(after.position)
            for host in self.hosts.values():
                if host.id in before.ids - after.ids:
                    self.note(f"{host.address} is left out by the clock, in the epoch {after.epoch}")
                    self.left_out(host)
                    self.gone.add(host.id)

    def _note_hand_over(self, group: bytes) -> None:
        self.handed[group] = self.now / SECOND

    def is_fenced(self, host: Host) -> bool:
        """Whether its processes refuse calls, since the host's lease is over."""
        return 0 < host.word[0] < self.now + host.clock_offset

    def is_unsure(self, host: Host) -> bool:
        """The same after a call that has changed something: perhaps too late."""
        return 0 < host.word[0] < self.now + host.clock_offset

    def _new_id(self, address: str, root: int) -> bytes:
        return f"{address}/{root}".encode().ljust(16, b"\0")

    def serve(
        self,
        host: Host,
        seed: str = "",
        *,
        is_owner: bool = True,
        names: Sequence[str] | None = None,
        moved: bool = False,
    ) -> None:
        """Starts the index process, as an agent does.

        Args:
            seed: a member that a root without a cluster asks; other hosts are asked too. Its own address: it makes a
                cluster, the first time.
            names: the hosts that it is told of instead.
        """
        if host.index is not None:
            return
        member = Member(host.id, host.address, host.address, is_owner)
        clock = lambda: self.now + host.clock_offset  # noqa: E731
        others = [address for address in self.hosts if address not in (host.address, seed)]
        if names is None:
            names = [seed, *others] if seed and seed != host.address else others
        is_new = seed == host.address and not self.is_founded
        self.is_founded |= is_new
        cluster = CLUSTER if is_new else host.id
        index = host.index = Index(
            member,
            names,
            clock,
            cluster=cluster,
            is_new=is_new,
            moved=moved,
            promote_after=self.promote_after,
            remove_after=self.remove_after,
            host_lease=HostLease(clock, host.word),
            left=self.left_by if self.is_shared else None,
        )
        if self.is_shared:
            self._clear_graves(host, index)
        index._sessions = Sessions(clock, last=self.sessions_last)  # pyright: ignore[reportPrivateUsage]
        for task, period in self.periods.items():
            self._repeat(host, index, task, period)
        for former in host.formers:
            self.bring_back(host, former)
        self._look_at_waits(host, index)

    def left_by(self, member: bytes) -> list[tuple[bytes, Entry]]:
        """What the folder of a removed host has, which may run still."""
        files = [tables for _, tables in self.graves.values()] + [host.tables for host in self.hosts.values()]
        return next((tables.left() for tables in files if tables.member == member), [])

    def file_of(self, place: Place) -> int | None:
        """The bytes of a file on shared storage; None: it isn't there."""
        files = [tables for _, tables in self.graves.values()] + [host.tables for host in self.hosts.values()]
        segments = (tables.segments for tables in files if self.is_shared and tables.member == place.host)
        segment = next(segments, dict[int, Segment]()).get(place.put_id)
        return None if segment is None else segment.value

    def _clear_graves(self, host: Host, index: Index) -> None:
        """Removes what former hosts of this address have left, once nobody names it."""

        def again(former: bytes | None = None, is_done: object = False) -> None:
            if is_done and former is not None:
                self.note(f"{host.address} removes what {former!r} has left")
                self.graves.pop(former, None)
            self.at(self.random.uniform(0.3, 1.5), start)

        def start() -> None:
            standing = host.tables.standing()
            ids = frozenset[bytes]() if standing is None else standing.roster.ids
            mine = [one for one, (address, _) in self.graves.items() if address == host.address and one not in ids]
            if host.index is index and standing is not None and mine:
                Task(self, host, index.clear(mine[0]), lambda: host.index is index, partial(again, mine[0])).start()
            elif host.index is index:
                again()

        self.at(1, start)

    def bring_back(self, host: Host, former: FormerTables) -> None:
        """Has a host bring back what a removed root has that was set aside."""
        assert host.index is not None
        if not host.index.returns:
            self._repeat(host, host.index, "return_all", 0.5)
        host.index.bring_back(former, partial(put_anew, self, host))

    def _repeat(self, host: Host, index: Index, task: str, period: float) -> None:
        name, *slots = task.split()
        has_work, looks_at_waits = _WORK.get(name, _always), name == "mirror"
        tables, chance, events = host.tables, self.random, self._events

        def again(_: object = None) -> None:
            if looks_at_waits and host.index is index:
                self._look_at_waits(host, index, also_asks=True)
            seconds = period * (0.5 + chance.random())
            heapq.heappush(events, (self.now + int(seconds * SECOND), next(self._order), start))

        def ended(_: object) -> None:
            standing = host.tables.standing()
            if standing is not None and standing.is_removed and standing.is_sealed and host.index is index:
                self.drained(host)
            elif self.comes_back and standing is not None and standing.is_removed and host.index is index:
                self.come_back(host)
            elif self.remove_after and standing is not None and standing.is_removed and host.index is index:
                self.note(f"{host.address} hears that it was removed")  # its agent ends
                self.lose(host)
                self.at(1, lambda: self.serve(host, "h0"))
            again()

        def start() -> None:
            if host.index is not index:
                return
            if not has_work(tables, tables.own_standing) or (host.address, name) in self.stopped:
                again()
                return
            duty = getattr(index, name)
            if name == "end_sessions":
                steps = duty(lambda: self.connected(host))
            elif name == "take_over":
                steps = duty(partial(take_over, self, host))
            elif name == "fill_up":
                steps = duty(partial(copy_here, self, host))
            else:
                steps = duty(*map(int, slots))
            Task(self, host, steps, lambda: host.index is index, ended).start()

        self.at(self.random.uniform(0, period), start)

    def stop(self, host: Host, duty: str) -> None:
        """Has the index processes of a host do one of their duties no more."""
        self.stopped.add((host.address, duty))

    def kill_index(self, host: Host) -> None:
        self.note(f"the index process of {host.address} is killed")
        self._end(host)
        for member, session in list(self._clients):
            if member == host.id:
                del self._clients[member, session]

    def lose(self, host: Host) -> None:
        """All processes of the host, and its memory. It comes back with another root."""
        self.note(f"{host.address} is lost")
        self.gone.add(host.id)
        self._end(host)
        for process in host.clients:
            process.is_alive = False
        host.clients.clear()
        if self.is_shared:
            self.graves[host.id] = host.address, host.tables
        host.roots += 1
        host.word = [0]
        host.tables = SimTables(self._new_id(host.address, host.roots), self.is_shared)
        self._set_up(host)

    def come_back(self, host: Host) -> None:
        """Its root was removed: it is set aside, and another one is served there, which brings back what that had."""
        self.note(f"{host.address} comes back")
        former = host.tables
        self.lose(host)
        host.formers.append(FormerTables(host, former))
        self.came_back(host, former.member)
        self.at(0.1, lambda: self.serve(host, "h0"))

    def drain(self, member: bytes, ended: Callable[[bool], None] = lambda done: None) -> None:
        """A person has a member drained, and tries it again until it is known to leave, or has left."""
        for host in self.hosts.values():
            standing = host.tables.standing()
            if host.index is not None and standing is not None and standing.is_seed and not standing.is_removed:
                answer = self.answer(host, host.index, Drain(member))
                if isinstance(answer, IsRoster | Refused):
                    self.note(f"{member!r} leaves: {type(answer).__name__}")
                    ended(isinstance(answer, IsRoster))
                    return
        self.at(0.5, lambda: self.drain(member, ended))

    def cancel_drain(self, host: Host, ended: Callable[[bool], None] = lambda done: None) -> None:
        """A person has a host stay, and tries it again until it is known to stay, or to leave."""
        self._cancel_drain(host, host.id, ended)

    def _cancel_drain(self, host: Host, member: bytes, ended: Callable[[bool], None]) -> None:
        if host.id != member:
            return
        standings = [one for at in self.hosts.values() if at.index is not None and (one := at.tables.standing())]
        position = max((one.roster.position for one in standings if one.is_seed and not one.is_removed), default=None)
        if host.index is not None and position is not None:
            answer = self.answer(host, host.index, Stay(*position))
            if isinstance(answer, Done | Refused):
                self.note(f"{host.address} stays: {type(answer).__name__}")
                ended(isinstance(answer, Done))
                return
        self.at(0.5, lambda: self._cancel_drain(host, member, ended))

    def drained(self, host: Host) -> None:
        """It has left. Its agent removes the folder, and somebody serves another one there."""
        self.note(f"{host.address} has left")
        self.lose(host)
        self.left(host)
        self.at(1, lambda: self.serve(host, "h0"))

    def _end(self, host: Host) -> None:
        """Its connections break: whoever waits for an answer hears so."""
        index, host.index = host.index, None
        for ticket in [ticket for ticket, (_, keeper) in self._kept.items() if keeper is index]:
            self._give_up(ticket, self.random.uniform(0, 0.5))

    def remove(self, member: bytes) -> None:
        """A person removes a member, and tries it again until it is done."""
        self.gone.add(member)
        for host in self.hosts.values():
            standing = host.tables.standing()
            if host.index is not None and standing is not None and standing.is_seed and standing.member != member:
                answer = self.answer(host, host.index, Remove(member))
                if isinstance(answer, IsRoster):
                    self.note(f"{member!r} is removed")
                    return
        self.at(0.5, lambda: self.remove(member))

    def promote(self, host: Host, ended: Callable[[bool], None] = lambda done: None, *, forced: bool = False) -> None:
        """A person makes a host the seed."""
        index = host.index
        if index is None or host.tables.standing() is None:
            ended(False)
            return
        self.note(f"{host.address} is to be the seed")

        def end(error: BaseException | None) -> None:
            self.note(f"{host.address} is the seed: {error!r}")
            if error is not None and not isinstance(error, NotPromoted):
                raise error
            ended(error is None)

        task = Task(self, host, index.promote(forced=forced), lambda: host.index is index, lambda _: end(None))
        task.failed = end
        task.start()
        self.at(30, lambda: ended(False))  # it may have been killed

    def start_process(self, host: Host) -> Process:
        process = Process(host, Client())
        host.clients.append(process)
        return process

    def call(
        self,
        process: Process,
        steps: AnySteps,
        seconds: float,
        ended: Callable[[Any, BaseException | None], None],
        *,
        changes: bool = False,
    ) -> Task:
        """Runs a call of a process, with a deadline. `ended` gets its result or its error.

        The process looks at its host's lease before the call, and after one that changes something.
        """
        host = process.host

        def end(result: Any) -> None:
            if changes and self.is_unsure(host):
                ended(None, UnknownOutcomeError("the lease was over before the call was"))
            else:
                ended(result, None)

        task = Task(self, host, fenced_out() if self.is_fenced(host) else steps, lambda: process.is_alive, end)
        task.failed = lambda error: ended(None, error)
        task.start()
        self.at(seconds, task.pass_deadline)
        return task

    # --- the network --------------------------------------------------------------------------------------------------

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        self.note(f"cut {a} -> {b}" + ("" if one_way else " and back"))
        self._cut.add((a, b))
        if not one_way:
            self._cut.add((b, a))
        for ticket, (asker, keeper) in list(self._kept.items()):
            if {asker, keeper.member.address} == {a, b}:  # pings get no answer
                self._give_up(ticket, self.random.uniform(1, 4))

    def uncut(self, a: str, b: str) -> None:
        self._cut -= {(a, b), (b, a)}

    def heal(self) -> None:
        self.note("healed")
        self._cut.clear()

    def connected(self, host: Host) -> set[int]:
        """Sessions at a host whose clients have a connection: they live, and no link was cut since their last call."""
        for (member, session), (address, is_alive) in list(self._clients.items()):
            links = {(address, host.address), (host.address, address)}
            if member == host.id and (not is_alive() or links & self._cut):
                del self._clients[member, session]
        return {session for member, session in self._clients if member == host.id}

    def send(self, host: Host, send: Send, is_alive: Callable[[], bool], reply: Callable[[Any], None]) -> None:
        """A request from this host. `reply` is called once: with the answer, or None when the link is given up.

        Where there is no way, it may be that no connection can be made: then it is NOT_SENT, and never comes.

        Args:
            is_alive: whether the process that sends it still lives.
        """
        ticket = next(self._tickets)
        self._replies[ticket] = reply
        request: Any = send.request
        sent = self.now
        is_cut = (host.address, send.address) in self._cut or (send.address, host.address) in self._cut
        is_away = is_cut or send.address not in self.hosts or self.hosts[send.address].index is None
        if is_away and not isinstance(request, Fetch) and self.random.random() < 0.5:
            self.at(self.random.uniform(0, 1), lambda: self._reply(ticket, NOT_SENT))
            return
        self._carry(host.address, send.address, lambda: self._arrive(host.address, send, ticket, sent, is_alive))
        patience = 12 if isinstance(request, Wait | WatchGroup | WaitAny) else self.random.uniform(0.3, 2)
        if isinstance(request, ClaimGroups | FindOwners | BringGroups):
            patience += 1  # the seed asks its deputies first
        if isinstance(request, Look):
            patience += request.milliseconds / 1000
        if isinstance(request, Replicate | Commit):
            patience += 1  # bytes are copied first
        self._give_up(ticket, patience)

    def _give_up(self, ticket: int, seconds: float) -> None:
        def give_up() -> None:
            _, index = self._kept.pop(ticket, ("", None))
            if index is not None:
                index.forget(ticket)
            self._reply(ticket, None)

        self.at(seconds, give_up)

    def _arrive(self, sender: str, send: Send, ticket: int, sent: int, is_alive: Callable[[], bool]) -> None:
        request: Any = send.request
        host = self.hosts.get(send.address)
        if host is not None and host.index is not None:
            self.stepped(host, f"{type(request).__name__} comes")
        index = None if host is None else host.index
        if host is None or index is None or (send.member is not None and send.member != host.id):
            return
        session = None if isinstance(request, Fetch) else session_of(request)
        if session is not None:
            if sent + host.clock_offset < host.tables.ended_sessions.get(session, 0):
                return  # no network keeps a message for as long as it takes a session to end
            if is_alive():
                self._clients[host.id, session] = sender, is_alive
        if isinstance(request, Replicate) or (
            not isinstance(request, Fetch) and index.is_copied_first(host.tables, request)
        ):
            self._answer_by_steps(host, index, sender, ticket, request)
            return
        if isinstance(request, Fetch):
            segment = host.tables.segments.get(request.place.put_id)
            answer: Any = None if segment is None else segment.value
            if answer is None:
                answer = 0
        else:
            answer = self.answer(host, index, request)
        self.stepped(host, f"{type(request).__name__} is answered")
        if host.index is not index:  # it was killed before the answer was out
            return
        if not isinstance(request, Fetch) and index.may_keep(request, answer):
            if ticket in self._replies:
                index.keep(ticket, request)
                self._kept[ticket] = sender, index
            return
        self._carry(host.address, sender, lambda: self._reply(ticket, answer))

    def _answer_by_steps(self, host: Host, index: Index, sender: str, ticket: int, request: Any) -> None:
        """Answers what takes copies of bytes, by a thread of its own."""

        def ended(answer: Answer) -> None:
            self.answers.add(type(answer))
            if ticket in self._replies and index.may_keep(request, answer):
                index.keep(ticket, request)
                self._kept[ticket] = sender, index
                return
            self._carry(host.address, sender, lambda: self._reply(ticket, answer))

        answer_by = index.replicate if isinstance(request, Replicate) else index.commit_copied
        Task(self, host, answer_by(request, partial(copy_here, self, host)), lambda: host.index is index, ended).start()

    def answer(self, host: Host, index: Index, request: Request) -> Answer:
        try:
            answer = index.answer(host.tables, request)
        except CorruptionError as error:
            answer = failed_of(error)
        self.answers.add(type(answer))
        self._look_at_waits(host, index)
        return answer

    def _look_at_waits(self, host: Host, index: Index, *, also_asks: bool = False) -> None:
        waits = index._waits  # pyright: ignore[reportPrivateUsage]
        if not waits:
            return
        tickets = None if also_asks else [one for one, (request, _, _) in waits.items() if not isinstance(request, Ask)]
        for ticket, answer in index.ended_waits(host.tables, tickets):
            index.forget(ticket)
            asker, _ = self._kept.pop(ticket, ("", index))
            self._carry(host.address, asker, lambda ticket=ticket, answer=answer: self._reply(ticket, answer))

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
        self, world: World, host: Host, steps: AnySteps, is_alive: Callable[[], bool], ended: Callable[[Any], None]
    ) -> None:
        self._world, self._host, self._tables = world, host, host.tables
        self._steps, self._is_alive, self._ended = steps, is_alive, ended
        self.failed: Callable[[BaseException], None] | None = None
        self._turn = 0
        self._is_over = self._is_late = self._is_told = False
        self._action: Any = None

    def start(self) -> None:
        self._go(lambda: next(self._steps))

    def pass_deadline(self) -> None:
        """Its time is over. A transaction that is under way ends first, and a message has no answer."""
        self._is_late = True
        if isinstance(self._action, Send | Race):
            self._resume(self._turn, None)
        elif isinstance(self._action, Pause):
            self._tell()

    def interrupt(self) -> None:
        """As KeyboardInterrupt does. The process goes on, with the same client; its user knows nothing of the call."""
        if not self._is_over and self._is_alive():
            self._is_over = True
            self._steps.close()
            if self.failed is not None:
                self.failed(UnknownOutcomeError("interrupted"))

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
        self._action = action
        if self._is_late and not self._is_told and not isinstance(action, Transact):
            self._action = None
            world.at(0, self._tell)
            return
        if isinstance(action, Pause):
            world.at(action.seconds, lambda: self._resume(turn, None))
        elif isinstance(action, Gather):
            answers: dict[int, Any] = {}

            def take(number: int, answer: Any) -> None:
                answers[number] = answer
                if len(answers) == len(action.sends) + (action.meanwhile is not None):
                    self._resume(turn, [answers[one] for one in range(len(action.sends))])

            for number, one in enumerate(action.sends):
                world.send(self._host, one, self._is_alive, partial(take, number))
            if action.meanwhile is not None:
                Task(world, self._host, action.meanwhile, self._is_alive, partial(take, -1)).start()
        elif isinstance(action, Send | Race):
            for one in action.sends if isinstance(action, Race) else (action,):
                world.send(self._host, one, self._is_alive, lambda answer: self._resume(turn, answer))
        else:
            world.transact(self._host, lambda: self._transact(action, turn))

    def _transact(self, action: Transact, turn: int) -> None:
        if not action.is_read and self._is_alive():
            self._world.stepped(self._host, "is to transact")
        if not self._is_alive() or self._is_over or self._host.tables is not self._tables:
            return
        try:
            result = action.action(self._tables)
        except MemstoreError as error:
            thrown = error
            self._go(lambda: self._steps.throw(thrown))
            return
        if not action.is_read:
            self._world.stepped(self._host, "has transacted")
        if self._host.index is not None and not action.is_read:
            self._world._look_at_waits(self._host, self._host.index)  # pyright: ignore[reportPrivateUsage]
        self._resume(turn, result)


# --- what a removed root has ------------------------------------------------------------------------------------------


class FormerTables:
    """The tables of a removed root, which was set aside: a `FormerRoot`."""

    def __init__(self, host: Host, tables: SimTables) -> None:
        self.tables, self.member = tables, tables.member
        self.who = Member(self.member, host.address, host.address).label

    def page(self, after: bytes, limit: int) -> list[FormerEntry]:
        tables, found = self.tables, list[FormerEntry]()
        for key in sorted({*tables.records, *tables.backups}):
            one = tables.records.get(key) or tables.backups[key]
            is_whole = not one.is_mutable and all(place.host == self.member for place in one.places)
            is_whole = is_whole and all(map(tables.is_there, one.places)) and key not in tables.damaged
            found.append(FormerEntry(key, one.version, key in tables.records, is_whole))
        return [one for one in found if one.key > after][:limit]

    def groups(self) -> list[bytes]:
        return list(self.tables.own_groups)

    def drop(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self.tables.records.pop(key, None)
            self.tables.backups.pop(key, None)


def put_anew(world: World, host: Host, root: Any, some: Sequence[tuple[FormerEntry, Returning]]) -> Steps[Any]:
    """Fills anew what a removed root has, and puts it."""
    former, changes, begun = root.tables, list[Change](), list[tuple[bytes, int]]()
    for entry, returning in some:
        key = entry.key
        old = former.records.get(key) or former.backups[key]
        body, places = old.body, tuple[Place, ...]()
        if old.places or body.isdigit() or body.startswith(MERGED):
            value = former.segments[old.places[0].put_id].value if old.places else None
            value = value or (merged_of(body)[0] if body.startswith(MERGED) else int(body))
            value = world.begun_return(host, key, value)
            begun.append((key, value))
            places = tuple(Place(host.id, host.tables.fill(value), place.segment) for place in old.places)
            body = body_of(value, places) if body.startswith(MERGED) else b"" if places else str(value).encode()
        changes.append(Change(key, body, places, returns=returning))
    try:
        versions = yield from Client().commit(changes, host.tables.now() + 2 * SECOND)
    except UnknownOutcomeError:
        return False
    except MemstoreError as error:
        world.note(f"{host.address}: nothing comes back: {error!r}")
        for key, value in begun:
            world.ended_return(key, value, None)
        return False
    world.note(f"{host.address} brings back {[change.key for change in changes]}: {versions}")
    version_of = dict(zip([change.key for change in changes], versions, strict=True))
    for key, value in begun:
        world.ended_return(key, value, version_of[key])
    return True


# --- what a process does ----------------------------------------------------------------------------------------------


def read(client: Client, key: bytes, fetch: Callable[[Entry], Steps[Any]]) -> Steps[tuple[int, Any] | None]:
    (found,) = yield from reading.read_all(client, [key], lambda _, entry: fetch(entry))
    return found


def copy_here(
    world: World, host: Host, entries: Sequence[tuple[bytes, Entry]], settle: Callable[[Sequence[Entry]], Steps[bool]]
) -> Steps[bool]:
    """Copies the bytes of entries as an index process does: see `rules.Fetch`."""
    tables, copies, filled = host.tables, list[Entry](), list[Place]()
    standing = tables.standing()
    for _, entry in entries:
        places = list[Place]()
        for place in entry.places:
            if place.host != host.id:
                member = None if standing is None else standing.roster.member(place.host)
                value: Any = None if member is None else (yield from send(member, Fetch(place)))  # pyright: ignore[reportArgumentType]
                if not value:
                    give_back(tables, filled)
                    return False
                put_id = tables.fill(value)
                world.taken(value, host.id)
                place = Place(host.id, put_id, place.segment and put_id)
                filled.append(place)
            places.append(place)
        body = entry.body
        if body.startswith(MERGED):
            body = body_of(merged_of(body)[0], tuple(places))
        copies.append(msgspec.structs.replace(entry, body=body, places=tuple(places)))
    done = yield from settle(copies)
    if not done:
        give_back(tables, filled)
    return done


def give_back(tables: SimTables, places: Sequence[Place]) -> None:
    for place in places:
        tables.retire(place)


def fenced_out() -> Steps[Any]:
    raise FencedOutError("the lease of this host is over")
    yield


def wait(client: Client, key: bytes, newer_than: int) -> Steps[int]:
    """As a process of a store waits, which sleeps on the key's doorbell in place of a pause."""
    try:
        while True:
            version = yield from reading.wait_there(client, key, newer_than)
            if version is not None:
                return version
            yield Pause(0.01)
    except DeadlinePassed:
        raise StoreTimeoutError("no newer version") from None


def take_over(world: World, host: Host, key: bytes, entry: Entry, leaver: bytes) -> Steps[bool]:
    """Fetches bytes as an index process does, and names them in the record."""
    tables, places = host.tables, list[Place]()
    standing = tables.standing()
    member = None if standing is None else standing.roster.member(leaver)
    for place in entry.places:
        if place.host == leaver:
            value: Any = world.file_of(place)
            if member is not None and not world.is_shared:
                value = yield from send(member, Fetch(place))  # pyright: ignore[reportArgumentType]
            if not value:
                return False
            put_id = tables.fill(value)
            world.taken(value, host.id)
            place = Place(host.id, put_id, place.segment and put_id)
        places.append(place)
    after = msgspec.structs.replace(entry, places=tuple(places))
    if entry.body.startswith(MERGED):
        after = msgspec.structs.replace(after, body=body_of(merged_of(entry.body)[0], after.places))

    def replace(tables: Tables) -> bool:
        done = replace_places(tables, key, entry, after)
        for place in after.places:
            if not done and place not in entry.places:
                tables.retire(place)
        return done

    return (yield from transact(replace))
