"""Sharded puts of a schedule: ranks on several hosts put parts, are killed, started again, or give up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.distributed.rules import PutPart, give_up_part, put_part, turn
from memstore.distributed.rules.messages import Pending
from memstore.engine import AttemptOutcome, Failure, PendingPart
from memstore.engine.protocols.attempts import is_complete
from memstore.errors import (
    HomeUnavailableError,
    MemstoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from tests.distributed.rules.history import PUT, Operation
from tests.distributed.rules.tables import body_of
from tests.distributed.rules.workload import Workload
from tests.distributed.rules.world import SECOND, Host, Process
from tests.support.explore import Fault

LOOK_EVERY = 1.0  # seconds
GIVE_UP_WITHIN = 5.0  # seconds
PASSABLE = ("VersionConflictError", "ShardMismatchError")  # ends of attempts where nothing is wrong


@dataclass
class Attempt:
    """One sharded put, as its ranks see it.

    Attributes:
        ended: what its ranks were told: versions, or the names of errors.
    """

    key: bytes
    value: int
    name: str
    world_size: int
    expect: int | None
    seconds: float
    start: float
    operation: Operation
    ended: set[int | str] = field(default_factory=set[int | str])
    may_be_forgotten: bool = False


class ShardedPuts:
    def __init__(self, workload: Workload) -> None:
        self.workload, self.world, self.chance = workload, workload.world, workload.world.random
        self.scene = workload.scene
        self.attempts: list[Attempt] = []
        self.restarted: list[Process | None] = []

    def begin(self, hosts: Sequence[Host]) -> None:
        workload, chance = self.workload, self.chance
        served = [host for host in hosts if host.tables.standing() is not None]
        key = chance.choice([key for key in workload.keys if key not in workload.filled])
        seen = [one.version for one in workload.histories[key] if one.version]
        expect = chance.choice([None, None, None, chance.choice([None, 0, *seen])])
        seconds = 20 if self.scene.all_must_work else chance.choice([2, 5, 20])
        attempt = self.attempt(key, chance.choice([1, 2, 2, 3]), expect, seconds)
        for rank in range(attempt.world_size):
            host = chance.choice(served)
            late = chance.uniform(0, self.scene.stragglers)
            self.world.at(late, functools.partial(self.begin_rank, attempt, rank, host))

    def attempt(self, key: bytes, world_size: int, expect: int | None, seconds: float) -> Attempt:
        workload = self.workload
        value = next(workload.values)
        operation = Operation(PUT, workload.time, math.inf, value, old=expect)
        attempt = Attempt(key, value, f"a{value}", world_size, expect, seconds, workload.time, operation)
        self.attempts.append(attempt)
        workload.histories[key].append(operation)
        workload.origin[value] = set()
        return attempt

    def begin_rank(self, attempt: Attempt, rank: int, host: Host) -> None:
        self.start(attempt, rank, host)

    def start(self, attempt: Attempt, rank: int, host: Host) -> Process | None:
        if host.tables.standing() is None:  # it is another root by now
            return None
        process = self.world.start_process(host)
        one = OneRank(self, attempt, rank, process)
        if self.scene.all_must_work:
            one.prepare()
            return process
        if self.chance.random() < 0.1:
            one.give_up(MemstoreError("it failed before it had a part"))
        else:
            one.prepare()
        if self.chance.random() < 0.2:
            self.world.at(self.chance.expovariate(self.chance.choice([5, 0.7])), lambda: self.kill(process))
        self.world.at(self.chance.uniform(0.5, 4), lambda: self.restart(attempt, rank, host, process))
        return process

    def kill(self, process: Process) -> None:
        process.is_alive = False
        if process in process.host.clients:
            process.host.clients.remove(process)

    def restart(self, attempt: Attempt, rank: int, host: Host, process: Process | None) -> None:
        """A rank that was killed, or, with no process, one that has given up: it doesn't know that it had."""
        if not (process and process.is_alive) and not self.workload.is_over and not attempt.may_be_forgotten:
            self.restarted.append(self.start(attempt, rank, host))

    def lose(self) -> None:
        """An owner is lost with its outcomes. So a rank that is started again would publish for a second time."""
        for attempt in self.attempts:
            attempt.may_be_forgotten = True
        for process in self.restarted:
            if process is not None:
                self.kill(process)

    def told(self, attempt: Attempt, said: int | str) -> None:
        """A rank was told what its attempt became, and all must be told the same."""
        history, operation = self.workload.histories[attempt.key], attempt.operation
        is_first = not attempt.ended
        attempt.ended.add(said)
        versions = [one for one in attempt.ended if isinstance(one, int)]
        if len(versions) > 1 or (len(attempt.ended) > 1 and (versions or not attempt.may_be_forgotten)):
            raise Fault(f"{attempt.name} of {attempt.key!r} became {attempt.ended}", tuple(self.world.trace))
        if not is_first:
            return
        history.remove(operation)
        if isinstance(said, int):
            time = self.workload.time
            history.append(Operation(PUT, attempt.start, time, attempt.value, said, old=attempt.expect))


class OneRank:
    """What the process of a rank does."""

    def __init__(self, puts: ShardedPuts, attempt: Attempt, rank: int, process: Process) -> None:
        self.puts, self.attempt, self.process = puts, attempt, process
        host, chance = process.host, puts.chance
        put_id = 0
        if chance.random() < 0.85:
            put_id = host.tables.fill(attempt.value)
        puts.workload.origin[attempt.value].add(host.id)
        self.until = puts.world.now + int(attempt.seconds * SECOND)
        lease = int((puts.scene.lease or attempt.seconds + chance.choice([1, 10])) * SECOND)
        name = attempt.key, attempt.name
        part = PendingPart(
            *name, 0, rank, attempt.world_size, put_id, put_id, expect=attempt.expect, waits_ns=lease, host=host.id
        )
        self.own = PutPart(part)
        self.leaves_early = not puts.scene.all_must_work and chance.random() < 0.2
        self.was_complete = False
        self.complete_since = -1

    @property
    def left(self) -> float:
        return max((self.until - self.puts.world.now) / SECOND, 0.0)

    def note(self, text: str) -> None:
        part = self.own.part
        self.puts.world.note(f"{self.process.host.address}: rank {part.rank} of {part.attempt}: {text}")

    def call(self, steps: Any, seconds: float, ended: Callable[[Any, BaseException | None], None]) -> None:
        self.puts.workload.call(self.process, steps, seconds, ended)

    def prepare(self) -> None:
        self.note(f"puts {self.own.part.put_id} of {self.own.part.world_size} for {self.attempt.key!r}")
        scene, host = self.puts.scene, self.process.host
        patience = int(min(self.attempt.seconds, scene.patience) * SECOND)
        until = self.puts.world.now + host.clock_offset + patience
        steps = put_part(self.process.client, self.own, str(self.attempt.value).encode(), until)
        self.call(steps, self.left, self.prepared)

    def prepared(self, outcome: AttemptOutcome | None, error: BaseException | None) -> None:
        self.note(f"has put it: {self.own.number} {outcome} {error!r}")
        if outcome is not None:
            self.end(outcome)
        elif isinstance(error, UnknownOutcomeError):
            self.may_fail(error)
        elif error is not None:
            self.give_up(error)
        else:
            self.turn(0, publishes=True)

    def turn(self, milliseconds: int, *, publishes: bool) -> None:
        steps = turn(
            self.process.client, self.own, self.merge, milliseconds, was_complete=self.was_complete, publishes=publishes
        )
        self.call(steps, max(self.left, 1.0), self.turned)

    def merge(self, parts: Sequence[PendingPart], contents: Sequence[bytes]) -> bytes | Failure:
        if len(set(contents)) > 1:
            raise Fault(f"parts of several attempts: {contents}", tuple(self.puts.world.trace))
        if self.puts.chance.random() < 0.05:
            return Failure("ShardMismatchError", "the ranks disagree")
        return body_of(self.attempt.value, tuple(place for part in parts for place in part.places))

    def turned(self, found: AttemptOutcome | Pending | None, error: BaseException | None) -> None:
        world = self.puts.world
        if isinstance(found, AttemptOutcome):
            self.end(found)
        elif isinstance(error, UnknownOutcomeError):
            self.may_fail(error)
        elif error is not None:
            self.give_up(error)
        elif self.leaves_early:
            self.note("exits")
        elif found is not None:
            if is_complete(found.parts):
                self.complete_since = world.now if self.complete_since < 0 else self.complete_since
            else:
                self.complete_since = -1
            self.was_complete = self.complete_since >= 0
            if self.left <= 0:
                self.give_up(StoreTimeoutError("other ranks put nothing"))
                return
            publishes = self.was_complete and world.now - self.complete_since >= LOOK_EVERY * SECOND
            milliseconds = int(min(LOOK_EVERY, self.left) * 1000)
            world.at(0.05, lambda: self.turn(milliseconds, publishes=publishes))

    def give_up(self, error: BaseException) -> None:
        self.note(f"gives up: {error!r}")
        if not isinstance(error, MemstoreError):
            raise error
        self.may_fail(error)
        failure = Failure(type(error).__name__, str(error))
        self.call(give_up_part(self.process.client, self.own, failure), GIVE_UP_WITHIN, self.gave_up)

    def gave_up(self, outcome: AttemptOutcome | None, error: BaseException | None) -> None:
        self.note(f"gave up: {outcome} {error!r}")
        if error is not None and not isinstance(error, UnknownOutcomeError):
            raise error
        if outcome is not None:
            self.end(outcome)
        if not self.own.number and self.puts.chance.random() < 0.5:
            part, host = self.own.part, self.process.host
            soon = self.puts.chance.uniform(0.1, 3)
            self.puts.world.at(soon, lambda: self.puts.restart(self.attempt, part.rank, host, None))

    def end(self, outcome: AttemptOutcome) -> None:
        self.note(f"ends: {outcome.version or outcome.failure}")
        failure = outcome.failure
        if failure is not None and failure.error not in PASSABLE and "begun later" not in failure.text:
            self.may_fail(MemstoreError(failure.text))
        self.puts.told(self.attempt, outcome.version if failure is None else failure.error)

    def may_fail(self, error: MemstoreError) -> None:
        if not isinstance(error, VersionConflictError | HomeUnavailableError) or self.puts.scene.all_must_work:
            self.puts.workload.may_fail(error)
