"""What comes of a number of hosts: a cluster at rest, joins, deaths, a broadcast."""

from __future__ import annotations

import random
import time

import msgspec

from memstore.distributed.rules import relays
from tests.distributed.rules.test_relays import Broadcast, Way
from tests.simulation.costs import Costs
from tests.simulation.large import LargeWorld, Network

GB = 10**9
WARM = 16.0  # seconds until all have a question open at the seed, and the deputies have their copies
LASTS = 30.0  # seconds of a rest that is measured: three questions of each member
LEASE = 30.0  # seconds: `remove_after`
_CHUNKS = 128  # of a value that is broadcast: relays pass on less than that at once


class Rest(msgspec.Struct, frozen=True):
    """Each second of a cluster in which nothing happens.

    Attributes:
        messages, nbytes: that the seed sends.
        busy: the part of its time in which the seed's processor works.
        most: bytes that another host sends: the one that sends most, and one that is no deputy.
    """

    hosts: int
    messages: float
    nbytes: float
    busy: float
    most: float
    member: float


class Change(msgspec.Struct, frozen=True):
    """A change of members, until all know it, and all that it begins is over.

    Attributes:
        hosts: before; `changed` of them died, or as many came.
        rosters: that somebody was told.
        nbytes: that the seed has sent.
        busy: seconds in which its processor worked.
        most: messages that another host has sent.
    """

    hosts: int
    changed: int
    seconds: float
    rosters: int
    messages: int
    nbytes: int
    busy: float
    most: int


class Spread(msgspec.Struct, frozen=True):
    """A value that all hosts get at once.

    Attributes:
        rounds: in which a host received a chunk of each half, for `chunks` chunks.
        sending: seconds until the last host has it, once all know their parents.
        asking: seconds in which the owner's process answers the waits, the lookups, and the requests for bytes.
        origin: how often the origin sent the value.
        with_deaths: the same, if a tenth of the hosts dies meanwhile; the most of three such broadcasts.
        star: seconds, if the origin sent it to each host.
    """

    hosts: int
    rounds: int
    chunks: int
    sending: float
    asking: float
    origin: float
    with_deaths: float
    star: float


def rest(costs: Costs, network: Network, *, remove_after: float = 0) -> Rest:
    world = LargeWorld(costs.hosts, costs, network, remove_after=remove_after)
    world.run(WARM + remove_after)
    world.forget_meters()
    world.run(LASTS)
    meters = world.meters()
    seed = meters.pop(world.seed)
    deputies = {member.address for member in world.seed_roster().members[1:3]}
    return Rest(
        costs.hosts,
        seed.messages / LASTS,
        seed.nbytes / LASTS,
        seed.seconds / LASTS,
        max(meter.nbytes for meter in meters.values()) / LASTS,
        max(meter.nbytes for address, meter in meters.items() if address not in deputies) / LASTS,
    )


def joins(costs: Costs, network: Network, count: int) -> Change:
    """So many hosts come at one moment."""
    world = LargeWorld(costs.hosts, costs, network)
    world.run(WARM)
    world.forget_meters()
    world.join(count)
    return _changed(world, costs.hosts, count, world.seconds_until_settled(600))


def deaths(costs: Costs, network: Network, part: float = 0.1) -> Change:
    """A part of the hosts dies at one moment, each of which owns a group. The clock removes them (`remove_after`).

    The time counts from when the first lease can be over.
    """
    world = LargeWorld(costs.hosts, costs, network, remove_after=LEASE)
    world.give_groups()
    world.run(WARM + LEASE)
    assert len(world.seed_roster().leased) == costs.hosts, "all hold leases"
    world.forget_meters()
    some = [host for host in world.hosts.values() if host.address != world.seed]
    count = max(1, int(part * costs.hosts))
    world.kill(random.Random(1).sample(some[2:], count))
    world.run(LEASE)
    return _changed(world, costs.hosts, count, world.seconds_until_settled(600))


def _changed(world: LargeWorld, hosts: int, count: int, seconds: float) -> Change:
    meters = world.meters()
    seed, most = meters.pop(world.seed), max(meter.messages for meter in meters.values())
    rosters = len(world.rosters)
    return Change(hosts, count, seconds, rosters, seed.messages, seed.nbytes, seed.seconds, most)


class _Timed(Broadcast):
    """Attributes:
    seconds: that its rounds take, each as long as the host that sends most.
    """

    def __init__(self, count: int, seconds_of_chunk: float, latency: float) -> None:
        super().__init__(count, chunks=_CHUNKS)
        self._chunk, self._latency, self.seconds = seconds_of_chunk, latency, 0.0

    def round(self, ways: list[tuple[int, Way]]) -> None:
        self.most, before = 0, self.sent
        super().round(ways)
        self.seconds += max(self.most, self.sent - before) * self._chunk + self._latency


def broadcast(costs: Costs, network: Network, nbytes: int) -> Spread:
    """A value of so many bytes goes to all hosts, of which each had waited for it."""
    count = costs.hosts
    timed = _Timed(count, nbytes / 2 / _CHUNKS / network.bandwidth, network.latency)
    began = time.thread_time()
    tree = relays.Tree()
    for host in timed.hosts:
        tree.source_of(host)
        tree.source_of(host)  # its other stream
    rules = time.thread_time() - began
    timed.run()
    return Spread(
        count,
        timed.rounds,
        _CHUNKS,
        timed.seconds,
        rules + 4 * count * (costs.read + costs.look),
        timed.times_sent(),
        max(_sent_while_some_die(count, seed) for seed in range(3)),
        count * nbytes / network.bandwidth,
    )


def _sent_while_some_die(count: int, seed: int) -> float:
    """Returns how often the origin sends the value if a tenth of the hosts dies, one after the other."""
    broadcast = Broadcast(count, seed, _CHUNKS)
    victims = broadcast.random.sample(list(broadcast.hosts.values()), count // 10)

    def die() -> None:
        while victims and len(victims) > count // 10 * (1 - broadcast.rounds / _CHUNKS):
            victims.pop().is_up = False

    broadcast.run(die)
    return broadcast.times_sent()
