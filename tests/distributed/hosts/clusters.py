"""A store served on the hosts of a test: agents are started, watched and ended; workers run beside them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.distributed.hosts import actions
from tests.support.fork_server import ForkServer, Worker
from tests.support.hosts import Host, Hosts, enter

ROOT = "/dev/shm/store"
PORT = 7411
SOURCES = Path(__file__).parent.parent.parent.parent
AGENT = "memstore.distributed.serving"
QUICK_AGENT = "tests.distributed.hosts.quick_agent"
LONG = 60.0  # seconds; nothing takes so long


class ServedHosts:
    """Hosts that serve one store, each at ROOT of its own `/dev/shm`. Host 0 has made the cluster.

    Args:
        hosts: whose processes, and `/dev/shm`, are its own.
        secret: the file of the cluster's secret.
        logs: a folder for what the agents print.

    Attributes:
        always: options of each agent that is given none.
    """

    def __init__(self, hosts: Hosts, secret: Path, logs: Path) -> None:
        self.hosts = hosts
        self.always: tuple[str, ...] = ()
        self._secret, self._logs = secret, logs
        self._agents: dict[int, subprocess.Popen[Any]] = {}
        self._before: dict[int, Sequence[str]] = {}
        self._options: dict[int, Sequence[str]] = {}
        self._is_founded = False
        self._names = itertools.count()
        self._servers: dict[int, ForkServer] = {}
        self.environment = {**os.environ, "PYTHONPATH": str(SOURCES), "MEMSTORE_SECRET_FILE": str(secret)}

    # --- agents -------------------------------------------------------------------------------------------------------

    def address(self, number: int) -> str:
        return f"tcp://{self.hosts[number].address}:{PORT}"

    def serve(
        self,
        number: int,
        *options: str,
        before: Sequence[str] = (),
        named: Sequence[int] | None = None,
        agent: str = "memstore",
    ) -> None:
        """Starts the agent of a host.

        Args:
            options: of its command line.
            before: words before the commands of this agent, and of workers that are started there from now on.
            named: the hosts that it is told of; None: all, but the first host that is served makes the cluster.
            agent: the program, if there are options: the command line, or one that takes the options of AGENT.
        """
        self._options[number], self._before[number] = options, before
        told = [one for one in range(len(self.hosts)) if one != number] if named is None else named
        joins = [f"--join={self.address(one)}" for one in told]
        if named is None and not self._is_founded:
            joins = ["--new"]
        self._is_founded = True
        if options and agent != "memstore":
            words = [agent, ROOT, self.address(number), *joins, *options]
        elif options:  # as people do; else without the command line's own imports
            words = ["memstore", "serve", ROOT, "--address", self.address(number), *joins, *options]
        else:
            words = [AGENT, ROOT, self.address(number), *joins, *self.always]
        with open(self._logs / f"host{number}.log", "ab") as log:
            self._agents[number] = self.hosts[number].popen(
                [*before, sys.executable, "-m", *words], env=self.environment, stdout=log, stderr=log
            )

    def agent(self, number: int) -> subprocess.Popen[Any]:
        return self._agents[number]

    def kill_agent(self, number: int) -> None:
        """And its index process with it, soon."""
        self._agents[number].kill()
        self._agents[number].wait(LONG)

    def index_process(self, number: int) -> int:
        """The pid of a host's index process, the agent's only child."""
        pid = self._agents[number].pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_until(lambda: children.read_text().split(), f"host {number} has an index process: {self.log(number)}")
        return int(children.read_text().split()[0])

    def log(self, number: int) -> str:
        return (self._logs / f"host{number}.log").read_text()

    def view(self, number: int) -> dict[str, Any]:
        """What ROOT/cluster says there; empty: nothing yet."""
        path = Path(f"/proc/{self._agents[number].pid}/root{ROOT}/cluster")
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            return {}

    def group_of(self, number: int) -> str:
        """A group that nobody has used yet, which that host owns from now on."""
        name = f"of-host{number}-{next(self._names)}"
        self.call(number, actions.own, name)
        return name

    def seed(self) -> int:
        """The number of the host that is the seed, as the first one that runs knows."""
        seed = next(view["seed"] for view in map(self.view, self._agents) if view)
        return [self.address(number) for number in range(len(self.hosts))].index(seed)

    def command(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `memstore` on a host, to its end."""
        command = [sys.executable, "-m", "memstore", *words]
        return self.hosts[number].run(command, env=self.environment, capture_output=True, text=True, timeout=LONG)

    def remove(self, number: int, by: int) -> None:
        """Removes a host that is dead, as a person does on another one."""
        done = self.command(by, "remove", ROOT, self.address(number))
        assert done.returncode == 0, done.stderr

    def wait_for_members(self, count: int, timeout: float = LONG) -> None:
        """Until all agents know of so many members, and have settled."""
        self.wait_at(self._agents, count, timeout)

    def wait_at(self, numbers: Iterable[int], count: int, timeout: float = LONG) -> None:
        """Until the agents of these hosts know of so many members, and have settled."""
        agents = {number: self._agents[number] for number in numbers}
        deadline = time.monotonic() + timeout
        while True:
            views = {number: self.view(number) for number in agents}
            epochs = {view.get("epoch") for view in views.values()}
            if len(epochs) == 1 and all(_is_settled(view, count) for view in views.values()):
                return
            for number, agent in agents.items():
                if agent.poll() is not None:
                    raise AssertionError(f"the agent of host {number} ended: {self.log(number)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not {count} members after {timeout} s: {views}")
            time.sleep(0.02)

    # --- workers ------------------------------------------------------------------------------------------------------

    def start(self, number: int, function: Callable[..., object], *arguments: Any) -> Worker:
        """Calls `function(channel, *arguments)` in a new process on a host."""
        if self._before.get(number):
            return self._own_server(number).start(function, *arguments)
        environment = {"MEMSTORE_SECRET_FILE": str(self._secret)}
        worker = _forks().start(on_host, self.hosts[number].namespaces(), environment, function, arguments)
        assert worker.recv(LONG) == "is there"  # so that it dies with its host
        return worker

    def call(self, number: int, action: Callable[..., Any], *arguments: Any, timeout: float = LONG) -> Any:
        """What `action(store, *arguments)` returns in a new process on a host. Raises WorkerError."""
        with self.start(number, actions.with_store, ROOT, action, arguments) as worker:
            return worker.recv(timeout)

    def _own_server(self, number: int) -> ForkServer:
        """Of a host whose commands have words before them: all that runs there is started with these."""
        if number not in self._servers:
            path = self._logs / f"python-on-host{number}"
            secret = f"MEMSTORE_SECRET_FILE={self._secret}"
            words = [*self.hosts[number].entering(), *self._before[number], "env", secret, sys.executable]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            path.chmod(0o700)
            self._servers[number] = ForkServer(_FOR_WORKERS, python=str(path))
        return self._servers[number]

    def sent(self, number: int) -> int:
        """Bytes that have left a host."""
        lines = Path(f"/proc/{self._agents[number].pid}/net/dev").read_text().splitlines()
        pairs = [line.split(":") for line in lines if ":" in line]
        return sum(int(counts.split()[8]) for name, counts in pairs if name.strip() != "lo")

    # --- their end ----------------------------------------------------------------------------------------------------

    def kill_host(self, number: int) -> None:
        """All of its processes. Its `/dev/shm` keeps its files."""
        self.hosts[number].kill()
        server = self._servers.pop(number, None)
        if server is not None:
            server.close()

    def begin_anew(self, number: int, before: Sequence[str] = (), *, by_clock: bool = False) -> None:
        """As after a reboot: its processes are gone, and what was in its memory. It is removed, and served anew.

        Args:
            by_clock: nobody removes it: the seed does, or who takes over from it, when its lease is over.
        """
        other = (number + 1) % len(self.hosts)
        if self.seed() == number:  # cuts may have left it none: then nobody can take over without --force
            wait_until(lambda: self.view(other)["deputies"], "there are deputies", LONG)
        self.kill_host(number)
        self.hosts[number].run(["sh", "-c", f"rm -rf {ROOT}"], timeout=LONG)
        if by_clock:
            left = len(self.hosts) - 1
            wait_until(lambda: len(self.view(other)["members"]) == left, f"{number} is removed", 2 * LONG)
        else:
            if self.seed() == number:
                done = self.command(other, "promote", ROOT)
                assert done.returncode == 0, done.stderr
            self.remove(number, by=other)
        self.serve(number, before=before)
        self.wait_for_members(len(self.hosts))

    def serve_again(self) -> None:
        """Starts the agents that have ended, as a unit of a service manager does."""
        for number, agent in list(self._agents.items()):
            if agent.poll() is not None:
                self.serve(number, *self._options[number], before=self._before[number])

    def restore(self) -> None:
        """As it was in the beginning: all serve, nothing is cut, no key is there."""
        for first in range(len(self.hosts)):
            for second in range(first + 1, len(self.hosts)):
                self.hosts.heal(first, second)
                self.hosts.delay(first, second, 0)
        self.serve_again()
        self.wait_for_members(len(self.hosts))
        for number in self._agents:
            self.call(number, actions.delete_all)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for agent in self._agents.values():
            agent.kill()
        for agent in self._agents.values():
            agent.wait(LONG)


_FOR_WORKERS = ["tests.distributed.hosts.clients"]


@functools.cache
def _forks() -> ForkServer:
    """For the workers of all hosts, and of all tests: torch is imported once."""
    return ForkServer(_FOR_WORKERS)


def on_host(
    channel: Connection,
    namespaces: Sequence[str],
    environment: dict[str, str],
    function: Callable[..., object],
    arguments: Sequence[Any],
) -> None:
    """Calls the function with the channel and its arguments, after this process has moved to a host."""
    enter(namespaces)
    os.environ.update(environment)
    os.chdir(SOURCES)
    channel.send("is there")
    function(channel, *arguments)


@contextlib.contextmanager
def empty(hosts: Hosts, folder: Path) -> Generator[ServedHosts]:
    """Hosts that nobody serves yet. Nothing of what is served then is left.

    Args:
        folder: for the secret and the agents' logs.
    """
    served = ServedHosts(hosts, new_secret(folder), folder)
    try:
        yield served
    finally:
        served.close()
        for first in range(len(hosts)):
            for second in range(first + 1, len(hosts)):
                hosts.heal(first, second)
        for host in hosts:
            _clear(host)


@contextlib.contextmanager
def served(hosts: Hosts, folder: Path, options: Sequence[Sequence[str]] | None = None) -> Generator[ServedHosts]:
    """All of these hosts, serving one store.

    Args:
        folder: for the secret and the agents' logs.
        options: of each agent's command line.
    """
    served = ServedHosts(hosts, new_secret(folder), folder)
    try:
        for number in range(len(hosts)):
            served.serve(number, *(options[number] if options else ()))
        served.wait_for_members(len(hosts))
        yield served
    finally:
        served.close()
        for host in hosts:
            _clear(host)


def wait_until(is_so: Callable[[], object], what: str, timeout: float = LONG) -> None:
    deadline = time.monotonic() + timeout
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {timeout:g} s: {what}")
        time.sleep(0.01)


def new_secret(folder: Path) -> Path:
    secret = folder / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    return secret


def _is_settled(view: dict[str, Any], count: int) -> bool:
    """Not what an index process has left that was killed."""
    if len(view.get("members", ())) != count or view["is_joining"]:
        return False
    try:
        return Path(f"/proc/{view['index_process']}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _clear(host: Host) -> None:
    """The next test's hosts have nothing in their memory."""
    host.kill()
    host.run(["sh", "-c", "rm -rf /dev/shm/*"], timeout=LONG)
