"""What these tests share: agents that owners of meshes have started, and hosts with workers of Monarch."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.meshes.owners import FAKED, Owner, environment, start_worker
from tests.distributed.serving.agents import Agents, agents_in, is_alive
from tests.support.hosts import Host, Hosts, need_hosts

HOSTS = 3
_ports = itertools.count(22222)


@pytest.fixture
def agents(scratch: str, tmp_path: Path) -> Iterator[Agents]:
    """Starts none: it finds those of roots in this folder, and ends them."""
    with agents_in(Path(scratch).parent, tmp_path) as made:
        yield made
        for pid in made.processes():
            os.kill(pid, signal.SIGKILL)


class MeshHosts:
    """Hosts with workers of Monarch, and an owner of meshes on the first one.

    Args:
        folder: for what they print.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.owner = self.another_owner(0)
        self.workers = tuple(self.work(number) for number in range(len(hosts)))

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def another_owner(self, number: int, **more: str) -> Owner:
        return Owner(environment(**more), self._folder / "owner", self.hosts[number])

    def work(self, number: int, **more: str) -> str:
        """Starts a worker on a host. Returns its address.

        Args:
            more: of its environment; FAKE_...: see `faked/sitecustomize.py`.
        """
        address = f"tcp://{self.hosts[number].address}:{next(_ports)}"
        more = {"PYTHONPATH": f"{FAKED}:{environment()['PYTHONPATH']}", **more}
        start_worker(self.hosts[number], address, self._folder / f"worker{number}", **more)
        return address

    def attach(self, *workers: str, owner: Owner | None = None, number: int = 0, name: str = "mesh") -> Owner:
        """An owner, here or on another host, has a mesh of these workers."""
        owner = owner or self.owner
        owner.call("attach", self.hosts[number].address, workers, name)
        return owner

    def agents(self, number: int, root: str) -> list[int]:
        """The pids of the agent of a root, and of its index process."""
        return [pid for pid in self.hosts[number].processes() if is_alive(pid) and root.encode() in words_of(pid)]

    def read(self, number: int, path: str) -> str:
        return self.run(number, "print(open(sys.argv[1]).read())", path)

    def run(self, number: int, code: str, *arguments: str) -> str:
        """Runs code in a fresh interpreter on a host. Returns what it prints."""
        done = self.hosts[number].run(
            [sys.executable, "-c", f"import sys, memstore\n{code}", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshHosts]:
    """Tests use roots of their own."""
    need_hosts()
    with Hosts(HOSTS, shm_bytes=128 << 20) as hosts:
        made = MeshHosts(hosts, tmp_path_factory.mktemp("mesh"))
        with made.owner:
            yield made
