"""Two hosts of one machine that serve one store, and processes on them that call what they are told.

The hosts are those of `tests/support/hosts.py`: namespaces, joined by a virtual cable. Host 0 has the bytes, and owns
all keys; host 1 reads, and owns nothing. Agents are those of `memstore serve`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import memstore
from memstore.distributed.serving import Cluster
from tests.benchmarks.report import Absent, Workload
from tests.benchmarks.session import Session
from tests.distributed.hosts.clusters import ServedHosts, served, wait_until
from tests.support.hosts import Host, Hosts, why_unavailable

R = TypeVar("R")
PATIENCE = 180.0  # seconds for a call, on a busy machine
SHM_BYTES, QUICK_SHM_BYTES = 2 << 30, 160 << 20
OWNER, READER = 0, 1  # numbers of hosts


class HostProcess:
    """A process on a host. Functions are passed by name: they stand in modules, and take what pickles."""

    def __init__(self, host: Host, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "tests.benchmarks.on_hosts", str(fd)]
            self.process: subprocess.Popen[Any] = host.popen(command, env=environment, pass_fds=[fd])
        self._channel = Connection(ours.detach())

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls `function(*arguments)` there; `answer` brings what it returns."""
        self._channel.send((function, arguments))

    def answer(self) -> Any:
        """Raises what the function has raised."""
        if not self._channel.poll(PATIENCE):
            raise TimeoutError(f"the process {self.process.pid} said nothing in {PATIENCE:g} s")
        value, error, trace = self._channel.recv()
        if error is not None:
            raise error from RuntimeError(trace)
        return value

    def run(self, function: Callable[..., R], *arguments: Any) -> R:
        self.begin(function, *arguments)
        return self.answer()

    def sent_bytes(self) -> int:
        """What its host has sent to others since it is there, as the kernel counts it, headers and all."""
        for line in Path(f"/proc/{self.process.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "eth0":
                return int(counts.split()[8])
        raise LookupError("the host has no network")

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


class TwoHosts:
    """The hosts, and the agents that serve them."""

    def __init__(self, cluster: ServedHosts, stack: ExitStack) -> None:
        self.cluster, self._stack = cluster, stack

    def address(self, number: int) -> str:
        return self.cluster.hosts[number].address

    def process_on(self, number: int) -> HostProcess:
        """A new process; it ends with the hosts, or when it is closed."""
        process = HostProcess(self.cluster.hosts[number], self.cluster.environment)
        self._stack.callback(process.close)
        return process


def two_hosts(session: Session, transport: str = "tcp") -> TwoHosts:
    """Made once for all workloads of a run. Only where `why_unavailable()` says nothing.

    Args:
        transport: which way bytes take, as of `memstore serve`.
    """

    def make() -> TwoHosts:
        shm_bytes = QUICK_SHM_BYTES if session.quick else SHM_BYTES
        return session.until_end.enter_context(_two_hosts(shm_bytes, transport))

    return session.shared(f"two hosts, {transport}", make)


def not_here(id: str, title: str) -> Workload | None:
    """A workload that says why it could not run, where there can be no hosts."""
    reason = why_unavailable()
    return None if reason is None else Workload(id, title, "", [], [], absent=[Absent("any of it", reason)])


@contextmanager
def _two_hosts(shm_bytes: int, transport: str) -> Generator[TwoHosts]:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-bench-hosts-")))
        hosts = stack.enter_context(Hosts(2, shm_bytes=shm_bytes))
        options = () if transport == "tcp" else ("--transport", transport)
        cluster = stack.enter_context(served(hosts, logs, [options, (*options, "--no-owner")]))
        wait_until(lambda: cluster.call(OWNER, has_transport, transport), f"{transport}: {cluster.log(OWNER)}")
        yield TwoHosts(cluster, stack)


def has_transport(store: memstore.Store, transport: str) -> bool:
    """Whether all of its hosts have it."""
    return all(host.transport == transport for host in Cluster(store.root).status().hosts)


# --- in a process on a host -------------------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Until whoever started it closes the channel."""
    while True:
        try:
            function, arguments = channel.recv()
        except EOFError:
            return
        value, error, trace = None, None, ""
        try:
            value = function(*arguments)
        except Exception as raised:
            error, trace = raised, f"on a host:\n{traceback.format_exc()}"
        channel.send_bytes(pickle.dumps((value, error, trace)))


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    importlib.import_module("torch").set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
