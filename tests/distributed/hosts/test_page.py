"""The commands of the page on hosts, each on the host that the page says, with these hosts' addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.hosts.clusters import LONG, SOURCES, wait_until
from tests.support.hosts import Hosts, need_hosts

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PAGE = SOURCES / "docs" / "hosts.md"
STORE = "/dev/shm/hosts"
GET = f"""python -c "import memstore; print(memstore.open('{STORE}').get('policy/step'))\""""


@pytest.fixture
def machines() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(3, shm_bytes=64 << 20) as hosts:
        yield hosts


def put(number: int) -> str:
    return f"""python -c "import memstore; memstore.open('{STORE}', 'r+').put('policy/step', {number})\""""


def block_with(words: str) -> list[str]:
    """Returns the lines of the page's one block of commands that has these words."""
    found = [block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if words in block]
    assert len(found) == 1, words
    return [line for line in found[0].splitlines() if line and not line.startswith("#")]


class Shells:
    """Shells on hosts, whose common home is one folder: so nobody copies the secret."""

    def __init__(self, hosts: Hosts, home: Path) -> None:
        self._hosts = hosts
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": str(SOURCES)}
        self.setup = ""

    def begin(self, number: int, line: str) -> subprocess.Popen[Any]:
        return self._hosts[number].popen(["sh", "-c", self._here(line)], env=self._environment, cwd=self._home)

    def run(self, number: int, line: str) -> str:
        done = self._hosts[number].run(
            ["sh", "-c", self._here(line)],
            env=self._environment,
            cwd=self._home,
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def _home(self) -> str:
        return self._environment["HOME"]

    def _here(self, line: str) -> str:
        """With the addresses of these hosts: 10.0.0.1 is the first one."""
        return self.setup + re.sub(r"10\.0\.0\.(\d)", lambda found: self._hosts[int(found[1]) - 1].address, line)


def test_the_commands_of_the_page_make_a_cluster_and_give_it_a_new_seed(machines: Hosts, tmp_path: Path) -> None:
    shells = Shells(machines, tmp_path)
    install, secret, export, first, second, look = block_with("--join")
    assert install.startswith("pip install"), "that is done"
    shells.run(0, secret)
    assert (tmp_path / "memstore.secret").stat().st_mode & 0o777 == 0o600
    shells.setup = f"{export}\n"
    assert first.endswith("# on 10.0.0.1") and second.endswith("# on 10.0.0.2")
    third = second.replace("10.0.0.2", "10.0.0.3")
    agents = [shells.begin(number, line) for number, line in enumerate((first, second, third))]
    try:
        status = f"memstore status {STORE}"
        for machine in machines:
            wait_until(lambda: machine.run(["test", "-e", f"{STORE}/cluster"]).returncode == 0, "it is served")  # noqa: B023
        wait_until(lambda: "3 of 3 hosts answer" in shells.run(2, status), "all are members")
        assert [shells.run(number, look) for number in range(3)] == ["0\n"] * 3
        shells.run(0, put(7))
        assert shells.run(1, GET) == "7\n"

        machines[0].kill()
        for line in block_with("memstore promote"):
            shells.run(1, line)
        wait_until(lambda: "2 of 2 hosts answer" in shells.run(2, status), "the old seed is removed")
        shells.run(2, put(8))
        assert shells.run(1, GET) == "8\n"
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(LONG)
