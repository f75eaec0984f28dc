"""Hosts and clients that are killed, lost or cut off at each step of what is under way.

A step is a request that comes, its answer that is made, or a transaction that is begun or has ended, of any host. A
story is told once for each step and each victim, until it has no such step. What must hold afterwards is what
schedules look at: histories are linearizable, members settle, each byte has its record.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from memstore.distributed.rules import Change, Place, directory
from tests.distributed.rules.scenes import CALM, Scene
from tests.distributed.rules.schedule import Schedule
from tests.distributed.rules.world import Host, Process
from tests.examples import IS_FULL

SCENE = Scene(hosts=6, first=5, keys=4, processes=0, calls=0, seconds=9, weather=CALM)
OWNED, NEW = b"group0/k0", b"group1/k0"  # host 3 owns the group of the first; nobody that of the second
SEED, DEPUTY, OWNER, GENERATOR, LATER = 0, 1, 3, 4, 5  # the numbers of hosts; 2 is a deputy, too
BEGIN = 0.5  # seconds
IDLE = ("Ask", "Meet", "Mirror", "Obey", "TakeOver")  # what comes all the time


class Told(Schedule):
    """A schedule that is told by hand, with one piece of bad luck.

    Args:
        story: what is under way.
        harm: what happens then.
        at: the number of the step before which it happens.

    Attributes:
        is_harmed: the story has come to that step.
        clients: the processes of the story.
    """

    def __init__(self, story: Callable[[Told], None], harm: Callable[[Told], None], at: int) -> None:
        super().__init__(SCENE, at)
        self.story, self.harm, self.left = story, harm, at
        self.is_harmed = False
        self.clients: list[Process] = []
        self.hosts: list[Host] = []

    def serve(self, host: Host) -> None:
        """Host 5 comes where the story lets it; host 4 is never an owner."""
        if host.address != f"h{LATER}" or self.workload.is_over:
            self.world.serve(host, "h0", is_owner=host.address != f"h{GENERATOR}")

    def draw_bad_luck(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.put(self.process(OWNER), OWNED)
        self.world.at(BEGIN, self.begin)

    def begin(self) -> None:
        self.world.stepped = self.step
        self.story(self)

    def step(self, host: Host, what: str) -> None:
        if self.is_harmed or self.workload.is_over or what.startswith(IDLE):
            return
        self.left -= 1
        if self.left < 0:
            self.is_harmed = True
            self.world.note(f"before {what!r} at {host.address}:")
            self.harm(self)
            for seconds, number in itertools.product((0.1, 2.0), (SEED, OWNER, GENERATOR)):
                self.world.at(seconds, lambda number=number: self.use(number))

    def use(self, number: int) -> None:
        """What goes on afterwards: a new process on a host reads and changes what there is."""
        if self.hosts[number].tables.standing() is not None:
            for key in (OWNED, NEW):
                process = self.world.start_process(self.hosts[number])
                self.workload.get(process, key, partial(self.put, process, key))

    # --- what stories are made of -------------------------------------------------------------------------------------

    def process(self, number: int) -> Process:
        process = self.world.start_process(self.hosts[number])
        self.clients.append(process)
        return process

    def put(self, process: Process, key: bytes, then: Callable[[], None] = lambda: None) -> None:
        if not process.is_alive or process.host.tables.standing() is None:
            return
        host, value = process.host, next(self.workload.values)
        self.workload.origin[value] = {host.id}
        change = Change(key, b"", (Place(host.id, host.tables.fill(value), 1),))
        self.workload.commit(process, key, change, value, self.workload.time, None, then)

    def kill_agents(self, *numbers: int) -> None:
        for number in numbers:
            host = self.hosts[number]
            if host.index is not None:
                self.world.kill_index(host)
                self.world.at(0.3, lambda host=host: self.serve(host))

    def kill_clients(self) -> None:
        for process in self.clients:
            process.is_alive = False

    def cut_off(self, number: int, seconds: float) -> None:
        for other in self.hosts:
            if other is not self.hosts[number]:
                self.world.cut(self.hosts[number].address, other.address)
        self.world.at(seconds, self.world.heal)


def first_put(told: Told) -> None:
    told.put(told.process(OWNER), NEW)


def first_put_of_a_generator(told: Told) -> None:
    """The seed is to own what it puts."""
    told.put(told.process(GENERATOR), NEW)


def put_elsewhere(told: Told) -> None:
    told.put(told.process(GENERATOR), OWNED)


def delete_and_put(told: Told) -> None:
    process = told.process(GENERATOR)
    told.workload.delete(process, OWNED, lambda: told.put(process, OWNED))


def wait_for_what_is_new(told: Told) -> None:
    told.workload.wait(told.process(GENERATOR), NEW, lambda: None)
    told.world.at(1, lambda: told.put(told.process(OWNER), NEW))


def sharded_put(told: Told) -> None:
    attempt = told.shards.attempt(OWNED, 2, None, 5)
    for rank, number in enumerate((OWNER, GENERATOR)):
        process = told.shards.start(attempt, rank, told.hosts[number])
        told.clients += [process] if process is not None else []


def hand_over(told: Told) -> None:
    directory.begin(told.hosts[OWNER].tables, b"group0", told.hosts[DEPUTY].id)
    told.put(told.process(GENERATOR), OWNED)


def drain(told: Told) -> None:
    told.world.drain(told.hosts[OWNER].id)
    told.put(told.process(GENERATOR), OWNED)
    told.put(told.process(OWNER), NEW)


def promotion(told: Told) -> None:
    told.promote(told.hosts[DEPUTY])
    told.put(told.process(GENERATOR), NEW)


def join_with_keys(told: Told) -> None:
    told.workload.scene = replace(SCENE, filled=2)
    told.workload.fill(told.hosts[LATER])
    told.world.serve(told.hosts[LATER], "h0")
    told.put(told.process(OWNER), NEW)


STORIES = {
    "a first put": first_put,
    "a generator's first put": first_put_of_a_generator,
    "a put elsewhere": put_elsewhere,
    "a deletion, and a put": delete_and_put,
    "a wait for what is new": wait_for_what_is_new,
    "a sharded put": sharded_put,
    "a hand-over": hand_over,
    "a drain": drain,
    "a promotion": promotion,
    "a join with keys": join_with_keys,
}
HARMS: dict[str, Callable[[Told], None]] = {
    "the owner is killed": lambda told: told.kill_agents(OWNER),
    "the seed is killed": lambda told: told.kill_agents(SEED),
    "a deputy is killed": lambda told: told.kill_agents(DEPUTY),
    "the generator's agent is killed": lambda told: told.kill_agents(GENERATOR),
    "all agents are killed": lambda told: told.kill_agents(*range(SCENE.hosts)),
    "clients are killed": lambda told: told.kill_clients(),
    "the generator is lost": lambda told: told.lose(told.hosts[GENERATOR], told.hosts),
    "the owner is lost": lambda told: told.lose(told.hosts[OWNER], told.hosts),
    "the seed is lost": lambda told: told.lose(told.hosts[SEED], told.hosts),
    "the generator is cut off": lambda told: told.cut_off(GENERATOR, 4),
    "the seed is cut off": lambda told: told.cut_off(SEED, 4),
    "the owner is cut off": lambda told: told.cut_off(OWNER, 4),
}
FAST = {
    ("a first put", "clients are killed"),
    ("a sharded put", "the owner is killed"),
    ("a put elsewhere", "all agents are killed"),
    ("a drain", "the owner is killed"),
    ("a generator's first put", "the generator is lost"),
}
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("story", "harm"),
    [pytest.param(story, harm, marks=() if (story, harm) in FAST else FULL) for story in STORIES for harm in HARMS],
)
def test_whatever_happens_at_any_step(story: str, harm: str) -> None:
    """The full run takes every third step, others each time; the fast one a few."""
    apart = 3 if IS_FULL else 6
    first = random.SystemRandom().randrange(apart) if IS_FULL else 0
    at = first
    while True:
        print(f"{story!r}, {harm!r}, step {at}")
        told = Told(STORIES[story], HARMS[harm], at)
        told.run()
        if not told.is_harmed:
            break
        at += apart
    assert at > first, "there were steps"
