"""Faults while clients on three hosts put, get, delete and wait: no value is lost, torn, or one that nobody put.

Each history is checked a key for linearizability. What fails may fail with a typed error and within its timeout; soon
after the fault has ended, all clients work again.

`make test-full` goes on for ten minutes with faults that are drawn; MEMSTORE_HISTORY_SECONDS is another time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.hosts import actions, clients
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts
from tests.examples import IS_FULL
from tests.support.fork_server import Worker
from tests.support.history import check, read_history

CLIENTS = 2  # on each host
WITHIN = 15.0  # seconds after its end, a fault is over for all clients; on a machine that does nothing else, 5

Fault = Callable[[ServedHosts], None]


@dataclass(frozen=True)
class Case:
    """What happens to a cluster under load.

    Attributes:
        begin: it begins, is over, or lasts until `end`.
        end: what ends it.
        seconds: that it lasts.
        kills: the hosts whose clients it kills.
    """

    begin: Fault
    end: Fault = lambda cluster: None
    seconds: float = 0.5
    kills: tuple[int, ...] = ()


def kill_index(number: int) -> Fault:
    return lambda cluster: os.kill(cluster.index_process(number), signal.SIGKILL)


def kill_agent(number: int) -> Fault:
    return lambda cluster: cluster.kill_agent(number)


def serve(number: int) -> Fault:
    return lambda cluster: cluster.serve(number)


def kill_host(number: int) -> Fault:
    return lambda cluster: cluster.kill_host(number)


def cut(first: int, second: int, *, one_way: bool = False) -> Fault:
    return lambda cluster: cluster.hosts.cut(first, second, one_way=one_way)


def isolate(number: int) -> Fault:
    def cut(cluster: ServedHosts) -> None:
        for other in range(len(cluster.hosts)):
            if other != number:
                cluster.hosts.cut(number, other)

    return cut


def heal(cluster: ServedHosts) -> None:
    for first in range(len(cluster.hosts)):
        for second in range(first + 1, len(cluster.hosts)):
            cluster.hosts.heal(first, second)


def delay(cluster: ServedHosts) -> None:
    cluster.hosts.delay(0, 1, 0.05)
    cluster.hosts.delay(1, 2, 0.02)


def no_delay(cluster: ServedHosts) -> None:
    cluster.hosts.delay(0, 1, 0)
    cluster.hosts.delay(1, 2, 0)


FULL = [pytest.mark.full, pytest.mark.timeout(600)]
CASES = [
    pytest.param(Case(kill_index(1)), id="an index process is killed"),
    pytest.param(Case(isolate(2), heal, 2.0), id="a host is cut off for 2 s", marks=FULL),
    pytest.param(Case(kill_index(0)), id="the seed's index process is killed", marks=FULL),
    pytest.param(Case(kill_agent(1), serve(1), 1.0), id="an agent is killed, and started again", marks=FULL),
    pytest.param(Case(kill_agent(0), serve(0), 3.0), id="the seed is killed, and started again", marks=FULL),
    pytest.param(Case(kill_host(2), serve(2), 1.0, kills=(2,)), id="all processes of a host are killed", marks=FULL),
    pytest.param(Case(isolate(1), heal, 60.0), id="a host is cut off for 60 s", marks=FULL),
    pytest.param(Case(isolate(0), heal, 20.0), id="the seed is cut off for 20 s", marks=FULL),
    pytest.param(Case(cut(0, 1, one_way=True), heal, 2.0), id="one way is cut for 2 s", marks=FULL),
    pytest.param(Case(cut(2, 0, one_way=True), heal, 60.0), id="one way is cut for 60 s", marks=FULL),
    pytest.param(Case(delay, no_delay, 4.0), id="packets take 50 ms", marks=FULL),
]


class Load:
    """Clients on every host, and what they record. Use it in a `with`, which ends when all have begun."""

    def __init__(self, cluster: ServedHosts, folder: Path, seed: int) -> None:
        self._cluster, self._folder, self._seed = cluster, folder, seed
        self._running: dict[str, Worker] = {}
        self._names = itertools.count(CLIENTS)
        self._read: dict[Path, int] = {}  # how far
        self._keys: dict[tuple[str, int], tuple[str, float]] = {}  # of a client's operation: its key, its start
        self._worked: dict[str, dict[str, float]] = {}  # a client, a key: the latest start of an operation with an end

    def __enter__(self) -> Load:
        self._folder.mkdir()
        for host, number in itertools.product(range(len(self._cluster.hosts)), range(CLIENTS)):
            name, seed = f"host{host}-{number}", (self._seed * 8 + host) * 64 + number
            self._running[name] = self._cluster.start(host, clients.run, ROOT, str(self._folder), name, seed)
        for worker in self._running.values():
            assert worker.recv() == "ready"
        return self

    def begin(self, host: int) -> None:
        """Begins clients on a host that has none any more."""
        begun: list[Worker] = []
        for number in itertools.islice(self._names, CLIENTS):
            name, seed = f"host{host}-{number}", (self._seed * 8 + host) * 64 + number
            begun.append(self._cluster.start(host, clients.run, ROOT, str(self._folder), name, seed))
            self._running[name] = begun[-1]
        for worker in begun:
            assert worker.recv() == "ready"

    def __exit__(self, *_: object) -> None:
        for worker in self._running.values():
            worker.kill()
        for worker in self._running.values():
            worker.wait()

    def lose(self, hosts: Sequence[int]) -> None:
        """The fault kills the clients there."""
        for name in [name for name in self._running if int(name[len("host")]) in hosts]:
            self._running.pop(name).close()

    def wait_until_all_work(self, since: float, timeout: float) -> None:
        """Until each client has done something on keys of all owners that it began after that moment."""
        deadline = time.monotonic() + timeout
        while idle := self._idle(since):
            for name, worker in self._running.items():
                if worker.channel.poll(0):
                    pytest.fail(f"client {name} ended: {worker.recv()}")
            if time.monotonic() > deadline:
                pytest.fail(f"after {timeout:g} s, and not yet done, by client: {idle}")
            time.sleep(0.05)

    def _idle(self, since: float) -> dict[str, list[str]]:
        for path in self._folder.iterdir():
            self._take_in(path)
        found = {name: self._worked.get(name, {}) for name in self._running}
        lacking = {
            name: [key for key in clients.KEYS if worked.get(key, 0.0) < since] for name, worked in found.items()
        }
        return {name: keys for name, keys in lacking.items() if keys}

    def _take_in(self, path: Path) -> None:
        """What its client has written since the last look."""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for line in map(json.loads, whole.splitlines()):
            operation = (path.stem, line["number"])
            if "start" in line:
                self._keys[operation] = (line["key"], line["start"])
            elif not line.get("failed"):
                key, start = self._keys.pop(operation)
                self._worked.setdefault(path.stem, {})[key] = start


@pytest.mark.parametrize("case", CASES)
def test_operations_stay_linearizable(cluster: ServedHosts, tmp_path: Path, case: Case) -> None:
    folder = tmp_path / "history"
    for number, key in enumerate(clients.KEYS):
        cluster.call(number % 3, actions.own, key.partition("/")[0])  # who is the first owns it, also from test to test
    with Load(cluster, folder, seed=1) as load:
        load.wait_until_all_work(time.monotonic(), LONG)
        case.begin(cluster)
        load.lose(case.kills)
        time.sleep(case.seconds)
        case.end(cluster)
        load.wait_until_all_work(time.monotonic(), WITHIN)
        load.wait_until_all_work(time.monotonic(), LONG)  # what was under way in the fault has ended, too
    check(read_history(folder.iterdir()))


# --- one fault after the other ----------------------------------------------------------------------------------------

SEEDS = 10 if IS_FULL else 1
SECONDS = float(os.environ.get("MEMSTORE_HISTORY_SECONDS", "600" if IS_FULL else "4")) / SEEDS
AT_ONCE = 12.0  # seconds of one history: longer ones take long to check


def signal_index(number: int, sent: int) -> Fault:
    """The agent of an index process that is stopped doesn't replace it within such a time."""
    return lambda cluster: os.kill(cluster.index_process(number), sent)


def promote_other(cluster: ServedHosts) -> None:
    """A person makes a deputy the seed, if it can be: it needs more than half of the hosts."""
    seed = cluster.seed()
    cluster.command((seed + 1) % len(cluster.hosts), "promote", ROOT)


def draw_fault(chance: random.Random) -> tuple[str, Case]:
    """A fault of one host or of a link, and how long it lasts."""
    number = chance.randrange(3)
    other = (number + chance.choice([1, 2])) % 3
    seconds = chance.choice([0.2, 1.0, 4.0])
    return chance.choice(
        [
            (f"kills the index process of host {number}", Case(kill_index(number), seconds=seconds)),
            (f"kills the agent of host {number}", Case(kill_agent(number), serve(number), seconds)),
            (f"kills host {number}", Case(kill_host(number), serve(number), seconds, kills=(number,))),
            (
                f"stops the index process of host {number}",
                Case(signal_index(number, signal.SIGSTOP), signal_index(number, signal.SIGCONT), min(seconds, 1.0)),
            ),
            (f"cuts off host {number}", Case(isolate(number), heal, seconds)),
            (f"cuts {number} and {other}", Case(cut(number, other), heal, seconds)),
            (f"cuts {number} to {other}", Case(cut(number, other, one_way=True), heal, seconds)),
            ("delays", Case(delay, no_delay, seconds)),
            ("promotes", Case(promote_other, seconds=0.2)),
        ]
    )


@pytest.mark.timeout(60 + 10 * SECONDS)
@pytest.mark.parametrize("part", range(SEEDS))
def test_operations_stay_linearizable_whatever_comes_next(cluster: ServedHosts, tmp_path: Path, part: int) -> None:
    seed = random.SystemRandom().randrange(1 << 20) if IS_FULL else part
    chance, until = random.Random(seed), time.monotonic() + SECONDS
    for number in itertools.count():
        folder, ends = tmp_path / f"history{number}", min(until, time.monotonic() + AT_ONCE)
        for one, key in enumerate(clients.KEYS):
            cluster.call(one % 3, actions.own, key.partition("/")[0])
        with Load(cluster, folder, seed=seed % 1000 + number) as load:
            load.wait_until_all_work(time.monotonic(), LONG)
            while time.monotonic() < ends:
                name, case = draw_fault(chance)
                print(f"seed {seed}: {name} for {case.seconds} s")
                case.begin(cluster)
                load.lose(case.kills)
                time.sleep(case.seconds)
                case.end(cluster)
                time.sleep(chance.choice([0.0, 0.3, 1.0]))
            load.wait_until_all_work(time.monotonic(), LONG)
            load.wait_until_all_work(time.monotonic(), LONG)
        check(read_history(folder.iterdir()))
        cluster.restore()
        if time.monotonic() > until:
            break
