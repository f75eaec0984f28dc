"""What processes of a schedule do: they read and change a few keys, and write down what they saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memstore.distributed.rules import Change, Entry, Place, Send, Steps, reading
from memstore.distributed.rules.nouns import EPOCH_BITS
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    KeyNotFoundError,
    NotReplicatedError,
    StaleMembershipError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from tests.distributed.rules.history import DELETE, GET, LOSS, PUT, RETURN, Operation
from tests.distributed.rules.scenes import Scene
from tests.distributed.rules.tables import MERGED, merged_of
from tests.distributed.rules.world import (
    SECOND,
    AnySteps,
    FencedOutError,
    Fetch,
    Host,
    Process,
    Task,
    World,
    read,
    wait,
)
from tests.support.explore import Fault

STABLE = [f"stable{number}/x".encode() for number in range(12)]
LIMITS = [None, None, (3, 0), (2, 0), (4, 2), (1, 0)]  # histories that puts ask for
PAIRS = [[b"pair/one", b"pair/two"], [b"one/of", b"two/of"]]  # of one group, and of two


class Workload:
    """Processes, their calls, and the histories of keys.

    Attributes:
        origin: of each value: the roots that have its bytes.
        stable: keys that were put, and that nobody changes.
        under_way: the process of each call.
    """

    def __init__(self, scene: Scene, world: World) -> None:
        self.scene, self.world, self.chance = scene, world, world.random
        self.keys = [f"group{number // 2}/k{number % 2}".encode() for number in range(scene.keys)]
        self.histories: dict[bytes, list[Operation]] = {key: [] for key in self.keys}
        self.values = iter(range(1, 1 << 30))
        self.origin: dict[int, set[bytes]] = {}
        self.stable: set[bytes] = set()
        self.filled: list[bytes] = []
        self.under_way: list[Process] = []
        self.is_over = False

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
        admitted = [key for key in self.keys if key not in self.filled or self.is_admitted(key)]
        key = self.chance.choice(admitted)
        kinds = {"wait_any": 0.5, "put": 4, "get": 4, "delete": 1, "wait": 1, "list": 0.5, "put_pair": 1, "get_pair": 1}
        if self.scene.history:
            kinds["get_version"] = 3
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "get_version":
            self.get_version(process, key, go_on)
        elif kind == "put":
            self.put(process, key, go_on)
        elif kind == "get":
            self.get(process, key, go_on)
        elif kind == "delete":
            self.delete(process, key, go_on)
        elif kind == "wait":
            self.wait(process, key, go_on)
        elif kind == "wait_any":
            self.wait_any(process, key, go_on)
        elif kind == "put_pair":
            self.put_pair(process, go_on)
        elif kind == "get_pair":
            self.get_pair(process, go_on)
        else:
            self.list_stable(process)
            go_on()

    def is_admitted(self, key: bytes) -> bool:
        """Whether the root that had a key before is a member: else another host's put of it would keep it away."""
        return self.world.hosts[key.partition(b"-")[0].decode()].tables.standing() is not None

    def is_joining(self, host: Host) -> bool:
        """Whether versions there may grow without a put: its root may be given others, until it has joined."""
        standing = host.tables.standing()
        return standing is None or standing.is_joining

    @property
    def time(self) -> float:
        return self.world.now / SECOND

    def call(
        self,
        process: Process,
        steps: AnySteps,
        seconds: float,
        ended: Callable[[Any, BaseException | None], None],
        *,
        changes: bool = False,
    ) -> Task:
        def end(result: Any, error: BaseException | None) -> None:
            self.under_way.remove(process)
            standing = process.host.tables.standing()
            if isinstance(error, StaleMembershipError) and standing is not None and standing.is_sealed:
                process.is_alive = False  # its host was drained: whoever runs it ends it
                return
            if isinstance(error, StaleMembershipError) and (self.scene.remove_after or self.scene.returns):
                error = FencedOutError("it was removed meanwhile")  # of which its owner knew: nothing was put
            ended(result, error)

        self.under_way.append(process)
        return self.world.call(process, steps, seconds, end, changes=changes)

    def put(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        host, start, value = process.host, self.time, next(self.values)
        seen = [one.version for one in self.histories[key] if one.version]
        expect = self.chance.choice([None, None, 0, self.chance.choice([None, *seen])])
        self.origin[value] = {host.id}
        places: tuple[Place, ...] = ()
        body = str(value).encode()
        if self.chance.random() < 0.6:
            places, body = (Place(host.id, host.tables.fill(value), 1),), b""
        limits = self.chance.choice(LIMITS) if self.scene.history else None
        change = Change(key, body, places, expect, history=limits)
        self.commit(process, key, change, value, start, expect, ended)

    def begin_return(self, host: Host, key: bytes, of: int) -> int:
        """What was lost may come back from now on, as another value."""
        if key not in self.histories:
            return of
        value = next(self.values)
        self.origin[value] = {host.id}
        self.histories[key].append(Operation(RETURN, self.time, math.inf, value, of=of))
        return value

    def end_return(self, key: bytes, value: int, version: int | None) -> None:
        """It has come back, under a version; None: it hasn't, and won't."""
        history = self.histories.get(key, [])
        for at, one in enumerate(history):
            if one.kind == RETURN and one.value == value:
                history[at] = replace(one, end=self.time, version=version)
                if version is None:
                    del history[at]
                return

    def may_fail(self, error: BaseException) -> None:
        """Where messages are lost, a call may end before there is an answer, and says so."""
        is_unlucky = isinstance(error, HomeUnavailableError | UnknownOutcomeError) and self.scene.weather.loss
        if self.scene.all_must_work and not is_unlucky:
            raise Fault(f"nothing is wrong, and a call fails: {error!r}", tuple(self.world.trace))

    def delete(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        missing_ok = self.scene.returns and self.chance.random() < 0.7
        self.commit(process, key, Change(key, None, missing_ok=missing_ok), None, self.time, None, ended)

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
            if isinstance(error, UnknownOutcomeError | NotReplicatedError):
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
        task = self.call(process, process.client.commit([change], until), seconds, end, changes=True)
        if self.scene.interrupts and self.chance.random() < self.scene.interrupts:
            self.world.at(self.chance.expovariate(20), task.interrupt)

    def get(self, process: Process, key: bytes, ended: Callable[[], None], *, must: bool = False) -> None:
        start, is_joining = self.time, self.is_joining(process.host)

        def end(result: tuple[int, int] | None, error: BaseException | None) -> None:
            self.world.note(f"{process.host.address}: get {key!r} since {start:.4f} -> {result} {error!r}")
            if error is None:
                version, value = result or (0, None)
                if 0 < version < 1 << EPOCH_BITS:  # of a root that has not joined yet: it gets another version
                    ended()
                    return
                told = None if is_joining and version else version
                self.histories[key].append(Operation(GET, start, self.time, value, told))
            elif must or not isinstance(error, HomeUnavailableError):
                raise Fault(f"a get of {key!r} fails: {error!r}", tuple(self.world.trace))
            ended()

        self.call(process, read(process.client, key, lambda entry: self.fetch(process, entry)), 20, end)

    def get_version(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        """One of the versions that a key is said to have, which is what was put under that number; or it went."""

        def reading_one() -> Steps[tuple[int, int | None] | None]:
            versions = yield from reading.versions_of(process.client, key)
            if not versions:
                return None
            version = self.chance.choice(versions)
            steps = reading.read_version(process.client, key, version, lambda _, entry: self.fetch(process, entry))
            return version, (yield from steps)

        def end(found: tuple[int, int | None] | None, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, HomeUnavailableError):
                raise Fault(f"a get of a version of {key!r} fails: {error!r}", tuple(self.world.trace))
            if found is not None and found[1] is not None:
                put = {one.version: one.value for one in self.histories[key] if one.kind == PUT and one.version}
                if found[1] != put.get(found[0], found[1]):
                    raise Fault(f"{key!r} has {found}, and {put} were put", tuple(self.world.trace))
            ended()

        self.call(process, reading_one(), 20, end)

    def fetch(self, process: Process, entry: Entry) -> Steps[int | None]:
        if entry.body.startswith(MERGED):
            value, places = merged_of(entry.body)
            if not places:
                return value
        elif not entry.places:
            return int(entry.body)
        values: set[int | None] = set()
        for place in entry.places:
            values.add((yield from self.fetch_place(process, place)))
        if None in values:
            return None
        if len(values) > 1:
            raise Fault(f"a value of several puts: {values}", tuple(self.world.trace))
        return values.pop()

    def fetch_place(self, process: Process, place: Place) -> Steps[int | None]:
        host = process.host
        if place.host == host.id:
            segment = host.tables.segments.get(place.put_id)
            return None if segment is None else segment.value
        standing = host.tables.standing()
        member = None if standing is None else standing.roster.member(place.host)
        if self.scene.shared:
            return self.world.file_of(place)
        if member is None:
            return None
        request: Any = Fetch(place)
        value: Any = yield Send(member.address, member.id, request)
        return value or None

    def wait(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        start, is_joining = self.time, self.is_joining(process.host)
        newer_than = max((one.version or 0 for one in self.histories[key]), default=0)

        def end(version: int | None, error: BaseException | None) -> None:
            self.world.note(f"{process.host.address}: wait {key!r} {newer_than} -> {version} {error!r}")
            if error is None:
                assert version is not None
                if version <= newer_than:
                    raise Fault(f"a wait for {key!r} newer than {newer_than} ended with {version}")
                if version >> EPOCH_BITS and not is_joining:  # else it may get another one
                    self.histories[key].append(Operation(GET, start, self.time, version=version))
            elif not isinstance(error, StoreTimeoutError):
                raise error
            else:
                self.check_wait(key, newer_than)
            ended()

        self.call(process, wait(process.client, key, newer_than), 15, end)

    def check_wait(self, key: bytes, newer_than: int) -> None:
        """Where nothing is wrong, and no message is lost, a wait ends once twenty messages were sent, at the latest."""
        puts = [one for one in self.histories[key] if one.kind == PUT and (one.version or 0) > newer_than]
        deletes = [one for one in self.histories[key] if one.kind == DELETE]
        is_calm = self.scene.all_must_work and not self.scene.weather.loss
        if is_calm and not deletes and any(one.end < self.time - 5 - 20 * self.scene.weather.delay for one in puts):
            raise Fault(f"a wait for {key!r} newer than {newer_than} misses {puts}", tuple(self.world.trace))

    def wait_any(self, process: Process, key: bytes, ended: Callable[[], None]) -> None:
        """All keys, or those of one group; of the other keys it is enough that they exist."""
        start, prefix = self.time, self.chance.choice([b"group", key[:-1]])
        is_joining = self.is_joining(process.host)
        newer_than = {one: max((it.version or 0 for it in self.histories[one]), default=0) for one in self.keys}

        def end(found: dict[bytes, int] | None, error: BaseException | None) -> None:
            if error is None:
                assert found is not None
                for one, version in found.items():
                    if not one.startswith(prefix) or version <= newer_than[one]:
                        raise Fault(f"a wait for {prefix!r} newer than {newer_than} ended with {found}")
                    if version >> EPOCH_BITS and not is_joining:
                        self.histories[one].append(Operation(GET, start, self.time, version=version))
            elif isinstance(error, HomeUnavailableError):  # somebody who may own some gave no answer within its time
                self.may_fail(error)
            elif not isinstance(error, StoreTimeoutError):
                raise error
            else:
                for one in self.keys:
                    if one.startswith(prefix):
                        self.check_wait(one, newer_than[one])
            ended()

        self.call(process, reading.wait_any(process.client, prefix, newer_than), 15, end)

    def fill(self, host: Host) -> None:
        """Keys that the root has before it is served."""
        for number in range(self.scene.filled):
            key, value = f"{host.address}-{number}/k".encode(), next(self.values)
            tables = host.tables
            tables.version += 1
            places = (Place(host.id, tables.fill(value), 1),) if self.chance.random() < 0.6 else ()
            entry = Entry(tables.version, b"" if places else str(value).encode(), places)
            tables.put_record(key, entry)
            for place in places:
                tables.own(place, key)
            self.origin[value] = {host.id}
            self.keys.append(key)
            self.histories[key] = [Operation(PUT, self.time, math.inf, value)]
            self.filled.append(key)

    def admitted(self) -> None:
        """By now all of them are there."""
        for key in self.filled:
            first, *later = self.histories[key]
            if not any(one.kind in (PUT, DELETE, LOSS) for one in later):
                self.histories[key][0] = replace(first, end=self.time)

    # --- two keys of a group, always put together ---------------------------------------------------------------------

    def put_pair(self, process: Process, ended: Callable[[], None]) -> None:
        body = str(next(self.values)).encode()
        changes = [Change(key, body) for key in self.chance.choice(PAIRS)]

        def end(_: object, error: BaseException | None) -> None:
            may = HomeUnavailableError | UnknownOutcomeError | CrossHostError | NotReplicatedError
            if error is not None and not isinstance(error, may):
                raise Fault(f"a put of a batch fails: {error!r}", tuple(self.world.trace))
            ended()

        self.call(process, process.client.commit(changes, 1 << 62), 5, end, changes=True)

    def get_pair(self, process: Process, ended: Callable[[], None]) -> None:
        def end(found: tuple[Entry | None, ...] | None, error: BaseException | None) -> None:
            # Groups of one batch may be drained, or handed over, to two hosts, of which one is lost.
            scene, bodies = self.scene, {entry and entry.body for entry in found or ()}
            if scene.losses and None in bodies and (scene.drains or scene.hand_overs or scene.returns):
                bodies.discard(None)
            if len(bodies) > 1:
                raise Fault(f"half of a batch: {found}", tuple(self.world.trace))
            if error is not None and not isinstance(error, HomeUnavailableError | CrossHostError):
                raise error
            ended()

        self.call(process, reading.look_up(process.client, self.chance.choice(PAIRS)), 5, end)

    # --- keys that nobody changes -------------------------------------------------------------------------------------

    def put_stable(self, hosts: Sequence[Host]) -> None:
        for number, key in enumerate(STABLE):
            process = self.world.start_process(hosts[number % len(hosts)])

            def end(result: Any, error: BaseException | None, key: bytes = key) -> None:
                if error is not None:
                    raise error
                self.stable.add(key)

            self.call(process, process.client.commit([Change(key, b"x")], 1 << 62), 30, end)

    def list_stable(self, process: Process) -> None:
        def listing() -> Steps[list[bytes]]:
            after, found = b"", list[bytes]()
            while rows := (yield from reading.page(process.client, b"stable", after, limit=2)):
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
