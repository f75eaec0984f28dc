"""Hosts on one machine: they reach each other, are cut off, come back, and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import MOUNTS, bind_mount, in_namespaces
from tests.support import holding
from tests.support.hosts import Host, HostGoneError, Hosts, HostsUnavailableError, need_hosts, why_unavailable
from tests.testing import peer
from tests.users import needs_root

PEER = [sys.executable, "-I", "-S", peer.__file__]
ROOT = Path(__file__).parent.parent.parent
LONG = 60.0  # seconds; nothing takes so long


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three, for all tests that leave them as they were."""
    need_hosts()
    with Hosts(3, shm_bytes=16 << 20) as made:
        yield made
        assert [host.processes() for host in made] == [[], [], []]


@contextlib.contextmanager
def running(host: Host, *words: str) -> Generator[subprocess.Popen[bytes]]:
    """A peer on the host, which listens where it does."""
    with host.popen([*PEER, *words], stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            if words[0] != "stream":
                assert next_line(process) == "listening"
            yield process
        finally:
            process.kill()


def say(host: Host, *words: str) -> str:
    done = host.run([*PEER, *words], stdout=subprocess.PIPE, text=True, timeout=LONG, check=True)
    return done.stdout.strip()


def next_line(process: subprocess.Popen[bytes], timeout: float = LONG) -> str | None:
    """None if there is none so long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    return process.stdout.readline().decode().strip() if ready else None


def ask(host: Host, address: str | None, **options: Any) -> str:
    assert address
    words = {"size": 10, "timeout": LONG, "times": 1, **options}
    return say(host, "call", address, *(str(words[name]) for name in ("size", "timeout", "times")))


def round_trip(host: Host, address: str | None, **options: Any) -> float:
    state, seconds = ask(host, address, **options).split()
    assert state == "whole"
    return float(seconds)


# --- Each is a host of its own ----------------------------------------------------------------------------------------


def test_hosts_reach_each_other(hosts: Hosts) -> None:
    addresses = [address for host in hosts for address in (host.address, host.address6) if address]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            own = [one for one in (host.address, host.address6) if one]
            stack.enter_context(running(host, "serve", *own))
        for host in hosts:
            assert say(host, "reach", *addresses).split() == addresses


def test_hosts_reach_each_other_by_name_and_nothing_else(hosts: Hosts) -> None:
    with running(hosts[1], "serve", hosts[1].address):
        assert ask(hosts[0], "host1").startswith("whole")
    assert ask(hosts[0], "192.0.2.1") == "ENETUNREACH"


def test_each_has_its_own_shared_memory_name_and_boot_id(hosts: Hosts) -> None:
    script = 'echo $0 > /dev/shm/whose; hostname 2>/dev/null || cat /proc/sys/kernel/hostname; cat "$1"'
    command = ["sh", "-c", script, "%d", holding.BOOT_ID]
    found = [
        host.run([word.replace("%d", str(host.number)) for word in command], stdout=subprocess.PIPE, text=True)
        for host in hosts
    ]
    names, boots = zip(*(one.stdout.split() for one in found), strict=True)
    assert names == ("host0", "host1", "host2")
    assert len({*boots, Path(holding.BOOT_ID).read_text().strip()}) == 4
    for host in hosts:
        read = host.run(["sh", "-c", "ls -A /dev/shm; cat /dev/shm/whose"], stdout=subprocess.PIPE, text=True)
        assert read.stdout.split() == ["whose", str(host.number)]
    assert not os.path.exists("/dev/shm/whose")


def test_shared_memory_is_bounded(hosts: Hosts) -> None:
    fill = ["dd", "if=/dev/zero", "of=/dev/shm/full", "bs=1M", "count=20"]
    done = hosts[2].run(fill, stderr=subprocess.PIPE, text=True)
    hosts[2].run(["rm", "/dev/shm/full"], check=True)
    assert done.returncode != 0 and "No space left" in done.stderr


def test_a_process_is_as_of_subprocess(hosts: Hosts, tmp_path: Path) -> None:
    show = "import os, sys; print(os.getcwd(), os.environ['WORD'], os.getpid(), sys.stdin.read(), flush=True)"
    environment = {"WORD": "a b", "PATH": "/nowhere"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    done = hosts[0].run([sys.executable, "-c", show], input="in", capture_output=True, **options)
    assert done.stdout.split()[:3] == [str(tmp_path), "a", "b"] and done.stdout.split()[-1] == "in", done
    with hosts[0].popen(["sh", "-c", "kill -TERM $$"]) as process:
        assert process.wait(LONG) == -signal.SIGTERM
    assert hosts[0].run(["sh", "-c", "exit 7"]).returncode == 7
    assert hosts[0].run(["no-such-program"], stderr=subprocess.DEVNULL).returncode == 127
    with hosts[0].popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # it has entered the host
        assert hosts[0].processes() == [process.pid]
        process.terminate()
        assert process.wait(LONG) == -signal.SIGTERM


# --- What lies between them -------------------------------------------------------------------------------------------


def test_a_cut_stalls_a_stream_and_healing_lets_it_go_on(hosts: Hosts) -> None:
    address = hosts[1].address
    with running(hosts[1], "listen", address) as ear, running(hosts[0], "stream", address, "60000"):
        assert next_line(ear) == "0"
        with cut(hosts, 0, 1):
            heard = ["0"]
            while (line := next_line(ear, timeout=0.3)) is not None:
                heard.append(line)
            with running(hosts[2], "serve", hosts[2].address):  # the others go on
                assert ask(hosts[0], hosts[2].address).startswith("whole")
                assert ask(hosts[1], hosts[2].address).startswith("whole")
        after = [next_line(ear) for _ in range(5)]
    assert heard + after == [str(number) for number in range(len(heard) + 5)]


def test_packets_vanish_in_a_cut(hosts: Hosts) -> None:
    """No refusal and no unreachable network: only the sender's patience finds it."""
    for address in filter(None, (hosts[1].address, hosts[1].address6)):
        with running(hosts[1], "serve", address), cut(hosts, 0, 1):
            assert ask(hosts[0], address, timeout=0.1) == "TimeoutError"
    address = hosts[1].address
    with running(hosts[1], "listen", address) as ear, running(hosts[0], "stream", address, "300") as mouth:
        assert next_line(ear) == "0"
        with cut(hosts, 0, 1):
            assert next_line(mouth) == "ETIMEDOUT"


def test_a_cut_may_be_one_way(hosts: Hosts) -> None:
    with running(hosts[0], "hear", hosts[0].address) as first, running(hosts[1], "hear", hosts[1].address) as second:
        with cut(hosts, 0, 1, one_way=True):
            say(hosts[0], "shout", hosts[1].address, "lost")
            say(hosts[1], "shout", hosts[0].address, "found")
        say(hosts[0], "shout", hosts[1].address, "after")
        assert next_line(first) == "found" and next_line(second) == "after"


def test_healing_one_way_leaves_the_other_cut(hosts: Hosts) -> None:
    with running(hosts[0], "hear", hosts[0].address) as first, running(hosts[1], "hear", hosts[1].address) as second:
        with cut(hosts, 0, 1):
            hosts.heal(1, 0, one_way=True)
            say(hosts[0], "shout", hosts[1].address, "lost")
            say(hosts[1], "shout", hosts[0].address, "found")
        say(hosts[0], "shout", hosts[1].address, "after")
        assert next_line(first) == "found" and next_line(second) == "after"


@contextlib.contextmanager
def cut(hosts: Hosts, first: int, second: int, *, one_way: bool = False) -> Generator[None]:
    hosts.cut(first, second, one_way=one_way)
    try:
        yield
    finally:
        hosts.heal(first, second, one_way=one_way)


@contextlib.contextmanager
def delay(hosts: Hosts, first: int, second: int, seconds: float, *, one_way: bool = False) -> Generator[None]:
    hosts.delay(first, second, seconds, one_way=one_way)
    try:
        yield
    finally:
        hosts.delay(first, second, 0.0, one_way=one_way)


def test_a_delay_is_what_it_says_each_way(hosts: Hosts) -> None:
    address = hosts[1].address
    with running(hosts[1], "serve", address), delay(hosts, 0, 1, 0.06, one_way=True):
        assert 0.06 <= round_trip(hosts[0], address, times=10) < 0.12  # both ways it would be
        with delay(hosts, 1, 0, 0.03, one_way=True):
            assert round_trip(hosts[0], address) >= 0.09
    with running(hosts[1], "serve", address):
        assert round_trip(hosts[0], address, times=100) < 0.06


def test_bytes_arrive_whole_and_late(hosts: Hosts) -> None:
    """Through the holder of the switch: frames of many segments, with checksums that are not computed yet."""
    for address in filter(None, (hosts[1].address, hosts[1].address6)):
        with running(hosts[1], "serve", address), delay(hosts, 0, 1, 0.01):
            assert round_trip(hosts[0], address, size=2 << 20) >= 0.02


def test_a_delayed_way_can_be_cut_and_healed(hosts: Hosts) -> None:
    address = hosts[1].address
    with running(hosts[1], "serve", address), delay(hosts, 0, 1, 0.05):
        with cut(hosts, 0, 1):
            assert ask(hosts[0], address, timeout=0.1) == "TimeoutError"
        assert round_trip(hosts[0], address) >= 0.1


# --- Ends -------------------------------------------------------------------------------------------------------------


def test_a_host_is_killed_with_all_that_it_started(hosts: Hosts) -> None:
    with (
        running(hosts[1], "serve", hosts[1].address) as other,
        hosts[0].popen([*PEER, "family", "4"], stdout=subprocess.PIPE, bufsize=0) as process,
    ):
        assert next_line(process) == "all there"
        assert len(hosts[0].processes()) == 5 and process.pid in hosts[0].processes()
        hosts[0].kill()
        assert hosts[0].processes() == [] and process.returncode == -signal.SIGKILL
        assert other.poll() is None
        assert ask(hosts[0], hosts[1].address).startswith("whole")  # it can be used again


def test_what_is_about_to_enter_a_host_is_killed_too(hosts: Hosts) -> None:
    for _ in range(20):
        process = hosts[0].popen(["sleep", "1000"])
        hosts[0].kill()
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("way", ["return", "exception", "interrupted", "killed"])
def test_nothing_is_left(way: str, hosts: Hosts) -> None:
    before = machine()
    command = [sys.executable, "-m", "tests.testing.owner", way]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options) as owner:
        assert owner.stdout is not None
        told = json.loads(owner.stdout.readline())
        if way == "interrupted":
            os.killpg(owner.pid, signal.SIGINT)  # as a terminal does
        code = owner.wait(LONG)
    try:
        codes = {"return": 0, "exception": 1, "interrupted": -signal.SIGINT, "killed": -signal.SIGKILL}
        assert code == codes[way]
        deadline = time.monotonic() + LONG
        while left := left_of(owner.pid, told["networks"]):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
    finally:
        if told["heir"]:
            os.kill(told["heir"], signal.SIGKILL)
    assert machine() == before


def left_of(owner: int, networks: list[str]) -> list[str]:
    """The processes that are in one of the networks, or hold namespaces for the owner."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            holds = str(owner) in words and any(word.startswith(str(Path(holding.__file__).parent)) for word in words)
            if holds or os.readlink(f"/proc/{pid}/ns/net") in networks:
                found.append(f"{pid}: {words}")
    return found


def machine() -> tuple[list[str], str]:
    """What this machine itself has of networks and mounts."""
    return sorted(os.listdir("/sys/class/net")), Path("/proc/self/mounts").read_text()


def test_two_sets_of_hosts_know_nothing_of_each_other(hosts: Hosts) -> None:
    with (
        Hosts(2) as others,
        running(hosts[1], "hear", hosts[1].address) as ear,
        running(others[1], "hear", others[1].address) as other_ear,
    ):
        others.cut(0, 1)
        say(hosts[0], "shout", hosts[1].address, "ours")
        others.heal(0, 1)
        say(others[0], "shout", others[1].address, "theirs")
        assert next_line(ear) == "ours" and next_line(other_ear) == "theirs"


def test_a_lost_holder_is_named(hosts: Hosts) -> None:
    with Hosts(2) as others:
        holder = others[0].holder.pid
        os.kill(holder, signal.SIGKILL)
        with pytest.raises(HostGoneError, match=str(holder)):
            others[0].kill()


# --- Where there can't be any -----------------------------------------------------------------------------------------


@needs_root
def test_no_root_is_needed_where_user_namespaces_are_permitted() -> None:
    """A process that may do nothing with namespaces, but for those of users."""
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin,-net_admin", sys.executable, "-c", USE_ALL],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["host1", "[]", "{-9}"], done


USE_ALL = """if True:
    from tests.support.hosts import Hosts
    with Hosts(2) as hosts:
        hosts.cut(0, 1)
        hosts.heal(0, 1)
        hosts.delay(0, 1, 0.01)
        print(hosts[1].run(["cat", "/proc/sys/kernel/hostname"], capture_output=True, text=True, check=True).stdout)
        processes = [hosts[0].popen(["sleep", "1000"]) for _ in range(10)]
        hosts[0].kill()
        print(hosts[0].processes(), {process.returncode for process in processes})
"""


@pytest.mark.parametrize("command", ["ip", "nsenter"])
def test_a_missing_command_is_named(command: str) -> None:
    path = shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        assert command in str(why_unavailable())
    else:
        reason = in_namespaces(MOUNTS, reason_without, path)
        assert command in reason and "package" in reason


def reason_without(path: str) -> str | None:
    bind_mount(path, "/dev/null")
    why_unavailable.cache_clear()
    return why_unavailable()


def test_a_machine_that_permits_no_namespaces_says_so() -> None:
    """In a user namespace that may have no networks; where there can't be one, unshare says that too."""
    code = "from tests.support.hosts import why_unavailable; print(why_unavailable())"
    script = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "unshare" in done.stdout + done.stderr, done


def test_bad_arguments_are_refused(hosts: Hosts) -> None:
    for count in (0, 101):
        with pytest.raises(ValueError, match="1 to 100"):
            Hosts(count)
    with pytest.raises(IndexError, match="no host 3"):
        hosts.cut(0, 3)
    with pytest.raises(ValueError, match="itself"):
        hosts.heal(1, 1)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="delay"):
            hosts.delay(0, 1, seconds)
    with pytest.raises(ValueError, match="give a list"):
        hosts[0].run("hostname")
    with pytest.raises(ValueError, match="shell"):
        hosts[0].popen(["hostname"], shell=True)
    with pytest.raises(HostsUnavailableError, match="mount"), Hosts(1, shm_bytes=-1):
        pass
