"""Hosts that die, are drained and served anew under load: histories hold what promise P8 says, in exactly its words.

Clients on four hosts put, get, delete and wait. A host is lost with its memory, and removed, or drained; index
processes, agents and hosts are killed; links are cut; other hosts are promoted. What may be missing afterwards is a
*loss* in the history: values above 64 KiB that clients of the lost host had put, all that they had put into groups that
it owned, and of these groups what nobody has acknowledged.

`make test-full` goes on for twenty minutes. In half of them hosts hold leases, and a clock removes some of those that
are lost; MEMSTORE_DEATHS_SECONDS is another time.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.hosts import actions, clients
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts, empty, wait_until
from tests.distributed.hosts.test_faults import Load, draw_fault, heal
from tests.examples import IS_FULL
from tests.support.history import UNKNOWN, Operation, check, read_history
from tests.support.hosts import Hosts, need_hosts

HOSTS = 4
LEASE = 30  # seconds
SECONDS = float(os.environ.get("MEMSTORE_DEATHS_SECONDS", "600" if IS_FULL else "1"))  # of each of two runs
QUIET = 2.5  # seconds after a fault in which owners tell hosts what they couldn't: a death before is a second failure
GROUPS = [key.partition("/")[0] for key in clients.KEYS]
SIZES = ("small", "large")
LARGE = 1 << 16  # bytes: a value above lies in a file of the host that has put it


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(HOSTS, shm_bytes=96 << 20) as hosts:
        yield hosts


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["by people", "with leases"])
def cluster(machines: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServedHosts]:
    with empty(machines, tmp_path) as served:
        if request.param:
            served.always = (f"--remove-after={LEASE}", "--promote-after=5")
        for number in range(HOSTS):
            served.serve(number)
        served.wait_for_members(HOSTS)
        if request.param:
            wait_until(lambda: all(len(served.view(one)["leased"]) == HOSTS for one in range(HOSTS)), "all hold leases")
        yield served


class Deaths:
    """Deaths of hosts, and what each may take with it."""

    def __init__(self, cluster: ServedHosts, load: Load) -> None:
        self._cluster, self._load = cluster, load
        self._losses: list[tuple[int, float, float, float, dict[str, int | None]]] = []
        self._handed: list[tuple[float, str]] = []  # groups that a drain has moved, and since when

    def lose(self, number: int, *, by_clock: bool = False) -> None:
        """A host is lost with all that is in its memory, is removed, by a person or a clock, and comes back empty."""
        owners = self._owners((number + 1) % HOSTS)
        self._put_stable()
        began = time.monotonic()
        self._load.lose([number])
        killed = time.monotonic()  # until then its clients went on
        self._cluster.begin_anew(number, by_clock=by_clock)
        self._losses.append((number, began, killed, time.monotonic(), owners))
        self._check_stable(
            f"{group}/{size}-of-{host}"
            for (group, owner), host, size in itertools.product(owners.items(), range(HOSTS), SIZES)
            if host != number or (size == "small" and owner != number)
        )
        self._load.begin(number)

    def drain(self, number: int) -> None:
        """A host is drained, and served anew."""
        other = (number + 1) % HOSTS
        if self._cluster.seed() == number:
            promoted = self._cluster.command(other, "promote", ROOT)
            if promoted.returncode:
                return
        owners = self._owners(other)
        self._put_stable()
        drained = self._cluster.command(other, "drain", ROOT, self._cluster.address(number), "--timeout", "45")
        assert drained.returncode == 0, drained.stderr
        self._handed += [(time.monotonic(), group) for group, owner in owners.items() if owner == number]
        self._load.lose([number])
        self._cluster.agent(number).wait(LONG)
        self._cluster.kill_host(number)
        self._cluster.serve(number)
        self._cluster.wait_for_members(HOSTS)
        self._check_stable(f"{group}/{size}-of-{host}" for group in owners for host in range(HOSTS) for size in SIZES)
        self._load.begin(number)

    def _put_stable(self) -> None:
        for number in range(HOSTS):
            self._cluster.call(number, actions.put_stable, GROUPS, number)

    def _check_stable(self, expected: Iterable[str]) -> None:
        """Every key is there whose newest version lies on another host, and no other one."""
        keys = sorted(expected)
        for asked in range(HOSTS):
            assert self._cluster.call(asked, actions.stable, GROUPS) == keys

    def _owners(self, asked: int) -> dict[str, int | None]:
        addresses = [self._cluster.address(number) for number in range(HOSTS)]
        found = self._cluster.call(asked, actions.owners, GROUPS)
        return {
            group: next((at for at, one in enumerate(addresses) if owner and owner.endswith(one)), None)
            for group, owner in zip(GROUPS, found, strict=True)
        }

    def among(self, history: list[Operation]) -> Iterator[Operation]:
        """Makes the losses of a history, for each key."""
        puts = [one for one in history if one.kind == "put" and one.value is not None]
        for (number, began, killed, ended, owners), key in itertools.product(self._losses, clients.KEYS):
            group = key.partition("/")[0]
            is_owner = owners[group] == number
            moved_at = max((since for since, moved in self._handed if moved == group and since < began), default=-1.0)
            lost = tuple(
                one.value
                for one in puts
                if one.key == key and one.start < ended and one.value is not None
                if (is_owner and one.start < moved_at) or (is_host(one, number) and (is_owner or is_large(one.value)))
                if not is_host(one, number) or one.start < killed
            )
            end = ended if is_owner else UNKNOWN
            yield Operation("loss", key, began, end, lost=lost, undoes=is_owner, client=f"host {number}")


def is_host(one: Operation, number: int) -> bool:
    return one.client.startswith(f"host{number}-")


def is_large(value: int | str) -> bool:
    return clients.size_of(int(value)) * 8 > LARGE


@pytest.mark.timeout(240 + 4 * SECONDS)
def test_a_death_takes_what_the_host_has_put_and_nothing_else(cluster: ServedHosts, tmp_path: Path) -> None:
    is_long = SECONDS > 60
    seed = random.SystemRandom().randrange(1 << 20) if is_long else 3
    chance, until = random.Random(seed), time.monotonic() + SECONDS
    for number in itertools.count():
        folder = tmp_path / f"history{number}"
        for one, key in enumerate(clients.KEYS):
            cluster.call(one % HOSTS, actions.own, key.partition("/")[0])
        with Load(cluster, folder, seed=seed % 1000 + 4 * number) as load:
            deaths = Deaths(cluster, load)
            load.wait_until_all_work(time.monotonic(), LONG)
            for _ in range(2 if is_long else 0):
                meet(cluster, load, chance)
            has_clock = cluster.always and chance.random() < 0.3
            lose = partial(deaths.lose, by_clock=True) if has_clock else deaths.lose
            die: Callable[[int], None] = chance.choice([lose, lose, deaths.drain])
            at = chance.randrange(HOSTS)
            what = "loses, by a clock," if isinstance(die, partial) else die.__name__
            print(f"seed {seed}, history {number}: {what} {at}", flush=True)
            die(at)
            load.wait_until_all_work(time.monotonic(), LONG)
            if is_long and chance.random() < 0.5:
                time.sleep(QUIET)
                deaths.lose(chance.randrange(HOSTS))
                load.wait_until_all_work(time.monotonic(), LONG)
            for _ in range(1 if is_long else 0):
                meet(cluster, load, chance)
            load.wait_until_all_work(time.monotonic(), LONG)
        history = read_history(folder.iterdir())
        check([*history, *deaths.among(history)])
        if time.monotonic() > until:
            break
        cluster.restore()


def meet(cluster: ServedHosts, load: Load, chance: random.Random) -> None:
    """Something happens that is over, and of which all have heard, before the next one."""
    name, case = draw_fault(chance)
    print(f"{name} for {case.seconds} s", flush=True)
    case.begin(cluster)
    load.lose(case.kills)
    time.sleep(case.seconds)
    case.end(cluster)
    heal(cluster)
    cluster.wait_for_members(HOSTS)
    for killed in case.kills:
        load.begin(killed)
    load.wait_until_all_work(time.monotonic(), LONG)
    time.sleep(QUIET)
