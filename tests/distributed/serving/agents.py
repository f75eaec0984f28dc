"""Agents on one machine, each with an address and a root of its own; none is left when a test ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import memstore
from memstore.distributed.catalog import look
from memstore.distributed.links import CLIENT, Links, hello_of_this_process, read_secret
from memstore.distributed.rules import Grant
from memstore.distributed.serving.questions import Asking, Report, Reported, Told, decode_answer, encode
from memstore.engine import Creation, close_root, open_root
from memstore.errors import HomeUnavailableError

PROGRAM = "memstore.distributed.serving"
SOURCES = Path(__file__).parents[3]
LONG = 240.0  # seconds; nothing takes so long, on a machine that does much else either

Result = TypeVar("Result")


def eventually(look: Callable[[], Result], what: str, timeout: float = LONG) -> Result:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {timeout:g} s: {what}")
        time.sleep(0.005)
    return found


def is_alive(pid: int) -> bool:
    """Not ended, nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Agent:
    """A started agent."""

    def __init__(self, root: str, address: str, process: subprocess.Popen[Any], log: Path) -> None:
        self.root, self.address, self.process, self._log = root, address, process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self._log.read_text()

    def view(self) -> dict[str, Any]:
        """What ROOT/cluster says; empty: there is none."""
        try:
            return json.loads(Path(f"{self.root}/cluster").read_text())
        except FileNotFoundError:
            return {}

    def index_process(self) -> int:
        """Its pid, once there is one."""

        def child() -> int:
            found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return int(found[0]) if found else 0

        return eventually(child, "an index process")

    def wait_until_serving(self, members: int = 1) -> Agent:
        """Until it is a member, has brought its keys along, and knows of so many members, one of them a deputy."""

        def is_serving() -> bool:
            assert self.process.poll() is None, self.log()
            view = self.view()
            has_joined = len(view.get("members", ())) == members and not view["is_joining"]
            return has_joined and (members == 1 or view["deputies"])

        eventually(is_serving, f"{members} members at {self.address}: {self.log()} {self.view()}")
        return self

    def ended(self) -> tuple[int, str]:
        """Waits for its end. Returns its exit code and what it printed."""
        return self.process.wait(LONG), self.log()

    def terminate(self) -> None:
        self.process.terminate()
        code, text = self.ended()
        assert code == 0, text


class Agents:
    """Starts agents.

    Args:
        folder: for their roots, in memory.
        logs: for what they print, and the secret.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, self._logs = folder, logs
        self.started: list[Agent] = []
        self.secret = self.new_secret("secret")
        self.environment = {**os.environ, "PYTHONPATH": str(SOURCES), "MEMSTORE_SECRET_FILE": str(self.secret)}

    def new_secret(self, name: str) -> Path:
        path = self._logs / name
        path.write_bytes(secrets.token_bytes(32))
        path.chmod(0o600)
        return path

    def start(
        self, name: str, *options: str, join: Agent | None = None, address: str | None = None, **environment: str
    ) -> Agent:
        """Starts an agent of the root with this name; each number of an agent has an address of its own.

        Args:
            join: the host that it is told of; None: it makes a cluster, if it is in none.
        """
        address = address or free_address(len(self.started))
        named = ["--new"] if join is None else ["--join", join.address]
        if options:  # as people do; else without the command line's own imports
            words = ["memstore", "serve", f"{self.folder}/{name}", "--address", address, *named, *options]
        else:
            words = [PROGRAM, f"{self.folder}/{name}", address, *named]
        log = self._logs / f"agent{len(self.started)}"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(Agent(f"{self.folder}/{name}", address, process, log))
        return self.started[-1]

    def serve(self, name: str, *options: str, join: Agent | None = None, members: int = 1, **more: Any) -> Agent:
        """As `start`; it is a member when this returns."""
        return self.start(name, *options, join=join, **more).wait_until_serving(members)

    def close(self) -> None:
        """Kills them, and whatever uses their roots."""
        for agent in self.started:
            agent.process.kill()
            agent.process.wait()
        eventually(lambda: not self.processes(), f"no process that uses {self.folder}: {self.processes()}")

    def processes(self) -> list[int]:
        """The pids of agents and index processes of these roots, whoever started them."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if str(self.folder).encode() in words and b"memstore" in words and is_alive(int(path.parent.name)):
                    found.append(int(path.parent.name))
        return found


@contextlib.contextmanager
def agents_in(folder: Path, logs: Path) -> Generator[Agents]:
    made = Agents(folder, logs)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def two_hosts(folder: Path, logs: Path) -> Generator[tuple[Agent, Agent, memstore.Store, memstore.Store]]:
    """Two agents, and a store open at each. The first one is the seed."""
    with agents_in(folder, logs) as agents, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_SECRET_FILE", str(agents.secret))
        first = agents.serve("a")
        second = agents.serve("b", join=first, members=2)
        with memstore.open(first.root, "r+") as store, memstore.open(second.root, "r+") as other:
            yield first, second, store, other


def owned_by(agent: Agent, group: str) -> Grant:
    """The grant of a group that nobody else owns, and this host from now on."""
    with memstore.open(agent.root, "r+") as store:
        store.put(f"{group}/own", 0)
    use = open_root(agent.root, "r", Creation(), LONG)
    try:
        grant = look(use.root, lambda tables: tables.owned(group.encode()), time.monotonic() + LONG)
    finally:
        close_root(use)
    assert grant is not None
    return grant


def free_address(number: int) -> str:
    """`tcp://127.0.0.x` at a port that is free there now."""
    ip = f"127.0.0.{number % 200 + 1}"
    with socket.socket() as sock:
        sock.bind((ip, 0))
        return f"tcp://{ip}:{sock.getsockname()[1]}"


class Caller:
    """Asks index processes, as clients do. Use it in a `with`."""

    def __init__(self, secret: Path) -> None:
        self.links = Links(secret=read_secret(str(secret)), kind=CLIENT, hello=hello_of_this_process())

    def call(self, agent: Agent, request: Asking, timeout: float = LONG) -> Told:
        """Until there is an answer."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(HomeUnavailableError):
                received = self.links.send(agent.address, None, encode(request), deadline)
                if received is not None:
                    return decode_answer(received)
        raise TimeoutError(f"{agent.address} did not answer in {timeout:g} s: {agent.log()}")

    def try_call(self, agent: Agent, request: Asking, timeout: float) -> Told | None:
        try:
            received = self.links.send(agent.address, None, encode(request), time.monotonic() + timeout)
        except HomeUnavailableError:
            return None
        return None if received is None else decode_answer(received)

    def report(self, agent: Agent) -> Reported:
        answer = self.call(agent, Report())
        assert isinstance(answer, Reported)
        return answer

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.links.close()


@contextlib.contextmanager
def stopped(pid: int) -> Generator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(pid) == "T", f"{pid} stops")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
