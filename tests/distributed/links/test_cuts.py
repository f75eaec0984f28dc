"""Links between hosts whose network is cut, and heals: real kernels, packets that vanish."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, why_unavailable

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "")

CHECKOUT = Path(__file__).parents[3]
HEALED = 5.0  # seconds after which all has to work again


@pytest.fixture
def hosts() -> Generator[Hosts]:
    with Hosts(2, shm_bytes=16 << 20) as two:
        yield two


class Caller:
    """A process on host 1 that asks one on host 0 again and again. What it says comes with the time it came."""

    def __init__(self, hosts: Hosts, ip: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        program = [sys.executable, "-m", "tests.distributed.links.across"]
        options = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": str(CHECKOUT)}
        server = hosts[0].popen([*program, "serve", f"tcp://{ip}:4242"], **options)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        self._process = hosts[1].popen([*program, "ask", address], **options)
        self._said: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self, seconds: float = 30.0) -> tuple[float, str]:
        return self._said.get(timeout=seconds)

    def answered_after(self, moment: float) -> float:
        """Seconds from `moment` to the first answer of a call that began after it."""
        said = [self.next()]
        while said[-1][1] != "answer" or said[-1][0] < moment:
            said.append(self.next())
        return said[-1][0] - moment

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put((time.monotonic(), line.strip()))


def test_a_caller_lives_through_a_cut(hosts: Hosts) -> None:
    caller = Caller(hosts, hosts[0].address)
    caller.answered_after(0.0)
    hosts.cut(0, 1)
    time.sleep(1.0)  # so long is the cut
    hosts.heal(0, 1)
    assert caller.answered_after(time.monotonic()) < HEALED


def test_hosts_speak_ipv6(hosts: Hosts) -> None:
    if hosts[0].address6 is None:
        pytest.skip("no IPv6 here")
    assert Caller(hosts, f"[{hosts[0].address6}]").answered_after(0.0) > 0


@pytest.mark.full
@pytest.mark.parametrize("seconds", [2.0, 7.0, 13.0, 60.0])
@pytest.mark.parametrize("ways", ["both", "requests", "answers"])
def test_a_caller_works_soon_after_any_cut(hosts: Hosts, seconds: float, ways: str) -> None:
    """Also after those that end in a pause of TCP's repetitions."""
    sender, receiver = (0, 1) if ways == "answers" else (1, 0)
    caller = Caller(hosts, hosts[0].address)
    caller.answered_after(0.0)
    hosts.cut(sender, receiver, one_way=ways != "both")
    time.sleep(seconds)
    hosts.heal(sender, receiver, one_way=ways != "both")
    assert caller.answered_after(time.monotonic()) < HEALED
