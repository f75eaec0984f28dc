"""One schedule: hosts, processes that read and change a few keys, bad luck, and what must hold afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from memstore.distributed import Change, Entry, Place, Send, Steps, reading
from memstore.distributed.members import EPOCH_BITS
from memstore.errors import (
    HomeUnavailableError,
    KeyNotFoundError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from memstore.testing.explore import Fault
from tests.distributed.history import DELETE, GET, LOSS, PUT, Operation, check_history
from tests.distributed.world import SECOND, AnySteps, Fetch, Host, Process, Weather, World

LATEST = 25  # seconds
STABLE = [f"stable{number}/x".encode() for number in range(12)]

PAIR = [b"pair/one", b"pair/two"]


@dataclass
class Scene:
    """What may happen in a schedule.

    Attributes:
        hosts: how many in the end; `first` of them from the beginning.
        owned: keys that each of the others has when it is first served.
        kills, losses, cuts: of index processes and clients; of hosts; of links.
    """

    hosts: int = 3
    first: int = 3
    keys: int = 3
    processes: int = 4
    calls: int = 12  # of each process
    seconds: float = 15
    kills: int = 0
    losses: int = 0
    cuts: int = 0
    owned: int = 0
    visitors: int = 0  # of the hosts: members that are no homes
    changing_homes: int = 0  # how often one begins or ends to be a home
    expiries: int = 0  # how often a home forgets a session
    ambushes: int = 0  # how often one of several new homes is lost while the others get their share
    patience: float = 3  # seconds that an audit leaves a call alone, at most
    all_must_work: bool = False  # nothing is so bad that a call may fail for it
    weather: Weather = field(default_factory=Weather)


class Schedule:
    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.world = scene, World(seed, scene.weather)
        self.chance = self.world.random
        self.keys = [f"group{number}/k".encode() for number in range(scene.keys)]
        self.histories: dict[bytes, list[Operation]] = {key: [] for key in self.keys}
        self.values = iter(range(1, 1 << 30))
        self.origin: dict[int, bytes] = {}  # of each value: the root that has its bytes
        self.no_homes: set[str] = set()
        self.under_way: list[Process] = []  # one for each call
        self.is_over = False
        self.owned: list[bytes] = []

    # --- the whole of it ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        scene, world = self.scene, self.world
        hosts = [world.add_host(f"h{number}") for number in range(scene.hosts)]
        self.no_homes = {host.address for host in hosts[scene.hosts - scene.visitors :]}
        for host in hosts[: scene.first]:
            self.serve(host)
        weather, world.weather = world.weather, Weather(0, 0, 0, 0)
        self.run_until_settled(hosts[: scene.first])
        self.put_stable(hosts[0])
        world.run(1)
        world.weather = weather
        for host in hosts[scene.first :]:
            self.fill(host)
            world.at(self.chance.uniform(0, scene.seconds), lambda host=host: self.serve(host))
        for _ in range(scene.processes):
            self.start_process(self.chance.choice(hosts))
        self.draw_bad_luck(hosts)
        world.run(scene.seconds)

        self.is_over = True
        world.heal()
        world.weather = Weather(0, 0, 0, 0)
        for host in hosts:
            self.serve(host)
        world.run(LATEST)  # what was sent before is here by now, and who was stopped goes on
        self.run_until_settled(hosts)
        self.registered()
        for host in hosts:
            process = world.start_process(host)
            for key in self.keys:
                self.get(process, key, lambda: None, must=True)
            self.list_stable(process)
        self.run_until_settled(hosts)
        for key, history in self.histories.items():
            wrong = check_history(history)
            if wrong:
                raise Fault(f"{key!r}: {wrong}", tuple(world.trace))

    def serve(self, host: Host) -> None:
        self.world.serve(host, "h0", is_home=host.address not in self.no_homes)

    # --- bad luck -----------------------------------------------------------------------------------------------------

    def draw_bad_luck(self, hosts: list[Host]) -> None:
        scene, world, chance = self.scene, self.world, self.chance

        def soon(action: Callable[[], None]) -> None:
            world.at(chance.uniform(0, scene.seconds), action)

        for _ in range(scene.kills):
            soon(lambda: self.kill(chance.choice(hosts)))
        for _ in range(scene.losses):
            soon(lambda: self.lose(chance.choice(hosts[1:])))
        for _ in range(scene.cuts):
            soon(lambda: self.cut(hosts))
        for _ in range(scene.changing_homes):
            soon(lambda: self.change_home(chance.choice(hosts[1:])))
        for _ in range(scene.expiries):
            soon(lambda: self.forget_session(chance.choice(hosts)))
        self.ambushes = scene.ambushes
        self.lie_in_wait()

    def kill(self, host: Host) -> None:
        if host.clients and self.chance.random() < 0.3:
            process = self.chance.choice(host.clients)
            self.world.note(f"a process of {host.address} is killed")
            process.is_alive = False
            host.clients.remove(process)
            self.start_process(host)
            return
        self.world.kill_index(host)
        self.world.at(self.chance.choice([0.3, 0.3, 10]), lambda: self.serve(host))

    def lose(self, host: Host) -> None:
        if host.index is None:
            return
        start, lost = self.world.now / SECOND, host.id
        self.world.lose(host)
        values = frozenset(value for value, origin in self.origin.items() if origin == lost)
        for key, history in self.histories.items():
            at_home = values
            if self.was_home(lost, key):
                at_home = frozenset(self.origin)
            history.append(Operation(LOSS, start, math.inf, lost=at_home))
        self.stable = {key for key in self.stable if not self.was_home(lost, key)}
        self.world.at(self.chance.uniform(0.5, 5), lambda: self.serve(host))

    def views(self) -> list[Any]:
        standings = [host.tables.standing() for host in self.world.hosts.values()]
        return [standing.view for standing in standings if standing is not None]

    def lie_in_wait(self) -> None:
        if not self.ambushes:
            return
        standing = self.world.hosts["h0"].tables.standing()
        assert standing is not None
        new = [one for one in standing.view.members if one.is_home and one.id not in standing.view.before]
        if len(new) > 1 and self.chance.random() < 0.5:
            host = self.world.hosts[self.chance.choice(new).address]
            if host.id in standing.view.homes:
                self.ambushes -= 1
                self.lose(host)
        self.world.at(0.1, self.lie_in_wait)

    def was_home(self, member: bytes, key: bytes) -> bool:
        """Or has its records still, on their way to the new home."""
        return any(member in (view.home_of(key), view.home_before(key)) for view in self.views())

    def cut(self, hosts: list[Host]) -> None:
        one, other = self.chance.sample(hosts, 2)
        self.world.cut(one.address, other.address, one_way=self.chance.random() < 0.4)
        self.world.at(self.chance.choice([2, 2, 15]), self.world.heal)

    def change_home(self, host: Host) -> None:
        """It is served again, with the other choice."""
        self.no_homes ^= {host.address}
        self.world.kill_index(host)
        self.serve(host)

    def forget_session(self, host: Host) -> None:
        """As after an hour without a connection of it."""
        if host.tables.sessions:
            host.tables.end_session(self.chance.choice(sorted(host.tables.sessions)))

    # --- what processes do --------------------------------------------------------------------------------------------

    def start_process(self, host: Host) -> None:
        process = self.world.start_process(host)
        self.world.at(self.chance.uniform(0, 2), lambda: self.do_calls(process, self.scene.calls))

    def do_calls(self, process: Process, left: int) -> None:
        if not left or not process.is_alive or self.is_over:
            return

        def go_on() -> None:
            pause = self.chance.expovariate(self.scene.calls / self.scene.seconds)
            self.world.at(pause, lambda: self.do_calls(process, left - 1))

        if process.host.tables.standing() is None:  # the store of a host that nobody serves is another one
            go_on()
            return
        key = self.chance.choice(self.keys)
        kinds = {"put": 4, "get": 4, "delete": 1, "wait": 1, "list": 0.5, "put_pair": 1, "get_pair": 1}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "put":
            self.put(process, key, go_on)
        elif kind == "get":
            self.get(process, key, go_on)
        elif kind == "delete":
            self.delete(process, key, go_on)
        elif kind == "wait":
            self.wait(process, key, go_on)
        elif kind == "put_pair":
            self.put_pair(process, go_on)
        elif kind == "get_pair":
            self.get_pair(process, go_on)
        else:
            self.list_stable(process)
            go_on()

    @property
    def time(self) -> float:
        return self.world.now / SECOND

    def call(
        self, process: Process, steps: AnySteps, seconds: float, ended: Callable[[Any, BaseException | None], None]
    ) -> None:
        def end(result: Any, error: BaseException | None) -> None:
            self.under_way.remove(process)
            ended(result, error)

        self.under_way.append(process)
        self.world.call(process, steps, seconds, end)

    def put(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        host, start, value = process.host, self.time, next(self.values)
        seen = [one.version for one in self.histories[key] if one.version]
        expect = self.chance.choice([None, None, 0, self.chance.choice([None, *seen])])
        self.origin[value] = host.id
        places: tuple[Place, ...] = ()
        body = str(value).encode()
        if self.chance.random() < 0.6:
            places, body = (Place(host.id, host.tables.fill(value)),), b""
        change = Change(key, body, places, expect)
        self.commit(process, key, change, value, start, expect, ended)

    def may_fail(self, error: BaseException) -> None:
        if self.scene.all_must_work:
            raise Fault(f"nothing is wrong, and a call fails: {error!r}", tuple(self.world.trace))

    def delete(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        self.commit(process, key, Change(key, None), None, self.time, None, ended)

    def commit(
        self,
        process: Process,
        key: bytes,
        change: Change,
        value: int | None,
        start: float,
        expect: int | None,
        ended: Callable[[], None],
    ) -> None:
        history = self.histories[key]
        kind = DELETE if value is None else PUT
        unknown = Operation(kind, start, math.inf, value, old=expect)
        history.append(unknown)  # also if its process is killed
        what = f"{process.host.address}: {kind} {key!r} {value or ''}"
        self.world.note(what)

        def end(result: tuple[int, ...] | None, error: BaseException | None) -> None:
            self.world.note(f"{what} -> {result or repr(error)}")
            if isinstance(error, HomeUnavailableError | StoreTimeoutError | UnknownOutcomeError):
                self.may_fail(error)
            if isinstance(error, UnknownOutcomeError):
                ended()
                return
            history.remove(unknown)
            if error is None:
                assert result is not None
                version = result[0]
                if kind == DELETE:
                    history.append(Operation(DELETE, start, self.time, old=version))
                else:
                    history.append(Operation(PUT, start, self.time, value, version, old=expect))
            elif isinstance(error, VersionConflictError):
                history.append(Operation(GET, start, self.time, version=error.found))
            elif isinstance(error, KeyNotFoundError):
                history.append(Operation(GET, start, self.time, version=0))
            elif not isinstance(error, HomeUnavailableError | StoreTimeoutError):
                raise error
            ended()

        seconds = 20 if self.scene.all_must_work else self.chance.choice([1, 5, 20])
        until = self.world.now + process.host.clock_offset + int(min(seconds, self.scene.patience) * SECOND)
        self.call(process, process.client.commit([change], until), seconds, end)

    def get(self, process: Process, key: bytes, ended: Callable[[], None], *, must: bool = False) -> None:
        start = self.time

        def end(result: tuple[int, int] | None, error: BaseException | None) -> None:
            self.world.note(f"{process.host.address}: get {key!r} since {start:.4f} -> {result} {error!r}")
            if error is None:
                version, value = result or (0, None)
                if 0 < version < 1 << EPOCH_BITS:  # of a root that has not joined yet: it gets another version
                    ended()
                    return
                self.histories[key].append(Operation(GET, start, self.time, value, version))
            elif must or not isinstance(error, HomeUnavailableError):
                raise Fault(f"a get of {key!r} fails: {error!r}", tuple(self.world.trace))
            ended()

        self.call(process, reading.read(key, lambda entry: self.fetch(process, entry)), 20, end)

    def fetch(self, process: Process, entry: Entry) -> Steps[int | None]:
        if not entry.places:
            return int(entry.body)
        (place,) = entry.places
        host = process.host
        if place.host == host.id:
            segment = host.tables.segments.get(place.put_id)
            return None if segment is None else segment.value
        standing = host.tables.standing()
        member = None if standing is None else standing.view.member(place.host)
        if member is None:
            return None
        request: Any = Fetch(place)
        value: Any = yield Send(member.address, member.id, request)
        return value or None

    def wait(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        start = self.time
        newer_than = max((one.version or 0 for one in self.histories[key]), default=0)

        def end(version: int | None, error: BaseException | None) -> None:
            self.world.note(f"{process.host.address}: wait {key!r} {newer_than} -> {version} {error!r}")
            if error is None:
                assert version is not None
                if version <= newer_than:
                    raise Fault(f"a wait for {key!r} newer than {newer_than} ended with {version}")
                self.histories[key].append(Operation(GET, start, self.time, version=version))
            elif not isinstance(error, StoreTimeoutError):
                raise error
            ended()

        self.call(process, reading.wait(key, newer_than), 15, end)

    def fill(self, host: Host) -> None:
        """Keys that the root has before it is served."""
        for number in range(self.scene.owned):
            key, value = f"{host.address}-{number}/k".encode(), next(self.values)
            tables = host.tables
            tables.version += 1
            places = (Place(host.id, tables.fill(value)),) if self.chance.random() < 0.6 else ()
            entry = Entry(tables.version, b"" if places else str(value).encode(), places)
            tables.put_record(key, entry)
            for place in places:
                tables.own(place.put_id, key)
            self.origin[value] = host.id
            self.keys.append(key)
            self.histories[key] = [Operation(PUT, self.time, math.inf, value)]
            self.owned.append(key)

    def registered(self) -> None:
        """By now all of them are there, but for those that others had put first."""
        for key in self.owned:
            first, *later = self.histories[key]
            if not any(one.kind in (PUT, DELETE, LOSS) for one in later):
                self.histories[key][0] = replace(first, end=self.time)

    # --- two keys of a group, always put together ---------------------------------------------------------------------

    def put_pair(self, process: Process, ended: Callable[[], None]) -> None:
        body = str(next(self.values)).encode()
        changes = [Change(key, body) for key in PAIR]

        def end(_: object, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, HomeUnavailableError | UnknownOutcomeError):
                raise error
            ended()

        self.call(process, process.client.commit(changes, 1 << 62), 5, end)

    def get_pair(self, process: Process, ended: Callable[[], None]) -> None:
        def end(found: tuple[Entry | None, ...] | None, error: BaseException | None) -> None:
            if found is not None and len({entry and entry.body for entry in found}) > 1:
                raise Fault(f"half of a batch: {found}", tuple(self.world.trace))
            if error is not None and not isinstance(error, HomeUnavailableError):
                raise error
            ended()

        self.call(process, reading.look_up(PAIR), 5, end)

    # --- keys that nobody changes -------------------------------------------------------------------------------------

    stable: set[bytes]

    def put_stable(self, host: Host) -> None:
        self.stable = set()
        process = self.world.start_process(host)
        for key in STABLE:

            def end(result: Any, error: BaseException | None, key: bytes = key) -> None:
                if error is not None:
                    raise error
                self.stable.add(key)

            self.call(process, process.client.commit([Change(key, b"x")], 1 << 62), 10, end)

    def list_stable(self, process: Process) -> None:
        def listing() -> Steps[list[bytes]]:
            after, found = b"", list[bytes]()
            while rows := (yield from reading.page(b"stable", after, limit=2)):
                found += [key for key, _ in rows]
                after = rows[-1][0]
            return found

        def end(found: list[bytes] | None, error: BaseException | None) -> None:
            if isinstance(error, HomeUnavailableError):
                return
            if error is not None:
                raise error
            assert found is not None
            if found != sorted(set(found)) or not self.stable <= set(found):
                raise Fault(f"{sorted(self.stable)} are listed as {found}", tuple(self.world.trace))

        self.call(process, listing(), 20, end)

    # --- in the end ---------------------------------------------------------------------------------------------------

    def run_until_settled(self, hosts: list[Host]) -> None:
        last = Fault("nothing settles", tuple(self.world.trace))
        for _ in range(60):
            self.world.run(1)
            try:
                self.check_settled(hosts)
                self.check_bytes(hosts)
                if not any(process.is_alive for process in self.under_way):
                    return
                last = Fault("some calls don't end", tuple(self.world.trace))
            except Fault as fault:
                last = fault
        raise last

    def check_settled(self, hosts: list[Host]) -> None:
        standings = [host.tables.standing() for host in hosts]
        epochs = {None if one is None else one.view.epoch for one in standings}
        if len(epochs) > 1 or None in epochs or any(one is None or one.missing or one.is_removed for one in standings):
            raise Fault(f"the members don't settle: {standings}", tuple(self.world.trace))
        view = self.views()[0]
        if view.ids != {host.id for host in hosts}:
            raise Fault(f"not all are members: {view}", tuple(self.world.trace))

    def check_bytes(self, hosts: list[Host]) -> None:
        """Every byte has one record that names it, and every record its bytes."""
        named = {place: key for host in hosts for key, entry in host.tables.records.items() for place in entry.places}
        there = {Place(host.id, put_id) for host in hosts for put_id in host.tables.segments}
        filling = {
            Place(host.id, put_id)
            for host in hosts
            for put_id, segment in host.tables.segments.items()
            if not segment.state
        }
        if set(named) - there:
            raise Fault(f"bytes are missing: {set(named) - there}", tuple(self.world.trace))
        if there - set(named) - filling:
            raise Fault(f"nobody gives back {there - set(named) - filling}", tuple(self.world.trace))
        for host in hosts:
            standing = host.tables.standing()
            assert standing is not None
            strays = [key for key in host.tables.records if not standing.is_home_of(key)]
            if strays or host.tables.debts:
                raise Fault(f"{host.address} still has {strays}, and owes {host.tables.debts}", tuple(self.world.trace))
